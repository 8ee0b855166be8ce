"""One WriteBlocks call, from the side of who writes.  [shell]

A block is done when the peer has said so, so a stream that is lost takes all of its blocks with it. A push that is
given up ends its stream and waits a moment for the answer: after it the peer writes no more.
"""

import asyncio
from collections.abc import Callable, Coroutine

import grpc
from grpc import aio

from ayni import rpc
from ayni.errors import BadChunk
from ayni.v1 import worker_pb2 as pb
from worker_agent.blocks import frames
from worker_agent.blocks.engines.grpc_calls import Share, timeout_of, write_begin
from worker_agent.blocks.engines.grpc_pull import failures_by_index
from worker_agent.blocks.engines.under_way import Progress
from worker_agent.blocks.stream_ends import Source
from worker_agent.blocks.stream_moves import Sending
from worker_agent.blocks.streams import ACCEPTED

LAST_WORD_S = 1.0
"""How long a push that was given up waits for the peer's answer."""

REFUSAL_S = 0.05
"""How long after the first sign of a peer that marks nothing as accepted its refusal may still come."""

StartWrite = Callable[..., "aio.StreamUnaryCall[bytes, pb.WriteBlocksResponse]"]
"""Starts a call whose frames are encoded messages."""


UntilReleased = Callable[[], Coroutine[None, None, None]]
"""Returns once the peer has let go of the blocks."""


class Push:
    """One share of a move on its way to a peer."""

    def __init__(
        self, share: Share, incarnation: int, progress: Progress, peer: str, until_released: UntilReleased
    ) -> None:
        """Marks in `progress` what is done, and what to wait for where the peer's answer is lost."""
        self._share, self._incarnation = share, incarnation
        self._progress, self._peer = progress, peer
        self._until_released = until_released
        self._is_given_up = False
        self._may_land = False

    async def run(self, start: StartWrite) -> None:
        """Writes the share's blocks.

        Raises:
            AyniError: the peer's answer is wrong, or too many local blocks can't be read.
            grpc.aio.AioRpcError: the peer refused, or the connection broke.
        """
        # A task of its own, because gRPC ends a call whose caller is cancelled, and then nobody knows what was written.
        writing = asyncio.ensure_future(self._write(start(timeout=timeout_of(self._share.move))))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            self._is_given_up = True
            await asyncio.wait({writing}, timeout=LAST_WORD_S)
            writing.cancel()
            await asyncio.wait({writing})
            raise
        finally:
            writing.add_done_callback(lambda done: done.cancelled() or done.exception())
            if self._may_land:
                self._progress.settle = self._until_released

    async def _write(self, call: "aio.StreamUnaryCall[bytes, pb.WriteBlocksResponse]") -> None:
        share, move, shape = self._share, self._share.move, self._share.shape
        source = Source(move.local, share.local_blocks, move.local_part, share.order)
        sending = Sending(shape, source, frames.MAX_CHUNK_BYTES, move.checksum)
        try:
            await self._send(call, sending)
            self._finish(await self._answer(call), sending, shape.block_bytes)
        finally:
            call.cancel()

    async def _answer(self, call: "aio.StreamUnaryCall[bytes, pb.WriteBlocksResponse]") -> pb.WriteBlocksResponse:
        """Waits for the answer; whoever answers has let go of the blocks."""
        try:
            response = await call
        except grpc.RpcError as error:
            self._may_land = self._may_land and rpc.error_from(error) is None
            raise
        self._may_land = False
        return response

    async def _send(self, call: "aio.StreamUnaryCall[bytes, pb.WriteBlocksResponse]", sending: Sending) -> None:
        """Writes all frames; stops where the call is over, whose status its result tells."""
        try:
            await call.write(write_begin(self._share, self._incarnation))
            await _accepted(call)
            async for frame in sending.frames():
                if self._is_given_up:
                    break
                self._may_land = True
                await call.write(frame)
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass

    def _finish(self, response: pb.WriteBlocksResponse, sending: Sending, block_bytes: int) -> None:
        share, num_blocks = self._share, len(self._share.remote_blocks)
        failures = failures_by_index(response.failures, num_blocks, self._peer) | sending.failures
        written = (num_blocks - len(failures)) * block_bytes
        if response.written_bytes != written:
            raise BadChunk(
                f"{self._peer} says that it wrote {response.written_bytes} bytes; those blocks have {written}",
                field="written_bytes",
                expected=written,
                received=response.written_bytes,
                bucket="",
            )
        self._progress.is_done[share.first : share.first + num_blocks] = True
        self._progress.fail(share.first, failures)


async def _accepted(call: "aio.StreamUnaryCall[bytes, pb.WriteBlocksResponse]") -> None:
    """Waits for leave to write. To write on after a refusal would lose the refusal."""
    if tuple(await call.initial_metadata()) != ACCEPTED:
        await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=REFUSAL_S)
