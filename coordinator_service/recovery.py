"""How a run goes on after its coordinator was away, or after everybody who had its newest state has gone.  [shell]

Workers that lost the coordinator come back by themselves and bring the run's state with them. Where nobody brings it
back in time, the newest state that is stored, or that a member still has, is where the run goes on; the ledger keeps
what that takes back.
"""

import asyncio
import logging
from collections.abc import Callable

from coordinator_service import plan
from coordinator_service.run import Run
from coordinator_service.store import RunStore
from coordinator_service.values import Waiting

_log = logging.getLogger(__name__)

_TRIES = 2
"""How often each worker must have found a stored state damaged before it is given up."""


class Recovery:
    """Waits for those who were there, and takes the run back to an earlier state when that is all there is."""

    def __init__(self, run: Run, store: RunStore) -> None:
        """Reads who was a member when the coordinator before this one ended."""
        self._run = run
        self._store = store
        self._epochs = run.epochs
        self._progress = run.progress
        epoch = store.last_epoch()
        self._former = epoch.worker_names if epoch and run.progress.has_begun else ()
        self._is_back = False
        self._since: float | None = None

    async def comeback(self) -> None:
        """Waits a moment for the members of before, once there are enough workers to go on.

        Without it, the first to come back would compute the next step alone.
        """
        if self._former and not self._is_back:
            self._is_back = True
            within = self._run.file.timeouts.comeback.total_seconds()
            await self._until(lambda: not self._run.absent(self._former), within)

    async def farewell(self) -> None:
        """Gives the members of before the time to come back and learn how the run has ended."""
        if self._former and not self._epochs.seats:
            within = self._run.file.timeouts.rejoin.total_seconds()
            _log.info("the last step was committed before: waiting for %s", ", ".join(self._former))
            await self._until(lambda: not self._run.absent(self._former), within)

    def patience(self) -> float | None:
        """Returns how long to wait for a worker with the newest state before `go_back`; None for as long as it takes.

        The time begins when there is somebody to go on with, and ends when somebody brings the state.
        """
        now = asyncio.get_running_loop().time()
        waiting = [seat for seat in self._epochs.seats.values() if seat.member.ready]
        if self._epochs.able or not waiting or not self._progress.has_begun:
            self._since = None
            return None
        source = self._source()
        if source is None:
            return None
        if source[1] == self._progress.committed_steps:
            # Once it has gone back, it waits for the members to load what they were offered.
            return None if self._run.stored_source == source else 0.0
        self._since = self._since or now
        return max(0.0, self._since + self._run.file.timeouts.rejoin.total_seconds() - now)

    def sentence(self, reason: str) -> str:
        """Returns why the run stands still and what would help."""
        behind = [seat.member.name for seat in self._epochs.seats.values() if seat.member.ready and seat.following]
        if not self._progress.has_begun and behind:
            who = ", ".join(behind)
            return f"{reason}; this run has made no step, and the parameters of {who} have: start them again"
        if not self._progress.has_begun:
            return reason
        committed = self._progress.committed_steps
        sentence = (
            f"paused after step {committed - 1}: {reason}; join with: python -m worker_agent --coordinator ADDRESS"
        )
        if self._epochs.able:
            return sentence
        source = self._source()
        problem = f"; {self._run.stored_problem}" if self._run.stored_problem else ""
        if source and source[1] == committed:
            return f"{sentence}; the state behind step {committed} is stored, and is loaded from there{problem}"
        lacking = f"{sentence}; nobody here has the state behind step {committed}{problem}"
        if source is None:
            return f"{lacking}, and none is stored"
        within = self._run.file.timeouts.rejoin.total_seconds()
        return (
            f"{lacking}; if nobody brings it within {within:g} s, the run goes back to the one behind step {source[1]}"
        )

    async def go_back(self) -> None:
        """Takes the run back to the newest state that there is."""
        source = self._source()
        if source is None:
            return
        run_id, steps = source
        committed = self._progress.committed_steps
        within = self._run.file.timeouts.rejoin.total_seconds()
        reason = f"nobody came back with the state behind step {committed} within {within:g} s"
        if steps == committed:
            _log.info("the run goes on from the stored state behind step %d", steps)
        else:
            _log.warning("%s: the run goes back to the state behind step %d", reason, steps)
        # First: of states that are taken back the ledger must never make any that count.
        await self._run.stored.spoil(*(one for one in self._run.stored.whole if one > steps))
        what = f"that the run goes back to step {steps}"
        await self._run.writing.write(what, self._store.rewind, steps, reason)
        commits = await self._run.writing.read("what is committed", self._store.commits)
        self._progress.committed_steps = steps
        self._progress.stored_steps = self._run.stored.newest(steps)
        self._progress.evaluated_steps, self._progress.best = plan.evaluated(self._run.file, commits)
        self._run.stored_source = (run_id, steps) if run_id else None
        self._run.stored_problem = ""
        self._run.forget(steps)
        self._since = None
        self._run.states.went_back(steps)
        self._epochs.changed.notify()
        self._run.changed.notify()

    async def pass_over(self) -> None:
        """Gives up a stored state that is damaged, once all who wait for it have found it so, if there is an older one.

        The run then goes back to that one, as it does where nobody brings the newest.
        """
        waiting = [seat for seat in self._epochs.seats.values() if seat.member.ready and seat.elastic]
        is_damaged = bool(waiting) and all(seat.damaged_offers >= _TRIES for seat in waiting)
        source = self._run.stored_source
        if source is None or source[1] not in self._run.stored.whole or not is_damaged:
            return
        if self._source(source[1]) is None:
            return
        _log.error("the state behind step %d is not used any more: %s", source[1], self._run.stored_problem)
        await self._run.stored.spoil(source[1])
        self._progress.stored_steps = self._run.stored.newest(source[1])
        self._run.stored_source = None
        for seat in waiting:
            seat.damaged_offers = 0

    def _source(self, before: int | None = None) -> tuple[str, int] | None:
        """Returns the run (empty: a member) and the steps of the newest state that is not lost.

        Args:
            before: only states behind fewer steps.
        """
        file = self._run.file
        limit = self._progress.committed_steps if before is None else before - 1
        held = [seat.completed_steps for seat in self._epochs.seats.values() if self._run.states.is_held(seat)]
        found = [("", steps) for steps in held if 0 < steps <= limit]
        if stored := self._run.stored.newest(limit):
            found.append((file.run_id, stored))
        if 0 < file.state.resume_step <= limit:
            found.append((file.state.resume_run_id or file.run_id, file.state.resume_step))
        return max(found, key=lambda source: source[1], default=None)

    async def _until(self, done: Callable[[], bool], within: float) -> None:
        try:
            async with asyncio.timeout(within):
                while not done() and not self._progress.ended:
                    await self._epochs.changed.wait()
        except TimeoutError:
            _log.info("went on without %s", ", ".join(self._run.absent(self._former)))

    def wait(self, reason: str) -> None:
        """Says why there is nothing to do, if that is news."""
        told = Waiting(reason=self.sentence(reason))
        if self._progress.wait(told):
            _log.info("%s", told.reason)
            self._epochs.broadcast(told)
            self._run.changed.notify()
