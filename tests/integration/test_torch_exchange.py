"""Topology torch, with groups of members in this process: what is added, in which order, and how groups follow."""

import asyncio
import math
import threading
from dataclasses import replace

import numpy as np
import pytest

from ayni.buckets import FLAT, Bucket
from ayni.errors import Fault, NonFinite, RoundRestarted, SpecMismatch, StaleEpoch, TooLarge
from ayni.reduce.digest import MeanDigest
from tests.support.torch_members import group_of, members, terms_of
from tests.support.torch_offers import offer
from worker_agent import own_sockets, torch_exchange, torch_store
from worker_agent.slice_offers import Moment

BLOCKS = [Bucket("block", index) for index in range(3)]


def torch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ayni-torch-")]


def moment(generation: int, step: int) -> Moment:
    return Moment(generation=generation, epoch=1, step=step, attempt=0)


async def within(seconds, *work):
    async with asyncio.timeout(seconds):
        return await asyncio.gather(*work)


def test_all_members_receive_the_weighted_mean_also_those_who_bring_nothing():
    async def scenario():
        async with members(3) as group:
            group.regroup([0, 1, 2], 1)
            offers = [offer(0, 2, 4, weight=3), offer(2, 4, 4, weight=3), offer(0, 0, 4)]
            outcomes = await within(30, *map(group.reduce, range(3), offers))
            return offers, outcomes

    offers, outcomes = asyncio.run(scenario())
    for brought, outcome in zip(offers, outcomes, strict=True):
        assert set(brought.out) == {np.float32(10 / 12)}
        assert (outcome.total_weight, outcome.num_contributors) == (12, 3)
        assert 0 < outcome.times.begun <= outcome.times.accepted <= outcome.times.sent <= outcome.times.last
    assert not torch_threads()


def test_buckets_are_added_in_one_order_whatever_comes_first_where():
    async def scenario():
        async with members(2) as group:
            group.regroup([0, 1], 1)
            offers = [[offer(rank, rank + 1, 2, bucket=b, size=7 + b.index) for b in BLOCKS] for rank in (0, 1)]
            offers[1].reverse()
            await within(30, *(group.reduce(rank, o) for rank in (0, 1) for o in offers[rank]))
            return [o for own in offers for o in own]

    assert all(set(o.out) == {np.float32(1.5)} for o in asyncio.run(scenario()))


def test_one_group_reduces_many_steps_and_counts_each_by_itself():
    async def scenario():
        async with members(2) as group:
            group.regroup([0, 1], 1)
            means = []
            for step in range(5):
                offers = [offer(rank, rank + 1, 2, step=step, weight=1 + step) for rank in (0, 1)]
                outcomes = await within(30, *map(group.reduce, range(2), offers))
                means.append((outcomes[0].total_weight, float(offers[1].out[0])))
            return means

    assert asyncio.run(scenario()) == [(2 * (1 + step), np.float32(1.5 / (1 + step))) for step in range(5)]


def test_nothing_is_added_before_the_leases_cover_the_step():
    async def scenario():
        async with members(2) as group:
            group.regroup([0, 1], 1)
            primaries = [offer(0, 1, 4), offer(1, 2, 4)]
            waiting = [asyncio.create_task(group.reduce(rank, primaries[rank])) for rank in (0, 1)]
            done, _ = await asyncio.wait(waiting, timeout=1.2)
            assert not done
            extra = offer(2, 4, 4, extra=True)
            *_, outcome = await within(30, *waiting, group.reduce(1, extra))
            return primaries, extra, outcome

    primaries, extra, outcome = asyncio.run(scenario())
    assert all(set(o.out) == {np.float32(10 / 4)} for o in primaries)
    assert np.isnan(extra.out).all()
    assert outcome.total_weight == 4


def test_a_step_without_weight_has_a_mean_of_zeros():
    async def scenario():
        async with members(2) as group:
            group.regroup([0, 1], 1)
            offers = [offer(rank, rank + 1, 2, weight=0) for rank in (0, 1)]
            await within(30, *map(group.reduce, range(3), offers))
            return offers

    assert all(set(o.out) == {np.float32(0)} for o in asyncio.run(scenario()))


