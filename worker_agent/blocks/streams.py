"""Serves bytes of blocks to peers: the bodies of ReadBlocks and WriteBlocks.  [shell]

What a service face calls; `add_service(..., raw={"ReadBlocks", "WriteBlocks"})` gives it the types below.

    async def ReadBlocks(self, request, context):
        async with aclosing(streams.read_blocks(request, lender, context)) as frames:
            async for frame in frames:
                yield frame

    async def WriteBlocks(self, requests, context):
        return await streams.write_blocks(requests, context, lender)

A refusal before the first byte leaves as an AyniError; `write_blocks` ends the call by itself where it refuses later.
The worker implements `Lender`. Blocks are held no longer than bytes move: a peer that vanishes ends the call, and
with it the loan; so does one that is there and takes or sends nothing for STALL_S, and one that gave its call no
deadline after DEFAULT_TIMEOUT_S. Both are told DEADLINE; a reader that took nothing sees it behind the chunk that
waits for it, which gRPC keeps until the call ends on the reader's side.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder, LayoutHandle
from ayni.blocks.messages import (
    AXIS_ORDERS,
    failure_message,
    field,
    handle_of,
    layers_of,
    listed_ids,
    optional_field,
    sent_by,
    slice_of,
)
from ayni.blocks.transfers import DEFAULT_TIMEOUT_S, Failure
from ayni.errors import AyniError, BadChunk, BadRequest, Deadline, IncompatibleLayout, TooLarge
from ayni.rpc import Context, abort, refuse_stream
from ayni.v1 import worker_pb2 as pb
from worker_agent.blocks import frames
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Memory, Part
from worker_agent.blocks.stream_ends import Sink, Source
from worker_agent.blocks.stream_moves import MOST_FAILURES, Receiving, Sending
from worker_agent.blocks.stream_order import Arrivals, StreamShape, check_reorder, shape_of

ACCEPTED = (("ayni-accepted", "1"),)
"""Initial metadata of a write that is accepted. A refusal comes with none, which many clients can't tell from it."""

STALL_S = 20.0
"""Longest wait for a peer that neither takes nor sends a frame."""

_PEER = "the peer"

_log = logging.getLogger(__name__)


class Lender(Protocol):
    """Lends blocks of this worker's layouts for the time of one stream."""

    def lend(self, handle: LayoutHandle, incarnation: int, ids: Ids, write: bool) -> AbstractContextManager[Memory]:
        """Holds blocks until the context is left.

        Args:
            handle: the layout.
            incarnation: process start that the caller knows the layout from.
            ids: shape [N]; each once when `write`.
            write: nobody else may read or write the blocks meanwhile.

        Raises:
            StaleEpoch: this is another incarnation.
            UnknownLayout: there is no such layout.
            UnknownBlock: an id is outside the layout.
            BlockBusy: for `write`: a block is being used.
            BadRequest: for `write`: an id comes twice.
        """

    def notify(self, number: int) -> None:
        """Tells the process that a peer's write with this number has ended, and every block of it is whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What both kinds of request name."""

    handle: LayoutHandle
    incarnation: int
    blocks: Ids
    part: Part


