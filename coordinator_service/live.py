"""A step in progress: its core, its live rounds, and the future that its workers wait for.  [shell]"""

import asyncio
from collections.abc import Sequence

from ayni.buckets import Bucket
from ayni.errors import AyniError, StepVoided
from ayni.order import microbatch_positions
from ayni.step_values import Commit, MicrobatchStats
from ayni.tensors import TensorSpec
from coordinator_service.membership import Epoch
from coordinator_service.plan import Layout
from coordinator_service.rounds import Exchange, Flow, LiveRound
from coordinator_service.signals import Signal
from coordinator_service.steps import Lease, Moment, Step
from coordinator_service.values import Assignment


class LiveStep:
    """Drives one `Step`. Call from the event loop only."""

    def __init__(
        self,
        layout: Layout,
        attempt: int,
        epoch: Epoch,
        leases: Sequence[Lease],
        chunk_elements: int,
        on_change: Signal,
    ) -> None:
        """Opens the step; `on_change` is notified when bytes were reduced."""
        self.layout = layout
        self.moment = Moment(epoch=epoch.number, step=layout.step, attempt=attempt)
        self.core = Step(
            moment=self.moment,
            kind=layout.kind,
            num_microbatches=layout.num_microbatches,
            leases=leases,
            chunk_elements=chunk_elements,
        )
        self.all_committed = asyncio.Event()
        self.ended: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        self.ended.add_done_callback(_retrieve)
        self._epoch = epoch
        self._rounds: dict[Bucket, LiveRound] = {}
        self._on_change = on_change
        if self.core.done:
            self.all_committed.set()

    def assignment(self, lease: Lease, update: str) -> Assignment:
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
            rank=self._epoch.workers.index(lease.worker_id),
            world_size=len(self._epoch.workers),
            update=update,
        )

    def samples_of(self, lease: Lease) -> int:
        """Returns how many samples a lease covers."""
        whole = (self.layout.position, self.layout.num_samples, self.core.num_microbatches)
        start, _ = microbatch_positions(*whole, lease.start)
        stop, _ = microbatch_positions(*whole, lease.stop)
        return stop - start

    def needs(self, worker_id: int) -> bool:
        """Returns whether the step can't be committed without this worker."""
        return any(lease.worker_id == worker_id for lease in self.core.uncommitted)

    def begin(
        self, lease: Lease, flow: Flow, bucket: Bucket, spec: TensorSpec, stats: Sequence[MicrobatchStats], window: int
    ) -> Exchange:
        """Opens a worker's contribution to a bucket; see `Step.begin`."""
        reduced = self.core.begin(lease, bucket, spec, stats)
        live = self._rounds.setdefault(bucket, LiveRound(self.core.rounds[bucket], self.core, self._on_change))
        exchange = Exchange(live, lease.worker_id, flow, window)
        live.publish(reduced)
        return exchange

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


def _retrieve(future: "asyncio.Future[Commit]") -> None:
    """Marks an exception as seen: workers may have no call open that waits for it."""
    if not future.cancelled():
        future.exception()
