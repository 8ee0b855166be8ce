"""What a remote group must be to be connected, and what is then known of it."""

from dataclasses import replace

import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import Axis, LayoutHandle, LocalLayout, Tier
from ayni.blocks.metadata import ParallelismMode, ResourceParallelism, WorkerMetadata
from ayni.errors import BadRequest, IncompatibleLayout, UnknownLayout
from coordinator_service.admission import ConnectRules, admit
from coordinator_service.layout_gates import BlockLayoutMode
from coordinator_service.parallelism import ParallelismTemplate, Strategy, derive_templates, stamp
from coordinator_service.pull_plan import GroupPull
from coordinator_service.remote_groups import LocalGroup, RemoteGroup, handle_map
from tests.support.fake_ranks import DEVICE, HOST, INSTANCE, blob, config_of, descriptor_of, stamp_of

TENSOR, REPLICATED = ParallelismMode.TENSOR_PARALLEL, ParallelismMode.REPLICATED_DATA
RULES = ConnectRules()
NOBODY = LocalGroup(num_ranks=0)


def unstamped(num_ranks: int, heads: int = 2, **changes) -> list[WorkerMetadata]:
    return [
        blob(
            rank,
            layouts=tuple(
                descriptor_of(config_of(heads), tier, handle=LayoutHandle(owner_id=rank, number=number))
                for number, tier in enumerate((Tier.DEVICE, Tier.HOST))
            ),
            **changes,
        )
        for rank in range(num_ranks)
    ]


def stamped(num_ranks: int, heads: int = 2, mode: ParallelismMode = TENSOR) -> list[WorkerMetadata]:
    group = unstamped(num_ranks, heads)
    return list(stamp(derive_templates(group, mode), group))


def local(num_ranks: int, heads: int = 2, mode: ParallelismMode = TENSOR) -> LocalGroup:
    metadata = stamped(num_ranks, heads, mode)
    return LocalGroup(
        num_ranks=num_ranks, metadata=tuple(metadata), templates=derive_templates(metadata, mode), mode=mode
    )


def connected(metadata, ours: LocalGroup = NOBODY, rules: ConnectRules = RULES) -> RemoteGroup:
    return admit(INSTANCE, metadata, ours, rules)


def gate(metadata, ours: LocalGroup = NOBODY, rules: ConnectRules = RULES) -> dict[str, str]:
    with pytest.raises(IncompatibleLayout) as caught:
        connected(metadata, ours, rules)
    return caught.value.metadata


def pull(tier: Tier = Tier.HOST, destination: LocalLayout = HOST) -> GroupPull:
    return GroupPull(
        instance_id=INSTANCE,
        remote_tier=tier,
        source_blocks=as_ids([1]),
        destination=destination,
        destination_blocks=as_ids([2]),
    )


@pytest.mark.fact("T3")
def test_empty_list_is_refused():
    with pytest.raises(BadRequest, match="no metadata was given"):
        connected([])


@pytest.mark.fact("T4", "T5", "T7", "T9")
def test_strict_group_is_known_by_its_stamps():
    """Workers may come in any order, and what they say of their own rank does not count."""
    group = connected([replace(one, rank=9) for one in reversed(stamped(4))])
    assert (group.strategy, group.tp_size) == (Strategy.STRICT, 4)
    assert [one.rank for one in group.descriptors] == [0, 1, 2, 3]
    assert [one.rank for one in group.metadata] == [0, 1, 2, 3]
    assert group.handle(3, HOST) == LayoutHandle(owner_id=3, number=1)


@pytest.mark.fact("T2", "T5", "T10")
def test_legacy_group_is_known_by_its_places():
    theirs = [stamped(3)[0], *unstamped(3)[1:]]
    group = connected([replace(one, rank=0) for one in theirs], local(3))
    assert (group.strategy, group.tp_size, group.descriptors) == (Strategy.LEGACY, 3, ())
    assert group.handle(2, DEVICE) == LayoutHandle(owner_id=2, number=0)
    assert [[one.rank for one in group.reached_by(rank)] for rank in range(3)] == [[0], [1], [2]]


