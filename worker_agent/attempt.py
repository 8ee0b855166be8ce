"""The leases that a worker holds in one attempt of a step, and the work on them.  [shell]

The primary lease is the one that the attempt began with; extra ones come in its middle. Work is a task: a contribution,
or a commit. What ends the primary lease ends all; what ends an extra one ends that one only. Belongs to the event loop.
"""

import asyncio
from collections.abc import Iterator

from ayni.errors import LeaseRevoked, StepVoided
from worker_agent.news import voided
from worker_agent.session import Commit, Report, ShardAssignment

Work = asyncio.Task[object]


class Held:
    """One lease and the work on it."""

    def __init__(self, assignment: ShardAssignment) -> None:
        """Starts without work."""
        self.assignment = assignment
        self.contributions: set[Work] = set()
        self.commit: asyncio.Task[Commit] | None = None
        self.asked: Report | None = None
        """What the coordinator was told when the lease was done, as long as it has not answered."""
        self._work: set[Work] = set()
        self._stopped_by: Exception | None = None

    @property
    def name(self) -> str:
        """Names it in errors."""
        lease = self.assignment
        return f"micro-batches {lease.microbatch_start} to {lease.microbatch_stop - 1} of step {lease.step}"

    @property
    def is_void(self) -> bool:
        """Whether the coordinator has ended it."""
        return isinstance(self._stopped_by, StepVoided | LeaseRevoked)

    def check(self) -> None:
        """Confirms that work on it makes sense.

        Raises:
            StepVoided: the attempt is over.
            LeaseRevoked: this lease, an extra one, is over.
        """
        if self._stopped_by:
            raise self.why_stopped()

    def begin(self, task: Work) -> None:
        """Notes that a task works on it."""
        self._work.add(task)

    def end(self, task: Work) -> None:
        """Notes that a task works on it no more."""
        self._work.discard(task)

    def cancel(self, why: Exception) -> list[Work]:
        """Cancels and returns all work but the caller's own; it raises `why_stopped`. The first reason stays."""
        self._stopped_by = self._stopped_by or why
        tasks = [task for task in self._work if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    def why_stopped(self) -> Exception:
        """Returns a fresh error for a task that was stopped."""
        why = self._stopped_by
        if self.assignment.extra and isinstance(why, StepVoided):
            # The commit of the primary lease says what became of the attempt.
            return self.revoked(why.message)
        if isinstance(why, StepVoided | LeaseRevoked):
            return type(why)(why.message, **why.metadata)
        return why or voided(self.assignment, "the worker gave it up")

    def revoked(self, reason: str) -> LeaseRevoked:
        """Returns the error that ends an extra lease."""
        return LeaseRevoked(
            f"the extra lease on {self.name} is over: {reason}", lease=self.assignment.lease_id, detail=reason
        )


class Attempt:
    """All leases of one attempt."""

    def __init__(self, primary: ShardAssignment) -> None:
        """Begins with one lease."""
        self.primary = Held(primary)
        self._extras: dict[int, Held] = {}

    def add(self, extra: ShardAssignment) -> None:
        """Notes that an extra lease was handed out."""
        self._extras[extra.lease_id] = Held(extra)

    def held(self, assignment: ShardAssignment) -> Held | None:
        """Returns a lease of this attempt; None when it is not one that was handed out."""
        return next((held for held in self._all() if held.assignment == assignment), None)

    def revoke(self, lease_id: int, reason: str) -> None:
        """Ends a lease that the coordinator has taken back."""
        if lease_id == self.primary.assignment.lease_id:
            self.cancel(voided(self.primary.assignment, f"the others went on without this worker: {reason}"))
        elif held := self._extras.get(lease_id):
            held.cancel(held.revoked(reason))

    def cancel(self, why: Exception) -> list[Work]:
        """Cancels all work but the caller's own, and returns it."""
        return [task for held in self._all() for task in held.cancel(why)]

    async def stop(self, why: Exception) -> None:
        """Cancels all work and waits until it has ended."""
        await _ended(self.cancel(why))

    async def stop_extras(self, reason: str) -> None:
        """Ends all extra leases and waits until nothing works on them any more."""
        await _ended([task for held in self._extras.values() for task in held.cancel(held.revoked(reason))])

    def _all(self) -> Iterator[Held]:
        yield self.primary
        yield from self._extras.values()


async def _ended(tasks: list[Work]) -> None:
    if tasks:
        await asyncio.wait(tasks)
