"""Disk tier: the blocks of one layout in one file that is set aside when it is made.  [shell]

Bytes go straight between the file and the caller's arrays, at fixed offsets, neighbours in one call. Each block's slot
says whether it was written and, once it was written whole, its checksum; see `slab_header`. So what a crash tore is
known when it is read, and a slab is recovered by its header alone. Copies: one, by the system.

A block that is written in parts has its checksum as soon as all of its parts are in. Until then a part of it is read
unchecked, and if the process is killed the block is torn: also one that was whole before, of which some was written
again. A part of a block that has a checksum is read with the whole block, and checked.

Not known: what a power cut took away that was never synced, where the block's slot was lost as well. Such a block
counts as never written; reading it from a recovered slab is refused.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import StorageKind
from ayni.errors import StorageFailed
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory
from worker_agent.blocks.memory import WHOLE, Bytes, Part
from worker_agent.blocks.slab_extents import Track, cover, extents, pieces, tracks
from worker_agent.blocks.slab_file import SlabFile
from worker_agent.blocks.slab_header import SlabHeader, checksums_of
from worker_agent.blocks.slab_header import places as places_in
from worker_agent.blocks.slab_slots import SlabSlots

_SMALL_RUN_BYTES = 4096
"""A part in runs shorter than this is taken out of, or put into, its whole block in memory."""

_Call = Callable[[int, Sequence[Bytes]], None]
_Write = Callable[[Ids, Part, Bytes], None]


class Fsync(Enum):
    """When bytes are forced onto the disk."""

    NEVER = "never"
    """The system decides: a crash of the process loses nothing, a power cut may."""
    CLOSE = "close"
    """When the slab is closed."""
    ALWAYS = "always"
    """Before every write returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabOptions:
    """How a slab is kept."""

    fsync: Fsync = Fsync.NEVER
    verify: bool = True
    """Compare the checksum of a block whenever it, or a part of it, is read."""


DEFAULT_OPTIONS = SlabOptions()


