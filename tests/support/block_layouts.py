"""Small layouts of every kind and order, and where their bytes lie according to the formulas, byte by byte."""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ayni.blocks.layouts import Axis, AxisOrder, LayoutConfig, LayoutKind
from ayni.blocks.transfers import AxisSlice
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import Part

FC = LayoutKind.FULLY_CONTIGUOUS
LS_FIRST = LayoutKind.LAYER_SEPARATE_BLOCK_FIRST
LS_SECOND = LayoutKind.LAYER_SEPARATE_BLOCK_SECOND
NHD, HND, UNIVERSAL, UNKNOWN = AxisOrder.NHD, AxisOrder.HND, AxisOrder.UNIVERSAL, AxisOrder.UNKNOWN

KNOWN = [(kind, order) for kind in LayoutKind for order in (NHD, HND)] + [(FC, UNIVERSAL)]
KINDS_AND_ORDERS = [*KNOWN, *((kind, UNKNOWN) for kind in LayoutKind)]


def config(**changes: int) -> LayoutConfig:
    """Extents are all different, so that no two axes can be taken for one another."""
    values = {
        "num_blocks": 7,
        "num_layers": 3,
        "outer_dim": 2,
        "page_size": 4,
        "inner_dim": 15,
        "num_heads": 5,
        "dtype_width_bytes": 2,
        **changes,
    }
    return LayoutConfig(**values)


def geometry(kind: LayoutKind = FC, order: AxisOrder = NHD, **changes: Any) -> Geometry:
    return Geometry(config=config(**changes), kind=kind, axis_order=order)


@st.composite
def configs(draw: st.DrawFn, num_blocks: int | None = None) -> LayoutConfig:
    heads = draw(st.integers(1, 4))
    return LayoutConfig(
        num_blocks=num_blocks or draw(st.integers(1, 6)),
        num_layers=draw(st.integers(1, 4)),
        outer_dim=draw(st.integers(1, 2)),
        page_size=draw(st.sampled_from([1, 2, 8])),
        inner_dim=heads * draw(st.integers(1, 5)),
        num_heads=heads,
        dtype_width_bytes=draw(st.sampled_from([1, 2, 4, 8])),
    )


@st.composite
def parts(draw: st.DrawFn, of: Geometry) -> Part:
    """Any part that a layout of known order has."""
    axis = draw(st.sampled_from([None, *(axis for axis in Axis if axis is not Axis.BLOCK)]))
    layers = draw(st.none() | ranges(of.config.num_layers))
    if axis is None:
        return Part(layers=layers)
    start, stop = draw(ranges(of.extent(axis)))
    return Part(layers=None if axis is Axis.LAYER else layers, slice=AxisSlice(axis=axis, start=start, stop=stop))


@st.composite
def ranges(draw: st.DrawFn, count: int) -> tuple[int, int]:
    start = draw(st.integers(0, count - 1))
    return start, draw(st.integers(start + 1, count))


def address(of: Geometry, block: int, layer: int, outer: int, page: int, head: int, byte: int) -> tuple[int, int]:
    """Returns allocation and offset of one byte of a head, as the formulas of each kind and order say."""
    c = of.config
    head_bytes = c.inner_dim * c.dtype_width_bytes // (c.num_heads or 1)
    heads = c.num_heads or 1
    region = c.page_size * heads * head_bytes
    if of.axis_order is UNIVERSAL:
        place = (((block * heads + head) * c.num_layers + layer) * c.outer_dim + outer) * c.page_size + page
        return 0, place * head_bytes + byte
    inside = (head * c.page_size + page if of.axis_order is HND else page * heads + head) * head_bytes + byte
    if of.kind is FC:
        return 0, ((block * c.num_layers + layer) * c.outer_dim + outer) * region + inside
    place = block * c.outer_dim + outer if of.kind is LS_FIRST else outer * c.num_blocks + block
    return layer, place * region + inside


def indices(of: Geometry, part: Part) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields (layer, outer, page, head, byte) of a part of a block, in NHD order."""
    c = of.config
    head_bytes = c.inner_dim * c.dtype_width_bytes // (c.num_heads or 1)
    extents = {
        Axis.LAYER: range(*(part.layers or (0, c.num_layers))),
        Axis.OUTER: range(c.outer_dim),
        Axis.PAGE: range(c.page_size),
        Axis.HEAD_COUNT: range(c.num_heads or 1),
        Axis.HEAD_SIZE: range(head_bytes),
    }
    if part.slice is not None:
        unit = c.dtype_width_bytes if part.slice.axis is Axis.HEAD_SIZE else 1
        extents[part.slice.axis] = range(part.slice.start * unit, part.slice.stop * unit)
    yield from itertools.product(*extents.values())


def in_order(of: Geometry, part: Part) -> list[tuple[int, int, int, int, int]]:
    """Returns the same in the layout's own order."""
    keys = {
        HND: lambda i: (i[0], i[1], i[3], i[2], i[4]),
        UNIVERSAL: lambda i: (i[3], i[0], i[1], i[2], i[4]),
    }
    return sorted(indices(of, part), key=keys.get(of.axis_order))


def part_bytes(of: Geometry, part: Part) -> int:
    return of.part_bytes(part.layers, part.slice, part.axis_order)


def noisy(of: Geometry, seed: int = 0) -> HostMemory:
    """Returns a layout whose every byte is random, so that nothing that is copied or left alone goes unseen."""
    memory = allocate_host(of)
    random = np.random.default_rng(seed)
    for buffer in memory.buffers:
        buffer[:] = random.integers(0, 256, buffer.shape, dtype=np.uint8)
    return memory


def snapshot(memory: HostMemory) -> list[np.ndarray]:
    return [buffer.copy() for buffer in memory.buffers]


def copied_by_loop(
    source: HostMemory,
    destination: HostMemory,
    pairs: list[tuple[int, int]],
    parts_of: tuple[Part, Part],
) -> list[np.ndarray]:
    """Returns the destination's buffers as they must be after a copy, byte by byte."""
    after = snapshot(destination)
    for one, other in pairs:
        places = addresses(source.geometry, one, parts_of[0]), addresses(destination.geometry, other, parts_of[1])
        for (allocation, offset), (target, at) in zip(*places, strict=True):
            after[target][at] = source.buffers[allocation][offset]
    return after


@lru_cache
def addresses(of: Geometry, block: int, part: Part, own_order: bool = False) -> list[tuple[int, int]]:
    """Returns allocation and offset of each byte of a part, in NHD order or in the layout's own."""
    return [address(of, block, *inside) for inside in (in_order(of, part) if own_order else indices(of, part))]
