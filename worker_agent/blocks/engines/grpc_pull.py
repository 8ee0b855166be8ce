"""One ReadBlocks call, from the side of who asks.  [shell]

A block is done when all of its bytes have come and the peer has said at the end that they are good. Until then it may
still name any block as failed, so a stream that ends before fails all of its blocks.
"""

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from grpc import aio

from ayni.blocks.messages import AXIS_ORDERS, failure_of
from ayni.blocks.transfers import Failure
from ayni.errors import BadChunk, BadRequest, IncompatibleLayout, PeerLost
from ayni.v1 import worker_pb2 as pb
from worker_agent.blocks import frames
from worker_agent.blocks.engines.grpc_calls import Share, StartRead, read_request, timeout_of
from worker_agent.blocks.engines.under_way import Progress
from worker_agent.blocks.frames import BlockChunk
from worker_agent.blocks.stream_ends import Sink
from worker_agent.blocks.stream_moves import Receiving
from worker_agent.blocks.stream_order import Arrivals, StreamShape

_M = TypeVar("_M", bound=Message)


async def pull(start: StartRead, share: Share, incarnation: int, progress: Progress, peer: str) -> None:
    """Reads a share's blocks, and marks what is done.

    Raises:
        AyniError: the peer sent something wrong, or ended the stream early.
        grpc.aio.AioRpcError: the peer refused, or the connection broke.
    """
    shape, move = share.shape, share.move
    arrivals = Arrivals(shape, peer, frames.MAX_CHUNK_BYTES)
    receiving = Receiving(arrivals, Sink(move.local, share.local_blocks, move.local_part, share.order))
    call = start(read_request(share, incarnation), timeout=timeout_of(move))
    try:
        _check_begin(await _next(call, peer), share, shape, peer)
        while isinstance(content := await _next(call, peer), BlockChunk):
            await receiving.take(content)
        receiving.drop(_failures(content, arrivals, peer))
        progress.is_done[share.first : share.first + len(shape.blocks)] = arrivals.is_whole
        await call.read()
    finally:
        call.cancel()
        progress.fail(share.first, receiving.failures)
    if unnamed := set(arrivals.missing()) - set(receiving.failures):
        raise BadChunk(
            f"{peer} left out {len(unnamed)} blocks and did not say why",
            field="complete",
            expected=len(shape.blocks),
            received=arrivals.num_whole,
            bucket="",
        )


async def _next(call: "aio.UnaryStreamCall[Any, bytes]", peer: str) -> "BlockChunk | tuple[int, memoryview]":
    """Returns the next chunk, or the next frame of another kind."""
    frame = await call.read()
    if not isinstance(frame, bytes):
        raise PeerLost(f"{peer} ended the stream before it was complete", peer=peer, detail="cut short")
    kind, content = frames.decode_block_frame(frame)
    return content if isinstance(content, BlockChunk) else (kind, content)


def _check_begin(frame: "BlockChunk | tuple[int, memoryview]", share: Share, shape: StreamShape, peer: str) -> None:
    begin = _message(frame, frames.BEGIN, pb.ReadBegin(), peer)
    offered = (begin.block_bytes, begin.total_bytes, AXIS_ORDERS.of(begin.axis_order, "axis_order"))
    expected = (shape.block_bytes, shape.total_bytes, share.move.remote.axis_order)
    names = ("block_bytes", "total_bytes", "axis_order")
    for name, one, other in zip(names, offered, expected, strict=True):
        if one != other:
            raise IncompatibleLayout(
                f"{peer} would send blocks whose {name} is {one}, but its layout says {other}",
                field=name,
                source=one,
                destination=other,
            )


def _failures(frame: "tuple[int, memoryview]", arrivals: Arrivals, peer: str) -> dict[int, Failure]:
    """Reads the last frame; returns the blocks that it names."""
    complete = _message(frame, frames.COMPLETE, pb.ReadComplete(), peer)
    if complete.sent_bytes != arrivals.received_bytes:
        raise BadChunk(
            f"{peer} sent {complete.sent_bytes} bytes, and {arrivals.received_bytes} came",
            field="sent_bytes",
            expected=complete.sent_bytes,
            received=arrivals.received_bytes,
            bucket="",
        )
    return failures_by_index(complete.failures, len(arrivals.is_whole), peer)


def failures_by_index(messages: Any, num_blocks: int, peer: str) -> dict[int, Failure]:
    """Returns why blocks failed, by place in the call's list.

    Raises:
        BadRequest: a place is outside the list.
    """
    failures = {message.index: failure_of(message.failure) for message in messages}
    if failures and max(failures) >= num_blocks:
        raise BadRequest(f"{peer} names block {max(failures)} of {num_blocks} as failed", field="failures")
    return failures


def _message(frame: "BlockChunk | tuple[int, memoryview]", kind: int, message: _M, peer: str) -> _M:
    """Reads the frame's content into an empty message, and returns it."""
    if isinstance(frame, BlockChunk) or frame[0] != kind:
        raise BadRequest(f"{peer} sent a frame of another kind than {kind}, which was due", field="frame")
    try:
        message.ParseFromString(bytes(frame[1]))
    except DecodeError:
        raise BadRequest(f"{peer} sent a frame of kind {kind} that can't be read", field="frame") from None
    return message
