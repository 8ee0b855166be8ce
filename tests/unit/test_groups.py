"""A member's exchange groups: everything is brought again under a new one, and committed again."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from ayni.buckets import FLAT, Bucket
from ayni.errors import Incompatible, NonFinite, RoundRestarted, StaleEpoch, StepVoided
from ayni.step_values import ExchangeGroup, GroupMember, MicrobatchStats, Report, SliceDigest
from ayni.tensors import TensorSpec
from worker_agent.assignment_frames import Regroup
from worker_agent.contributions import Offer
from worker_agent.exchange import Contribution, Outcome
from worker_agent.group_exchange import Brought
from worker_agent.groups import Groups
from worker_agent.messages import Membership
from worker_agent.session import Commit, ShardAssignment
from worker_agent.slice_offers import Moment, Terms
from worker_agent.standing import Standing

OTHER = Bucket("block", 1)
OUTCOME = Outcome(num_contributors=2, total_weight=4, global_loss=1.0, num_correct=0, num_predictions=0)
COMMIT = Commit(
    step=3,
    attempt=0,
    total_weight=4,
    global_loss=1.0,
    gradient_norm=1.0,
    num_correct=0,
    num_predictions=0,
    learning_rate=0.1,
    clip_factor=1.0,
    best=False,
)


def group(generation: int, topology: str = "sharded") -> ExchangeGroup:
    members = tuple(GroupMember(worker_id=number, worker_name=f"w{number}", is_owner=True) for number in range(2))
    return ExchangeGroup(
        generation=generation, topology=topology, members=members, secret="0" * 16, chunk_bytes=1 << 16
    )


def lease(lease_id: int = 1, *, step: int = 3, generation: int | None = 1, extra: bool = False) -> ShardAssignment:
    return ShardAssignment(
        step=step,
        attempt=0,
        epoch=1,
        kind="train",
        lease_id=lease_id,
        microbatch_start=0,
        microbatch_stop=2,
        num_microbatches=4,
        position=0,
        num_samples=4,
        shard_start=0,
        shard_end=2,
        rank=0,
        world_size=2,
        update="host",
        extra=extra,
        group=None if generation is None else group(generation),
    )


def contribution(assignment: ShardAssignment, bucket: Bucket = FLAT, num_buckets: int = 2) -> Contribution:
    stats = tuple(MicrobatchStats(microbatch=m, weight=1) for m in range(2))
    out = np.zeros(4, np.float32)
    offer = Offer(
        assignment=assignment,
        bucket=bucket,
        parts=(np.ones(4, np.float32),),
        microbatches=stats,
        out=out,
        num_buckets=num_buckets,
    )
    spec = TensorSpec(dtype="float32", num_elements=4)
    return Contribution(name=offer.name, begin=b"", spec=spec, parts=offer.parts, out=out, offer=offer)


@dataclass
class Reduction:
    """One call of `reduce`, which ends when the test says so."""

    terms: Terms
    brought: Brought
    end: "asyncio.Future[Outcome]"


class FakeExchange:
    """Records what it is asked to do."""

    def __init__(self) -> None:
        self.terms: Terms | None = None
        self.ends: list[str] = []
        self.calls: list[Reduction] = []
        self.called = asyncio.Event()

    def regroup(self, terms: Terms) -> None:
        self.terms = terms

    def end(self, why: str) -> None:
        self.terms = None
        self.ends.append(why)

    async def reduce(self, brought: Brought) -> Outcome:
        assert self.terms
        call = Reduction(self.terms, brought, asyncio.get_running_loop().create_future())
        self.calls.append(call)
        self.called.set()
        return await call.end

    def slices(self, moment: Moment) -> tuple[SliceDigest, ...]:
        assert self.terms
        assert moment == self.terms.moment
        name = str(moment.generation).encode()
        return (SliceDigest(bucket=FLAT, first_element=0, num_elements=4, digests=name, squares=()),)

    async def close(self) -> None:
        raise AssertionError("a membership does not close what outlives it")

    def open(self, generation: int) -> list[Reduction]:
        return [call for call in self.calls if call.terms.moment.generation == generation and not call.end.done()]

    def finish(self, generation: int) -> None:
        for call in self.open(generation):
            call.brought.on_sent()
            call.end.set_result(OUTCOME)


@dataclass
class FakeRepeating:
    """Plays the calls to the coordinator."""

    answers: list[Any]
    said: list[tuple[int, Report]] = field(default_factory=list)
    contributed: list[Bucket] = field(default_factory=list)

    async def commit(self, assignment: ShardAssignment, report: Report) -> Commit:
        self.said.append((assignment.lease_id, report))
        answer = self.answers.pop(0)
        if isinstance(answer, asyncio.Future):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Commit)
        return answer

    async def contribute(self, bucket: Bucket, contribution: Contribution) -> Outcome:
        self.contributed.append(bucket)
        return OUTCOME


class Scene:
    """A member with one fake way of exchange."""

    def __init__(self, *answers: Any) -> None:
        self.exchange, self.repeating, self.standing = FakeExchange(), FakeRepeating(list(answers)), Standing()
        self.standing.peers.exchanges["sharded"] = self.exchange
        self.beats: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.num_spared = 0
        membership = Membership(
            worker_id=0,
            session="s",
            total_workers=2,
            run_id="r",
            lease=timedelta(seconds=10),
            heartbeat_interval=timedelta(seconds=1),
            wire_type="float32",
        )
        self.groups = Groups(self.repeating, membership, self.standing, self)  # type: ignore[arg-type]

    def beat_now(self) -> None:
        said = self.standing
        self.beats.append((said.generation, said.contributed_leases, said.lost_owners))

    def beat_soon(self) -> None:
        self.beat_now()

    def spare(self) -> None:
        self.num_spared += 1

    def bring(self, assignment: ShardAssignment, *buckets: Bucket) -> "list[asyncio.Task[Outcome]]":
        return [asyncio.create_task(self.groups.reduce(bucket, contribution(assignment, bucket))) for bucket in buckets]

    def regroup(self, generation: int, *, step: int = 3) -> None:
        self.groups.regroup(Regroup(step=step, attempt=0, group=group(generation), reason="w1 died"))


REPORT = Report(num_buckets=2, microbatches=())


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(10):
            return await work

    return asyncio.run(bounded())


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def generations(said: Sequence[tuple[int, Report]]) -> list[tuple[int, int]]:
    return [(lease_id, report.generation) for lease_id, report in said]


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
