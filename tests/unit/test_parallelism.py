"""Templates, stamps, and who pulls from whom."""

from dataclasses import replace

import pytest

from ayni.blocks.layouts import Axis, LayoutConfig, Tier
from ayni.blocks.metadata import ParallelismMode, WorkerMetadata
from ayni.errors import BadRequest, Unsupported
from coordinator_service.parallelism import (
    ParallelismTemplate,
    Strategy,
    derive_templates,
    pick_source_tier,
    remote_rank,
    routes,
    stamp,
    strategy_of,
)
from tests.support.fake_ranks import blob, config_of, descriptor_of, stamp_of

REPLICATED = ParallelismMode.REPLICATED_DATA


def template(tp_size: int = 4, **changes) -> ParallelismTemplate:
    return replace(ParallelismTemplate.from_layout(config_of(2), tp_size), **changes)


def stamped(num_ranks: int) -> list[WorkerMetadata]:
    return list(stamp({0: template(num_ranks)}, [blob(rank) for rank in range(num_ranks)]))


@pytest.mark.fact("T1")
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_all_stamped_is_strict(num_ranks):
    assert strategy_of(stamped(num_ranks)) is Strategy.STRICT


@pytest.mark.fact("T2", "T3")
@pytest.mark.parametrize("num_stamped", [3, 0])
def test_any_missing_stamp_is_legacy(num_stamped):
    assert strategy_of([*stamped(4)[:num_stamped], *[blob()] * (4 - num_stamped)]) is Strategy.LEGACY
    assert strategy_of([]) is Strategy.LEGACY


@pytest.mark.fact("T4", "T5")
def test_remote_rank_is_that_of_the_stamp_else_the_place():
    assert remote_rank(stamped(4)[3], 0) == 3
    assert remote_rank(blob(rank=0), 2) == 2


@pytest.mark.fact("T37", "T38")
def test_stamping_writes_ranks_and_shape_and_keeps_the_rest():
    plain = [blob(rank) for rank in range(4)]
    result = stamp({0: template(4)}, plain)
    for rank, (one, before) in enumerate(zip(result, plain, strict=True)):
        mark = stamp_of(one)
        assert (one.rank, mark.rank, mark.tp_size) == (rank, rank, 4)
        assert mark.global_extents == template(4).global_extents
        assert (mark.layer_start, mark.layer_stop) == (0, 2)
        assert (one.address, one.engines, one.layouts) == (before.address, before.engines, before.layouts)


@pytest.mark.fact("T39")
def test_stamping_twice_changes_nothing_and_stamping_anew_replaces():
    once = stamp({0: template(4)}, [blob(rank) for rank in range(4)])
    assert stamp({0: template(4)}, once) == once
    other = ParallelismTemplate.from_layout(config_of(4), 4)
    assert dict(stamp_of(stamp({0: other}, once)[1]).global_extents)[Axis.HEAD_COUNT] == 16


@pytest.mark.fact("T40")
def test_stamping_needs_one_worker_for_each_rank_and_one_stage():
    with pytest.raises(BadRequest, match=r"2 workers .* tp_size 4"):
        stamp({0: template(4)}, [blob(0), blob(1)])
    with pytest.raises(Unsupported, match="pp_size 2"):
        stamp({0: template(2, pp_size=2)}, [blob(0), blob(1)])


@pytest.mark.fact("T41")
def test_template_multiplies_heads_only_where_they_are_divided():
    config = LayoutConfig(num_blocks=4, num_layers=3, outer_dim=2, page_size=16, inner_dim=512, num_heads=8)
    divided = ParallelismTemplate.from_layout(config, 4)
    whole = ParallelismTemplate.from_layout(config, 4, REPLICATED)
    assert (divided.extent(Axis.HEAD_COUNT), divided.extent(Axis.HEAD_SIZE)) == (32, 64)
    assert whole.extent(Axis.HEAD_COUNT) == 8
    assert [axis.name for axis, _ in divided.global_extents] == ["HEAD_COUNT", "HEAD_SIZE", "LAYER", "OUTER", "PAGE"]
    assert divided.extent(Axis.BLOCK) == 0


@pytest.mark.fact("T42")
def test_template_needs_workers_and_heads_that_fit():
    with pytest.raises(BadRequest, match=r"num_heads \(7\) must divide"):
        ParallelismTemplate.from_layout(config_of(7, inner_dim=100), 2)
    with pytest.raises(BadRequest, match="without workers"):
        ParallelismTemplate.from_layout(config_of(2), 0)
    with pytest.raises(BadRequest, match="how many heads"):
        ParallelismTemplate.from_layout(replace(config_of(2), num_heads=0), 2)


def test_templates_are_derived_where_layouts_say_enough():
    heads, no_heads = config_of(2), replace(config_of(2), num_heads=0)
    layouts = (descriptor_of(heads), descriptor_of(no_heads, resource_id=1), descriptor_of(heads, resource_id=2))
    uneven = replace(layouts[2], config=config_of(4))
    group = [blob(0, layouts=layouts), blob(1, layouts=(*layouts[:2], uneven))]
    templates = derive_templates(group, ParallelismMode.TENSOR_PARALLEL)
    assert {resource: t.extent(Axis.HEAD_COUNT) for resource, t in templates.items()} == {0: 4}
    assert derive_templates([blob(0, layouts=())], REPLICATED) == {}


def test_pools_of_different_sizes_are_one_shape():
    group = [blob(rank, layouts=(descriptor_of(config_of(2, num_blocks=4 + rank)),)) for rank in range(2)]
    assert 0 in derive_templates(group, ParallelismMode.TENSOR_PARALLEL)


@pytest.mark.parametrize(("resources", "expected"), [([0, 1], [0, 1]), ([0, 2], [])])
def test_other_resources_are_stamped_all_or_none(resources, expected):
    layouts = tuple(descriptor_of(config_of(2), resource_id=resource) for resource in resources)
    group = [blob(rank, layouts=layouts) for rank in range(2)]
    result = stamp(derive_templates(group, ParallelismMode.TENSOR_PARALLEL), group)
    assert [r.resource_id for r in result[1].resources] == expected
    assert all(r.parallelism.rank == 1 for r in result[1].resources)


def test_routes_join_ranks_whose_shares_meet():
    assert routes(2, 4, None) == ((0, 0), (0, 1), (1, 2), (1, 3))
    assert routes(3, 2, None) == ((0, 0), (1, 0), (1, 1), (2, 1))
    assert routes(3, 2, REPLICATED) == ((0, 0), (1, 1), (2, 0))
    assert routes(0, 2, None) == routes(2, 0, None) == routes(2, 0, REPLICATED) == ()


@pytest.mark.fact("T66")
def test_source_tier_is_host_before_disk_before_device():
    assert pick_source_tier([Tier.DEVICE, Tier.HOST, Tier.DISK]) is Tier.HOST
    assert pick_source_tier([Tier.DEVICE, Tier.DISK]) is Tier.DISK
    assert pick_source_tier([Tier.DEVICE]) is Tier.DEVICE
    assert pick_source_tier([]) is None
