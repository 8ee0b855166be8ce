"""One attempt at one lease: what it gave, and where its time went.  [shell]"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from worker_agent.session import Commit, MicrobatchStats, ShardAssignment, StepTimes, Vector
from worker_agent.training.events import StepEvent
from worker_agent.training.task import LossSums


@dataclass(slots=True)
class Shard:
    """Fills up while the lease is worked on. Moments are those of `time.perf_counter`."""

    assignment: ShardAssignment
    began: float = field(default_factory=time.perf_counter)
    stats: list[MicrobatchStats] = field(default_factory=list)
    futures: list[Future[Vector]] = field(default_factory=list)
    data_s: float = 0.0
    computed: float = 0.0
    """Moment when the last micro-batch was done."""
    means_arrived: float = 0.0
    """Moment when the last mean was complete."""

    @property
    def span(self) -> tuple[int, int, int, int]:
        """Names what the lease computes: equal spans have equal gradients."""
        lease = self.assignment
        return lease.step, lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches

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

    def add_future(self, future: Future[Vector]) -> None:
        """Keeps a reduction that is under way, and later the moment of its mean."""
        future.add_done_callback(self._note_arrival)
        self.futures.append(future)

    def times_so_far(self) -> StepTimes:
        """Returns what is known before the commit."""
        return StepTimes(data=self.data_s, compute=self.computed - self.began - self.data_s)

    def times(self, committed: float, now: float) -> StepTimes:
        """Returns all times of a step that was committed at one moment and done at another."""
        arrived = min(max(self.means_arrived, self.computed), now)
        return StepTimes(
            data=self.data_s,
            compute=self.computed - self.began - self.data_s,
            exchange=arrived - self.computed,
            commit_wait=max(committed - arrived, 0.0),
            update=now - max(committed, arrived),
        )

    def event(
        self, commit: Commit, times: StepTimes, elapsed_s: float, note: str, derived: Mapping[str, float]
    ) -> StepEvent:
        """Returns the lease's event."""
        lease = self.assignment
        return StepEvent(
            kind=lease.kind,
            step=lease.step,
            attempt=lease.attempt,
            epoch=lease.epoch,
            rank=lease.rank,
            world_size=lease.world_size,
            num_microbatches=len(lease.microbatches),
            num_samples=lease.shard_end - lease.shard_start,
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
            elapsed_s=elapsed_s,
            note=note,
            best=commit.best,
            derived=derived,
        )

    def _note_arrival(self, future: Future[Vector]) -> None:
        # Called on the session's thread, one mean at a time.
        self.means_arrived = max(self.means_arrived, time.perf_counter())
