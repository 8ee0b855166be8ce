"""Refusals of transfers before anything is copied."""

import time

import numpy as np
import pytest

from ayni.blocks.layouts import Axis, LayoutHandle
from ayni.blocks.transfers import AxisSlice
from ayni.errors import BadRequest, IncompatibleLayout, UnknownBlock
from tests.support.block_layouts import FC, HND, LS_FIRST, NHD, UNIVERSAL, UNKNOWN, geometry
from worker_agent.blocks.memory import WHOLE, Part
from worker_agent.blocks.validation import MAX_LISTED, Side, check_ids, check_parts, check_transfer

ONE = LayoutHandle(owner_id=1, number=0)
OTHER = LayoutHandle(owner_id=1, number=1)


def side(blocks=(), layout=None, part=WHOLE, **changes) -> Side:
    changes = {"num_blocks": 20, **changes}
    of = geometry(changes.pop("kind", FC), changes.pop("order", NHD), **changes)
    return Side(geometry=of, blocks=np.array(blocks, dtype=np.int64), part=part, layout=layout)


@pytest.mark.fact("T78")
def test_every_destination_that_is_named_twice_is_listed():
    with pytest.raises(BadRequest, match=r"destination blocks are named more than once: 1$"):
        check_transfer(side([5, 6, 7, 8, 9]), side([0, 1, 2, 1, 3]))
    with pytest.raises(BadRequest, match=r"more than once: 1, 3$") as refusal:
        check_transfer(side([5, 6, 7, 8, 9, 10]), side([3, 1, 2, 1, 3, 3]))
    assert refusal.value.metadata["field"] == "destination_blocks"


@pytest.mark.fact("T79")
def test_one_layout_is_not_source_and_destination_of_the_same_block():
    with pytest.raises(BadRequest, match=r"source and destination at once: 2$"):
        check_transfer(side([0, 1, 2], ONE), side([2, 3, 4], ONE))
    check_transfer(side([0, 1, 2], ONE), side([3, 4, 5], ONE))


@pytest.mark.fact("T80")
def test_the_same_ids_of_two_layouts_are_different_blocks():
    check_transfer(side([0, 1, 2], ONE), side([0, 1, 2], OTHER))
    check_transfer(side([0, 1, 2]), side([0, 1, 2]))


@pytest.mark.fact("T81")
def test_unequal_lengths_are_refused_with_both_numbers():
    with pytest.raises(BadRequest, match="3 source blocks and 2 destination blocks"):
        check_transfer(side([0, 1, 2]), side([3, 4]))


def test_source_blocks_may_be_named_twice_and_lists_may_be_empty():
    check_transfer(side([4, 4, 4]), side([0, 1, 2]))
    check_transfer(side(), side())


@pytest.mark.parametrize("block", [20, -1])
@pytest.mark.parametrize("name", ["source", "destination"])
def test_ids_outside_a_layout_are_refused_with_side_and_largest(block, name):
    inside, outside = side([0, 1]), side([19, block])
    sides = (outside, inside) if name == "source" else (inside, outside)
    with pytest.raises(
        UnknownBlock, match=f"{name} block {block} is outside its layout, whose ids end at 19"
    ) as refusal:
        check_transfer(*sides)
    assert refusal.value.metadata == {"block": str(block), "num_blocks": "20"}


def test_long_lists_of_ids_are_cut_short_in_messages():
    ids = np.arange(1000).repeat(2)
    with pytest.raises(BadRequest, match=rf"0, 1, .*, {MAX_LISTED - 1} and {1000 - MAX_LISTED} more$"):
        check_ids(side(ids, num_blocks=1000), side(ids, num_blocks=1000))


@pytest.mark.parametrize(
    ("bounce", "message"),
    [
        (side(), "there are no bounce blocks"),
        (side([3, 4, 3]), "bounce blocks are named more than once: 3"),
        (side([3, 20]), "bounce block 20 is outside"),
        (side([3, 1], ONE), "source and bounce at once: 1"),
        (side([6, 3], OTHER), "destination and bounce at once: 6"),
        (side([3], num_layers=2), "bounce is 720 in the source and 480 in the destination"),
    ],
)
def test_bounce_blocks_are_checked_as_well(bounce, message):
    with pytest.raises((BadRequest, UnknownBlock, IncompatibleLayout), match=message):
        check_transfer(side([0, 1], ONE), side([5, 6], OTHER), bounce)


def test_good_bounce_blocks_pass():
    check_transfer(side([0, 1], ONE), side([5, 6], OTHER), side([0, 19]))
    check_transfer(
        side([0, 1], ONE, Part(layers=(0, 2))), side([5, 6], OTHER, Part(layers=(1, 3))), side([3], num_layers=2)
    )


