"""Handles and the layouts behind them."""

import numpy as np
import pytest

from ayni.blocks.layouts import MAX_LAYOUTS, LayoutConfig, LayoutHandle, LocalLayout, Tier
from ayni.errors import BadRequest, TooLarge, UnknownLayout
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory
from worker_agent.blocks.registry import Registry, owner_id_of

GROUP = "6f1d7a52-0b7e-4a6c-9c3d-2f4e5a6b7c8d"


def memory(num_blocks: int = 2) -> HostMemory:
    config = LayoutConfig(num_blocks=num_blocks, num_layers=1, outer_dim=1, page_size=1, inner_dim=4)
    geometry = Geometry(config=config)
    return HostMemory(geometry, [np.zeros(size, np.uint8) for size in geometry.allocation_bytes])


def place(tier: Tier, resource_id: int = 0) -> LocalLayout:
    return LocalLayout(tier=tier, resource_id=resource_id)


@pytest.mark.fact("T68")
@pytest.mark.parametrize("owner_id", [0, 1, (1 << 64) - 1])
@pytest.mark.parametrize("number", [0, 7, 0xFFFF, (1 << 64) - 1])
def test_a_handle_keeps_both_of_its_parts_and_all_128_bits(owner_id: int, number: int):
    handle = LayoutHandle(owner_id=owner_id, number=number)
    assert int(handle) == number << 64 | owner_id
    assert LayoutHandle.from_int(int(handle)) == handle


@pytest.mark.fact("T69")
def test_layouts_are_numbered_from_0_upwards():
    registry = Registry(owner_id_of(GROUP, 0), "model")
    entries = [registry.add(place(tier), memory()) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)]
    assert [entry.handle.number for entry in entries] == [0, 1, 2]
    assert {entry.handle.owner_id for entry in entries} == {owner_id_of(GROUP, 0)}
    assert len(registry.entries()) == 3


def test_a_number_is_not_used_again_when_its_layout_is_gone():
    registry = Registry(1, "model")
    registry.add(place(Tier.HOST), memory())
    registry.remove(place(Tier.HOST))
    again = registry.add(place(Tier.HOST), memory())
    assert again.handle.number == 1
    with pytest.raises(UnknownLayout, match="has no layout"):
        registry.named(LayoutHandle(owner_id=1, number=0))


def test_a_worker_can_name_65535_layouts_and_no_more(monkeypatch: pytest.MonkeyPatch):
    assert MAX_LAYOUTS == 65535
    monkeypatch.setattr("worker_agent.blocks.registry.MAX_LAYOUTS", 3)
    registry = Registry(1, "model")
    for number in range(3):
        assert registry.add(place(Tier.HOST), memory()).handle.number == number
        registry.remove(place(Tier.HOST))
    with pytest.raises(TooLarge, match="named 3 layouts already"):
        registry.add(place(Tier.HOST), memory())


def test_layouts_are_listed_by_resource_and_then_by_tier():
    registry = Registry(1, "model")
    for resource_id, tier in [(1, Tier.DISK), (0, Tier.DISK), (1, Tier.DEVICE), (0, Tier.DEVICE), (0, Tier.HOST)]:
        registry.add(place(tier, resource_id), memory())
    assert [(e.place.resource_id, e.place.tier) for e in registry.entries()] == [
        *((0, tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)),
        *((1, tier) for tier in (Tier.DEVICE, Tier.DISK)),
    ]


def test_a_new_owner_means_new_handles_for_the_same_memory():
    registry = Registry(owner_id_of(GROUP, 0), "model")
    before = registry.add(place(Tier.HOST), memory())
    registry.rename(owner_id_of(GROUP, 3))
    after = registry.at(place(Tier.HOST))
    assert after.memory is before.memory
    assert after.handle == LayoutHandle(owner_id=owner_id_of(GROUP, 3), number=1)
    with pytest.raises(UnknownLayout):
        registry.named(before.handle)


def test_owner_ids_differ_between_ranks_and_groups():
    ids = {owner_id_of(group, rank) for group in (GROUP, GROUP.replace("6", "7")) for rank in range(4)}
    assert len(ids) == 8


def test_places_that_are_taken_missing_or_in_the_object_tier_are_refused():
    registry = Registry(1, "model")
    registry.add(place(Tier.HOST), memory())
    with pytest.raises(BadRequest, match="there is a host layout already"):
        registry.add(place(Tier.HOST), memory())
    with pytest.raises(UnknownLayout, match="no disk layout; it has: host layout"):
        registry.at(place(Tier.DISK))
    for call in (registry.at, lambda object_place: registry.add(object_place, memory())):
        with pytest.raises(BadRequest, match="keys and no layouts"):
            call(place(Tier.OBJECT))


def test_equal_shapes_have_equal_fingerprints_and_another_model_another_one():
    one, other = Registry(1, "model"), Registry(2, "model")
    few, many = one.add(place(Tier.HOST), memory(2)), other.add(place(Tier.DISK), memory(9))
    assert few.descriptor.fingerprint == many.descriptor.fingerprint
    foreign = Registry(1, "another").add(place(Tier.HOST), memory(2))
    assert foreign.descriptor.fingerprint != few.descriptor.fingerprint
