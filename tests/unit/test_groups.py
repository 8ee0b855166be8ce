"""A member's exchange groups: everything is brought again under a new one, and committed again."""

import asyncio
from dataclasses import replace

import pytest

from ayni.buckets import FLAT
from ayni.errors import Incompatible, NonFinite, StepVoided
from tests.support.group_scene import (
    COMMIT,
    OTHER,
    OUTCOME,
    REPORT,
    Scene,
    contribution,
    group,
    lease,
    run,
    turns,
)


def test_without_a_group_the_coordinator_reduces():
    async def scenario() -> None:
        scene = Scene(COMMIT)
        first = lease(generation=None)
        scene.groups.told(first)
        assert await scene.groups.reduce(FLAT, contribution(first)) == OUTCOME
        assert await scene.groups.commit(first, REPORT) == COMMIT
        assert scene.repeating.contributed == [FLAT]
        assert scene.repeating.said == [(1, REPORT)]
        assert scene.exchange.calls == []

    run(scenario())


def test_a_commit_carries_the_generation_and_what_was_taken_down():
    async def scenario() -> None:
        scene = Scene(COMMIT, COMMIT)
        first, extra = lease(), lease(2, extra=True)
        scene.groups.told(first)
        scene.groups.told(extra)
        work = scene.bring(first, FLAT, OTHER)
        more = scene.bring(extra, FLAT)
        committing = asyncio.create_task(scene.groups.commit(first, REPORT))
        await turns()
        assert not committing.done()
        scene.exchange.finish(1)
        await asyncio.gather(*work, *more)
        assert await committing == COMMIT
        assert await scene.groups.commit(extra, REPORT) == COMMIT
        (_, said), (_, said_of_extra) = scene.repeating.said
        assert (said.generation, [taken.digests for taken in said.slices]) == (1, [b"1"])
        assert (said_of_extra.generation, said_of_extra.slices) == (1, ())

    run(scenario())


def test_work_that_is_cancelled_has_ended_before_anybody_hears_of_it():
    async def scenario() -> None:
        scene = Scene()
        first = lease()
        scene.groups.told(first)
        (work,) = scene.bring(first, FLAT)
        await turns()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert scene.exchange.calls[0].end.cancelled()
        scene.regroup(2)
        await turns()
        assert scene.exchange.open(2) == []

    run(scenario())


def test_a_worker_that_was_left_behind_is_in_no_group():
    async def scenario() -> None:
        scene = Scene()
        first = lease()
        scene.groups.told(first)
        (work,) = scene.bring(first, FLAT)
        await turns()
        scene.groups.revoke(1)
        with pytest.raises(StepVoided):
            await work
        assert scene.exchange.terms is None
        with pytest.raises(StepVoided):
            await scene.groups.commit(first, REPORT)

    run(scenario())


def test_an_extra_lease_that_is_taken_back_is_brought_no_more():
    async def scenario() -> None:
        scene = Scene()
        first, extra = lease(), lease(2, extra=True)
        scene.groups.told(first)
        (work,) = scene.bring(first, FLAT)
        (more,) = scene.bring(extra, FLAT)
        await turns()
        scene.groups.revoke(2)
        with pytest.raises(StepVoided):
            await more
        scene.regroup(2)
        await turns()
        assert [call.brought.offer.assignment.lease_id for call in scene.exchange.open(2)] == [1]
        scene.exchange.finish(2)
        assert await work == OUTCOME

    run(scenario())


def test_the_coordinator_is_told_when_a_lease_has_left_whole():
    async def scenario() -> None:
        scene = Scene()
        first = lease()
        scene.groups.told(first)
        work = scene.bring(first, FLAT, OTHER)
        await turns()
        flat, other = scene.exchange.open(1)
        flat.brought.on_sent()
        flat.brought.on_sent()
        assert scene.beats == []
        other.brought.on_sent()
        assert scene.beats == [(1, (1,), ())]
        scene.regroup(2)
        assert (scene.standing.generation, scene.standing.contributed_leases) == (2, ())
        flat.brought.on_sent()
        await turns()
        for call in scene.exchange.open(2):
            call.brought.on_sent()
        assert scene.beats[1:] == [(2, (1,), ())]
        await scene.groups.close()
        ends = await asyncio.gather(*work, return_exceptions=True)
        assert [type(end) for end in ends] == [StepVoided, StepVoided]
        assert (scene.standing.generation, scene.standing.contributed_leases) == (0, ())

    run(scenario())


def test_how_many_buckets_there_are_may_be_known_from_the_commit_only():
    async def scenario() -> None:
        scene = Scene(COMMIT)
        first = lease()
        scene.groups.told(first)
        work = asyncio.create_task(scene.groups.reduce(FLAT, contribution(first, num_buckets=0)))
        await turns()
        (call,) = scene.exchange.open(1)
        call.brought.on_sent()
        assert scene.beats == []
        committing = asyncio.create_task(scene.groups.commit(first, replace(REPORT, num_buckets=1)))
        await turns()
        assert scene.beats == [(1, (1,), ())]
        call.end.set_result(OUTCOME)
        assert (await work, await committing) == (OUTCOME, COMMIT)
        assert scene.num_spared == 1, "the commit says what a heartbeat would"

    run(scenario())


def test_the_coordinator_is_told_once_of_owners_that_can_not_be_reached():
    async def scenario() -> None:
        scene = Scene()
        scene.groups.told(lease())
        scene.standing.peers.lost(1, [1])
        scene.standing.peers.lost(1, [1])
        assert scene.beats == [(1, (), (1,))]
        scene.regroup(2)
        scene.standing.peers.lost(1, [0])
        assert (len(scene.beats), scene.standing.lost_owners) == (1, ())

    run(scenario())


def test_what_is_wrong_is_told_now_or_by_the_commit():
    async def scenario() -> None:
        scene = Scene()
        first = lease()
        scene.groups.told(first)
        fine, wrong = scene.bring(first, FLAT, OTHER)
        await turns()
        for call in scene.exchange.open(1):
            if call.brought.offer.bucket == FLAT:
                call.end.set_result(OUTCOME)
            else:
                call.end.set_exception(NonFinite("nan", worker="w0"))
        assert await fine == OUTCOME
        with pytest.raises(NonFinite):
            await wrong
        scene.regroup(2)
        await turns()
        for call in scene.exchange.open(2):
            call.end.set_exception(NonFinite("nan", worker="w0"))
        with pytest.raises(NonFinite):
            await scene.groups.commit(first, REPORT)

    run(scenario())


def test_a_topology_that_the_worker_does_not_know_is_refused_by_name():
    async def scenario() -> None:
        scene = Scene()
        strange = replace(lease(), group=group(1, "torch"))
        with pytest.raises(Incompatible, match=r"torch.*sharded"):
            scene.groups.told(strange)

    run(scenario())
