"""Serves bytes of blocks to peers: the bodies of ReadBlocks and WriteBlocks.  [shell]

What a service face calls; `add_service(..., raw={"ReadBlocks", "WriteBlocks"})` gives it the types below.

    async def ReadBlocks(self, request, context):
        async with aclosing(streams.read_blocks(request, lender)) as frames:
            async for frame in frames:
                yield frame

    async def WriteBlocks(self, requests, context):
        return await streams.write_blocks(requests, context, lender)

A refusal before the first byte leaves as an AyniError; `write_blocks` ends the call by itself where it refuses later.
The worker implements `Lender`. Blocks are held no longer than bytes move: a peer that vanishes ends the call, and
with it the loan.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractContextManager
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
from ayni.blocks.transfers import Failure
from ayni.errors import AyniError, BadChunk, BadRequest, IncompatibleLayout, TooLarge
from ayni.rpc import Context, refuse_stream
from ayni.v1 import worker_pb2 as pb
from worker_agent.blocks import frames
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Memory, Part
from worker_agent.blocks.stream_ends import Sink, Source
from worker_agent.blocks.stream_moves import MOST_FAILURES, Receiving, Sending
from worker_agent.blocks.stream_order import Arrivals, StreamShape, check_reorder, shape_of

ACCEPTED = (("ayni-accepted", "1"),)
"""Initial metadata of a write that is accepted. A refusal comes with none, which many clients can't tell from it."""

_PEER = "the peer"


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


async def read_blocks(request: pb.ReadBlocksRequest, lender: Lender) -> AsyncGenerator[bytes, None]:
    """Yields the frames of a read, encoded.

    Args:
        request: what the peer asks for.
        lender: where the blocks come from.

    Raises:
        AyniError: before the first frame: the request is wrong or the blocks can't be lent. Later: StorageFailed,
            where more blocks can't be read than an answer may name.
    """
    asked, chunk_bytes = _asked(request), _chunk_bytes(request.chunk_bytes)
    with lender.lend(asked.handle, asked.incarnation, asked.blocks, False) as memory:
        order = memory.geometry.axis_order
        shape = shape_of(memory.geometry, asked.part, asked.blocks, order)
        source = Source(memory, asked.blocks, asked.part, order)
        sending = Sending(shape, source, chunk_bytes, request.checksum)
        yield _begin_frame(shape, order)
        async for frame in sending.frames():
            yield frame
    complete = pb.ReadComplete(sent_bytes=sending.sent_bytes, failures=_block_failures(sending.failures, asked.blocks))
    yield pb.ReadBlocksResponse(complete=complete).SerializeToString()


async def write_blocks(requests: AsyncIterator[bytes], context: Context, lender: Lender) -> pb.WriteBlocksResponse:
    """Receives the frames of a write and answers it.

    Args:
        requests: the frames, encoded.
        context: the call; is told that the write is accepted.
        lender: where the blocks come from, and who is told of the end.

    Raises:
        AyniError: before the write was accepted.
    """
    begin = await _read_begin(requests)
    asked = _asked(begin)
    with lender.lend(asked.handle, asked.incarnation, asked.blocks, True) as memory:
        shape, order = _shape(begin, asked, memory.geometry)
        arrivals = Arrivals(shape, _PEER, frames.MAX_CHUNK_BYTES)
        receiving = Receiving(arrivals, Sink(memory, asked.blocks, asked.part, order))
        await context.send_initial_metadata(ACCEPTED)
        error = await _receive(requests, receiving)
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