class SlabMemory:
    """The bytes of a layout on disk; see `worker_agent.blocks.memory.Memory`."""

    storage = StorageKind.DISK

    def __init__(self, path: Path, geometry: Geometry, header: SlabHeader, options: SlabOptions = DEFAULT_OPTIONS):
        """Recovers the slab at `path`, or makes it. Blocks the calling thread.

        Args:
            path: the file.
            geometry: the layout.
            header: `SlabHeader.of` the geometry and its owner.
            options: how to keep it.

        Raises:
            StorageFailed: see `SlabFile`.
        """
        self.geometry = geometry
        self._options = options
        self._places = places_in(geometry)
        self._file = SlabFile(path, header, self._places.end)
        self.recovered = self._file.recovered
        """Whether the file was there, with blocks of this layout and owner."""
        self._slots = SlabSlots(self._file, partial(cover, geometry))
        self._parts_lock = threading.Lock()
        self._is_open = True

    def written_blocks(self) -> Ids:
        """Returns the ids of all blocks that were written whole and that are not known to be torn, ascending."""
        return self._slots.written()

    def rows(self, part: Part) -> Bytes | None:
        """Returns None: nothing of it is in memory."""
        return None

    def views(self, block: int, part: Part) -> list[memoryview] | None:
        """Returns None: nothing of it is in memory."""
        return None

    def read(self, blocks: Ids, part: Part, out: Bytes) -> None:
        """Copies parts of blocks out; see `Memory.read`.

        Raises:
            Checksum: a block is torn, or its bytes are not those that were written.
            StorageFailed: the file can't be read, or a recovered slab never had the block, or all of it.
        """
        assert out.flags.c_contiguous, "rows that are not together would be read into a copy"
        self._slots.check_written(blocks)
        if self._is_whole(part):
            self._read_whole(blocks, out)
            return
        # A checksum is that of a whole block: to check a part, all of it is read.
        must_verify = self._options.verify and self._slots.whole(blocks).size > 0
        if must_verify or _are_small(self._tracks(part)):
            self._read_through_whole(blocks, part, out)
        else:
            self._move(self._file.read, blocks.tolist(), self._tracks(part), out)

    def write(self, blocks: Ids, part: Part, data: Bytes) -> None:
        """Copies parts of blocks in; see `Memory.write`.

        A block that was torn, or never written, is read again once all of it was written.

        Raises:
            StorageFailed: the file can't be written. The blocks in hand are torn; those after them are unchanged.
        """
        if self._is_whole(part):
            self._write(blocks, part, data, self._write_whole)
            return
        # Small runs are put in by reading and writing whole blocks, which no other part of a block may cut across.
        with self._parts_lock:
            self._write(blocks, part, data, self._write_part)

    def close(self) -> None:
        """Gives every block that is whole its checksum and closes the file; a second call does nothing.

        Raises:
            StorageFailed: the file can't be read or written; it is closed all the same, and not marked as clean.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._slots.complete(self._read_block)
            self._file.mark(clean=True)
            if self._options.fsync is not Fsync.NEVER:
                self._file.sync()
        finally:
            self._file.close()

    def _write(self, blocks: Ids, part: Part, data: Bytes, write: _Write) -> None:
        try:
            for places in pieces(len(blocks), data.shape[1]):
                write(blocks[places], part, data[places])
        except StorageFailed:
            # What the disk refused may refuse the slots as well; the first refusal is the one to tell.
            with suppress(StorageFailed):
                self._slots.save(blocks)
            raise
        self._slots.save(blocks)
        if self._options.fsync is Fsync.ALWAYS:
            self._file.sync()

    def _write_whole(self, blocks: Ids, part: Part, data: Bytes) -> None:
        ids = blocks.tolist()
        self._slots.begin_write(blocks)
        self._move(self._file.write, ids, self._tracks(part), data)
        self._slots.end_whole(blocks, checksums_of(ids, data))

    def _write_part(self, blocks: Ids, part: Part, data: Bytes) -> None:
        # The checksum of the whole block is given up with the first part: what is damaged by then stays damaged.
        self._slots.tear_damaged(blocks, self._read_block)
        begun = self._slots.begin_write(blocks)
        runs = self._tracks(part)
        if _are_small(runs):
            self._write_small(blocks, part, data)
        else:
            self._move(self._file.write, blocks.tolist(), runs, data)
        self._slots.end_part(begun, part, self._read_block)

    def _move(self, call: _Call, ids: Sequence[int], runs: Sequence[Track], rows: Bytes) -> None:
        for track in runs:
            for offset, first, num_blocks in extents(ids, track):
                call(offset, _buffers(track, rows, first, num_blocks))

    def _read_whole(self, blocks: Ids, out: Bytes) -> None:
        ids = blocks.tolist()
        for places in pieces(len(ids), out.shape[1]):
            self._move(self._file.read, ids[places], self._tracks(WHOLE), out[places])
            if self._options.verify:
                self._slots.verify(blocks[places], checksums_of(ids[places], out[places]))

    def _read_through_whole(self, blocks: Ids, part: Part, out: Bytes) -> None:
        block_bytes = self.geometry.config.block_bytes
        for places in pieces(len(blocks), block_bytes):
            rows = np.empty((places.stop - places.start, block_bytes), np.uint8)
            self._read_whole(blocks[places], rows)
            for i, row in enumerate(rows, places.start):
                self._as_memory(row).read(_FIRST, part, out[i : i + 1])

    def _write_small(self, blocks: Ids, part: Part, rows: Bytes) -> None:
        for i, block in enumerate(blocks.tolist()):
            whole = self._read_block(block)
            self._as_memory(whole).write(_FIRST, part, rows[i : i + 1])
            self._move(self._file.write, [block], self._tracks(WHOLE), whole)

    def _read_block(self, block: int) -> Bytes:
        """Returns one block, shape [1, block_bytes]."""
        whole = np.empty((1, self.geometry.config.block_bytes), np.uint8)
        self._move(self._file.read, [block], self._tracks(WHOLE), whole)
        return whole

    def _as_memory(self, block: Bytes) -> HostMemory:
        """Returns a layout of one block over its bytes."""
        geometry = replace(self.geometry, config=replace(self.geometry.config, num_blocks=1, alignment_bytes=1))
        return HostMemory(geometry, np.split(block.reshape(-1), len(geometry.allocation_bytes)))

    def _tracks(self, part: Part) -> tuple[Track, ...]:
        return tracks(self.geometry, part, self._places.allocations)

    def _is_whole(self, part: Part) -> bool:
        return self.geometry.part_bytes(part.layers, part.slice, part.axis_order) == self.geometry.config.block_bytes


_FIRST = np.array([0])


def _buffers(track: Track, rows: Bytes, first: int, num_blocks: int) -> list[Bytes]:
    """Returns where the runs of blocks lie in memory: one buffer when they are neighbours there too."""
    if track.length != rows.shape[1]:
        return list(rows[first : first + num_blocks, track.place : track.place + track.length])
    return [rows[first] if num_blocks == 1 else rows[first : first + num_blocks].reshape(-1)]


def _are_small(runs: Sequence[Track]) -> bool:
    return len(runs) > 1 and runs[0].length < _SMALL_RUN_BYTES
