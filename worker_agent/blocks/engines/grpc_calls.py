"""What a move asks a peer for over gRPC, and what the end of a call means.  [shell]

Ugly: a request must fit into one message, so very long lists become several calls, one after the other.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from grpc import aio

from ayni import rpc
from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder
from ayni.blocks.messages import handle_message, ids_message, layers_message, slice_message
from ayni.errors import AyniError, Deadline, PeerLost, Unsupported
from ayni.v1 import worker_pb2 as pb
from worker_agent.blocks import frames
from worker_agent.blocks.engine import Move
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.stream_order import StreamShape, shape_of

MOST_PER_CALL = 1 << 18
"""Blocks of one call: however their ids lie, the request stays below gRPC's limit of 4 MiB."""

GRACE_S = 2.0
"""How much longer than the move a call may last; the peer learns from it when to give up by itself."""

StartRead = Callable[..., "aio.UnaryStreamCall[pb.ReadBlocksRequest, bytes]"]
"""Starts a ReadBlocks call whose frames are encoded messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The pairs of a move that one call carries."""

    move: Move
    first: int
    """Place of the first pair in the move."""
    remote_blocks: Ids
    local_blocks: Ids
    is_last: bool

    @property
    def order(self) -> AxisOrder:
        """Order in which the bytes travel: that of the peer's blocks, or the one that the caller takes them to have."""
        return self.move.remote_part.axis_order or self.move.remote.axis_order

    @property
    def shape(self) -> StreamShape:
        """Shape of the stream."""
        remote = self.move.remote
        geometry = Geometry(config=remote.config, kind=remote.kind, axis_order=remote.axis_order)
        return shape_of(geometry, self.move.remote_part, self.remote_blocks, self.order)


def shares(move: Move) -> Iterator[Share]:
    """Yields what goes with each call."""
    total = len(move.remote_blocks)
    for first in range(0, total, MOST_PER_CALL):
        places = slice(first, first + MOST_PER_CALL)
        yield Share(
            move=move,
            first=first,
            remote_blocks=move.remote_blocks[places],
            local_blocks=move.local_blocks[places],
            is_last=first + MOST_PER_CALL >= total,
        )


def check_order(move: Move, field: str) -> None:
    """Refuses what a peer can't be asked for; `field` is the option that gives its blocks another order.

    Raises:
        Unsupported: a slice, or some layers, of blocks that are taken to have another order than the peer knows of. All
            orders but the universal one have their layers in the same places.
    """
    part, own = move.remote_part, move.remote.axis_order
    order = part.axis_order or own
    is_universal = AxisOrder.UNIVERSAL in (order, own)
    has_layers = part.layers not in (None, (0, move.remote.config.num_layers))
    if order is not own and (part.slice is not None or (has_layers and is_universal)):
        what = "a slice" if part.slice is not None else "a range of layers"
        raise Unsupported(
            f"a peer cuts its blocks in the order that they have ({own.value}): {what} can't be combined with "
            f"{order.value} order",
            field=field,
            detail=order.value,
        )


def read_request(share: Share, incarnation: int) -> pb.ReadBlocksRequest:
    """Returns what asks for a share's blocks."""
    part = share.move.remote_part
    return pb.ReadBlocksRequest(
        layout=handle_message(share.move.remote.handle),
        incarnation=incarnation,
        blocks=ids_message(share.remote_blocks),
        layers=None if part.layers is None else layers_message(part.layers),
        slice=None if part.slice is None else slice_message(part.slice),
        chunk_bytes=frames.MAX_CHUNK_BYTES,
        checksum=share.move.checksum,
    )


def write_begin(share: Share, incarnation: int) -> bytes:
    """Returns the first frame of a share's write, encoded."""
    part = share.move.remote_part
    begin = pb.WriteBegin(
        layout=handle_message(share.move.remote.handle),
        incarnation=incarnation,
        blocks=ids_message(share.remote_blocks),
        layers=None if part.layers is None else layers_message(part.layers),
        slice=None if part.slice is None else slice_message(part.slice),
        block_bytes=share.shape.block_bytes,
        write_notification=share.move.write_notification if share.is_last else None,
    )
    return pb.WriteBlocksRequest(begin=begin).SerializeToString()


def timeout_of(move: Move) -> float:
    """Returns how long a call of a move may last."""
    return max(0.0, move.deadline - asyncio.get_running_loop().time()) + GRACE_S


def error_of_call(error: BaseException, peer: str) -> AyniError:
    """Returns what a call that failed says: the peer's refusal, or how the connection ended."""
    if not isinstance(error, grpc.RpcError):
        return PeerLost(f"the connection with {peer} ended: {error}", peer=peer, detail=error)
    if refusal := rpc.error_from(error):
        return refusal
    code, details = error.code(), str(error.details())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Deadline(f"{peer} did not answer in time", waiting_for=peer, timeout="")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Unsupported(f"{peer} does not move blocks: {details}", field="engine", detail=details)
    return PeerLost(f"lost {peer}: {details} ({code.name})", peer=peer, detail=details)
