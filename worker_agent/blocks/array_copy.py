"""Copies blocks between byte arrays, pair by pair.  [core]

Where blocks are large, or many of them neighbours, each run is one assignment. Small ones are gathered and scattered
by index, so many at a time as stay in the processor's cache, because an assignment costs more than they do. One
indexed assignment from end to end would be two passes through memory.

Legend: B blocks of a side, N ids, P bytes of a part.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Bytes, Part
from worker_agent.blocks.pairs import Pair, Place, reordering
from worker_agent.blocks.plan import runs

INDEXED_BELOW_BYTES = 8192
"""Runs shorter than this are copied by index."""
_CACHE_BYTES = 1 << 18

Lane = np.dtype[Any]
Array = npt.NDArray[Any]

_LANES: dict[int, Lane] = {
    width: np.dtype(name) for width, name in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (16, "c16"))
}
"""Numbers that are copied, and nothing else; numpy has no whole number of 16 bytes."""

Buffers = Sequence[Bytes]
"""The allocations of one side, each a flat array of bytes."""


def copy_blocks(
    pairs: Sequence[Pair], source: Buffers, destination: Buffers, source_blocks: Ids, destination_blocks: Ids
) -> None:
    """Copies what the pairs say, of source block i to destination block i for each i."""
    todo = runs(source_blocks, destination_blocks)
    if not todo:
        return
    num_blocks = int(source_blocks.max()) + 1, int(destination_blocks.max()) + 1
    for pair in pairs:
        by_index = len(todo) > 1 and pair.block_bytes * len(source_blocks) < INDEXED_BELOW_BYTES * len(todo)
        flat = by_index and len(pair.shape) == 1
        lane: Lane = np.dtype(f"V{pair.block_bytes}") if flat else _LANES[pair.lane_bytes]
        sources = _array(pair, pair.source, source, num_blocks[0], lane)
        destinations = _array(pair, pair.destination, destination, num_blocks[1], lane)
        if by_index:
            step = max(1, _CACHE_BYTES // pair.block_bytes)
            for start in range(0, len(source_blocks), step):
                places = slice(start, start + step)
                destinations[destination_blocks[places]] = sources[source_blocks[places]]
        else:
            _copy_runs(sources, destinations, todo)


def reordered(geometry: Geometry, part: Part, strings: Bytes, order: AxisOrder, wanted: AxisOrder) -> Bytes:
    """Returns a part's strings, shape [N, P], with their axes in another order; copies them."""
    out = np.empty_like(strings)
    places = np.arange(len(strings))
    pairs = reordering(geometry, part, order, wanted)
    copy_blocks(pairs, [strings.reshape(-1)], [out.reshape(-1)], places, places)
    return out


def _copy_runs(sources: Array, destinations: Array, todo: Sequence[tuple[int, int, int]]) -> None:
    for first, target, count in todo:
        if count == 1:
            destinations[target] = sources[first]
        else:
            destinations[target : target + count] = sources[first : first + count]


def _array(pair: Pair, place: Place, buffers: Buffers, num_blocks: int, lane: Lane) -> Array:
    """Returns one side of a pair, shape [B, ...], with just as many blocks as are needed; the last axis counts lanes.

    numpy refuses blocks that end beyond the buffer.
    """
    shape = (num_blocks, *pair.shape[:-1], pair.shape[-1] // lane.itemsize)
    strides = (place.block_stride, *place.strides[:-1], lane.itemsize)
    return np.ndarray(shape, lane, buffers[place.allocation], place.offset, strides)
