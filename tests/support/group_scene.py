"""A worker in exchange groups, with exchanges that do nothing."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from ayni.buckets import FLAT, Bucket
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
