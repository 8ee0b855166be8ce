"""Ways for bytes from one local layout to another.  [shell]

A path copies one batch of blocks. `Straight` goes from strides to strides: both sides in host memory, or both on
devices; a change of axis order costs no further pass. `Hop` goes by way of strings (see `memory`): one side fills
them, the other takes them. They are in a buffer; or, where one side is in host memory and has its own strings in large
pieces, there, which saves a copy.

Legend: N blocks of a batch, P bytes of a part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder, StorageKind
from ayni.errors import Checksum, StorageFailed, Unsupported
from worker_agent.blocks import array_copy, tensor_copy
from worker_agent.blocks.device_memory import DeviceMemory
from worker_agent.blocks.host_memory import HostMemory, new_buffer
from worker_agent.blocks.memory import WHOLE, Bytes, Memory, Part
from worker_agent.blocks.pairs import between
from worker_agent.blocks.plan import HOST, runs

BUFFER_BYTES = 4 << 20
"""Size of a bounce buffer, unless one block needs more."""
IN_PLACE_BYTES = 1 << 20
"""Pieces of host memory from this size on are read and written in place; a call costs more than a copy of less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What of a layout is copied, or copied to."""

    memory: Memory
    blocks: Ids
    part: Part = WHOLE

    @property
    def order(self) -> AxisOrder:
        """Order of the axes in the part."""
        return self.part.axis_order or self.memory.geometry.axis_order

    @property
    def part_bytes(self) -> int:
        """P."""
        return self.memory.geometry.part_bytes(self.part.layers, self.part.slice, self.part.axis_order)


class Unreadable(Exception):
    """A source block can't be read; `error` says why."""

    def __init__(self, error: Checksum | StorageFailed) -> None:
        super().__init__(error.message)
        self.error = error


class Path(Protocol):
    """Copies batches."""

    def copy(self, source_blocks: Ids, destination_blocks: Ids) -> None:
        """Copies the parts of some blocks; returns when they have landed.

        Raises:
            Unreadable: a source block can't be read.
            StorageFailed: a destination block can't be written.
            Unsupported: bounce blocks are needed, and the ones given are of no use.
        """


def path_between(source: Selection, destination: Selection, bounce: Selection | None = None) -> Path:
    """Returns the best path.

    Args:
        source: its blocks do not matter, nor do the destination's.
        destination: its part has as many bytes as the source's.
        bounce: whole blocks in host memory that the path may use; None: it has a buffer of its own.
    """
    memories = source.memory, destination.memory
    for kind in (HostMemory, DeviceMemory):
        if all(isinstance(memory, kind) for memory in memories):
            return Straight(source, destination)
    return Hop(source, destination, bounce)


class Straight:
    """From strides to strides, in one pass."""

    def __init__(self, source: Selection, destination: Selection) -> None:
        """Takes two sides in host memory, or two on devices."""
        self._pairs = between(source.memory.geometry, source.part, destination.memory.geometry, destination.part)
        self._source, self._destination = source.memory, destination.memory

    def copy(self, source_blocks: Ids, destination_blocks: Ids) -> None:
        """See `Path`."""
        source, destination = self._source, self._destination
        blocks = source_blocks, destination_blocks
        if isinstance(source, HostMemory) and isinstance(destination, HostMemory):
            array_copy.copy_blocks(self._pairs, source.buffers, destination.buffers, *blocks)
        elif isinstance(source, DeviceMemory) and isinstance(destination, DeviceMemory):
            tensor_copy.copy_blocks(self._pairs, source.buffers, destination.buffers, *blocks)
            tensor_copy.wait(source.device)
            tensor_copy.wait(destination.device)


class Hop:
    """By way of strings in host memory."""

    def __init__(self, source: Selection, destination: Selection, bounce: Selection | None = None) -> None:
        """Finds out where the strings can be."""
        self._source, self._destination = source, destination
        self._order = _order_between(source, destination)
        self._reorders = not _can_reorder(destination.memory) and self._order is not destination.order
        self._in_place = InPlace.of(source, destination, self._order)
        self._bounce = bounce
        self._buffers: list[Bytes] = []

    def copy(self, source_blocks: Ids, destination_blocks: Ids) -> None:
        """See `Path`."""
        if self._in_place is not None and self._in_place.suits(source_blocks, destination_blocks):
            self._in_place.copy(source_blocks, destination_blocks)
            return
        self._buffers = self._buffers or _buffers(self._source, self._destination, self._bounce)
        done = 0
        for buffer in cycle(self._buffers):
            places = slice(done, done + len(buffer))
            if done >= len(source_blocks):
                return
            self._through(buffer, source_blocks[places], destination_blocks[places])
            done += len(buffer)

    def _through(self, buffer: Bytes, source_blocks: Ids, destination_blocks: Ids) -> None:
        strings, order = buffer[: len(source_blocks)], self._order
        _fetch(self._source, source_blocks, strings, order)
        if self._reorders:
            geometry, order = self._source.memory.geometry, self._destination.order
            strings = array_copy.reordered(geometry, self._source.part, strings, self._order, order)
        _store(self._destination, destination_blocks, strings, order)


