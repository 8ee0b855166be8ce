"""Where the parts of blocks lie in a file, and which of them one call can move.  [core]

Legend: N blocks of a call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from worker_agent.blocks import plan
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Part

MAX_CALL_BYTES = 1 << 19
"""Neighbours are moved in one call up to this size: the bytes are then still in the processor's cache."""
_MAX_BUFFERS = 1024
"""Buffers that the system takes in one call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Track:
    """A run of bytes that every block has: that of block b is at `offset` + b * `stride` in the file."""

    offset: int
    stride: int
    length: int
    place: int
    """Where the run lies in the block's part."""


Extent = tuple[int, int, int]
"""Runs of neighbouring blocks of one call that are neighbours in the file too: offset of the first in the file, its
place in the call's list, number of blocks."""


@lru_cache(maxsize=256)
def tracks(geometry: Geometry, part: Part, starts: tuple[int, ...]) -> tuple[Track, ...]:
    """Returns the runs that a part of a block consists of, in the order of its bytes.

    Args:
        geometry: the layout.
        part: what of each block.
        starts: where each allocation begins in the file.
    """
    chunks = plan.chunk_table(geometry, 0, part.layers, part.slice, part.axis_order)
    places = (np.cumsum(chunks[:, 2]) - chunks[:, 2]).tolist()
    return tuple(
        Track(offset=starts[allocation] + offset, stride=geometry.block_stride, length=length, place=place)
        for (allocation, offset, length), place in zip(chunks.tolist(), places, strict=True)
    )


@lru_cache(maxsize=1024)
def cover(geometry: Geometry, parts: frozenset[Part]) -> bool:
    """Says whether every byte of a block is in one of its parts."""
    tables = [plan.chunk_table(geometry, 0, part.layers, part.slice, part.axis_order) for part in parts]
    chunks = np.concatenate(tables)
    if chunks[:, 2].sum() < geometry.config.block_bytes:
        return False
    starts = chunks[:, 0] * max(geometry.allocation_bytes) + chunks[:, 1]
    order = np.argsort(starts)
    starts, ends = starts[order], (starts + chunks[:, 2])[order]
    before = np.concatenate(([0], np.maximum.accumulate(ends)[:-1]))
    return int(np.maximum(0, ends - np.maximum(starts, before)).sum()) == geometry.config.block_bytes


def extents(blocks: Sequence[int], track: Track) -> Iterator[Extent]:
    """Yields what can be moved in one call each, in the order of the call's list."""
    limit = min(_MAX_BUFFERS, max(1, MAX_CALL_BYTES // track.length)) if track.stride == track.length else 1
    first = 0
    for stop in range(1, len(blocks) + 1):
        if stop == len(blocks) or blocks[stop] != blocks[stop - 1] + 1 or stop - first == limit:
            yield track.offset + blocks[first] * track.stride, first, stop - first
            first = stop


def pieces(num_blocks: int, row_bytes: int) -> Iterator[slice]:
    """Yields the places of blocks that are moved, and have their checksums computed, at a time."""
    step = max(1, MAX_CALL_BYTES // row_bytes)
    for start in range(0, num_blocks, step):
        yield slice(start, min(start + step, num_blocks))
