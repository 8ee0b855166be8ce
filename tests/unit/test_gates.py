"""Gates between two groups: what each refuses, in which order, and what its refusal says."""

from dataclasses import replace

import pytest

from ayni.blocks.layouts import Axis, Tier
from ayni.blocks.metadata import ParallelismDescriptor, ParallelismMode
from ayni.errors import IncompatibleLayout
from coordinator_service import gates
from coordinator_service.parallelism import ParallelismTemplate, stamp
from tests.support.fake_ranks import blob, config_of, descriptor_of

Stamps = list[ParallelismDescriptor]
ALL = [(Tier.DEVICE, Tier.HOST)]


def local(tp_size: int, total_heads: int = 16, **changes) -> ParallelismTemplate:
    heads = {Axis.HEAD_COUNT: total_heads}
    template = ParallelismTemplate.from_layout(config_of(4), max(1, tp_size))
    extents = tuple(sorted((dict(template.global_extents) | heads).items(), key=lambda item: item[0].name))
    return replace(replace(template, tp_size=tp_size, global_extents=extents), **changes)


def remote(tp_size: int, total_heads: int = 16, **changes) -> Stamps:
    return [local(tp_size, total_heads, **changes).descriptor(rank) for rank in range(tp_size)]


def with_extents(extents, **changes):
    """Returns extents with axes replaced; None takes one away."""
    merged = dict(extents) | {Axis[name]: size for name, size in changes.items()}
    return tuple((axis, size) for axis, size in merged.items() if size is not None)


def refusal(template: ParallelismTemplate, stamps: Stamps, tiers=None, required=Tier.HOST) -> IncompatibleLayout:
    with pytest.raises(IncompatibleLayout) as caught:
        gates.check_compatibility(template, stamps, ALL * len(stamps) if tiers is None else tiers, required)
    assert f"the {caught.value.metadata['gate']} gate refuses" in caught.value.message
    return caught.value


@pytest.mark.fact("T23")
@pytest.mark.parametrize(("here", "there"), [(2, 2), (2, 4), (4, 2)])
def test_sizes_that_divide_one_another_pass(here, there):
    gates.check_compatibility(local(here), remote(there), ALL * there)


@pytest.mark.fact("T24")
@pytest.mark.parametrize(("here", "there"), [(3, 2), (2, 3), (4, 6), (12, 1)])
def test_any_sizes_that_divide_the_extent_pass(here, there):
    gates.check_compatibility(local(here, 12), remote(there, 12), ALL * there)


@pytest.mark.fact("T24")
def test_size_that_does_not_divide_the_extent_is_refused_naming_extent_and_both_sizes():
    error = refusal(local(3), remote(2))
    assert error.metadata["gate"] == "indivisible_extent"
    assert (error.metadata["source"], error.metadata["destination"], error.metadata["extent"]) == ("2", "3", "16")
    assert "head_count has 16 indices" in error.message
    assert "this group has 3 ranks" in error.message
    assert refusal(local(2), remote(3)).message.count("the remote group has 3 ranks") == 1


def test_fewer_heads_than_ranks_are_refused_as_replication():
    error = refusal(local(8, 4), remote(2, 4))
    assert error.metadata["gate"] == "indivisible_extent"
    assert "held by several ranks is not served" in error.message


def test_ranks_that_hold_everything_need_not_divide_it():
    whole = {"mode": ParallelismMode.REPLICATED_DATA}
    gates.check_compatibility(local(3, 4, **whole), remote(5, 4), ALL * 5)


@pytest.mark.fact("T25")
def test_other_shard_axis_is_refused():
    error = refusal(local(2), remote(2, shard_axis=Axis.LAYER))
    assert error.metadata == {
        "gate": "shard_axis",
        "field": "shard_axis",
        "source": "layer",
        "destination": "head_count",
    }


@pytest.mark.fact("T26", "T27")
@pytest.mark.parametrize(("axis", "ours", "theirs"), [("LAYER", 24, 48), ("HEAD_COUNT", 16, 32)])
def test_other_extent_is_refused_also_of_the_shard_axis(axis, ours, theirs):
    here = local(2, global_extents=with_extents(local(2).global_extents, **{axis: ours}))
    there = remote(2, global_extents=with_extents(local(2).global_extents, **{axis: theirs}))
    error = refusal(here, there)
    assert (error.metadata["gate"], error.metadata["field"]) == ("extent", Axis[axis].value)
    assert (error.metadata["source"], error.metadata["destination"]) == (str(theirs), str(ours))


@pytest.mark.fact("T28")
@pytest.mark.parametrize(("side", "axis"), [("remote", "LAYER"), ("local", "HEAD_SIZE")])
def test_missing_extent_names_the_side(side, axis):
    fewer = with_extents(local(2).global_extents, **{axis: None})
    here = local(2, global_extents=fewer) if side == "local" else local(2)
    there = remote(2, global_extents=fewer) if side == "remote" else remote(2)
    error = refusal(here, there)
    assert (error.metadata["gate"], error.metadata["field"]) == ("missing_extent", Axis[axis].value)
    assert error.metadata["side"] == side


