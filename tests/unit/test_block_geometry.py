"""Where blocks lie: formulas of each kind, and the refusals.

R is the bytes of one region.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks.layouts import (
    MAX_ALIGNMENT_BYTES,
    MAX_LAYERS,
    Axis,
    AxisOrder,
    LayoutConfig,
    LayoutHandle,
    LayoutKind,
    needs_transform,
)
from ayni.blocks.transfers import AxisSlice
from ayni.errors import BadRequest, IncompatibleLayout, UnknownBlock
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
    address,
    configs,
    geometry,
    in_order,
    part_bytes,
    parts,
)
from worker_agent.blocks.geometry import AXES, Geometry
from worker_agent.blocks.memory import Part

SAMPLE = LayoutConfig(
    num_blocks=2, num_layers=2, outer_dim=2, page_size=16, inner_dim=128, num_heads=8, dtype_width_bytes=2
)
R = 4096


@pytest.mark.fact("T71")
def test_fully_contiguous_regions_follow_one_another():
    layout = Geometry(config=SAMPLE)
    offsets = [layout.region(*place).offset for place in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert offsets == [0, R, 2 * R, 4 * R]
    assert layout.region(1, 1, 1).length == R


@pytest.mark.fact("T72")
def test_block_first_has_outer_parts_side_by_side():
    layout = Geometry(config=SAMPLE, kind=LS_FIRST)
    assert (layout.region(0, 1, 0).allocation, layout.region(0, 1, 0).offset) == (1, 0)
    assert (layout.region(0, 0, 1).allocation, layout.region(0, 0, 1).offset) == (0, R)
    assert layout.region(1, 0, 0).offset == 2 * R


@pytest.mark.fact("T73")
def test_block_second_has_blocks_side_by_side():
    layout = Geometry(config=SAMPLE, kind=LS_SECOND)
    for block in range(2):
        for layer in range(2):
            for outer in range(2):
                region = layout.region(block, layer, outer)
                assert (region.allocation, region.offset) == (layer, block * R + outer * 2 * R)


@pytest.mark.fact("T74")
def test_allocations_are_one_or_one_for_each_layer():
    assert Geometry(config=SAMPLE).allocation_bytes == (16 * R // 2,)
    for kind in (LS_FIRST, LS_SECOND):
        assert Geometry(config=SAMPLE, kind=kind).allocation_bytes == (4 * R, 4 * R)


@pytest.mark.fact("T75")
def test_head_size_follows_from_the_number_of_heads():
    values = {"num_blocks": 1, "num_layers": 1, "outer_dim": 1, "page_size": 16}
    assert LayoutConfig(inner_dim=1024, num_heads=8, **values).head_dim == 128
    assert LayoutConfig(inner_dim=1024, **values).head_dim == 0
    with pytest.raises(BadRequest, match=r"num_heads \(8\) must divide inner_dim \(1023\)"):
        LayoutConfig(inner_dim=1023, num_heads=8, **values)


@pytest.mark.fact("T76")
def test_orders_need_a_transform_unless_they_are_the_same():
    for one in AxisOrder:
        for other in AxisOrder:
            assert needs_transform(one, other) == (one is not other)


@pytest.mark.fact("T68")
@pytest.mark.parametrize("owner_id", [0, 12345, 2**64 - 1])
@pytest.mark.parametrize("number", [0, 7, 2**16 - 1])
def test_handles_keep_both_ids(owner_id, number):
    handle = LayoutHandle(owner_id=owner_id, number=number)
    again = LayoutHandle.from_int(int(handle))
    assert (again.owner_id, again.number) == (owner_id, number)
    assert int(again) < 2**128


@given(configs(), st.sampled_from(KINDS_AND_ORDERS), st.data())
def test_every_byte_is_where_a_loop_finds_it(config, kind_and_order, data):
    layout = Geometry(config=config, kind=kind_and_order[0], axis_order=kind_and_order[1])
    part = data.draw(parts(layout)) if layout.axis_order is not UNKNOWN else Part()
    block = data.draw(st.integers(0, config.num_blocks - 1))
    views = layout.strided(part.layers, part.slice, part.axis_order)
    found = {_address(view, (block, *inside)) for view in views for inside in _inside(view.shape[1:])}
    assert found == {address(layout, block, *inside) for inside in in_order(layout, part)}
    assert len(found) == part_bytes(layout, part)


@pytest.mark.parametrize(("kind", "order"), KINDS_AND_ORDERS)
def test_whole_layouts_tile_their_allocations(kind, order):
    layout = geometry(kind, order)
    found = [
        _address(view, (block, *inside))
        for view in layout.strided(None, None, None)
        for block in range(layout.config.num_blocks)
        for inside in _inside(view.shape[1:])
    ]
    sizes = layout.allocation_bytes
    assert sorted(found) == [(number, offset) for number, size in enumerate(sizes) for offset in range(size)]
    assert sum(sizes) == layout.config.total_bytes


@pytest.mark.parametrize("kind", list(LayoutKind))
def test_places_outside_a_layout_are_refused_by_name_and_count(kind):
    layout = Geometry(config=SAMPLE, kind=kind)
    with pytest.raises(UnknownBlock, match="block 2 is outside its layout, whose ids end at 1") as refusal:
        layout.region(2, 0, 0)
    assert refusal.value.metadata == {"block": "2", "num_blocks": "2"}
    with pytest.raises(UnknownBlock):
        layout.region(-1, 0, 0)
    with pytest.raises(BadRequest, match="layer 2 does not exist: the layout has 2"):
        layout.region(0, 2, 0)
    with pytest.raises(BadRequest, match="outer 2 does not exist: the layout has 2"):
        layout.region(0, 0, 2)


@pytest.mark.parametrize("kind", [LS_FIRST, LS_SECOND])
def test_layers_apart_have_no_heads_outermost(kind):
    with pytest.raises(IncompatibleLayout, match="can't be universal") as refusal:
        geometry(kind, UNIVERSAL)
    assert refusal.value.metadata["field"] == "axis_order"
    with pytest.raises(IncompatibleLayout):
        geometry(kind, NHD).strided(None, None, UNIVERSAL)


def test_a_universal_layer_is_no_region():
    with pytest.raises(IncompatibleLayout, match="universal"):
        geometry(FC, UNIVERSAL).region(0, 0, 0)


@pytest.mark.parametrize("layers", [(0, 4), (3, 4), (2, 2), (-1, 2), (2, 1)])
def test_layer_ranges_beyond_the_layers_are_refused_by_number(layers):
    with pytest.raises(BadRequest, match=f"layers {layers[0]} to {layers[1]} is not within 0 to 3"):
        geometry().check_part(layers, None, None)


@pytest.mark.parametrize("axis", [axis for axis in Axis if axis is not Axis.BLOCK])
def test_slices_beyond_an_axis_are_refused_by_number(axis):
    layout = geometry()
    extent = layout.extent(axis)
    layout.check_part(None, AxisSlice(axis=axis, start=0, stop=extent), None)
    with pytest.raises(BadRequest, match=f"0 to {extent + 1} is not within 0 to {extent}"):
        layout.check_part(None, AxisSlice(axis=axis, start=0, stop=extent + 1), None)


def test_blocks_are_not_sliced_and_layers_are_named_once():
    with pytest.raises(BadRequest, match="named by their ids"):
        geometry().check_part(None, AxisSlice(axis=Axis.BLOCK, start=0, stop=1), None)
    with pytest.raises(BadRequest, match="given twice"):
        geometry().check_part((0, 1), AxisSlice(axis=Axis.LAYER, start=0, stop=1), None)


def test_an_unknown_order_has_layers_but_no_slices():
    layout = geometry(order=UNKNOWN)
    assert layout.part_bytes((0, 1), None, None) == layout.config.outer_dim * layout.config.region_bytes
    with pytest.raises(IncompatibleLayout, match="unknown axis order has no head_count slices"):
        layout.check_part(None, AxisSlice(axis=Axis.HEAD_COUNT, start=0, stop=1), None)
    layout.check_part(None, AxisSlice(axis=Axis.HEAD_COUNT, start=0, stop=1), NHD)


@pytest.mark.parametrize(("kind", "order"), KNOWN)
def test_without_heads_whole_blocks_still_have_bytes(kind, order):
    layout = geometry(kind, order, num_heads=0)
    assert layout.part_bytes(None, None, None) == layout.config.block_bytes
    assert layout.part_bytes((0, 3), None, None) == layout.config.block_bytes


@pytest.mark.parametrize(
    ("order", "axis"),
    [
        (NHD, Axis.HEAD_COUNT),
        (NHD, Axis.HEAD_SIZE),
        (HND, Axis.PAGE),
        (HND, Axis.HEAD_COUNT),
        (UNIVERSAL, Axis.LAYER),
        (UNIVERSAL, Axis.OUTER),
        (UNIVERSAL, Axis.PAGE),
    ],
)
def test_without_heads_nothing_inside_them_can_be_told_apart(order, axis):
    layout = geometry(order=order, num_heads=0)
    with pytest.raises(IncompatibleLayout, match="needs num_heads") as refusal:
        layout.check_part(None, AxisSlice(axis=axis, start=0, stop=1), None)
    assert refusal.value.metadata["field"] == "num_heads"


def test_without_heads_a_universal_layer_can_not_be_told_apart():
    with pytest.raises(IncompatibleLayout, match="needs num_heads"):
        geometry(order=UNIVERSAL, num_heads=0).check_part((0, 1), None, None)


def test_pages_of_nhd_need_no_heads():
    layout = geometry(order=NHD, num_heads=0)
    assert layout.part_bytes(None, AxisSlice(axis=Axis.PAGE, start=0, stop=1), None) * 4 == layout.config.block_bytes


def test_equal_layouts_are_one_key():
    assert len({geometry(), geometry(), replace(geometry(), axis_order=HND)}) == 2


def _address(view, index) -> tuple[int, int]:
    assert len(index) == len(AXES)
    return view.allocation, view.offset + sum(i * stride for i, stride in zip(index, view.strides, strict=True))


def _inside(shape):
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _inside(shape[1:]):
            yield (first, *rest)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_layers": MAX_LAYERS + 1}, "num_layers"),
        ({"num_layers": (1 << 32) - 1}, "num_layers"),
        ({"alignment_bytes": 2 * MAX_ALIGNMENT_BYTES}, "alignment_bytes"),
        ({"inner_dim": 1 << 33}, "block_bytes"),
        ({"page_size": 1 << 31}, "block_bytes"),
        ({"num_blocks": 1 << 62}, "total_bytes"),
    ],
)
def test_sizes_that_no_machine_has_are_refused_by_name(changes, field):
    shape = {"num_blocks": 4, "num_layers": 2, "outer_dim": 2, "page_size": 16, "inner_dim": 64, **changes}
    with pytest.raises(BadRequest, match=f"{field} must be at most [0-9]+"):
        LayoutConfig(**shape)


def test_largest_sizes_are_taken():
    LayoutConfig(
        num_blocks=1, num_layers=MAX_LAYERS, outer_dim=1, page_size=1, inner_dim=1, alignment_bytes=MAX_ALIGNMENT_BYTES
    )
    assert LayoutConfig(num_blocks=1, num_layers=1, outer_dim=2, page_size=1 << 20, inner_dim=1 << 12)
