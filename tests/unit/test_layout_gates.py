"""Whether layouts are alike enough: exactly, or once undivided."""

from dataclasses import replace

import pytest

from ayni.blocks.layouts import AxisOrder, LayoutConfig, Tier
from ayni.blocks.metadata import ParallelismMode, WorkerMetadata
from ayni.errors import IncompatibleLayout
from coordinator_service.layout_gates import BlockLayoutMode, check_layouts, choose_mode
from coordinator_service.parallelism import ParallelismTemplate, stamp
from tests.support.fake_ranks import blob, config_of, descriptor_of

OPERATIONAL, UNIVERSAL = BlockLayoutMode.OPERATIONAL, BlockLayoutMode.UNIVERSAL
NHD, HND, UNKNOWN = AxisOrder.NHD, AxisOrder.HND, AxisOrder.UNKNOWN


def group(num_ranks: int, config: LayoutConfig, order: AxisOrder = NHD) -> list[WorkerMetadata]:
    return [blob(rank, layouts=(descriptor_of(config, Tier.HOST, order),)) for rank in range(num_ranks)]


def refusal(mode, local, remote, templates=None) -> IncompatibleLayout:
    with pytest.raises(IncompatibleLayout) as caught:
        check_layouts(mode, local, remote, templates or {})
    return caught.value


@pytest.mark.fact("T16")
def test_operational_refuses_another_order():
    error = refusal(OPERATIONAL, group(2, config_of(4)), group(2, config_of(4), HND))
    assert error.metadata == {
        "gate": "layout_shape",
        "field": "axis_order",
        "source": "hnd",
        "destination": "nhd",
        "rank": "0",
        "local_rank": "0",
    }


@pytest.mark.fact("T17")
def test_operational_accepts_equal_shapes_in_pools_of_any_size():
    check_layouts(OPERATIONAL, group(2, config_of(4)), group(2, config_of(4, num_blocks=99, alignment_bytes=64)), {})
    check_layouts(OPERATIONAL, group(2, config_of(4), UNKNOWN), group(2, config_of(4), UNKNOWN), {})
    check_layouts(OPERATIONAL, [], group(2, config_of(4), UNKNOWN), {})


@pytest.mark.fact("T18")
def test_operational_refuses_another_number_of_heads_and_names_the_pair():
    theirs = group(4, config_of(16))
    theirs[2] = group(1, config_of(12))[0]
    error = refusal(OPERATIONAL, group(4, config_of(16)), theirs)
    assert (error.metadata["field"], error.metadata["source"], error.metadata["destination"]) == (
        "inner_dim",
        "48",
        "64",
    )
    assert (error.metadata["rank"], error.metadata["local_rank"]) == ("2", "2")


@pytest.mark.fact("T19")
def test_universal_accepts_another_order_and_another_share():
    check_layouts(UNIVERSAL, group(2, config_of(8)), group(2, config_of(8), HND), {})
    check_layouts(UNIVERSAL, group(2, config_of(8)), group(4, config_of(4), HND), {})


@pytest.mark.fact("T20")
def test_universal_needs_known_orders_on_every_rank():
    theirs = [*group(1, config_of(8)), *group(1, config_of(8), UNKNOWN)]
    error = refusal(UNIVERSAL, group(2, config_of(8)), theirs)
    assert (error.metadata["gate"], error.metadata["rank"], error.metadata["side"]) == ("axis_order", "1", "remote")
    ours = refusal(UNIVERSAL, theirs, group(2, config_of(8)))
    assert (ours.metadata["rank"], ours.metadata["side"]) == ("1", "local")


@pytest.mark.fact("T21")
def test_universal_needs_known_orders_when_nothing_is_known_here():
    assert refusal(UNIVERSAL, [], group(2, config_of(8), UNKNOWN)).metadata["gate"] == "axis_order"
    check_layouts(UNIVERSAL, [], group(2, config_of(8)), {})


@pytest.mark.fact("T22")
@pytest.mark.parametrize(
    ("theirs", "field", "source", "destination"),
    [
        (config_of(8, inner_dim=64), "head_dim", "8", "4"),
        (config_of(12), "num_heads", "24", "16"),
        (config_of(8, page_size=4), "page_size", "4", "2"),
        (config_of(8, num_layers=3), "num_layers", "3", "2"),
        (config_of(8, outer_dim=1), "outer_dim", "1", "2"),
        (config_of(8, dtype_width_bytes=4), "dtype_width_bytes", "4", "2"),
    ],
)
def test_universal_refuses_another_undivided_shape(theirs, field, source, destination):
    error = refusal(UNIVERSAL, group(2, config_of(8)), group(2, theirs))
    assert (error.metadata["gate"], error.metadata["field"]) == ("canonical_shape", field)
    assert (error.metadata["source"], error.metadata["destination"]) == (source, destination)
    template = ParallelismTemplate.from_layout(config_of(8), 2)
    assert refusal(UNIVERSAL, [], group(2, theirs), {0: template}).metadata["field"] == field


def test_universal_needs_layouts_and_heads():
    empty = [*group(1, config_of(8)), blob(1, layouts=())]
    assert refusal(UNIVERSAL, [], empty).metadata["gate"] == "no_layouts"
    headless = replace(config_of(8), num_heads=0)
    assert refusal(UNIVERSAL, [], group(1, headless)).metadata["gate"] == "head_count"


def test_ranks_that_hold_everything_are_not_added_up():
    whole = ParallelismMode.REPLICATED_DATA
    theirs = [replace(one, mode=whole) for one in group(3, config_of(8))]
    check_layouts(UNIVERSAL, group(2, config_of(8)), theirs, {}, whole)
    assert refusal(UNIVERSAL, group(2, config_of(8)), theirs).metadata["field"] == "num_heads"


def test_stamps_say_how_many_heads_a_second_resource_has():
    """Resource 0 is divided, resource 1 is held whole by each rank."""

    def two(num_ranks: int, heads: int) -> list[WorkerMetadata]:
        layouts = (descriptor_of(config_of(heads)), descriptor_of(config_of(8), resource_id=1))
        return [blob(rank, layouts=layouts) for rank in range(num_ranks)]

    def templates(num_ranks: int, heads: int) -> dict[int, ParallelismTemplate]:
        divided = ParallelismTemplate.from_layout(config_of(heads), num_ranks)
        whole = ParallelismTemplate.from_layout(config_of(8), num_ranks, ParallelismMode.REPLICATED_DATA)
        return {0: divided, 1: whole}

    theirs = stamp(templates(4, 4), two(4, 4))
    check_layouts(UNIVERSAL, two(2, 8), theirs, templates(2, 8))


def test_mode_is_universal_only_where_everything_is_known():
    known, unknown = group(2, config_of(4)), group(2, config_of(4), UNKNOWN)
    headless = group(2, replace(config_of(4), num_heads=0))
    assert choose_mode(known, known) is choose_mode([], known) is UNIVERSAL
    assert {choose_mode(known, unknown), choose_mode(unknown, known), choose_mode([], headless)} == {OPERATIONAL}
    assert choose_mode([], []) is OPERATIONAL
