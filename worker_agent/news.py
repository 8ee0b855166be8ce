"""What the coordinator last said to this worker, and waiting for more.  [shell]

Only the newest assignment counts: a lease that was not taken before the next one came is void, and so are the extra
leases of its attempt. The first ending (shutdown or error) stays. Belongs to the event loop.
"""

from collections import deque

from ayni.errors import StepVoided
from worker_agent.assignment_frames import Shutdown
from worker_agent.changes import Change
from worker_agent.session import ShardAssignment


class News:
    """The newest assignment, the last reason to wait, and how membership ended."""

    def __init__(self) -> None:
        """Starts with nothing said."""
        self.waiting_for = "the first assignment"
        """Why there is nothing to do, in the coordinator's words."""
        self.is_idle = True
        """Whether no step is in progress, as far as the coordinator has said."""
        self.ending: Shutdown | Exception | None = None
        self.change = Change()
        """Announced whenever there is more."""
        self._assignment: ShardAssignment | None = None
        self._taken = True
        self._extras: deque[ShardAssignment] = deque()

    def assign(self, assignment: ShardAssignment) -> None:
        """Notes a new lease; an extra one only if it belongs to the attempt of the newest."""
        if not assignment.extra:
            self.waiting_for, self.is_idle = (
                f"step {assignment.step} attempt {assignment.attempt} is in progress",
                False,
            )
            self._assignment, self._taken = assignment, False
            self._extras.clear()
        elif self._assignment and is_same_attempt(assignment, self._assignment):
            self._extras.append(assignment)
        self.change.announce()

    def wait(self, reason: str) -> None:
        """Notes that there is nothing to do, and why."""
        self.waiting_for, self.is_idle = reason, True

    def revoke(self, lease_id: int) -> None:
        """Drops a lease that was not taken yet."""
        self._extras = deque(extra for extra in self._extras if extra.lease_id != lease_id)
        if self._assignment and self._assignment.lease_id == lease_id:
            self._taken = True
            self._extras.clear()

    def end(self, ending: Shutdown | Exception) -> None:
        """Notes how membership ended, if it has not ended before."""
        self.ending = self.ending or ending
        self.change.announce()

    @property
    def has_more(self) -> bool:
        """Whether `take` would return or raise something."""
        return self.ending is not None or not self._taken

    @property
    def has_lease(self) -> bool:
        """Whether there is a lease that was not taken, and membership has not ended."""
        return self.ending is None and not self._taken

    async def more(self) -> None:
        """Waits until `has_more`."""
        while not self.has_more:
            await self.change.wait()

    def take(self) -> ShardAssignment | None:
        """Returns the newest lease, if it was not taken before; None after a shutdown, or where there is no more.

        Raises:
            Exception: membership ended in another way.
        """
        if isinstance(self.ending, Exception):
            raise self.ending
        if self.ending or self._taken:
            return None
        self._taken = True
        return self._assignment

    def take_extra(self, primary: ShardAssignment) -> ShardAssignment | None:
        """Returns the next extra lease of the attempt that `primary` belongs to."""
        if not self._extras or not is_same_attempt(self._extras[0], primary):
            return None
        return self._extras.popleft()

    async def failure(self) -> Exception | None:
        """Waits until membership has ended; returns the error, or None after a shutdown."""
        while self.ending is None:
            await self.change.wait()
        return self.ending if isinstance(self.ending, Exception) else None

    async def truth_about(self, assignment: ShardAssignment) -> Exception:
        """Waits until the coordinator has said something that explains why this lease's work ended."""
        while True:
            if isinstance(self.ending, Exception):
                return self.ending
            if self.ending:
                return voided(assignment, f"the run is over: {self.ending.reason}")
            if self._assignment != assignment:
                return voided(assignment, "the coordinator has leased this step again")
            await self.change.wait()


def is_same_attempt(one: ShardAssignment, other: ShardAssignment) -> bool:
    """Says whether two leases are of the same attempt of the same step."""
    return (one.epoch, one.step, one.attempt, one.kind) == (other.epoch, other.step, other.attempt, other.kind)


def voided(assignment: ShardAssignment, detail: str) -> StepVoided:
    """Returns the error that ends an attempt."""
    return StepVoided(
        f"step {assignment.step} attempt {assignment.attempt} was given up: {detail}",
        step=assignment.step,
        attempt=assignment.attempt,
        detail=detail,
    )