@pytest.mark.parametrize(
    ("changes", "field", "values"),
    [
        ({"num_layers": 4}, "num_layers", ("3", "4")),
        ({"outer_dim": 1}, "outer_dim", ("2", "1")),
        ({"page_size": 8}, "page_size", ("4", "8")),
        ({"inner_dim": 30}, "head_dim", ("3", "6")),
        ({"inner_dim": 30, "num_heads": 10}, "num_heads", ("5", "10")),
        ({"inner_dim": 30, "num_heads": 0}, "inner_dim", ("15", "30")),
        ({"num_heads": 3}, "num_heads", ("5", "3")),
        ({"dtype_width_bytes": 4}, "dtype_width_bytes", ("2", "4")),
        ({"dtype_width_bytes": 4, "page_size": 2}, "dtype_width_bytes", ("2", "4")),
    ],
)
def test_unlike_shapes_are_refused_by_field_with_both_values(changes, field, values):
    with pytest.raises(IncompatibleLayout, match=field) as refusal:
        check_parts(side(), side(**changes))
    assert refusal.value.metadata == {"field": field, "source": values[0], "destination": values[1]}


def test_shapes_are_those_of_the_parts():
    first, two = Part(layers=(0, 1)), Part(layers=(0, 2))
    check_parts(side(part=first), side(part=Part(layers=(2, 3)), num_layers=9))
    check_parts(side(part=first), side(num_layers=1))
    with pytest.raises(IncompatibleLayout, match="num_layers is 1 in the source and 2 in the destination"):
        check_parts(side(part=first), side(part=two))


def test_a_slice_of_many_heads_fits_all_of_a_few():
    cut = Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=2, stop=7))
    check_parts(side(part=cut, num_heads=10, inner_dim=30), side())
    check_parts(side(), side(part=cut, num_heads=10, inner_dim=30))
    with pytest.raises(IncompatibleLayout, match="num_heads is 4 in the source and 5 in the destination"):
        check_parts(side(part=Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=0, stop=4))), side())


def test_a_part_that_is_none_is_refused():
    with pytest.raises(BadRequest, match="layers 0 to 9 is not within 0 to 3"):
        check_transfer(side(part=Part(layers=(0, 9))), side())


@pytest.mark.fact("T96")
def test_known_orders_can_be_changed_into_one_another_and_unknown_ones_can_not():
    for one in (NHD, HND, UNIVERSAL):
        for other in (NHD, HND, UNIVERSAL):
            check_parts(side(order=one), side(order=other))
        for sides in ((side(order=one), side(order=UNKNOWN)), (side(order=UNKNOWN), side(order=one))):
            with pytest.raises(IncompatibleLayout, match="unknown order can't be changed") as refusal:
                check_parts(*sides)
            assert refusal.value.metadata["field"] == "axis_order"
    check_parts(side(order=UNKNOWN), side(order=UNKNOWN, kind=LS_FIRST))


def test_an_order_can_not_be_changed_without_heads():
    with pytest.raises(IncompatibleLayout, match="nhd to hnd needs them on both sides"):
        check_parts(side(num_heads=0), side(order=HND))
    check_parts(side(num_heads=0), side())


def test_a_side_can_be_taken_for_another_order():
    check_parts(side(order=UNKNOWN, part=Part(axis_order=NHD)), side())
    with pytest.raises(IncompatibleLayout):
        check_parts(side(part=Part(axis_order=UNKNOWN)), side())


def test_many_ids_are_checked_quickly():
    count = 1 << 16
    ids = np.random.permutation(count)
    sides = side(ids, ONE, num_blocks=count), side(ids + count, ONE, num_blocks=2 * count)
    started = time.process_time()
    check_ids(*sides)
    assert time.process_time() - started < 0.2


def test_nothing_inside_a_region_is_taken_where_one_side_does_not_know_its_heads():
    cut = Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=0, stop=5))
    page = Part(slice=AxisSlice(axis=Axis.PAGE, start=0, stop=2))
    for order in (NHD, HND, UNIVERSAL):
        check_parts(side(order=order, num_heads=0), side(order=order))
        check_parts(side(order=order), side(order=order, num_heads=0))
        with pytest.raises(IncompatibleLayout, match="num_heads is 5 in the source and 0 in the destination"):
            check_parts(side(order=order, part=cut), side(order=order, num_heads=0))
    with pytest.raises(IncompatibleLayout, match="num_heads is 0 in the source and 5 in the destination"):
        check_parts(side(order=HND, num_heads=0, page_size=2), side(order=HND, part=page))
    check_parts(side(num_heads=0, part=page), side(part=page))