class _Patience:
    """Until when a peer is waited for."""

    def __init__(self, what: str, stall_s: float, context: Context | None) -> None:
        self._what, self._stall_s = what, stall_s
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._telling: asyncio.Task[None] | None = None
        is_endless = context is not None and context.time_remaining() is None
        self._end = self._loop.time() + DEFAULT_TIMEOUT_S if is_endless else math.inf

    def check(self) -> None:
        """Raises Deadline when all of the call's time is over."""
        if self._loop.time() >= self._end:
            raise self.over()

    def until(self) -> float:
        """Returns the moment until which a frame that is due now is waited for."""
        return min(self._loop.time() + self._stall_s, self._end)

    def over(self) -> Deadline:
        """Returns why the peer is waited for no longer."""
        if self._loop.time() >= self._end:
            message = f"{self._what} without a deadline of its own did not end within {DEFAULT_TIMEOUT_S:g} s"
            return Deadline(message, waiting_for=f"the end of {self._what}", timeout=DEFAULT_TIMEOUT_S)
        message = f"{self._what} stood still for {self._stall_s:g} s and was given up; its blocks are free again"
        return Deadline(message, waiting_for=f"the next frame of {self._what}", timeout=self._stall_s)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Cancels the task that runs this unless the context is left in time."""
        self.check()
        task = asyncio.current_task()
        assert task is not None
        timer = self._loop.call_at(self.until(), self._give_up, task)
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, task: "asyncio.Task[object]") -> None:
        task.cancel()
        if self._context is None:
            _log.warning("ReadBlocks: %s", self.over())
            return
        # A task of its own, since the other one waits for the peer to take a frame.
        self._telling = self._loop.create_task(abort(self._context, self.over(), "ReadBlocks"))
        self._telling.add_done_callback(lambda done: done.cancelled() or done.exception())


class _Timely:
    """The frames of a peer; raises Deadline where one does not come in time."""

    def __init__(self, requests: AsyncIterator[bytes], patience: _Patience) -> None:
        self._requests, self._patience = requests, patience

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self._patience.check()
        try:
            async with asyncio.timeout_at(self._patience.until()):
                return await anext(self._requests)
        except TimeoutError:
            raise self._patience.over() from None


async def read_blocks(
    request: pb.ReadBlocksRequest, lender: Lender, context: Context | None = None, stall_s: float = STALL_S
) -> AsyncGenerator[bytes, None]:
    """Yields the frames of a read, encoded.

    Args:
        request: what the peer asks for.
        lender: where the blocks come from.
        context: the call; None: nothing limits all of its time, and a reader that takes nothing is not told why it
            gets no more.
        stall_s: longest wait for a peer that takes no frame; then the task that asks for frames is cancelled.

    Raises:
        AyniError: before the first frame: the request is wrong or the blocks can't be lent. Later: StorageFailed,
            where more blocks can't be read than an answer may name, or Deadline.
    """
    patience = _Patience("a read of a peer", stall_s, context)
    asked, chunk_bytes = _asked(request), _chunk_bytes(request.chunk_bytes)
    with lender.lend(asked.handle, asked.incarnation, asked.blocks, False) as memory:
        order = memory.geometry.axis_order
        shape = shape_of(memory.geometry, asked.part, asked.blocks, order)
        source = Source(memory, asked.blocks, asked.part, order)
        sending = Sending(shape, source, chunk_bytes, request.checksum)
        with patience.taking():
            yield _begin_frame(shape, order)
        async for frame in sending.frames():
            with patience.taking():
                yield frame
    complete = pb.ReadComplete(sent_bytes=sending.sent_bytes, failures=_block_failures(sending.failures, asked.blocks))
    yield pb.ReadBlocksResponse(complete=complete).SerializeToString()


async def write_blocks(
    requests: AsyncIterator[bytes], context: Context, lender: Lender, stall_s: float = STALL_S
) -> pb.WriteBlocksResponse:
    """Receives the frames of a write and answers it.

    Args:
        requests: the frames, encoded.
        context: the call; is told that the write is accepted.
        lender: where the blocks come from, and who is told of the end.
        stall_s: longest wait for a frame.

    Raises:
        AyniError: before the write was accepted.
    """
    timely = _Timely(requests, _Patience("a write of a peer", stall_s, context))
    begin = await _read_begin(timely)
    asked = _asked(begin)
    with lender.lend(asked.handle, asked.incarnation, asked.blocks, True) as memory:
        shape, order = _shape(begin, asked, memory.geometry)
        arrivals = Arrivals(shape, _PEER, frames.MAX_CHUNK_BYTES)
        receiving = Receiving(arrivals, Sink(memory, asked.blocks, asked.part, order))
        await context.send_initial_metadata(ACCEPTED)
        error = await _receive(timely, receiving)
    num_undone = len(asked.blocks) - arrivals.num_whole
    if error or num_undone > MOST_FAILURES:
        await refuse_stream(context, requests, error or _cut_short(), method="WriteBlocks")
    failures = receiving.undone(_cut_short())
    if begin.HasField("write_notification") and not failures:
        lender.notify(begin.write_notification)
    return pb.WriteBlocksResponse(
        written_bytes=arrivals.num_whole * shape.block_bytes, failures=_block_failures(failures, asked.blocks)
    )


async def _receive(requests: AsyncIterator[bytes], receiving: Receiving) -> AyniError | None:
    """Writes what comes; returns what is wrong with it."""
    try:
        async for frame in requests:
            kind, content = frames.decode_block_frame(frame)
            if not isinstance(content, frames.BlockChunk):
                return BadRequest(f"the peer sent frame kind {kind} where a chunk was due", field="frame")
            await receiving.take(content)
    except AyniError as error:
        return error
    return None


def _shape(begin: pb.WriteBegin, asked: _Asked, geometry: Geometry) -> tuple[StreamShape, AxisOrder]:
    """Compares what a peer wants to write with the blocks; returns the stream's shape and the order of its bytes.

    Raises:
        BadRequest: the blocks have no such part.
        IncompatibleLayout: sizes differ, or the order can't be changed.
    """
    with sent_by(_PEER):
        order = AXIS_ORDERS.or_none(begin.axis_order, "axis_order") or geometry.axis_order
    check_reorder(geometry, order, geometry.axis_order)
    shape = shape_of(geometry, asked.part, asked.blocks, order)
    if begin.block_bytes != shape.block_bytes:
        raise IncompatibleLayout(
            f"the peer wants to write blocks of {begin.block_bytes} bytes; here the same part of a block of layout "
            f"{asked.handle} has {shape.block_bytes}",
            field="block_bytes",
            source=begin.block_bytes,
            destination=shape.block_bytes,
        )
    return shape, order


async def _read_begin(requests: AsyncIterator[bytes]) -> pb.WriteBegin:
    frame = await anext(requests, b"")
    kind, content = frames.decode_block_frame(frame)
    if kind != frames.BEGIN or not isinstance(content, memoryview):
        raise BadRequest("the first frame of a write must be its begin", field="begin")
    try:
        return pb.WriteBegin.FromString(bytes(content))
    except DecodeError:
        raise BadRequest("the begin of a write can't be read", field="begin") from None


def _asked(message: pb.ReadBlocksRequest | pb.WriteBegin) -> _Asked:
    with sent_by(_PEER):
        return _Asked(
            handle=field(message, "layout", handle_of),
            incarnation=message.incarnation,
            blocks=listed_ids(message, "blocks"),
            part=Part(
                layers=optional_field(message, "layers", layers_of), slice=optional_field(message, "slice", slice_of)
            ),
        )


def _chunk_bytes(wanted: int) -> int:
    if wanted > frames.MAX_CHUNK_BYTES:
        raise TooLarge(
            f"chunks of {wanted} bytes were asked for; at most {frames.MAX_CHUNK_BYTES}",
            field="chunk_bytes",
            limit=frames.MAX_CHUNK_BYTES,
            received=wanted,
        )
    return wanted or frames.DEFAULT_CHUNK_BYTES


def _begin_frame(shape: StreamShape, order: AxisOrder) -> bytes:
    begin = pb.ReadBegin(
        block_bytes=shape.block_bytes, total_bytes=shape.total_bytes, axis_order=AXIS_ORDERS.number(order)
    )
    return pb.ReadBlocksResponse(begin=begin).SerializeToString()


def _cut_short() -> BadChunk:
    return BadChunk(
        "the stream ended before all bytes of the blocks had come",
        field="data",
        expected="all of the stream",
        received="a part of it",
        bucket="",
    )


def _block_failures(failures: Mapping[int, Failure], blocks: Ids) -> list[pb.BlockFailure]:
    return [
        pb.BlockFailure(index=index, block=int(blocks[index]), failure=failure_message(failures[index]))
        for index in sorted(failures)
    ]
