"""Who pulls which heads from whom."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import Axis, LocalLayout, Tier
from ayni.blocks.metadata import ParallelismDescriptor, ParallelismMode
from ayni.blocks.slices import block_extents, translate
from ayni.blocks.transfers import AxisSlice, PullPlan, PullShard
from ayni.errors import IncompatibleLayout
from coordinator_service.parallelism import ParallelismTemplate
from coordinator_service.pull_plan import GroupPull, plan_pull
from tests.support.fake_ranks import HOST, config_of

REPLICATED = ParallelismMode.REPLICATED_DATA
PULL = GroupPull(
    instance_id="peer",
    remote_tier=Tier.DISK,
    source_blocks=as_ids([4, 2, 4]),
    destination=HOST,
    destination_blocks=as_ids([1, 0, 7]),
)
NOTHING = replace(PULL, source_blocks=as_ids([]), destination_blocks=as_ids([]))
HEADS = Axis.HEAD_COUNT


def template(tp_size: int, total_heads: int = 32, **changes) -> ParallelismTemplate:
    made = ParallelismTemplate.from_layout(config_of(total_heads), 1)
    return replace(replace(made, tp_size=tp_size), **changes)


def stamps(tp_size: int, total_heads: int = 32, **changes) -> list[ParallelismDescriptor]:
    return [template(tp_size, total_heads, **changes).descriptor(rank) for rank in range(tp_size)]


def shards_of(here: int, there: int, total_heads: int = 32) -> list[list[tuple]]:
    """Returns for each local rank: remote rank, heads there, heads here; None is all of them."""

    def span(part: AxisSlice | None) -> tuple[int, int] | None:
        return (part.start, part.stop) if part else None

    plans = plan_pull(template(here, total_heads), stamps(there, total_heads), PULL)
    assert [rank for rank, _ in plans] == list(range(here))
    return [
        [(s.remote_rank, span(s.source_slice), span(s.destination_slice)) for s in plan.shards] for _, plan in plans
    ]


def word(call, *arguments) -> dict[str, str]:
    with pytest.raises(IncompatibleLayout) as caught:
        call(*arguments)
    return caught.value.metadata


@pytest.mark.fact("T43")
def test_equal_sizes_pull_whole_blocks_from_the_same_rank():
    assert shards_of(4, 4) == [[(rank, None, None)] for rank in range(4)]


@pytest.mark.fact("T44", "T47")
def test_fewer_ranks_here_join_several_remote_ranks():
    assert shards_of(2, 4) == [
        [(0, None, (0, 8)), (1, None, (8, 16))],
        [(2, None, (0, 8)), (3, None, (8, 16))],
    ]
    assert shards_of(1, 4) == [[(j, None, (8 * j, 8 * j + 8)) for j in range(4)]]


@pytest.mark.fact("T45", "T46")
def test_more_ranks_here_take_parts_of_one_remote_rank():
    assert shards_of(4, 2) == [
        [(0, (0, 8), None)],
        [(0, (8, 16), None)],
        [(1, (0, 8), None)],
        [(1, (8, 16), None)],
    ]
    assert shards_of(4, 1) == [[(0, (8 * i, 8 * i + 8), None)] for i in range(4)]


@pytest.mark.fact("T50")
def test_sizes_that_do_not_divide_one_another_meet_in_parts():
    assert shards_of(3, 2, 6) == [
        [(0, (0, 2), None)],
        [(0, (2, 3), (0, 1)), (1, (0, 1), (1, 2))],
        [(1, (1, 3), None)],
    ]


@pytest.mark.fact("T50", "T54")
@pytest.mark.parametrize(("here", "there", "heads", "side"), [(3, 2, 32, "this group"), (1, 2, 7, "the remote group")])
def test_size_that_does_not_divide_the_heads_is_refused(here, there, heads, side):
    with pytest.raises(IncompatibleLayout, match=f"head_count has {heads} indices in all, and {side} has") as caught:
        plan_pull(template(here, heads), stamps(there, heads), PULL)
    assert caught.value.metadata["gate"] == "indivisible_extent"
    assert (caught.value.metadata["source"], caught.value.metadata["destination"]) == (str(there), str(here))


@pytest.mark.fact("T48")
def test_no_blocks_give_no_plans_even_where_heads_do_not_fit():
    assert plan_pull(template(3, 7), stamps(2, 7), NOTHING) == ()


@pytest.mark.fact("T49")
def test_all_plans_have_the_same_lists_tiers_and_group():
    for _, plan in plan_pull(template(4), stamps(2), PULL):
        assert (plan.instance_id, plan.remote_tier, plan.destination) == ("peer", Tier.DISK, HOST)
        assert plan.source_blocks is PULL.source_blocks
        assert plan.destination_blocks is PULL.destination_blocks


@pytest.mark.fact("T51")
def test_sides_that_make_no_sense_are_refused_apart():
    asked = [
        (template(0), stamps(2)),
        (template(2), []),
        (template(2, pp_size=2), stamps(2)),
        (template(2), stamps(2, pp_size=2)),
    ]
    said = [word(plan_pull, *sides, NOTHING) for sides in asked]
    assert [(one["gate"], one.get("side")) for one in said] == [
        ("zero_size", "local"),
        ("description", None),
        ("pipeline_parallel", "local"),
        ("pipeline_parallel", "remote"),
    ]


@pytest.mark.fact("T52")
def test_remote_rank_that_disagrees_is_named():
    said = word(plan_pull, template(2), [stamps(2)[0], replace(stamps(2)[1], tp_size=4)], PULL)
    assert (said["gate"], said["field"], said["rank"]) == ("inconsistent_remote", "tp_size", "1")


@pytest.mark.fact("T53")
def test_shard_axis_must_have_an_extent():
    said = word(plan_pull, template(2, global_extents=((Axis.LAYER, 2),)), stamps(2), PULL)
    assert (said["gate"], said["field"], said["side"]) == ("missing_extent", "head_count", "local")


def test_ranks_that_hold_everything_pull_whole_blocks_in_turn():
    plans = plan_pull(template(5, 7, mode=REPLICATED), stamps(3, 7), PULL)
    assert [[(s.remote_rank, s.source_slice, s.destination_slice) for s in plan.shards] for _, plan in plans] == [
        [(i % 3, None, None)] for i in range(5)
    ]


def check_filling(here: int, there: int, total: int) -> None:
    """Every head arrives where it belongs, once; so the bytes of a rank's parts are those of its blocks."""
    heads = np.arange(total)
    remote, local = heads.reshape(there, -1), heads.reshape(here, -1)
    source, destination = {HEADS: total // there}, {HEADS: total // here}
    for rank, plan in plan_pull(template(here, total), stamps(there, total), PULL):
        arrived = np.full(total // here, -1)
        for one in plan.shards:
            parts = translate(one, source, destination)
            from_, to = [slice(p.start, p.stop) for p in parts] if parts else [slice(None)] * 2
            assert (arrived[to] == -1).all()
            arrived[to] = remote[one.remote_rank][from_]
        assert (arrived == local[rank]).all()


@pytest.mark.fact("T43", "T44", "T45", "T46", "T47")
def test_parts_fill_every_local_block_exactly_once_for_all_sizes_that_divide_12():
    for here, there in product([1, 2, 3, 4, 6, 12], repeat=2):
        check_filling(here, there, 12)


@given(data=st.data(), total=st.integers(1, 96))
def test_parts_fill_every_local_block_exactly_once(data, total):
    sizes = st.sampled_from([size for size in range(1, total + 1) if total % size == 0])
    check_filling(data.draw(sizes), data.draw(sizes), total)


@pytest.mark.fact("T60")
def test_extents_of_a_layout_leave_heads_out_when_they_are_not_known():
    assert block_extents(config_of(8)) == {Axis.LAYER: 2, Axis.OUTER: 2, Axis.PAGE: 2, HEADS: 8, Axis.HEAD_SIZE: 4}
    assert block_extents(replace(config_of(8), num_heads=0)).keys() == {Axis.LAYER, Axis.OUTER, Axis.PAGE}


def shard(source: tuple | None = None, destination: tuple | None = None, axes=(HEADS, HEADS)) -> PullShard:
    def part(axis: Axis, span: tuple | None) -> AxisSlice | None:
        return AxisSlice(axis=axis, start=span[0], stop=span[1]) if span else None

    return PullShard(remote_rank=5, source_slice=part(axes[0], source), destination_slice=part(axes[1], destination))


def translated(one: PullShard, source: int | None, destination: int | None) -> list[tuple[int, int]] | None:
    sides = [{Axis.LAYER: 2} | ({HEADS: size} if size else {}) for size in (source, destination)]
    parts = translate(one, *sides)
    return parts and [(part.start, part.stop) for part in parts]


@pytest.mark.fact("T55", "T56", "T57")
def test_missing_part_is_all_of_the_other_side():
    assert translated(shard(destination=(0, 8)), 8, 16) == [(0, 8), (0, 8)]
    assert translated(shard(source=(8, 16)), 16, 8) == [(8, 16), (0, 8)]
    assert translated(shard(), None, None) is None


@pytest.mark.fact("T59")
def test_both_sides_may_be_parts_of_equal_length():
    """Sizes that do not divide one another need it."""
    assert translated(shard(source=(2, 3), destination=(0, 1)), 3, 2) == [(2, 3), (0, 1)]


@pytest.mark.fact("T58", "T59", "T60")
@pytest.mark.parametrize(
    ("one", "source", "destination", "text"),
    [
        (shard(destination=(0, 8)), 7, 16, "head_count 0 to 7 there, head_count 0 to 8 here"),
        (shard(source=(0, 8)), 16, 7, "head_count 0 to 8 there, head_count 0 to 7 here"),
        (shard(source=(0, 2), destination=(0, 3)), 8, 8, "its parts differ"),
        (shard(source=(0, 2), destination=(0, 2), axes=(Axis.LAYER, HEADS)), 8, 8, "layer 0 to 2 there, head_count"),
        (shard(destination=(0, 8)), None, 16, "the remote layout does not say how large head_count is"),
        (shard(source=(0, 8)), 16, None, "the local layout does not say"),
        (shard(source=(8, 24)), 16, 16, "head_count 8 to 24 is not within the remote blocks, whose head_count is 16"),
    ],
)
def test_parts_that_do_not_fit_are_refused(one, source, destination, text):
    with pytest.raises(IncompatibleLayout, match=text) as caught:
        translated(one, source, destination)
    assert caught.value.metadata["rank"] == "5"
    assert "remote rank 5" in caught.value.message


def test_plan_of_one_rank_is_a_value_of_the_contract():
    plan = PULL.plan([PullShard(remote_rank=0)])
    assert isinstance(plan, PullPlan)
    assert plan.destination == LocalLayout(tier=Tier.HOST)
