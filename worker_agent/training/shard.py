"""One lease in one attempt: what it gave, and where its time went.  [shell]"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from worker_agent.session import Commit, MicrobatchStats, Report, ShardAssignment, StepTimes, Vector
from worker_agent.training.events import LeaseMoments, StepEvent
from worker_agent.training.gradients import ShardSums
from worker_agent.training.task import LossSums

Span = tuple[int, int, int, int]
"""Step, first micro-batch, one past the last, and micro-batches of the step: equal spans have equal gradients."""


@dataclass(slots=True)
class Shard:
    """Fills up while the lease is worked on. Moments are those of `time.perf_counter`."""

    assignment: ShardAssignment
    began: float = field(default_factory=time.perf_counter)
    stats: list[MicrobatchStats] = field(default_factory=list)
    sums: ShardSums | None = None
    """What goes out; None when evaluating."""
    is_whole: bool = False
    """Whether all of its micro-batches are done."""
    report: Report | None = None
    """What the coordinator was told, which stays the same when it is told again."""
    futures: list[Future[Vector]] = field(default_factory=list)
    data_s: float = 0.0
    before: StepTimes = StepTimes()
    """What was spent on it in an attempt that was voided."""
    computed: float = 0.0
    """Moment when the last micro-batch was done."""
    means_arrived: float = 0.0
    """Moment when the last mean was complete."""

    @property
    def span(self) -> Span:
        """Names what the lease computes."""
        lease = self.assignment
        return lease.step, lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches

    @property
    def busy_s(self) -> float:
        """Seconds from the lease to its last micro-batch."""
        return self.computed - self.began

    def add_stats(self, microbatch: int, sums: LossSums) -> None:
        """Keeps a micro-batch's numbers; waits for its loss."""
        self.stats.append(
            MicrobatchStats(
                microbatch=microbatch,
                weight=sums.weight,
                loss_sum=float(sums.loss_sum.detach()) if sums.weight else 0.0,
                num_correct=sums.num_correct,
                num_predictions=sums.num_predictions,
            )
        )

    def add_non_finite(self, microbatch: int) -> None:
        """Keeps that a micro-batch is left out because its values are not finite."""
        self.stats.append(MicrobatchStats(microbatch=microbatch, weight=0, loss_sum=0.0, non_finite=True))

    def add_future(self, future: Future[Vector]) -> None:
        """Keeps a reduction that is under way, and later the moment of its mean."""
        future.add_done_callback(self._note_arrival)
        self.futures.append(future)

    def moments(self) -> LeaseMoments:
        """Returns when it was worked on."""
        return LeaseMoments(lease_id=self.assignment.lease_id, began=self.began, computed=self.computed)

    def computing_times(self) -> StepTimes:
        """Returns what the micro-batches took, in whichever attempt that was."""
        return StepTimes(data=self.before.data + self.data_s, compute=self.before.compute + self.busy_s - self.data_s)

    def times(self, committed: float, now: float, extras: Sequence["Shard"] = ()) -> StepTimes:
        """Returns all times of a step that was committed at one moment and done at another.

        Args:
            committed: moment when the commit was known.
            now: moment when the update was done.
            extras: further leases of the same attempt, which were worked on while this one's means were awaited.
        """
        arrived = min(max(self.means_arrived, self.computed), now)
        extra_s = sum(extra.busy_s for extra in extras)
        data = self.data_s + sum(extra.data_s for extra in extras)
        return StepTimes(
            data=data,
            compute=self.busy_s + extra_s - data,
            exchange=max(arrived - self.computed - extra_s, 0.0),
            commit_wait=max(committed - arrived, 0.0),
            update=now - max(committed, arrived),
        )

    def event(
        self,
        commit: Commit,
        times: StepTimes,
        extras: Sequence["Shard"] = (),
        derived: Mapping[str, float] | None = None,
    ) -> StepEvent:
        """Returns the event of this lease and of further ones of the same attempt."""
        lease = self.assignment
        leases = [lease, *(extra.assignment for extra in extras)]
        return StepEvent(
            kind=lease.kind,
            step=lease.step,
            attempt=lease.attempt,
            epoch=lease.epoch,
            rank=lease.rank,
            world_size=lease.world_size,
            num_microbatches=sum(len(each.microbatches) for each in leases),
            num_samples=sum(each.shard_end - each.shard_start for each in leases),
            total_samples=lease.num_samples,
            total_weight=commit.total_weight,
            loss=commit.global_loss,
            num_correct=commit.num_correct,
            num_predictions=commit.num_predictions,
            learning_rate=commit.learning_rate,
            gradient_norm=commit.gradient_norm,
            clip_factor=commit.clip_factor,
            times=times,
            wall_s=time.perf_counter() - self.began,
            elapsed_s=0.0,
            best=commit.best,
            derived=derived or {},
        )

    def _note_arrival(self, future: Future[Vector]) -> None:
        # Called on the session's thread, one mean at a time.
        self.means_arrived = max(self.means_arrived, time.perf_counter())
