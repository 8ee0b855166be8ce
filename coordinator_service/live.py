"""A step in progress: its core, its live rounds, and the future that its workers wait for.  [shell]"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ayni import failpoints
from ayni.buckets import Bucket
from ayni.errors import AyniError, RoundRestarted, StepVoided
from ayni.order import microbatch_positions
from ayni.step_values import Commit, ExchangeGroup, MicrobatchStats, Report
from ayni.tensors import TensorSpec
from coordinator_service.leases import Change, Lease, Moment
from coordinator_service.membership import Epoch
from coordinator_service.peer_steps import PeerStep
from coordinator_service.plan import Layout
from coordinator_service.rounds import Exchange, Flow, LiveRound
from coordinator_service.same_host import AttemptPlaces, SameHost
from coordinator_service.signals import Signal
from coordinator_service.steps import Step
from coordinator_service.values import Assignment


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a worker says when it begins to contribute to a bucket."""

    bucket: Bucket
    spec: TensorSpec
    stats: Sequence[MicrobatchStats]
    num_buckets: int
    """Buckets that it contributes to in the step; 0 for not said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a step is given by its run."""

    chunk_elements: int
    on_change: Signal
    """Notified when bytes were reduced."""
    same_host: SameHost
    group: ExchangeGroup | None = None
    """Workers that reduce among themselves; None where the coordinator does."""