def test_a_bucket_that_is_longer_than_the_run_takes_is_refused_by_everybody_and_the_next_is_reduced():
    async def scenario():
        async with members(2) as group:
            told = replace(group_of(group.stores), max_bucket_bytes=4 * 16)
            for place, exchange in enumerate(group.exchanges):
                exchange.regroup(terms_of(told, place))
            for rank in (0, 1):
                with pytest.raises(TooLarge, match=r"68 bytes; 1 to 64 are taken \(max_bucket_bytes\)"):
                    await within(30, group.reduce(rank, offer(rank, rank + 1, 2, size=17)))
            offers = [offer(rank, rank + 1, 2, size=16) for rank in (0, 1)]
            await within(30, *map(group.reduce, range(2), offers))
            return offers

    assert all(set(o.out) == {np.float32(1.5)} for o in asyncio.run(scenario()))


def test_the_lowest_rank_takes_the_means_down_and_nobody_else():
    async def scenario():
        async with members(2) as group:
            group.regroup([0, 1], 1)
            offers = [[offer(r, r + 1, 2, bucket=b) for b in (FLAT, BLOCKS[1])] for r in (0, 1)]
            await within(30, *(group.reduce(r, o) for r in (0, 1) for o in offers[r]))
            first, second = group.exchanges
            others = [second.slices(moment(1, 0)), first.slices(moment(1, 1)), first.slices(moment(2, 0))]
            return offers[0], first.slices(moment(1, 0)), others

    offers, taken, others = asyncio.run(scenario())
    assert others == [()] * 3
    assert [one.bucket for one in taken] == [BLOCKS[1], FLAT]
    for one, brought in zip(taken, reversed(offers), strict=True):
        digest = MeanDigest()
        digest.add(brought.out)
        assert (one.first_element, one.num_elements) == (0, brought.out.size)
        assert one.digests == b"".join(digest.digests())
        assert math.fsum(one.squares) == digest.square_sum()


def test_a_new_group_fails_what_is_under_way_and_everything_is_brought_again():
    async def scenario():
        async with members(3) as group:
            group.regroup([0, 1, 2], 1)
            offers = [offer(rank, rank + 1, 3) for rank in range(3)]
            waiting = [asyncio.create_task(group.reduce(rank, offers[rank])) for rank in (0, 1)]
            await asyncio.wait(waiting, timeout=0.5)
            group.regroup([0, 1], 2)
            failed = await within(5, *(asyncio.gather(task, return_exceptions=True) for task in waiting))
            extra = offer(2, 3, 3, extra=True)
            await within(30, *map(group.reduce, range(2), offers), group.reduce(0, extra))
            return [error for (error,) in failed], offers[:2], group.broken

    failed, offers, broken = asyncio.run(scenario())
    assert all(isinstance(error, RoundRestarted) for error in failed)
    assert "generation 2 is in force" in failed[0].message
    assert all(set(o.out) == {np.float32(2)} for o in offers)
    assert not broken
    assert not torch_threads()


def test_a_group_of_the_same_members_goes_on_with_what_the_one_before_was_built_of():
    async def scenario():
        places = []
        async with members(2) as group:
            for generation, ranks in ((1, [0, 1]), (2, [0, 1]), (3, [1, 0])):
                group.regroup(ranks, generation)
                offers = [offer(r, r + 1, 2, step=generation) for r in (0, 1)]
                await within(30, *map(group.reduce, (0, 1), offers))
                assert all(set(o.out) == {np.float32(1.5)} for o in offers)
                places.append(own_sockets.listening())
        return places

    first, second, third = asyncio.run(scenario())
    assert first == second
    assert first != third


def test_where_one_member_lost_what_the_group_was_built_of_all_build_anew():
    async def scenario():
        async with members(2) as group:
            group.regroup([0, 1], 1)
            await within(30, *map(group.reduce, (0, 1), [offer(r, r + 1, 2) for r in (0, 1)]))
            newest = group.exchanges[1]._newest
            assert newest
            newest.give_up("for this test")
            group.regroup([0, 1], 2)
            offers = [offer(r, r + 1, 2, step=1) for r in (0, 1)]
            await within(30, *map(group.reduce, (0, 1), offers))
            return offers

    assert all(set(o.out) == {np.float32(1.5)} for o in asyncio.run(scenario()))


def test_an_older_group_is_not_taken():
    async def scenario():
        async with members(1) as group:
            group.regroup([0], 5)
            group.regroup([0], 4)
            brought = offer(0, 1, 1)
            await within(30, group.reduce(0, brought))
            return brought

    assert set(asyncio.run(scenario()).out) == {np.float32(1)}


