"""What a stream of blocks carries: cut into chunks, taken back, with gaps, lies and other orders."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks.layouts import Axis, AxisOrder, LayoutConfig, LayoutKind
from ayni.blocks.transfers import AxisSlice
from ayni.errors import BadChunk, Checksum, IncompatibleLayout
from worker_agent.blocks import stream_order
from worker_agent.blocks.frames import BlockChunk
from worker_agent.blocks.geometry import NESTING, Geometry
from worker_agent.blocks.memory import Part
from worker_agent.blocks.stream_order import Arrivals, Run, StreamShape, cut, head_of, reorder, shape_of

LAYERS = (2, 6)


def shape(num_blocks: int = 5, block_bytes: int = 24, layer_bytes: int = 6) -> StreamShape:
    blocks = np.arange(num_blocks, dtype=np.int64)[::-1] * 7
    return StreamShape(blocks=blocks, block_bytes=block_bytes, layers=LAYERS, layer_bytes=layer_bytes)


def chunk(of: StreamShape, place: int, length: int, received: int | None = None, **other: object) -> BlockChunk:
    """Returns the chunk with bytes `place` to `place + length` of a stream."""
    first, last = place // of.block_bytes, (place + length - 1) // of.block_bytes
    fields: dict[str, Any] = {
        "stream_offset_bytes": place if received is None else received,
        "index": first,
        "blocks": of.blocks[first : last + 1].tolist(),
        "layer_start": LAYERS[0],
        "layer_stop": LAYERS[1],
        "offset_bytes": place % of.block_bytes,
        "data": memoryview(bytes(length)),
    }
    return BlockChunk(**(fields | other))


@pytest.mark.parametrize("num_blocks", [0, 1, 63, 64, 65, 1023, 1025])
@pytest.mark.parametrize(("block_bytes", "chunk_bytes"), [(24, 64), (24, 24), (24, 25), (24, 7), (1, 4096)])
def test_chunks_make_up_the_stream_in_order(num_blocks, block_bytes, chunk_bytes):
    whole = shape(num_blocks, block_bytes)
    arrivals, place = Arrivals(whole, "a peer", chunk_bytes), 0
    for run in cut(whole, chunk_bytes):
        assert run.length <= chunk_bytes
        assert run.count <= stream_order.MOST_BLOCKS
        head = head_of(whole, run, place)
        fields: dict[str, Any] = {"stream_offset_bytes": place, "index": head.index, "blocks": head.blocks}
        fields |= {"layer_start": head.layers[0], "layer_stop": head.layers[1], "offset_bytes": head.offset_bytes}
        assert arrivals.take(BlockChunk(**fields, data=memoryview(bytes(run.length)))) == [run]
        arrivals.placed(run)
        place += run.length
    assert arrivals.received_bytes == place == whole.total_bytes
    assert arrivals.missing() == []


@given(cuts=st.lists(st.integers(1, 119), max_size=8, unique=True))
def test_any_cut_in_order_is_taken_and_a_block_counts_with_its_last_byte(cuts):
    whole = shape()
    arrivals, bounds = Arrivals(whole, "a peer", 120), [0, *sorted(cuts), whole.total_bytes]
    for start, stop in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007 -- pairs read better here
        for run in arrivals.take(chunk(whole, start, stop - start)):
            assert run.offset == 0 or run.count == 1
            arrivals.placed(run)
        assert arrivals.missing() == list(range(stop // whole.block_bytes, 5))


def test_layers_may_come_one_by_one():
    whole = shape(2)
    arrivals = Arrivals(whole, "a peer", 100)
    for place in range(0, whole.total_bytes, 6):
        layer = LAYERS[0] + place % 24 // 6
        runs = arrivals.take(chunk(whole, place, 6, layer_start=layer, layer_stop=layer + 1, offset_bytes=0))
        assert runs == [Run(place // 24, 1, place % 24, 6)]
        arrivals.placed(runs[0])
    assert arrivals.missing() == []


@pytest.mark.parametrize("layers", [(1, 3), (3, 7), (3, 3), (0, 1)])
def test_layers_outside_the_part_are_refused(layers):
    with pytest.raises(BadChunk, match="layers"):
        Arrivals(shape(), "a peer", 100).take(chunk(shape(), 0, 6, layer_start=layers[0], layer_stop=layers[1]))


def test_layers_of_blocks_with_heads_outermost_are_not_apart():
    whole = shape(layer_bytes=0)
    with pytest.raises(BadChunk, match="layers"):
        Arrivals(whole, "a peer", 100).take(chunk(whole, 0, 6, layer_start=2, layer_stop=3))


def test_sender_may_leave_out_the_rest_of_a_block_and_whole_blocks():
    whole = shape()
    arrivals = Arrivals(whole, "a peer", 100)
    arrivals.placed(arrivals.take(chunk(whole, 0, 24))[0])
    arrivals.placed(arrivals.take(chunk(whole, 24, 10))[0])
    arrivals.placed(arrivals.take(chunk(whole, 72, 48, received=34))[0])
    assert arrivals.missing() == [1, 2]
    assert arrivals.received_bytes == 82


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "gap inside a block": ({"place": 30, "length": 5, "received": 24}, "index"),
    "going back": ({"place": 0, "length": 24, "received": 24}, "index"),
    "beyond the end": ({"place": 96, "length": 25, "received": 24}, "data|index|blocks"),
    "wrong count of bytes": ({"place": 24, "length": 24, "received": 23}, "stream_offset_bytes"),
    "no data": ({"place": 24, "length": 0}, "data"),
    "too much data": ({"place": 24, "length": 60}, "data"),
    "other blocks": ({"place": 24, "length": 24, "blocks": [5]}, "blocks"),
    "too many blocks": ({"place": 24, "length": 24, "blocks": [21, 14]}, "blocks"),
    "no blocks": ({"place": 24, "length": 24, "blocks": []}, "blocks"),
    "huge index": ({"place": 24, "length": 24, "index": 2**63}, "index"),
    "huge offset": ({"place": 24, "length": 24, "offset_bytes": 2**63}, "data"),
    "more than the layer": ({"place": 24, "length": 7, "layer_stop": 3, "offset_bytes": 0}, "data"),
}


@pytest.mark.parametrize("name", BAD)
def test_chunk_that_may_not_come_now_is_refused(name):
    fields, field = BAD[name]
    whole = shape()
    arrivals = Arrivals(whole, "the peer 1", 50)
    arrivals.take(chunk(whole, 0, 24))
    with pytest.raises(BadChunk, match=f"the peer 1 sent a chunk with wrong ({field})"):
        arrivals.take(chunk(whole, **fields))
    assert arrivals.received_bytes == 24
    assert arrivals.take(chunk(whole, 24, 24)), "what was refused has changed nothing"


def test_damaged_chunk_is_refused():
    whole = shape()
    with pytest.raises(Checksum):
        Arrivals(whole, "a peer", 50).take(chunk(whole, 0, 24, crc32=1))


CONFIG = LayoutConfig(num_blocks=3, num_layers=3, outer_dim=2, page_size=4, inner_dim=10, num_heads=5)


@pytest.mark.parametrize(
    ("part", "order", "expected"),
    [
        (Part(), AxisOrder.NHD, (480, (0, 3), 160)),
        (Part(layers=(1, 3)), AxisOrder.HND, (320, (1, 3), 160)),
        (Part(), AxisOrder.UNIVERSAL, (480, (0, 3), 0)),
        (Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=1, stop=3)), AxisOrder.NHD, (192, (0, 3), 64)),
        (Part(slice=AxisSlice(axis=Axis.LAYER, start=1, stop=3)), AxisOrder.NHD, (320, (1, 3), 160)),
    ],
)
def test_shape_of_a_part(part, order, expected):
    geometry = Geometry(config=CONFIG, axis_order=order)
    found = shape_of(geometry, part, np.arange(3), order)
    assert (found.block_bytes, found.layers, found.layer_bytes) == expected


PARTS = [
    Part(),
    Part(layers=(1, 2)),
    Part(layers=(0, 2), slice=AxisSlice(axis=Axis.HEAD_COUNT, start=1, stop=4)),
    Part(slice=AxisSlice(axis=Axis.PAGE, start=2, stop=3)),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("source", [AxisOrder.NHD, AxisOrder.HND, AxisOrder.UNIVERSAL])
@pytest.mark.parametrize("target", [AxisOrder.NHD, AxisOrder.HND, AxisOrder.UNIVERSAL])
@pytest.mark.parametrize("kind", [LayoutKind.FULLY_CONTIGUOUS, LayoutKind.LAYER_SEPARATE_BLOCK_SECOND])
def test_reorder_moves_every_element_to_its_place(part, source, target, kind):
    """Element (l, o, t, h, d) holds a number of its own; a naive loop says where it must be."""
    geometry = Geometry(config=CONFIG, kind=kind, axis_order=AxisOrder.NHD)
    layers = part.layers or (0, 3)
    extents = {"layer": layers[1] - layers[0], "outer": 2, "page": 4, "head_count": 5, "head_size": 2}
    if part.slice:
        extents[part.slice.axis.value] = part.slice.length

    def string(order: AxisOrder) -> np.ndarray:
        names = [axis.value for axis in NESTING[order]]
        result = np.empty([extents[name] for name in names], np.uint16)
        for place in np.ndindex(result.shape):
            index = dict(zip(names, place, strict=True))
            result[place] = sum(index[name] * 11**power for power, name in enumerate(extents)) % 65521
        return result.reshape(1, -1).view(np.uint8)

    data = np.concatenate([string(source), string(source) ^ 255])
    found = reorder(data, geometry, part, source, target)
    assert np.array_equal(found, np.concatenate([string(target), string(target) ^ 255]))


@pytest.mark.parametrize(
    ("source", "target", "heads"), [("unknown", "nhd", 5), ("nhd", "unknown", 5), ("nhd", "hnd", 0)]
)
def test_bytes_that_cannot_be_told_apart_are_not_reordered(source, target, heads):
    config = LayoutConfig(num_blocks=3, num_layers=3, outer_dim=2, page_size=4, inner_dim=10, num_heads=heads)
    geometry = Geometry(config=config)
    with pytest.raises(IncompatibleLayout, match=f"{source} order can't be brought into {target} order"):
        stream_order.check_reorder(geometry, AxisOrder(source), AxisOrder(target))
    stream_order.check_reorder(geometry, AxisOrder(source), AxisOrder(source))
