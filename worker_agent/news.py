"""What the coordinator last said to this worker, and waiting for more.  [shell]

Only the newest assignment counts: a lease that was not taken before the next one came is void. The first ending
(shutdown or error) stays. Belongs to the event loop.
"""

import asyncio

from ayni.errors import StepVoided
from worker_agent.messages import Shutdown
from worker_agent.session import ShardAssignment


class News:
    """The newest assignment, the last reason to wait, and how membership ended."""

    def __init__(self) -> None:
        """Starts with nothing said."""
        self.waiting_for = "the first assignment"
        """Why there is nothing to do, in the coordinator's words."""
        self.ending: Shutdown | Exception | None = None
        self._assignment: ShardAssignment | None = None
        self._taken = True
        self._changed = asyncio.Event()

    def assign(self, assignment: ShardAssignment) -> None:
        """Notes a new lease."""
        self._assignment, self._taken = assignment, False
        self._announce()

    def end(self, ending: Shutdown | Exception) -> None:
        """Notes how membership ended, if it has not ended before."""
        self.ending = self.ending or ending
        self._announce()

    @property
    def has_more(self) -> bool:
        """Whether `next_assignment` would return or raise at once."""
        return self.ending is not None or not self._taken

    async def next_assignment(self) -> ShardAssignment | None:
        """Waits for a lease that was not taken before; None after a shutdown.

        Raises:
            Exception: membership ended in another way.
        """
        while True:
            self._raise_if_failed()
            if self.ending:
                return None
            if self._assignment and not self._taken:
                self._taken = True
                return self._assignment
            await self._changed.wait()

    async def truth_about(self, assignment: ShardAssignment) -> Exception:
        """Waits until the coordinator has said something that explains why this lease's work ended."""
        while True:
            if isinstance(self.ending, Exception):
                return self.ending
            if self.ending:
                return voided(assignment, f"the run is over: {self.ending.reason}")
            if self._assignment != assignment:
                return voided(assignment, "the coordinator has leased this step again")
            await self._changed.wait()

    def _raise_if_failed(self) -> None:
        if isinstance(self.ending, Exception):
            raise self.ending

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def voided(assignment: ShardAssignment, detail: str) -> StepVoided:
    """Returns the error that ends an attempt."""
    return StepVoided(
        f"step {assignment.step} attempt {assignment.attempt} was given up: {detail}",
        step=assignment.step,
        attempt=assignment.attempt,
        detail=detail,
    )
