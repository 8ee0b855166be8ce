"""Bytes that host memory copies, against a loop over every byte.

Everything that is not copied to is checked as well: all memory is random before.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks.layouts import Axis, AxisOrder, LayoutKind
from ayni.blocks.transfers import AxisSlice
from ayni.errors import BadRequest
from tests.support.block_layouts import (
    FC,
    HND,
    KINDS_AND_ORDERS,
    KNOWN,
    LS_FIRST,
    LS_SECOND,
    NHD,
    UNIVERSAL,
    UNKNOWN,
    addresses,
    configs,
    copied_by_loop,
    geometry,
    noisy,
    part_bytes,
    parts,
    snapshot,
)
from worker_agent.blocks import array_copy
from worker_agent.blocks.array_copy import copy_blocks, reordered
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import WHOLE, Part
from worker_agent.blocks.pairs import between


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int64)


@pytest.fixture(params=["by index", "by run"])
def way(request, monkeypatch):
    """Small runs go another way than large ones; both have to be right for all."""
    monkeypatch.setattr(array_copy, "INDEXED_BELOW_BYTES", 1 << 30 if request.param == "by index" else 0)


def check_copy(source: HostMemory, destination: HostMemory, pairs, parts_of) -> None:
    expected = copied_by_loop(source, destination, pairs, parts_of)
    before = snapshot(source)
    found = between(source.geometry, parts_of[0], destination.geometry, parts_of[1])
    lists = (ids(*(pair[i] for pair in pairs)) for i in range(2))
    copy_blocks(found, source.buffers, destination.buffers, *lists)
    for one, other in zip(destination.buffers, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(source.buffers, before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.fact("T96")
@pytest.mark.parametrize(("kind", "order"), KNOWN)
def test_blocks_keep_their_content_in_any_kind_and_order(kind, order, way):
    source = noisy(geometry(kind, order))
    for other_kind, other_order in KNOWN:
        check_copy(source, noisy(geometry(other_kind, other_order), 1), [(5, 1), (0, 4)], (WHOLE, WHOLE))


@pytest.mark.parametrize("kind", list(LayoutKind))
def test_blocks_of_unknown_order_are_copied_as_they_are(kind, way):
    source = noisy(geometry(kind, UNKNOWN))
    for other_kind in LayoutKind:
        destination = noisy(geometry(other_kind, UNKNOWN), 1)
        check_copy(source, destination, [(5, 1), (5, 4)], (WHOLE, WHOLE))
        check_copy(source, destination, [(5, 1)], (Part(layers=(0, 2)), Part(layers=(1, 3))))


@given(configs(num_blocks=4), st.sampled_from(KNOWN), st.sampled_from(KNOWN), st.data())
def test_any_part_is_copied_and_nothing_else(config, one, other, data):
    source = noisy(Geometry(config=config, kind=one[0], axis_order=one[1]))
    destination = noisy(Geometry(config=config, kind=other[0], axis_order=other[1]), 1)
    part = data.draw(parts(source.geometry))
    check_copy(source, destination, [(0, 2), (1, 3), (0, 0)], (part, part))


@pytest.mark.parametrize(("kind", "order"), KNOWN)
def test_a_slice_goes_to_another_place_of_its_axis(kind, order, way):
    source = noisy(geometry(kind, order))
    for axis in (axis for axis in Axis if axis is not Axis.BLOCK):
        extent = source.geometry.extent(axis)
        first = Part(slice=AxisSlice(axis=axis, start=0, stop=1))
        last = Part(slice=AxisSlice(axis=axis, start=extent - 1, stop=extent))
        check_copy(source, noisy(geometry(FC, HND), 1), [(6, 0), (3, 6)], (first, last))


def test_a_slice_of_many_heads_is_all_of_a_few(way):
    many = noisy(geometry(LS_SECOND, HND, num_heads=10, inner_dim=30))
    few = noisy(geometry(FC, UNIVERSAL), 1)
    cut = Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=5, stop=10))
    check_copy(many, few, [(1, 2), (2, 3)], (cut, WHOLE))
    check_copy(few, many, [(1, 2), (6, 0)], (WHOLE, cut))


@pytest.mark.parametrize(("kind", "order"), KINDS_AND_ORDERS)
def test_a_string_is_the_parts_bytes_in_order(kind, order, way):
    memory = noisy(geometry(kind, order))
    for part, count in ((WHOLE, 0), (WHOLE, 1), (WHOLE, 4), (Part(layers=(1, 3)), 0), (Part(layers=(1, 3)), 4)):
        blocks = np.random.permutation(7)[:count]
        out = np.empty((count, part_bytes(memory.geometry, part)), np.uint8)
        memory.read(blocks, part, out)
        for row, block in zip(out, blocks.tolist(), strict=True):
            places = addresses(memory.geometry, block, part, own_order=True)
            assert row.tobytes() == bytes(memory.buffers[allocation][offset] for allocation, offset in places)
            assert b"".join(memory.views(block, part)) == row.tobytes()


@pytest.mark.parametrize(("kind", "order"), KINDS_AND_ORDERS)
def test_what_is_written_is_read_again_and_the_rest_is_as_before(kind, order, way):
    memory = noisy(geometry(kind, order))
    part = Part(layers=(1, 2))
    data = np.random.randint(0, 256, (3, part_bytes(memory.geometry, part)), dtype=np.uint8)
    data.setflags(write=False)
    expected = noisy(memory.geometry)
    for row, block in zip(data, (6, 0, 1), strict=True):
        for byte, (allocation, offset) in zip(
            row, addresses(memory.geometry, block, part, own_order=True), strict=True
        ):
            expected.buffers[allocation][offset] = byte
    memory.write(ids(6, 0, 1), part, data)
    for one, other in zip(memory.buffers, expected.buffers, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("kind", "order"), KNOWN)
def test_strings_in_another_order_are_those_of_a_layout_of_that_order(kind, order):
    memory = noisy(geometry(kind, order))
    blocks = ids(3, 1)
    for other in (NHD, HND, UNIVERSAL):
        same = noisy(geometry(FC, other), 1)
        copy_blocks(between(memory.geometry, WHOLE, same.geometry, WHOLE), memory.buffers, same.buffers, blocks, blocks)
        expected, found, own = (np.empty((2, memory.geometry.config.block_bytes), np.uint8) for _ in range(3))
        same.read(blocks, WHOLE, expected)
        memory.read(blocks, WHOLE, found, other)
        np.testing.assert_array_equal(found, expected)
        memory.read(blocks, WHOLE, own)
        np.testing.assert_array_equal(reordered(memory.geometry, WHOLE, own, order, other), expected)
        memory.write(blocks + 1, WHOLE, found, other)
        again = np.empty_like(own)
        memory.read(blocks + 1, WHOLE, again)
        np.testing.assert_array_equal(again, own)


@pytest.mark.parametrize(("kind", "order"), KINDS_AND_ORDERS)
@pytest.mark.parametrize("part", [WHOLE, Part(layers=(1, 2))], ids=["whole", "layer"])
def test_rows_are_the_memory_itself_where_a_part_is_one_run(kind, order, part):
    memory = noisy(geometry(kind, order))
    rows = memory.rows(part)
    in_one_run = len(memory.views(0, part)) == 1
    assert (rows is not None) == in_one_run
    if rows is not None:
        assert rows.shape == (7, part_bytes(memory.geometry, part))
        rows[3] = 7
        assert set(memory.views(3, part)[0]) == {7}
        assert np.shares_memory(rows, memory.buffers[1 if kind is not FC and part != WHOLE else 0])


def test_rows_are_there_for_what_engines_ask_most():
    assert noisy(geometry(FC)).rows(WHOLE) is not None
    assert noisy(geometry(LS_FIRST)).rows(Part(layers=(2, 3))) is not None
    assert noisy(geometry(LS_SECOND, outer_dim=1)).rows(Part(layers=(2, 3))) is not None
    assert noisy(geometry(FC, UNIVERSAL)).rows(Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=1, stop=3))) is not None


def test_lanes_are_as_wide_as_offsets_and_strides_allow():
    plain, other = (geometry(FC, order, inner_dim=64, num_heads=4) for order in (NHD, HND))
    assert [pair.lane_bytes for pair in between(plain, WHOLE, other, WHOLE)] == [16]
    part = Part(slice=AxisSlice(axis=Axis.HEAD_SIZE, start=3, stop=7))
    assert [pair.lane_bytes for pair in between(plain, part, plain, part)] == [2]
    assert [pair.shape for pair in between(geometry(FC), WHOLE, geometry(FC), WHOLE)] == [(720,)]
    assert [pair.shape for pair in between(geometry(FC), WHOLE, geometry(LS_FIRST), WHOLE)] == [(240,)] * 3


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_new_memory_is_aligned_and_zero(alignment):
    memory = allocate_host(geometry(LS_FIRST, alignment_bytes=alignment))
    assert [buffer.nbytes for buffer in memory.buffers] == list(memory.geometry.allocation_bytes)
    assert not any(buffer.ctypes.data % alignment or buffer.any() for buffer in memory.buffers)


def test_buffers_that_do_not_fit_are_refused_with_both_sizes():
    layout = geometry(FC)
    size = layout.config.total_bytes
    with pytest.raises(BadRequest, match=f"allocation 0 needs {size} bytes; it has {size - 1}"):
        HostMemory(layout, [np.zeros(size - 1, np.uint8)])
    with pytest.raises(BadRequest, match="a layer_separate_block_first layout of 3 layers needs 3 allocations; got 2"):
        HostMemory(geometry(LS_FIRST), [np.zeros(size, np.uint8)] * 2)
    HostMemory(layout, [np.zeros(size + 1, np.uint8)])


def test_a_layout_can_be_read_as_if_it_had_another_order():
    unknown = noisy(geometry(FC, UNKNOWN))
    known = HostMemory(geometry(FC, NHD), unknown.buffers)
    part = Part(axis_order=AxisOrder.NHD, slice=AxisSlice(axis=Axis.HEAD_COUNT, start=1, stop=2))
    outs = [np.empty((1, part_bytes(known.geometry, part)), np.uint8) for _ in range(2)]
    unknown.read(ids(2), part, outs[0])
    known.read(ids(2), part, outs[1])
    np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.parametrize(("kind", "order"), KNOWN)
@pytest.mark.parametrize("unknown", [0, 1])
def test_whole_blocks_are_copied_as_they_are_where_one_side_does_not_know_its_heads(kind, order, unknown, way):
    heads: list[dict[str, int]] = [{}, {}]
    heads[unknown] = {"num_heads": 0}
    source = noisy(geometry(kind, order, **heads[0]))
    destination = noisy(geometry(FC, order, **heads[1]), 1)
    one, other = (
        replace(side, config=replace(side.config, num_heads=0)) for side in (source.geometry, destination.geometry)
    )
    twins = HostMemory(one, source.buffers), HostMemory(other, destination.buffers)
    expected = copied_by_loop(*twins, [(5, 1), (0, 4)], (WHOLE, WHOLE))
    found = between(source.geometry, WHOLE, destination.geometry, WHOLE)
    copy_blocks(found, source.buffers, destination.buffers, ids(5, 0), ids(1, 4))
    for buffer, content in zip(destination.buffers, expected, strict=True):
        np.testing.assert_array_equal(buffer, content)
