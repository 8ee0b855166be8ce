"""Who is in an exchange group, who owns slices, and under which number."""

from dataclasses import replace

import pytest

from ayni.shm.host import HostIdentity, SharedMemoryOffer, socket_name
from coordinator_service.exchange_groups import EPOCH_BITS, ExchangeGroups
from coordinator_service.membership import Epoch
from tests.support.peer_groups import member


def groups(epoch: int = 3) -> ExchangeGroups:
    made = ExchangeGroups(chunk_bytes=1 << 20, max_bucket_bytes=1 << 22)
    made.enter(Epoch(number=epoch, workers=(0, 1, 2)))
    return made


def formed(made, topology="sharded", members=None):
    group = made.form(topology, members or [member(w) for w in range(3)], "s" * 32).group
    assert group
    return group


def owners(group):
    return [owner.worker_id for owner in group.owners]


def test_a_group_says_who_is_in_it_and_what_the_members_show_one_another():
    group = formed(groups())
    assert (group.topology, group.secret, group.chunk_bytes) == ("sharded", "s" * 32, 1 << 20)
    assert group.max_bucket_bytes == 1 << 22
    assert [(m.worker_id, m.worker_name, m.address) for m in group.members] == [
        (0, "ant", "127.0.0.1:7000"),
        (1, "bee", "127.0.0.1:7001"),
        (2, "cat", "127.0.0.1:7002"),
    ]
    assert all(m.store_address == "" for m in group.members)
    assert group.member(1) is group.members[1]
    assert group.member(3) is None


@pytest.mark.parametrize(
    "changes", [{"following": True}, {"peer_address": ""}], ids=["it follows", "nobody can dial it"]
)
def test_a_member_that_can_not_own_slices_is_in_the_group_all_the_same(changes):
    group = formed(groups(), members=[member(0), member(1, **changes), member(2)])
    assert owners(group) == [0, 2]
    assert [m.worker_id for m in group.members] == [0, 1, 2]


def test_generations_grow_within_an_epoch_and_over_epochs_and_restarts():
    made = groups(epoch=3)
    numbers = [formed(made).generation for _ in range(3)]
    made.enter(Epoch(number=4, workers=(0, 1, 2)))
    numbers += [formed(made).generation]
    numbers += [formed(groups(epoch=5)).generation]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == (3 << EPOCH_BITS) + 1


def test_one_that_could_not_be_reached_owns_nothing_for_the_rest_of_the_epoch():
    made = groups()
    first = formed(made)
    assert [m.worker_name for m in made.lose(first, [1, 77])] == ["bee"]
    second = formed(made)
    assert owners(second) == [0, 2]
    assert made.lose(second, [1]) == []
    made.enter(Epoch(number=3, workers=(0, 1, 2)))
    assert owners(formed(made)) == [0, 2]
    made.enter(Epoch(number=4, workers=(0, 1, 2)))
    assert owners(formed(made)) == [0, 1, 2]


def test_without_any_owner_left_there_is_no_group_and_a_reason():
    made = groups()
    made.lose(formed(made), [0, 1, 2])
    none = made.form("sharded", [member(w) for w in range(3)], "s" * 32)
    assert none.group is None
    assert none.reason == "there is no worker that the others can dial"


def test_one_that_takes_no_part_keeps_the_others_from_it_and_is_named():
    for changes in ({"topologies": ()}, {"elastic": False}):
        none = groups().form("sharded", [member(0), member(1, **changes)], "s" * 32)
        assert none.group is None
        assert none.reason == "bee takes part in no exchange among workers"
    assert groups().form("sharded", [], "s" * 32).group is None


def test_in_a_torch_group_all_take_part_and_the_first_one_has_the_store():
    group = formed(groups(), "torch", [member(0), member(1, following=True, peer_address="")])
    assert owners(group) == [0]
    assert [m.store_address for m in group.members] == ["127.0.0.1:8000", "127.0.0.1:8001"]
    none = groups().form("torch", [member(0, store_address=""), member(1)], "s" * 32)
    assert none.reason == "the rendezvous store of ant can't be dialed"


def test_a_torch_group_whose_members_lose_one_another_is_tried_a_few_times_in_an_epoch():
    made = groups()
    for _ in range(4):
        assert [m.worker_id for m in made.lose(formed(made, "torch"), [2])] == [2]
    none = made.form("torch", [member(0), member(1)], "s" * 32)
    assert none.group is None
    assert "lost one another 4 times" in none.reason
    made.enter(Epoch(number=4, workers=(0, 1)))
    assert formed(made, "torch")


def test_members_are_told_where_memory_is_shared_with_them_where_that_is_wanted():
    host = HostIdentity(boot_id="b", pid_namespace=1, uid=2)
    offers = [SharedMemoryOffer(host=host, folder="/run", socket_name=socket_name(n)) for n in range(2)]
    members = [member(n, shared_memory=offer) for n, offer in enumerate(offers)]
    told = groups()
    assert told.share_memory(members)
    assert [one.shared_memory for one in formed(told, "sharded", members).members] == offers
    assert not told.share_memory([*members, member(2)])
    elsewhere = replace(offers[0], host=replace(host, boot_id="c"))
    assert not told.share_memory([*members, member(2, shared_memory=elsewhere)])
    assert [one.shared_memory for one in formed(told, "torch", members).members] == [None, None]
    off = ExchangeGroups(chunk_bytes=1 << 20, max_bucket_bytes=1 << 22, shares_memory=False)
    off.enter(Epoch(number=3, workers=(0, 1, 2)))
    assert not off.share_memory(members)
    assert [one.shared_memory for one in formed(off, "sharded", members).members] == [None, None]
