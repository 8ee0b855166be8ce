"""What a stream of blocks carries, in which order, and what of it has come.  [core]

Theory of operation. Both sides of a stream know the blocks and how many bytes each has, so the stream is one string of
bytes with a place for each of them. `cut` says into which chunks a sender cuts it. `Arrivals` takes chunks as they
come and says which runs of which blocks they hold. Chunks come in order; a sender may leave out the rest of a block,
and whole blocks, that it can't read, and says so at the end. A block counts when all of its bytes have been placed.

Legend: N blocks of the stream, P bytes of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import Axis, AxisOrder
from ayni.errors import BadChunk, IncompatibleLayout
from worker_agent.blocks.array_copy import copy_blocks
from worker_agent.blocks.frames import BlockChunk, ChunkHead
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Bytes, Part
from worker_agent.blocks.pairs import reordering

Flags = npt.NDArray[np.bool_]

MOST_BLOCKS = 1024
"""Blocks that we put into one chunk: more would not make small blocks faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamShape:
    """What both sides agreed on before the first chunk."""

    blocks: Ids
    """As the request has them, shape [N]."""
    block_bytes: int
    """P."""
    layers: tuple[int, int]
    """First layer of the part and one past the last."""
    layer_bytes: int
    """Bytes from one layer of a block to the next; 0 where a layer's bytes are not together."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole stream."""
        return len(self.blocks) * self.block_bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of the stream that are together: `count` whole blocks, or some bytes of one."""

    index: int
    """Place of the first block in the list."""
    count: int
    offset: int
    """Where in the block the bytes begin; 0 with whole blocks."""
    length: int
    """Bytes of all of it."""

    def singles(self) -> Iterator["Run"]:
        """Yields whole blocks one by one."""
        size = self.length // self.count
        for index in range(self.index, self.index + self.count):
            yield Run(index, 1, 0, size)


def shape_of(geometry: Geometry, part: Part, blocks: Ids, wire_order: AxisOrder) -> StreamShape:
    """Returns the shape of a stream of parts of blocks, whose bytes travel in `wire_order`.

    Raises:
        BadRequest: a range is empty, reversed or beyond its axis.
        IncompatibleLayout: blocks of this layout have no such part.
    """
    block_bytes = geometry.part_bytes(part.layers, part.slice, part.axis_order)
    layers = part.layers or (0, geometry.config.num_layers)
    if part.slice is not None and part.slice.axis is Axis.LAYER:
        layers = (part.slice.start, part.slice.stop)
    layer_bytes = 0 if wire_order is AxisOrder.UNIVERSAL else block_bytes // (layers[1] - layers[0])
    return StreamShape(blocks=blocks, block_bytes=block_bytes, layers=layers, layer_bytes=layer_bytes)


def cut(shape: StreamShape, chunk_bytes: int) -> Iterator[Run]:
    """Yields what to send, chunk by chunk: as many whole blocks as fit, or a part of a block that does not."""
    size = shape.block_bytes
    if size <= chunk_bytes:
        step = min(chunk_bytes // size, MOST_BLOCKS)
        for index in range(0, len(shape.blocks), step):
            count = min(step, len(shape.blocks) - index)
            yield Run(index, count, 0, count * size)
        return
    for index in range(len(shape.blocks)):
        for offset in range(0, size, chunk_bytes):
            yield Run(index, 1, offset, min(chunk_bytes, size - offset))


def head_of(shape: StreamShape, run: Run, stream_offset_bytes: int) -> ChunkHead:
    """Returns the small fields of the chunk that carries a run."""
    return ChunkHead(
        stream_offset_bytes=stream_offset_bytes,
        index=run.index,
        blocks=shape.blocks[run.index : run.index + run.count].tolist(),
        layers=shape.layers,
        offset_bytes=run.offset,
    )


class Arrivals:
    """Takes the chunks of one stream."""

    def __init__(self, shape: StreamShape, sender: str, chunk_bytes: int, is_whole: Flags | None = None) -> None:
        """Expects chunks.

        Args:
            shape: the stream.
            sender: who sends it, as errors say.
            chunk_bytes: most bytes of data in a chunk.
            is_whole: all false, shape [N]; becomes the attribute of this name. None: an array of its own.
        """
        self._shape = shape
        self._sender = sender
        self._chunk_bytes = chunk_bytes
        self._cursor = 0
        self.received_bytes = 0
        """Bytes of data that have come."""
        self.is_whole = np.zeros(len(shape.blocks), np.bool_) if is_whole is None else is_whole
        """Shape [N]: which blocks have been placed whole."""

    def take(self, chunk: BlockChunk) -> list[Run]:
        """Returns the runs that a chunk holds, in order.

        Raises:
            BadChunk: it is not what may come now.
            Checksum: it was damaged.
        """
        start = self._place_of(chunk)
        self._check_ids(chunk, start, start + len(chunk.data))
        chunk.check_sum(self._sender)
        self._cursor = start + len(chunk.data)
        self.received_bytes += len(chunk.data)
        return list(self._runs(start, self._cursor))

    def placed(self, run: Run) -> None:
        """Says that the bytes of a run are in their blocks."""
        if run.count > 1 or run.offset + run.length == self._shape.block_bytes:
            self.is_whole[run.index : run.index + run.count] = True

    @property
    def num_whole(self) -> int:
        """Blocks that have been placed whole."""
        return int(np.count_nonzero(self.is_whole))

    def missing(self) -> list[int]:
        """Returns the places of the blocks that are not whole, in order."""
        places: list[int] = np.flatnonzero(~self.is_whole).tolist()
        return places

    def _place_of(self, chunk: BlockChunk) -> int:
        """Returns where in the stream a chunk belongs."""
        shape, first, length = self._shape, chunk.layer_start, len(chunk.data)
        if chunk.stream_offset_bytes != self.received_bytes:
            raise self._bad("stream_offset_bytes", self.received_bytes, chunk.stream_offset_bytes)
        if not 0 < length <= self._chunk_bytes:
            raise self._bad("data", f"1 to {self._chunk_bytes} bytes", f"{length} bytes")
        layers, room = (first, chunk.layer_stop), shape.total_bytes
        if layers != shape.layers:
            if not (shape.layer_bytes and shape.layers[0] <= layers[0] < layers[1] <= shape.layers[1]):
                raise self._bad("layers", shape.layers, layers)
            room = (layers[1] - layers[0]) * shape.layer_bytes
        if chunk.offset_bytes + length > room:
            raise self._bad("data", f"at most {room - chunk.offset_bytes} bytes", f"{length} bytes")
        place = chunk.index * shape.block_bytes + (first - shape.layers[0]) * shape.layer_bytes + chunk.offset_bytes
        is_next = place == self._cursor or (place > self._cursor and place % shape.block_bytes == 0)
        if not is_next or place + length > shape.total_bytes:
            raise self._bad("index", f"what follows byte {self._cursor} of {shape.total_bytes}", f"byte {place}")
        return place

    def _check_ids(self, chunk: BlockChunk, start: int, stop: int) -> None:
        size = self._shape.block_bytes
        expected = self._shape.blocks[start // size : (stop - 1) // size + 1].tolist()
        if list(chunk.blocks) != expected:
            raise self._bad("blocks", _short(expected), _short(list(chunk.blocks)))

    def _runs(self, start: int, stop: int) -> Iterator[Run]:
        size = self._shape.block_bytes
        while start < stop:
            index, offset = divmod(start, size)
            count = (stop - start) // size if offset == 0 else 0
            length = count * size or min(stop - start, size - offset)
            yield Run(index, count or 1, offset, length)
            start += length

    def _bad(self, field: str, expected: object, received: object) -> BadChunk:
        return BadChunk(
            f"{self._sender} sent a chunk with wrong {field}: expected {expected}, received {received}",
            field=field,
            expected=expected,
            received=received,
            bucket="",
        )


def check_reorder(geometry: Geometry, source: AxisOrder, target: AxisOrder) -> None:
    """Refuses to bring blocks from one order into another where their bytes can't be told apart.

    Raises:
        IncompatibleLayout: names the orders.
    """
    is_known = AxisOrder.UNKNOWN not in (source, target) and geometry.config.num_heads
    if source is not target and not is_known:
        raise IncompatibleLayout(
            f"blocks in {source.value} order can't be brought into {target.value} order: both orders and the number of "
            "heads must be known",
            field="axis_order",
            source=source.value,
            destination=target.value,
        )


def reorder(data_NP: Bytes, geometry: Geometry, part: Part, source: AxisOrder, target: AxisOrder) -> Bytes:
    """Returns parts of blocks with their axes in another order; copies them once.

    Args:
        data_NP: shape [N, P], in order `source`.
        geometry: layout that `part` is a part of.
        part: what of each block the bytes are.
        source: order of the bytes.
        target: order of the result; `check_reorder` allows it.
    """
    result, ids = np.empty_like(data_NP), np.arange(len(data_NP))
    pairs = reordering(geometry, part, source, target)
    copy_blocks(pairs, [data_NP.reshape(-1)], [result.reshape(-1)], ids, ids)
    return result


def _short(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 8 else f"{len(ids)} from {ids[0]} to {ids[-1]}"