@pytest.mark.fact("T29")
def test_pipeline_stages_are_refused_local_side_first():
    there = refusal(local(2), remote(2, pp_size=2))
    both = refusal(local(2, pp_size=3), remote(2, pp_size=2))
    assert [(e.metadata["gate"], e.metadata["side"]) for e in (there, both)] == [
        ("pipeline_parallel", "remote"),
        ("pipeline_parallel", "local"),
    ]
    assert both.metadata["destination"] == "3"


@pytest.mark.fact("T30", "T36")
def test_required_tier_must_be_on_every_rank():
    tiers = [(Tier.DEVICE, Tier.HOST), (Tier.DEVICE,)]
    error = refusal(local(2), remote(2), tiers)
    assert (error.metadata["gate"], error.metadata["rank"]) == ("missing_tier", "1")
    assert (error.metadata["source"], error.metadata["destination"]) == ("device", "host")
    disk = [(Tier.DEVICE, Tier.DISK)] * 2
    gates.check_compatibility(local(2), remote(2), disk, Tier.DISK)
    gates.check_compatibility(local(2), remote(2), disk, None)
    assert refusal(local(2), remote(2), disk, Tier.HOST).metadata["gate"] == "missing_tier"


@pytest.mark.fact("T31")
def test_size_zero_is_refused_local_side_first():
    error = refusal(local(0), [replace(remote(2)[0], tp_size=0)])
    assert (error.metadata["gate"], error.metadata["side"], error.metadata["field"]) == (
        "zero_size",
        "local",
        "tp_size",
    )
    there = refusal(local(2), [replace(remote(2)[0], pp_size=0)])
    assert (there.metadata["side"], there.metadata["field"], there.metadata["source"]) == ("remote", "pp_size", "0")


@pytest.mark.fact("T32", "T33", "T34")
@pytest.mark.parametrize(
    ("stamps", "detail", "source", "expected"),
    [
        (remote(4)[:2], "count", "2", "4"),
        ([remote(2)[0], remote(2)[0]], "duplicate", "0", "2"),
        ([remote(2)[0], replace(remote(2)[1], rank=7)], "out_of_range", "7", "2"),
    ],
)
def test_every_remote_rank_must_come_once(stamps, detail, source, expected):
    error = refusal(local(2), stamps)
    assert (error.metadata["gate"], error.metadata["detail"]) == ("incomplete_ranks", detail)
    assert (error.metadata["source"], error.metadata["destination"]) == (source, expected)


@pytest.mark.fact("T35")
@pytest.mark.parametrize(
    ("field", "value"), [("tp_size", 4), ("shard_axis", Axis.PAGE), ("layer_stop", 1), ("global_extents", ())]
)
def test_remote_ranks_must_agree(field, value):
    first, second = remote(2)
    error = refusal(local(2), [first, replace(second, **{field: value})])
    assert (error.metadata["gate"], error.metadata["field"], error.metadata["rank"]) == (
        "inconsistent_remote",
        field,
        "1",
    )


@pytest.mark.parametrize(("num_stamps", "num_tiers"), [(0, 0), (2, 1)])
def test_nothing_to_compare_is_refused(num_stamps, num_tiers):
    error = refusal(local(2), remote(2)[:num_stamps], ALL * num_tiers)
    assert error.metadata["gate"] == "description"


FAULTS = [
    ("zero_size", lambda here, there: (replace(here, tp_size=0), there)),
    ("pipeline_parallel", lambda here, there: (here, [replace(one, pp_size=2) for one in there])),
    ("inconsistent_remote", lambda here, there: (here, [there[0], replace(there[1], layer_start=1), *there[2:]])),
    ("incomplete_ranks", lambda here, there: (here, there[:-1])),
    ("indivisible_extent", lambda here, there: (replace(here, tp_size=5), there)),
    ("shard_axis", lambda here, there: (replace(here, shard_axis=Axis.PAGE, tp_size=2), there)),
    ("missing_extent", lambda here, there: (replace(here, global_extents=here.global_extents[1:]), there)),
    ("missing_tier", None),
]


@pytest.mark.parametrize("first", range(len(FAULTS)))
def test_the_first_gate_that_refuses_wins(first):
    """Has a fault at one gate and at every later one that can have one at the same time."""
    here, there = local(2), remote(4)
    for word, apply in reversed(FAULTS[first:]):
        if apply and not (word == "indivisible_extent" and first in (5, 6)):
            here, there = apply(here, there)
    error = refusal(here, there, [(Tier.DEVICE,)] * len(there))
    assert error.metadata["gate"] == FAULTS[first][0]


@pytest.mark.parametrize(("heads", "axis"), [(3, "head_count"), (16, "head_count")])
def test_stamp_must_fit_the_layouts_of_its_rank(heads, axis):
    group = [blob(rank, layouts=(descriptor_of(config_of(4)),)) for rank in range(2)]
    group = list(stamp({0: local(2, 8)}, group))
    gates.check_stamps_fit(group)
    group[1] = replace(group[1], layouts=(descriptor_of(config_of(heads)),))
    with pytest.raises(IncompatibleLayout) as caught:
        gates.check_stamps_fit(group)
    assert (caught.value.metadata["gate"], caught.value.metadata["field"]) == ("stamp", axis)
    assert caught.value.metadata["rank"] == "1"