@pytest.mark.fact("T6")
def test_ranks_without_layouts_have_no_handles():
    assert handle_map(INSTANCE, [blob(rank, layouts=()) for rank in range(2)]) == {}


@pytest.mark.fact("T10")
@pytest.mark.parametrize("num_local", [0, 2])
def test_legacy_group_of_another_size_is_refused_as_not_stamped(num_local):
    said = gate(unstamped(1, heads=4), local(num_local) if num_local else NOBODY)
    assert (said["gate"], said["source"], said["destination"]) == ("not_stamped", "1", str(num_local))


@pytest.mark.fact("T12")
def test_sharing_that_all_ranks_agree_on_is_known():
    assert connected(stamped(2, mode=REPLICATED)).mode is REPLICATED


@pytest.mark.fact("T13")
@pytest.mark.parametrize("modes", [(TENSOR, REPLICATED), (None, REPLICATED), (REPLICATED, None)])
def test_ranks_that_share_differently_are_refused(modes):
    said = gate([replace(one, mode=mode) for one, mode in zip(stamped(2), modes, strict=True)])
    assert (said["gate"], said["rank"]) == ("mode", "1")
    assert {said["source"], said["destination"]} == {"tensor_parallel", "replicated_data"}


@pytest.mark.fact("T12")
def test_what_is_not_said_means_tensor_parallel():
    first, second = stamped(2)
    connected([first, replace(second, mode=None)], local(2))


@pytest.mark.parametrize("ours", [TENSOR, REPLICATED])
def test_groups_that_share_differently_are_refused(ours):
    theirs = REPLICATED if ours is TENSOR else TENSOR
    heads = {TENSOR: 2, REPLICATED: 4}
    said = gate(stamped(2, heads[theirs], theirs), local(2, heads[ours], ours))
    assert (said["gate"], said["source"], said["destination"]) == ("mode", theirs.value, ours.value)


def two_resources(num_ranks: int, heads: int) -> tuple[list[WorkerMetadata], dict[int, ParallelismTemplate]]:
    """Returns a group that divides resource 0 and holds resource 1 whole on every rank."""
    layouts = (descriptor_of(config_of(heads)), descriptor_of(config_of(8), resource_id=1))
    group = [blob(rank, layouts=layouts) for rank in range(num_ranks)]
    whole = ParallelismTemplate.from_layout(config_of(8), num_ranks, REPLICATED)
    templates = {0: ParallelismTemplate.from_layout(config_of(heads), num_ranks), 1: whole}
    return list(stamp(templates, group)), templates


@pytest.mark.fact("T14")
def test_resource_of_another_rank_is_refused():
    theirs, _ = two_resources(2, 4)
    wrong = [ResourceParallelism(resource_id=i, parallelism=stamp_of(theirs[i])) for i in range(2)]
    said = gate([replace(theirs[0], resources=tuple(wrong)), theirs[1]])
    assert (said["gate"], said["field"], said["source"], said["destination"]) == ("resources", "rank", "1", "0")


@pytest.mark.fact("T15", "T65")
def test_two_resources_with_matching_templates_are_accepted_beside_the_primary_one():
    theirs, _ = two_resources(4, 4)
    ours, templates = two_resources(2, 8)
    group = connected(theirs, LocalGroup(num_ranks=2, metadata=tuple(ours), templates=templates))
    assert dict(group.descriptors[1].global_extents)[Axis.HEAD_COUNT] == 16
    plans = group.plan(pull(destination=LocalLayout(tier=Tier.HOST, resource_id=1)))
    assert [[shard.remote_rank for shard in plan.shards] for plan in plans.values()] == [[0], [1]]
    plans = group.plan(pull())
    assert [[shard.remote_rank for shard in plan.shards] for plan in plans.values()] == [[0, 1], [2, 3]]


@pytest.mark.fact("T65")
@pytest.mark.parametrize("ids", [[0, 0], [1, 0], [0, 2], [1]])
def test_resources_must_count_upwards_each_once(ids):
    one = stamped(1)[0]
    resources = tuple(ResourceParallelism(resource_id=i, parallelism=stamp_of(one)) for i in ids)
    assert gate([replace(one, resources=resources)])["gate"] == "resources"


