"""Exchange groups that change while something is brought to them."""

import asyncio
from typing import Any

import pytest

from ayni.buckets import FLAT
from ayni.errors import RoundRestarted, StaleEpoch, StepVoided
from tests.support.group_scene import (
    COMMIT,
    OTHER,
    OUTCOME,
    REPORT,
    Scene,
    contribution,
    generations,
    lease,
    run,
    turns,
)
from worker_agent.exchange import Outcome
from worker_agent.group_exchange import Brought


def test_another_group_has_everything_brought_again_and_the_loop_sees_nothing():
    async def scenario() -> None:
        scene = Scene(COMMIT)
        first = lease()
        scene.groups.told(first)
        done, pending = scene.bring(first, FLAT, OTHER)
        await turns()
        scene.exchange.open(1)[0].end.set_result(OUTCOME)
        await done
        scene.regroup(2)
        await turns()
        again = scene.exchange.open(2)
        assert [(call.brought.offer.bucket, call.brought.has_mean) for call in again] == [(FLAT, True), (OTHER, False)]
        assert not pending.done()
        scene.exchange.finish(2)
        assert await pending == OUTCOME
        assert await scene.groups.commit(first, REPORT) == COMMIT
        assert generations(scene.repeating.said) == [(1, 2)]

    run(scenario())


@pytest.mark.parametrize("told_first", [True, False])
def test_a_commit_is_said_again_when_the_group_has_changed(told_first):
    async def scenario() -> None:
        pending: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        scene = Scene(pending, COMMIT)
        first = lease()
        scene.groups.told(first)
        work = scene.bring(first, FLAT)
        await turns()
        scene.exchange.finish(1)
        await asyncio.gather(*work)
        committing = asyncio.create_task(scene.groups.commit(first, REPORT))
        await turns()
        if told_first:
            scene.regroup(2)
            await turns()
        pending.set_result(RoundRestarted("the group has changed", bucket="", detail=""))
        await turns()
        if not told_first:
            scene.regroup(2)
            await turns()
        assert not committing.done(), "nothing was brought under the new group yet"
        scene.exchange.finish(2)
        assert await committing == COMMIT
        assert generations(scene.repeating.said) == [(1, 1), (1, 2)]

    run(scenario())


def test_what_is_stopped_while_it_fails_is_not_brought_twice():
    """A group of tasks that is cancelled while one of them fails raises the failure, and no cancellation."""

    async def scenario() -> None:
        scene = Scene(COMMIT)
        first = lease()
        scene.groups.told(first)
        (work,) = scene.bring(first, FLAT)
        await turns()
        reduce = scene.exchange.reduce

        async def stubborn(brought: Brought) -> Outcome:
            try:
                return await reduce(brought)
            except asyncio.CancelledError:
                raise StaleEpoch("another generation is in force") from None

        scene.exchange.reduce = stubborn  # type: ignore[method-assign]
        scene.regroup(2)
        await turns()
        scene.regroup(3)
        await asyncio.sleep(0.1)
        assert [call.terms.moment.generation for call in scene.exchange.calls] == [1, 2, 3]
        scene.exchange.finish(3)
        assert await work == OUTCOME

    run(scenario())


def test_older_groups_and_those_of_other_attempts_change_nothing():
    async def scenario() -> None:
        scene = Scene()
        scene.groups.told(lease(generation=5))
        work = scene.bring(lease(generation=5), FLAT)
        await turns()
        scene.regroup(4)
        scene.regroup(5)
        scene.regroup(6, step=4)
        await turns()
        assert [call.terms.moment.generation for call in scene.exchange.calls] == [5]
        scene.exchange.finish(5)
        await asyncio.gather(*work)

    run(scenario())


def test_the_next_attempt_ends_what_the_last_one_waits_for():
    async def scenario() -> None:
        scene = Scene()
        first = lease()
        scene.groups.told(first)
        (work,) = scene.bring(first, FLAT)
        committing = asyncio.create_task(scene.groups.commit(first, REPORT))
        await turns()
        scene.groups.told(lease(2, step=4, generation=2))
        for waiting in (work, committing):
            with pytest.raises(StepVoided, match="step 3"):
                await waiting
        await scene.groups.ended()
        assert all(call.end.cancelled() for call in scene.exchange.calls)
        with pytest.raises(StepVoided):
            await scene.groups.reduce(FLAT, contribution(first))

    run(scenario())


@pytest.mark.parametrize("passing", [RoundRestarted("again"), StaleEpoch("not told yet")])
def test_what_is_to_be_brought_again_is(passing):
    async def scenario() -> None:
        scene = Scene()
        first = lease()
        scene.groups.told(first)
        (work,) = scene.bring(first, FLAT)
        await turns()
        scene.exchange.called.clear()
        scene.exchange.calls[0].end.set_exception(passing)
        await scene.exchange.called.wait()
        scene.exchange.finish(1)
        assert await work == OUTCOME

    run(scenario())
