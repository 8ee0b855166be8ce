"""Which copies a transfer consists of: runs of neighbouring blocks, chunks of a part, copies between chunks.  [core]

A *run* is blocks that are neighbours on both sides; one copy does all of them. A *chunk* is bytes of a part that are
neighbours in memory. A part's chunks, in order, are its string (see `memory`); the fewer there are, the cheaper it is
to move. Two lists of chunks with equal sums are cut against one another into the fewest copies.

Legend: N chunks, M copies.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder, StorageKind
from ayni.blocks.transfers import AxisSlice
from ayni.errors import IncompatibleLayout
from worker_agent.blocks.geometry import Geometry, Strided

Chunk = tuple[int, int, int]
"""Allocation, offset in it, length; in bytes."""

Copy = tuple[int, int, int, int, int]
"""Source allocation and offset, destination allocation and offset, length; in bytes."""

Table = npt.NDArray[np.int64]

HOST = frozenset({StorageKind.SYSTEM, StorageKind.PINNED})
"""Storage that the processor reads and writes itself."""


def runs(source_blocks: Ids, destination_blocks: Ids) -> list[tuple[int, int, int]]:
    """Returns (first source block, first destination block, count) of each run, in order."""
    if len(source_blocks) <= 1:
        return [(one, other, 1) for one, other in zip(source_blocks.tolist(), destination_blocks.tolist(), strict=True)]
    steps = (np.diff(source_blocks) != 1) | (np.diff(destination_blocks) != 1)
    starts = np.concatenate(([0], np.flatnonzero(steps) + 1))
    counts = np.diff(starts, append=len(source_blocks))
    columns = source_blocks[starts].tolist(), destination_blocks[starts].tolist(), counts.tolist()
    return list(zip(*columns, strict=True))


def moves_whole_blocks(source: Geometry, destination: Geometry, layers: tuple[int, int] | None) -> bool:
    """Says whether each block moves as one run of bytes: both sides fully contiguous, and all layers."""
    is_everything = layers is None or layers == (0, source.config.num_layers)
    return source.is_fully_contiguous and destination.is_fully_contiguous and is_everything


def needs_host_hop(source: StorageKind, destination: StorageKind) -> bool:
    """Says whether bytes between two storages pass through host memory on their way.

    Disks are read and written by the processor, so everything goes straight but disk to disk and disk to device.
    """
    return StorageKind.DISK in (source, destination) and not {source, destination} & HOST


def chunks(
    geometry: Geometry,
    block: int,
    layers: tuple[int, int] | None,
    slice: AxisSlice | None,
    axis_order: AxisOrder | None,
) -> list[Chunk]:
    """Returns the runs of bytes of a part of one block, in the order of its string; neighbours are one chunk.

    Raises as `Geometry.check_part`.
    """
    return list(map(tuple, chunk_table(geometry, block, layers, slice, axis_order).tolist()))


def chunk_table(
    geometry: Geometry,
    block: int,
    layers: tuple[int, int] | None,
    slice: AxisSlice | None,
    axis_order: AxisOrder | None,
) -> Table:
    """Returns `chunks` as an array, shape [N, 3]: allocation, offset, length."""
    table, block_stride = _first_block(geometry, layers, slice, axis_order)
    moved: Table = table + np.array((0, block * block_stride, 0))
    return moved


def copies(source: Sequence[Chunk] | Table, destination: Sequence[Chunk] | Table) -> list[Copy]:
    """Returns the fewest copies that put the source's string into the destination's."""
    return list(map(tuple, copy_table(np.asarray(source), np.asarray(destination)).tolist()))


def copy_table(source: Table, destination: Table) -> Table:
    """Returns `copies` as an array, shape [M, 5].

    Raises:
        IncompatibleLayout: the strings' lengths differ.
    """
    source_ends, destination_ends = np.cumsum(source[:, 2]), np.cumsum(destination[:, 2])
    if source_ends[-1] != destination_ends[-1]:
        sizes = {"source": source_ends[-1], "destination": destination_ends[-1]}
        message = f"the source's part has {source_ends[-1]} bytes and the destination's {destination_ends[-1]}"
        raise IncompatibleLayout(message, field="part_bytes", **sizes)
    stops = np.union1d(source_ends, destination_ends)
    starts = np.concatenate(([0], stops[:-1]))
    sides = (_at(source, source_ends, starts), _at(destination, destination_ends, starts))
    return np.column_stack((*sides[0], *sides[1], stops - starts))


def merged(table: Table) -> Table:
    """Returns chunks with each one joined to the one before it where its bytes follow."""
    ends = table[:, 1] + table[:, 2]
    is_first = np.ones(len(table), dtype=bool)
    is_first[1:] = (table[1:, 0] != table[:-1, 0]) | (table[1:, 1] != ends[:-1])
    starts = np.flatnonzero(is_first)
    lengths = np.add.reduceat(table[:, 2], starts)
    return np.column_stack((table[starts, :2], lengths))


@lru_cache(maxsize=256)
def _first_block(
    geometry: Geometry, layers: tuple[int, int] | None, slice: AxisSlice | None, axis_order: AxisOrder | None
) -> tuple[Table, int]:
    """Chunks of block 0, and how far apart blocks are; the same in every allocation."""
    views = geometry.strided(layers, slice, axis_order)
    order = axis_order or geometry.axis_order
    table = merged(np.concatenate([_chunks_of(view, order) for view in views]))
    table.setflags(write=False)
    return table, views[0].block_stride


def _chunks_of(view: Strided, order: AxisOrder) -> Table:
    """Chunks of block 0 in one allocation: one for each index of the axes outside the innermost run."""
    shape, strides = view.nested(order)
    length, place = 1, len(shape)
    while place and strides[place - 1] == length:
        place -= 1
        length *= shape[place]
    offsets = np.array([view.offset], dtype=np.int64)
    for count, stride in zip(shape[:place], strides[:place], strict=True):
        offsets = np.add.outer(offsets, np.arange(count) * stride).reshape(-1)
    return np.column_stack((np.full_like(offsets, view.allocation), offsets, np.full_like(offsets, length)))


def _at(table: Table, ends: Table, positions: Table) -> tuple[Table, Table]:
    """Allocation and offset of the bytes at positions of a string."""
    places = np.searchsorted(ends, positions, side="right")
    chunk_starts = ends[places] - table[places, 2]
    return table[places, 0], table[places, 1] + positions - chunk_starts