class InPlace:
    """The side in host memory has its strings in one piece: the other side reads or writes them there."""

    def __init__(self, source: Selection, destination: Selection, order: AxisOrder, rows: Bytes) -> None:
        """Takes two sides, one of them in host memory with these rows."""
        self._source, self._destination, self._order, self._rows = source, destination, order, rows
        self._fills_rows = destination.memory.storage in HOST

    @classmethod
    def of(cls, source: Selection, destination: Selection, order: AxisOrder) -> "InPlace | None":
        """Returns the way in place, if there is one."""
        for side in (source, destination):
            if side.memory.storage in HOST and side.order is order:
                rows = side.memory.rows(side.part)
                return None if rows is None else cls(source, destination, order, rows)
        return None

    def suits(self, source_blocks: Ids, destination_blocks: Ids) -> bool:
        """Says whether few enough calls are needed."""
        num_bytes = len(source_blocks) * int(self._rows.shape[1])
        return num_bytes >= IN_PLACE_BYTES * len(self._pieces(source_blocks, destination_blocks))

    def copy(self, source_blocks: Ids, destination_blocks: Ids) -> None:
        """See `Path`."""
        done = 0
        for first, count in self._pieces(source_blocks, destination_blocks):
            places = slice(done, done + count)
            strings = self._rows[first : first + count]
            if self._fills_rows:
                _fetch(self._source, source_blocks[places], strings, self._order)
            else:
                _store(self._destination, destination_blocks[places], strings, self._order)
            done += count

    def _pieces(self, source_blocks: Ids, destination_blocks: Ids) -> list[tuple[int, int]]:
        """First row and count of each piece of host memory; the other side finds its blocks wherever they are."""
        ours = destination_blocks if self._fills_rows else source_blocks
        if self._rows.strides[0] != self._rows.shape[1]:
            return [(block, 1) for block in ours.tolist()]
        return [(first, count) for first, _, count in runs(ours, ours)]


def _order_between(source: Selection, destination: Selection) -> AxisOrder:
    """Order of the strings: one that both can do where there is one; else the source's."""
    if not _can_reorder(source.memory):
        return source.order
    if not _can_reorder(destination.memory) or destination.memory.storage in HOST:
        return destination.order
    return source.order


def _can_reorder(memory: Memory) -> bool:
    return isinstance(memory, HostMemory | DeviceMemory)


def _fetch(side: Selection, blocks: Ids, out: Bytes, order: AxisOrder) -> None:
    try:
        if isinstance(side.memory, HostMemory | DeviceMemory):
            side.memory.read(blocks, side.part, out, order)
        else:
            side.memory.read(blocks, side.part, out)
    except (Checksum, StorageFailed) as error:
        raise Unreadable(error) from error


def _store(side: Selection, blocks: Ids, data: Bytes, order: AxisOrder) -> None:
    if isinstance(side.memory, HostMemory | DeviceMemory):
        side.memory.write(blocks, side.part, data, order)
    else:
        side.memory.write(blocks, side.part, data)


def _buffers(source: Selection, destination: Selection, bounce: Selection | None) -> list[Bytes]:
    """Returns buffers, each of shape [N, P] and contiguous."""
    part_bytes = source.part_bytes
    storages = source.memory.storage, destination.memory.storage
    if bounce is None or set(storages) & HOST:
        count = max(1, BUFFER_BYTES // part_bytes)
        buffer = new_buffer(count * part_bytes, pinned=StorageKind.DEVICE in storages)
        return [buffer.reshape(count, part_bytes)]
    return list(_bounce_rows(bounce, part_bytes))


def _bounce_rows(bounce: Selection, part_bytes: int) -> Iterator[Bytes]:
    rows = bounce.memory.rows(WHOLE)
    if rows is None or rows.shape[1] < part_bytes:
        message = f"bounce blocks must be fully contiguous, in host memory, and hold {part_bytes} bytes"
        raise Unsupported(message, option="bounce")
    if rows.shape[1] == part_bytes == rows.strides[0]:
        yield from (rows[first : first + count] for first, _, count in runs(bounce.blocks, bounce.blocks))
    else:
        yield from (rows[block : block + 1, :part_bytes] for block in bounce.blocks.tolist())