def test_two_stamps_of_the_primary_resource_must_be_equal():
    one = stamped(1)[0]
    other = replace(stamp_of(one), layer_stop=1)
    assert (
        gate([replace(one, resources=(ResourceParallelism(resource_id=0, parallelism=other),))])["gate"] == "resources"
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [({"instance_id": "another"}, "instance_id"), ({"epoch": 4}, "epoch")],
)
def test_entries_must_be_of_one_group_and_epoch(change, field):
    first, second = stamped(2)
    said = gate([first, replace(second, **change)])
    assert (said["gate"], said["field"]) == ("identity", field)


def test_two_layouts_of_one_tier_are_refused():
    one = blob(0, layouts=(descriptor_of(config_of(2)),) * 2)
    assert gate([one])["field"] == "layouts"


def test_layout_gate_comes_before_the_stamps():
    theirs = stamped(2, heads=6)
    theirs[1] = replace(theirs[1], parallelism=replace(stamp_of(theirs[1]), tp_size=9))
    assert gate(theirs, local(2))["gate"] == "canonical_shape"


def test_stamps_must_fit_the_layouts():
    """Where nothing is known here, only the peer itself can show that its stamp is wrong."""
    theirs = [replace(one, layouts=(descriptor_of(config_of(3)),)) for one in stamped(2, heads=2)]
    assert gate(theirs)["gate"] == "stamp"


def test_sizes_without_a_template_are_refused_unless_equal():
    headless = tuple(replace(d, config=replace(d.config, num_heads=0)) for d in blob().layouts)
    ours = tuple(blob(rank, layouts=headless) for rank in range(2))
    theirs = [replace(one, layouts=headless) for one in stamped(4)]
    assert gate(theirs, LocalGroup(num_ranks=2, metadata=ours))["gate"] == "no_template"
    equal = [replace(one, layouts=headless) for one in stamped(2)]
    assert connected(equal, LocalGroup(num_ranks=2, metadata=ours)).tp_size == 2


def test_unequal_groups_that_hold_everything_need_no_stamps():
    theirs = [replace(one, mode=REPLICATED) for one in unstamped(2)]
    group = connected(theirs, local(3, mode=REPLICATED))
    assert group.strategy is Strategy.LEGACY
    assert [[one.rank for one in group.reached_by(rank)] for rank in range(3)] == [[0], [1], [0]]
    assert [plan.shards[0].remote_rank for plan in group.plan(pull()).values()] == [0, 1, 0]


def test_required_tier_is_a_rule():
    theirs = [replace(one, layouts=one.layouts[:1]) for one in stamped(2)]
    assert gate(theirs, local(2))["gate"] == "missing_tier"
    assert connected(theirs, local(2), ConnectRules(required_tier=None)).tp_size == 2


def test_layout_mode_is_a_rule():
    rules = ConnectRules(layout_mode=BlockLayoutMode.OPERATIONAL)
    assert gate(stamped(4, heads=2), local(2, heads=4), rules)["gate"] == "layout_shape"
    assert connected(stamped(4, heads=2), local(2, heads=4)).tp_size == 4


def test_pull_needs_the_tier_on_every_rank_that_is_read():
    theirs = stamped(2)
    theirs[1] = replace(theirs[1], layouts=theirs[1].layouts[1:])
    group = connected(theirs, local(2))
    with pytest.raises(UnknownLayout, match=r"rank 1 of group .* exported no device layout"):
        group.plan(pull(Tier.DEVICE))
    assert list(group.plan(pull())) == [0, 1]


def test_pull_of_an_unplanned_resource_between_unequal_groups_is_refused():
    group = connected(stamped(4), local(2, heads=4))
    with pytest.raises(IncompatibleLayout, match="resource 3 is divided is not known"):
        group.plan(pull(destination=LocalLayout(tier=Tier.HOST, resource_id=3)))
