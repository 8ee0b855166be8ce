"""One peer reached over gRPC: pulls are ReadBlocks, pushes are WriteBlocks.  [shell]

Copies: one at each end, from block to frame and from frame to block; see `stream_ends` for when there is one more.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import grpc

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import LayoutDescriptor
from ayni.channels import HeaderChannel
from ayni.v1 import worker_pb2 as pb
from worker_agent.blocks.engine import Move, Ticket
from worker_agent.blocks.engines.grpc_calls import Share, check_order, error_of_call, shares
from worker_agent.blocks.engines.grpc_probe import Probe
from worker_agent.blocks.engines.grpc_pull import pull
from worker_agent.blocks.engines.grpc_push import Push
from worker_agent.blocks.engines.under_way import MovesUnderWay, Progress

NAME = "grpc"
_SERVICE = "/ayni.v1.WorkerService"


class GrpcLink:
    """Moves blocks with one peer."""

    engine = NAME

    def __init__(self, channel: HeaderChannel, incarnation: int, peer: str) -> None:
        """Takes a channel, which it closes; `peer` is named in errors."""
        self._channel, self._incarnation, self._peer = channel, incarnation, peer
        self._moves = MovesUnderWay(peer)
        self._read = channel.unary_stream(
            f"{_SERVICE}/ReadBlocks", request_serializer=pb.ReadBlocksRequest.SerializeToString
        )
        self._probe = Probe(self._read, incarnation)
        self._write = channel.stream_unary(
            f"{_SERVICE}/WriteBlocks", response_deserializer=pb.WriteBlocksResponse.FromString
        )

    def reaches(self, layout: LayoutDescriptor) -> bool:
        """Says yes: a peer's service lends all of its layouts."""
        return True

    def pull(self, move: Move) -> Ticket:
        """Copies the peer's blocks into local ones."""
        check_order(move, "options.source_axis_order")
        return self._start(move, self._pull)

    def push(self, move: Move) -> Ticket:
        """Copies local blocks into the peer's."""
        check_order(move, "options.destination_axis_order")
        return self._start(move, self._push)

    async def ask(self, layout: LayoutDescriptor, deadline: float) -> None:
        """Has the peer begin to read the first block of a layout, whose bytes are not taken.

        Raises:
            AyniError: the peer's refusal, or how the connection ended.
        """
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            await self._probe.begin(layout.handle, as_ids([0]), left)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise error_of_call(error, self._peer) from None

    async def close(self) -> None:
        """Forgets the peer: what is in flight fails with PEER_LOST. Returns once no byte can land here.

        A peer that a push was lost with is not asked any more.
        """
        await self._moves.end()
        await self._channel.close()

    def _start(self, move: Move, one_call: Callable[[Share, Progress], Awaitable[None]]) -> Ticket:
        async def carry_out(progress: Progress) -> None:
            for share in shares(move):
                try:
                    await one_call(share, progress)
                except (grpc.RpcError, asyncio.InvalidStateError) as error:
                    raise error_of_call(error, self._peer) from None

        return self._moves.start(move, carry_out)

    async def _pull(self, share: Share, progress: Progress) -> None:
        await pull(self._read, share, self._incarnation, progress, self._peer)

    async def _push(self, share: Share, progress: Progress) -> None:
        until_released = partial(self._probe.until_released, share.move.remote.handle, share.remote_blocks[:1])
        await Push(share, self._incarnation, progress, self._peer, until_released).run(self._write)
