"""Bytes that go from one layout to another, as strides on both sides.  [core]

Theory of operation. Both sides are cut by layer until each piece lies in one allocation on either side. In each piece
the axes are put into the destination's order, and axes that are neighbours in both are made one. What is left is one
axis of bytes when a whole block is copied as it is, and a few when heads or tokens change places. The same strides hold
for every block.

A string of bytes (see `memory`) is a layout as well: one allocation, one block after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from ayni.blocks.layouts import AxisOrder
from worker_agent.blocks.geometry import AXES, NESTING, Geometry, Strided, with_heads_alike
from worker_agent.blocks.memory import Part

MAX_LANE_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One side of a pair."""

    allocation: int
    offset: int
    """Of the first byte of block 0."""
    block_stride: int
    strides: tuple[int, ...]
    """Inside a block, outermost first; the last one is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Bytes with the same indices in one source and one destination allocation."""

    shape: tuple[int, ...]
    """Inside a block; the last axis counts bytes."""
    source: Place
    destination: Place

    block_bytes: int
    """Bytes of one block that the pair moves."""
    lane_bytes: int
    """Bytes that can always be moved as one: at most 16, a power of two."""


@lru_cache(maxsize=256)
def between(source: Geometry, source_part: Part, destination: Geometry, destination_part: Part) -> tuple[Pair, ...]:
    """Returns the pairs of two parts with equal extents, in any orders; raises as `Geometry.check_part`.

    Where one side does not know its heads, neither is looked into: see `with_heads_alike`.
    """
    source, destination = with_heads_alike(source, destination)
    return _pairs(views_of(source, source_part), views_of(destination, destination_part))


@lru_cache(maxsize=256)
def to_string(geometry: Geometry, part: Part, order: AxisOrder) -> tuple[Pair, ...]:
    """Returns the pairs from a part to its string, whose axes are nested as in `order`; raises as `between`."""
    views = views_of(geometry, part)
    return _pairs(views, (_string(views, order),))


@lru_cache(maxsize=256)
def from_string(geometry: Geometry, part: Part, order: AxisOrder) -> tuple[Pair, ...]:
    """Returns the pairs from a string to the part; otherwise as `to_string`."""
    views = views_of(geometry, part)
    return _pairs((_string(views, order),), views)


@lru_cache(maxsize=256)
def reordering(geometry: Geometry, part: Part, source: AxisOrder, destination: AxisOrder) -> tuple[Pair, ...]:
    """Returns the pairs from a part's string in one order to its string in another; raises as `between`."""
    views = views_of(geometry, part)
    return _pairs((_string(views, source),), (_string(views, destination),))


def views_of(geometry: Geometry, part: Part) -> tuple[Strided, ...]:
    """Returns where a part lies; raises as `Geometry.check_part`."""
    return geometry.strided(part.layers, part.slice, part.axis_order)


def _string(views: Sequence[Strided], order: AxisOrder) -> Strided:
    num_layers = sum(view.shape[1] for view in views)
    shape = (1, num_layers, *views[0].shape[2:])
    extents = dict(zip(AXES, shape, strict=True))
    strides, step = {}, 1
    for axis in reversed(NESTING[order]):
        strides[axis] = step
        step *= extents[axis]
    ordered = tuple(strides[axis] for axis in AXES[1:])
    return Strided(allocation=0, offset=0, shape=shape, strides=(step, *ordered), first_layer=0)


def _pairs(source: Sequence[Strided], destination: Sequence[Strided]) -> tuple[Pair, ...]:
    pairs = []
    for one in source:
        for other in destination:
            start = max(_start(one, source), _start(other, destination))
            stop = min(_start(one, source) + one.shape[1], _start(other, destination) + other.shape[1])
            if start < stop:
                cuts = (_cut(one, start - _start(one, source)), _cut(other, start - _start(other, destination)))
                pairs.append(_joined((stop - start, *one.shape[2:]), one, other, cuts))
    return tuple(pairs)


def _start(view: Strided, views: Sequence[Strided]) -> int:
    """First layer of a view, counted from the part's first."""
    return view.first_layer - views[0].first_layer


def _cut(view: Strided, layers: int) -> int:
    """Offset of the bytes after so many layers of a view."""
    return view.offset + layers * view.strides[1]


def _joined(shape: tuple[int, ...], source: Strided, destination: Strided, offsets: tuple[int, int]) -> Pair:
    *outer, size = zip(shape, source.strides[1:], destination.strides[1:], strict=True)
    axes = [size]
    for count, *strides in sorted(outer, key=lambda axis: axis[2]):
        inner = axes[-1]
        if count == 1:
            continue
        if strides == [inner[0] * inner[1], inner[0] * inner[2]]:
            axes[-1] = (inner[0] * count, inner[1], inner[2])
        else:
            axes.append((count, strides[0], strides[1]))
    counts, source_strides, destination_strides = zip(*reversed(axes), strict=True)
    places = _place(source, offsets[0], source_strides), _place(destination, offsets[1], destination_strides)
    return Pair(
        shape=counts,
        source=places[0],
        destination=places[1],
        block_bytes=prod(counts),
        lane_bytes=gcd(MAX_LANE_BYTES, counts[-1], *map(_lane, places)),
    )


def _lane(place: Place) -> int:
    return gcd(place.offset, place.block_stride, *place.strides[:-1])


def _place(view: Strided, offset: int, strides: tuple[int, ...]) -> Place:
    return Place(allocation=view.allocation, offset=offset, block_stride=view.block_stride, strides=strides)
