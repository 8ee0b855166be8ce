"""Stored objects of a group: every key has its own answer, whatever happened to its neighbours."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from ayni.blocks.metadata import ParallelismMode
from ayni.blocks.objects import OutcomeState, PresenceState
from ayni.errors import BadRequest, StorageFailed
from coordinator_service.leader import SpmdParallelWorkers
from tests.support.fake_ranks import DEVICE, HOST, Fabric, FakeRank, make_group

A = "a0000000-1111-4222-8333-444455556666"
KEYS = [bytes([i]) * 24 for i in range(5)]
FULL = StorageFailed("the disk is full", place="", detail="")
DONE, FAILED = OutcomeState.DONE, OutcomeState.FAILED
PRESENT, ABSENT, UNKNOWN = PresenceState.PRESENT, PresenceState.ABSENT, PresenceState.UNKNOWN


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, 15))


def group_of(num_ranks: int, **arguments) -> tuple[list[FakeRank], SpmdParallelWorkers]:
    ranks = make_group(Fabric(), A, num_ranks, **arguments)
    return ranks, SpmdParallelWorkers(ranks)


@pytest.mark.fact("T123")
def test_put_and_get_answer_key_by_key_in_input_order():
    async def test():
        ranks, group = group_of(2)
        ranks[1].key_errors[KEYS[3]] = FULL
        report = await group.put_blocks(HOST, [4, 3, 2, 1, 0], KEYS)
        assert [one.state for one in report.outcomes] == [DONE, DONE, DONE, FAILED, DONE]
        assert [one.size_bytes for one in report.outcomes] == [128, 128, 128, 0, 128]
        assert report.by_rank[0][3] is not None
        assert report.by_rank[0][3].is_success
        del ranks[1].key_errors[KEYS[3]]
        before = [rank.array(DEVICE).copy() for rank in ranks]
        order = [KEYS[3], KEYS[0], KEYS[4]]
        report = await group.get_blocks(order, DEVICE, [7, 8, 9])
        assert [one.state for one in report.outcomes] == [OutcomeState.ABSENT, DONE, DONE]
        assert not report.is_done
        for rank, old in zip(ranks, before, strict=True):
            assert (rank.array(DEVICE)[[8, 9]] == rank.array(HOST)[[4, 0]]).all()
            assert (rank.array(DEVICE)[[6, 10]] == old[[6, 10]]).all()
        assert (ranks[1].array(DEVICE)[7] == before[1][7]).all()

    run(test())


def test_stored_twice_is_already_present():
    async def test():
        _, group = group_of(2)
        await group.put_blocks(HOST, [0], KEYS[:1])
        report = await group.put_blocks(HOST, [0, 1], KEYS[:2])
        assert [one.state for one in report.outcomes] == [OutcomeState.ALREADY_PRESENT, DONE]

    run(test())


@pytest.mark.fact("T124")
def test_presence_is_rank_0s_and_disagreement_is_visible(caplog):
    async def test():
        ranks, group = group_of(2)
        await group.put_blocks(HOST, [0, 1], KEYS[:2])
        del ranks[0].fabric.objects[1, KEYS[1]]
        report = await group.has_blocks(HOST, KEYS[:3])
        assert [one.state for one in report.presences] == [PRESENT, PRESENT, ABSENT]
        assert report.disagreements == (1,)
        assert "ranks disagree on 1 of 3 keys" in caplog.text

    run(test())


def test_rank_that_can_not_be_asked_never_raises():
    async def test():
        ranks, group = group_of(3, total_heads=12)
        for method in ("has_blocks", "put_blocks", "get_blocks"):
            ranks[0].raises[method] = ConnectionError("gone")
            ranks[1].raises[method] = KeyError("surprise")
        has = await group.has_blocks(HOST, KEYS)
        assert {one.state for one in has.presences} == {UNKNOWN}
        assert [one[0].failure.reason for one in has.by_rank if one[0].failure] == ["PEER_LOST", "FAULT"]
        put = await group.put_blocks(HOST, range(5), KEYS)
        get = await group.get_blocks(KEYS, HOST, range(5))
        for report in (put, get):
            assert {one.state for one in report.outcomes} == {FAILED}
            assert all("rank 0: rank 0 can't be reached" in str(one.failure) for one in report.outcomes)

    run(test())


def test_rank_that_does_not_answer_fails_its_keys_at_the_deadline():
    async def test():
        ranks, group = group_of(2)
        ranks[1].gate = asyncio.Event()
        report = await group.put_blocks(HOST, [0], KEYS[:1], timeout_s=0.05)
        assert report.outcomes[0].state is FAILED
        assert report.outcomes[0].failure is not None
        assert report.outcomes[0].failure.reason == "DEADLINE"

    run(test())


@pytest.mark.fact("T123")
def test_ranks_that_hold_everything_divide_what_they_store_and_all_load_all():
    async def test():
        ranks, group = group_of(2, mode=ParallelismMode.REPLICATED_DATA, total_heads=4)
        await group.export_metadata()
        for rank in ranks:
            rank.object_rank = 0
        ranks[1].key_errors[KEYS[3]] = FULL
        report = await group.put_blocks(HOST, range(5), KEYS)
        assert [rank.named("put_blocks") for rank in ranks] == [[(KEYS[0], KEYS[2], KEYS[4])], [(KEYS[1], KEYS[3])]]
        assert [one.state for one in report.outcomes] == [DONE, DONE, DONE, FAILED, DONE]
        assert [one is None for one in report.by_rank[0]] == [False, True, False, True, False]
        report = await group.get_blocks(KEYS[:3], DEVICE, [4, 5, 6])
        assert report.is_done
        for rank in ranks:
            for block, owner in ((0, 0), (1, 1), (2, 0)):
                assert (rank.array(DEVICE)[4 + block] == ranks[owner].array(HOST)[block]).all()

    run(test())


def test_group_without_workers_has_nothing_and_stores_nothing():
    async def test():
        group = SpmdParallelWorkers([])
        assert [one.state for one in (await group.has_blocks(HOST, KEYS)).presences] == [ABSENT] * 5
        for report in (await group.put_blocks(HOST, range(5), KEYS), await group.get_blocks(KEYS, HOST, range(5))):
            assert [one.state for one in report.outcomes] == [FAILED] * 5

    run(test())


def test_lists_that_do_not_fit_are_refused_before_anybody_is_asked():
    async def test():
        ranks, group = group_of(2)
        with pytest.raises(BadRequest, match="2 source blocks and 5 keys"):
            await group.put_blocks(HOST, [0, 1], KEYS)
        with pytest.raises(BadRequest, match="come more than once"):
            await group.put_blocks(HOST, [0, 1], [KEYS[0]] * 2)
        with pytest.raises(BadRequest, match="5 source blocks and 2 destination blocks"):
            await group.get_blocks(KEYS, HOST, [0, 1])
        with pytest.raises(BadRequest, match="destination blocks 3 come more than once"):
            await group.get_blocks(KEYS[:2], HOST, [3, 3])
        assert not any(rank.calls for rank in ranks)

    run(test())
