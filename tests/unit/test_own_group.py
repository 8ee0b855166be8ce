"""What a leader knows of its own group."""

from dataclasses import replace

import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import LayoutHandle
from ayni.blocks.metadata import GroupConfig, ParallelismMode
from ayni.blocks.transfers import DEFAULT_OPTIONS, Bounce
from ayni.errors import BadRequest, Fault, StaleEpoch, UnknownLayout, Unsupported
from coordinator_service.own_group import OwnGroup
from coordinator_service.parallelism import ParallelismTemplate
from tests.support.fake_ranks import INSTANCE, blob, config_of, stamp_of

TENSOR, REPLICATED = ParallelismMode.TENSOR_PARALLEL, ParallelismMode.REPLICATED_DATA


def handle(owner_id: int, number: int) -> LayoutHandle:
    return LayoutHandle(owner_id=owner_id, number=number)


def own_group(num_ranks: int = 2, template: ParallelismTemplate | None = None) -> OwnGroup:
    return OwnGroup(num_ranks, template, {})


def test_metadata_is_stamped_when_heads_are_known():
    group = own_group()
    result = group.install([[blob(0)], [blob(1)]])
    assert [stamp_of(one).rank for one in result] == [0, 1]
    assert group.local.metadata == result
    assert group.local.templates[0].tp_size == 2
    assert group.local.mode is TENSOR


def test_metadata_stays_as_it_is_when_nothing_is_known_of_heads():
    layouts = tuple(replace(d, config=replace(d.config, num_heads=0)) for d in blob().layouts)
    plain = [blob(rank, layouts=layouts) for rank in range(2)]
    assert list(own_group().install([[one] for one in plain])) == plain
    assert own_group(0).install([]) == ()


def test_given_template_is_not_derived_again():
    template = ParallelismTemplate.from_layout(config_of(2), 2, REPLICATED)
    group = own_group(template=template)
    assert stamp_of(group.install([[blob(0)], [blob(1)]])[1]).global_extents == template.global_extents
    assert group.local.mode is REPLICATED


@pytest.mark.fact("T120")
def test_rank_that_says_otherwise_how_the_model_is_shared_is_refused():
    group = own_group(template=ParallelismTemplate.from_layout(config_of(2), 2))
    with pytest.raises(BadRequest, match="rank 1 says that its group is replicated_data") as caught:
        group.install([[blob(0)], [blob(1, mode=REPLICATED)]])
    assert caught.value.metadata["rank"] == "1"
    with pytest.raises(BadRequest, match="rank 1 says"):
        own_group().install([[blob(0, mode=TENSOR)], [blob(1, mode=REPLICATED)]])
    with pytest.raises(BadRequest, match="rank 0 says"):
        own_group().install([[blob(0, mode=TENSOR)], [blob(1)]], REPLICATED)


@pytest.mark.fact("T120")
def test_configuration_must_agree_with_the_template():
    group = own_group(template=ParallelismTemplate.from_layout(config_of(2), 2))
    config = GroupConfig(epoch=1, instance_id=INSTANCE, rank=0, world_size=2, mode=REPLICATED)
    with pytest.raises(BadRequest, match="replicated_data, but the leader's template says tensor_parallel"):
        group.check_config(config)


def test_older_epoch_is_refused():
    group = own_group()
    config = GroupConfig(epoch=4, instance_id=INSTANCE, rank=0, world_size=2)
    group.configured(5)
    with pytest.raises(StaleEpoch) as caught:
        group.check_config(config)
    assert caught.value.metadata == {"epoch": "4", "current_epoch": "5"}
    group.check_config(replace(config, epoch=5))


def test_rank_must_answer_for_itself_only():
    with pytest.raises(Fault, match="rank 1 exported metadata of 2 ranks"):
        own_group().install([[blob(0)], [blob(1), blob(2)]])


def test_imported_handle_stands_for_each_ranks_own():
    group = own_group()
    group.remember_imported([blob(5), blob(6)])
    assert group.imported(handle(6, 1)) == (handle(5, 1), handle(6, 1))
    assert group.imported(handle(7, 0)) is None
    group.remember_imported([blob(5), blob(6, layouts=())])
    with pytest.raises(UnknownLayout, match="rank 1 imported no counterpart"):
        group.imported(handle(5, 0))


def test_bounce_blocks_are_in_each_ranks_own_layout():
    group = own_group()
    group.install([[blob(0)], [blob(1)]])
    options = replace(DEFAULT_OPTIONS, bounce=Bounce(layout=handle(1, 1), blocks=as_ids([3])))
    mine = [group.options_on(rank, options) for rank in range(2)]
    assert [one.bounce and one.bounce.layout for one in mine] == [handle(0, 1), handle(1, 1)]
    assert group.options_on(1, DEFAULT_OPTIONS) is DEFAULT_OPTIONS
    unknown = replace(DEFAULT_OPTIONS, bounce=Bounce(layout=handle(9, 1), blocks=as_ids([3])))
    with pytest.raises(Unsupported, match="no rank of the group is known to have layout"):
        group.options_on(0, unknown)
    assert own_group(1).options_on(0, unknown) is unknown