def test_work_that_is_cancelled_breaks_the_group_for_all_and_the_coordinator_is_told():
    async def scenario():
        async with members(2) as group:
            group.regroup([0, 1], 1)
            second = asyncio.create_task(group.reduce(1, offer(1, 2, 2)))
            await asyncio.wait([second], timeout=0.5)
            second.cancel()
            first = asyncio.create_task(group.reduce(0, offer(0, 1, 2)))
            async with asyncio.timeout(10):
                while len(group.broken) < 2:
                    await group.change.wait()
            assert not first.done()
            group.regroup([0, 1], 2)
            return *await within(5, asyncio.gather(first, return_exceptions=True)), group.broken

    (error,), broken = asyncio.run(scenario())
    assert isinstance(error, RoundRestarted)
    assert sorted(broken) == [(0, 1, [11]), (1, 1, [10])]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (offer(1, 2, 2, size=3, parts=[np.array([1, np.nan, 1], np.float32)]), NonFinite),
        (offer(1, 2, 2, size=4), SpecMismatch),
    ],
    ids=["nan", "length"],
)
def test_who_brings_something_wrong_is_told_so_and_the_others_bring_it_to_the_next_group(bad, expected):
    async def scenario():
        async with members(2) as group:
            group.regroup([0, 1], 1)
            first = asyncio.create_task(group.reduce(0, offer(0, 1, 2, size=3)))
            with pytest.raises(expected) as refused:
                await within(20, group.reduce(1, bad))
            group.regroup([0], 2)
            with pytest.raises(RoundRestarted):
                await within(5, first)
            alone = offer(0, 2, 2, size=3)
            await within(20, group.reduce(0, alone))
            return refused.value, alone

    error, alone = asyncio.run(scenario())
    assert set(alone.out) == {np.float32(1.5)}
    assert error.metadata["bucket"] == "flat"


def test_a_group_that_somebody_does_not_come_to_is_said_to_be_broken(monkeypatch):
    monkeypatch.setattr(torch_store, "ANSWER_S", 1.0)

    async def scenario():
        async with members(2) as group:
            only = group_of(group.stores)
            group.exchanges[1].regroup(terms_of(only, 1))
            async with asyncio.timeout(20):
                while not group.broken:
                    await group.change.wait()
            return group.broken

    assert asyncio.run(scenario()) == [(1, 1, [10])]


def test_groups_that_do_not_end_are_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_store, "ANSWER_S", 3.0)
    monkeypatch.setattr(torch_exchange, "MOST_LINGERING", 2)
    # Connections can't be found then, so that what waits in them can't be ended.
    monkeypatch.setattr(own_sockets, "_DESCRIPTORS", tmp_path / "no such folder")

    async def scenario():
        async with members(2) as group:
            for generation in range(1, 4):
                group.exchanges[1].regroup(terms_of(group_of(group.stores, generation), 1))
                await asyncio.sleep(0.2)
            with pytest.raises(Fault, match="3 torch groups that were given up have not ended"):
                group.exchanges[1].regroup(terms_of(group_of(group.stores, 4), 1))

    asyncio.run(scenario())


def test_without_a_group_there_is_nothing_to_bring_it_to():
    async def scenario():
        async with members(1) as group:
            with pytest.raises(StaleEpoch, match="in no torch group"):
                await group.reduce(0, offer(0, 1, 1))

    asyncio.run(scenario())


def test_what_the_topology_gives_up_is_said_once(caplog):
    async def scenario():
        async with members(1) as group:
            for generation in (1, 2):
                group.regroup([0], generation)

    asyncio.run(scenario())
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "topology torch: the bytes of a mean depend on which worker computed what, so two runs with the same seed need "
        "not give the same parameters; with topology star or sharded they do"
    ]


def test_a_store_listens_at_one_address_and_an_exchange_that_is_closed_leaves_no_socket():
    async def scenario():
        before = own_sockets.listening()
        async with members(2) as group:
            assert {host for host, _ in own_sockets.listening() - before} == {"127.0.0.1"}
            group.regroup([0, 1], 1)
            await within(30, *(group.reduce(r, offer(r, r + 1, 2)) for r in (0, 1)))
        return own_sockets.listening() - before

    assert not asyncio.run(scenario())