class LiveStep:
    """Drives one `Step`. Call from the event loop only."""

    def __init__(
        self,
        layout: Layout,
        attempt: int,
        epoch: Epoch,
        leases: Sequence[Lease],
        surroundings: Surroundings,
    ) -> None:
        """Opens the step."""
        self._same_host = surroundings.same_host
        self._places = AttemptPlaces(surroundings.same_host)
        self.layout = layout
        self.update = ""
        """Where the optimizer runs."""
        self.wire_type = ""
        """Element type that contributions travel in."""
        self.traceparent = ""
        """Trace context of the attempt."""
        self.epoch = epoch
        self.moment = Moment(epoch=epoch.number, step=layout.step, attempt=attempt)
        self.peers = self._peer_step(leases, surroundings.group) if surroundings.group else None
        """The same as `core` where the workers reduce among themselves, else None."""
        self.core: Step = self.peers or Step(
            moment=self.moment,
            kind=layout.kind,
            num_microbatches=layout.num_microbatches,
            leases=leases,
            chunk_elements=surroundings.chunk_elements,
            places=self._places,
        )
        self.opened = time.monotonic()
        self.regrouped = self.moved = self.opened
        """When the exchange group in force was formed; when anything came of it the last time."""
        self.since = {lease.lease_id: self.opened for lease in leases}
        """When each lease was given."""
        self.on_ended: Callable[[Sequence[Lease]], None] = lambda leases: None
        """Told of leases that ended before they were done, and when a bucket starts again: what leases that are over
        had left in it is lost then."""
        self.first_sent: dict[int, float] = {}
        """By worker, when its first contribution came."""
        self.done_at: dict[int, float] = {}
        """By worker, when it last said that a lease is done."""
        self.publishers: set[int] = set()
        """Workers that were asked to publish the state after this step."""
        self.all_committed = asyncio.Event()
        self.ended: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        self.ended.add_done_callback(_retrieve)
        self._reported: set[int] = set()
        self._group_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rounds: dict[Bucket, LiveRound] = {}
        self._on_change = surroundings.on_change
        self._note_done()

    @property
    def is_open(self) -> bool:
        """Whether something is still missing, and the attempt is not given up."""
        return not (self.ended.done() or self.all_committed.is_set())

    def assignment(self, lease: Lease, *, publish_state: bool = False, discard_state: bool = False) -> Assignment:
        """Returns what a worker is told of its lease."""
        return Assignment(
            epoch=self.core.epoch,
            step=self.core.step,
            attempt=self.core.attempt,
            kind=self.core.kind,
            lease_id=lease.lease_id,
            microbatch_start=lease.start,
            microbatch_stop=lease.stop,
            num_microbatches=self.core.num_microbatches,
            position=self.layout.position,
            num_samples=self.layout.num_samples,
            rank=self.epoch.workers.index(lease.worker_id),
            world_size=len(self.epoch.workers),
            update=self.update,
            extra=lease.is_extra,
            publish_state=publish_state,
            discard_state=discard_state,
            group=self.peers.group if self.peers else None,
            wire_type=self.wire_type,
            traceparent=self.traceparent,
        )

    @property
    def generation(self) -> int:
        """Number of the exchange group in force; 0 where the coordinator reduces."""
        return self.peers.group.generation if self.peers else 0

    def samples_of(self, lease: Lease) -> int:
        """Returns how many samples a lease covers."""
        whole = (self.layout.position, self.layout.num_samples, self.core.num_microbatches)
        start, _ = microbatch_positions(*whole, lease.start)
        stop, _ = microbatch_positions(*whole, lease.stop)
        return stop - start

    def needs(self, worker_id: int) -> bool:
        """Returns whether the step can't be committed without this worker."""
        return any(lease.worker_id == worker_id for lease in self.core.uncommitted)

    def add(self, lease: Lease) -> None:
        """Gives an extra lease."""
        self.core.add(lease)
        self.since[lease.lease_id] = time.monotonic()

    def begin(self, lease: Lease, flow: Flow, offer: Offer, window: int, *, again: bool) -> Exchange:
        """Opens a lease's contribution to a bucket; see `Step.begin`.

        Args:
            lease: in force.
            flow: its worker's budget.
            offer: what the worker says.
            window: chunks.
            again: whether the worker may begin a second time, because its stream broke.
        """
        if again and offer.bucket in self._rounds:
            self._take_back(lease, self._rounds[offer.bucket])
        change = self.core.begin(lease, offer.bucket, offer.spec, offer.stats, offer.num_buckets)
        self.first_sent.setdefault(lease.worker_id, time.monotonic())
        live = self._rounds.get(offer.bucket)
        if live is None or live.round is not self.core.rounds[offer.bucket]:
            live = self._rounds[offer.bucket] = LiveRound(offer.bucket, self.core, self._same_host, self._on_change)
            live.on_torn = self._start_again
        exchange = Exchange(live, lease, flow, window)
        self.apply(change)
        return exchange

    def commit(self, lease: Lease, report: Report) -> bool:
        """Notes that a lease is done, see `Step.commit`; returns whether its worker says so for the first time."""
        self.moved = time.monotonic()
        self.apply(self.core.commit(lease, report))
        self.done_at[lease.worker_id] = self.moved
        is_news = lease.lease_id not in self._reported
        self._reported.add(lease.lease_id)
        return is_news

    async def outcome(self) -> Commit:
        """Waits for the step's commit.

        Raises:
            StepVoided, Halted, Diverged: the attempt ended without one.
            RoundRestarted: another exchange group was formed, so what was committed is void.
        """
        if self.peers is None:
            return await asyncio.shield(self.ended)
        generation = self.peers.group.generation
        ends: set[asyncio.Future[Any]] = {self.ended, self._group_over}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not self.ended.done():
            self.peers.check_generation(generation)
        return self.ended.result()

    def regroup(self, group: ExchangeGroup) -> None:
        """Puts another exchange group in force: whoever waits for the commit has to contribute and commit again."""
        assert self.peers
        self.peers.regroup(group)
        self.regrouped = self.moved = time.monotonic()
        self._group_over.set_result(None)
        self._group_over = asyncio.get_running_loop().create_future()

    def end(self, leases: Sequence[Lease], reason: str) -> None:
        """Ends leases before they are done; see `Step.end`. Does nothing once all are committed."""
        if leases and self.is_open:
            self.apply(self.core.end(leases, reason))

    def apply(self, change: Change) -> None:
        """Tells everybody concerned what has changed."""
        for bucket in change.restarted:
            live = self._rounds[bucket]
            detail = "a part of another contribution was lost with its worker"
            live.start_again(RoundRestarted(f"{live.round.label} starts again: {detail}", bucket=bucket, detail=detail))
        for bucket, reduced in change.reduced:
            if bucket in self._rounds:
                self._rounds[bucket].publish(reduced)
        for lease in change.ended:
            for live in self._rounds.values():
                if exchange := live.exchange_of(lease.lease_id):
                    exchange.fail(self.core.revoked(lease))
        if change.ended or change.restarted:
            self.on_ended(change.ended)
        self._note_done()

    def exchanges_of(self, worker_id: int) -> list[Exchange]:
        """Returns a worker's open streams."""
        return [e for live in self._rounds.values() for e in live.exchanges if e.lease.worker_id == worker_id]

    def void(self, detail: str) -> None:
        """Gives the attempt up, unless all workers have committed: then nothing is missing any more."""
        if self.all_committed.is_set():
            return
        self.fail(
            StepVoided(
                f"{self.core.label} attempt {self.core.attempt} was given up: {detail}",
                step=self.core.step,
                attempt=self.core.attempt,
                detail=detail,
            )
        )

    def fail(self, error: AyniError) -> None:
        """Ends the attempt with an error, for everybody who takes part or waits."""
        if not self.ended.done():
            self.ended.set_exception(error)
        for live in self._rounds.values():
            live.fail(error)

    def close(self) -> None:
        """Makes sure that nobody waits for this attempt any more."""
        if not self.ended.done():
            self.void("the attempt is over")
            self.ended.cancel()
        for live in self._rounds.values():
            live.close()
        self._places.close()

    def _peer_step(self, leases: Sequence[Lease], group: ExchangeGroup) -> PeerStep:
        count = self.layout.num_microbatches
        return PeerStep(moment=self.moment, num_microbatches=count, leases=leases, group=group)

    def _start_again(self, live: LiveRound) -> None:
        """Has a bucket contributed once more, since a contribution to it was written to too early."""
        if self.is_open:
            self.apply(self.core.restart(live.bucket))

    def _take_back(self, lease: Lease, live: LiveRound) -> None:
        if not live.round.has_begun(lease.lease_id):
            return
        if exchange := live.exchange_of(lease.lease_id):
            detail = "its worker has begun again"
            exchange.fail(RoundRestarted(f"{live.round.label}: {detail}", bucket=live.bucket, detail=detail))
        self.apply(self.core.take_back(lease, live.bucket))
        if lease.lease_id in self.core.ended:
            raise self.core.revoked(lease)

    def _note_done(self) -> None:
        if self.core.done and not self.all_committed.is_set():
            failpoints.hit("coordinator.commit.ready")
            self.all_committed.set()


def _retrieve(future: "asyncio.Future[Commit]") -> None:
    """Marks an exception as seen: workers may have no call open that waits for it."""
    if not future.cancelled():
        future.exception()
