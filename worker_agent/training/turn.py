"""One attempt of a step as a worker lives it: a lease, perhaps more of them, a commit or none.  [shell]"""

import logging
from collections.abc import Callable
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field

from ayni.errors import LeaseRevoked
from worker_agent.session import Commit, Session, ShardAssignment
from worker_agent.training.events import StepMoments
from worker_agent.training.shard import Shard

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Turn:
    """The leases of one attempt."""

    primary: Shard
    """The first lease; the means come for it."""
    extras: list[Shard] = field(default_factory=list)
    """Further leases, on what others did not do."""
    revoked: list[Shard] = field(default_factory=list)
    """Further leases that were taken back."""

    @property
    def lease(self) -> ShardAssignment:
        """The first lease."""
        return self.primary.assignment

    @property
    def shards(self) -> list[Shard]:
        """All leases."""
        return [self.primary, *self.extras, *self.revoked]

    def settle(self, session: Session, work_on: Callable[[Shard], None]) -> Commit:
        """Works on the first lease, and on what comes on top of it, until the step is committed.

        Args:
            session: where leases come from.
            work_on: does what a lease asks for, and leaves the report about it in `shard.report`.

        Raises:
            StepVoided: the attempt was given up.
            LeaseRevoked: the first lease was taken back.
            AyniError: the coordinator refused.
        """
        current = self.primary
        work_on(current)
        while True:
            try:
                assert current.report is not None, "work_on() leaves the report"
                answer = session.commit(current.assignment, current.report)
                if isinstance(answer, Commit):
                    return answer
                current = self._take_on(answer)
                work_on(current)
            except LeaseRevoked as error:
                if current is self.primary:
                    raise
                self._put_down(current, error)
                current = self.primary

    def wait(self, seconds: float) -> None:
        """Waits until the session has let go of all buffers.

        Raises:
            RuntimeError: it has not in time.
        """
        futures = [future for shard in self.shards for future in shard.futures]
        _, held = wait_for_futures(futures, seconds)
        if held:
            raise RuntimeError(
                f"{len(held)} reductions of attempt {self.lease.attempt} at step {self.lease.step} did not end within "
                f"{seconds:.0f} s after it was over"
            )

    def moments(self, committed: float, updating: float, updated: float) -> StepMoments:
        """Returns the moments of a step that this turn led to, and whose commit and update were then."""
        counted = (self.primary, *self.extras)
        return StepMoments(
            leases=tuple(shard.moments() for shard in counted),
            committed=committed,
            updating=updating,
            updated=updated,
            traceparent=self.lease.traceparent,
        )

    def _take_on(self, lease: ShardAssignment) -> Shard:
        first, last = lease.microbatch_start, lease.microbatch_stop - 1
        what = (
            f"{last - first + 1} more micro-batches, {first} to {last}"
            if last > first
            else f"micro-batch {first} as well"
        )
        log.info("step %d: taking on %s", lease.step, what)
        shard = Shard(lease)
        self.extras.append(shard)
        return shard

    def _put_down(self, shard: Shard, error: LeaseRevoked) -> None:
        log.info("step %d: an additional lease was taken back: %s", shard.assignment.step, error)
        self.extras.remove(shard)
        self.revoked.append(shard)
