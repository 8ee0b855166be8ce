"""Has the workers' published train state stored as objects: the leader's work inside the coordinator.  [shell]

`due_states` says which state is next and who holds it. Members keep what they published until they hear that it is
settled, so that no object can come from another step. A state that can't be stored is given up; the run goes on.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from ayni.errors import AyniError
from ayni.settings import SettingsError
from coordinator_service.due_states import Missed, Standing, Store, next_state
from coordinator_service.epochs import Seat
from coordinator_service.live import LiveStep
from coordinator_service.run import Run
from coordinator_service.state_group import STATE, Dial, Foreign, StateGroup

__all__ = ["STATE", "Dial", "StateKeeper"]

_log = logging.getLogger(__name__)

_LAST_S = 5.0
"""At the end, how long members that do not publish the last due state are waited for where others hold it."""
_BEATS = 3
"""Heartbeats that a member has had by the time that it is taken at its word."""
_FAILURES = (AyniError, OSError, SettingsError)
_TIDY_S = 10.0
"""Longest time for removing what a failure left: it is tried again before the next state is stored."""


class StateKeeper:
    """Stores what the members publish."""

    def __init__(self, run: Run, dial: Dial) -> None:
        """Watches a run; `dial` reaches its workers."""
        self._run = run
        self._config = run.file.state
        self._group = StateGroup(run.file.run_id, run.file.state.store, dial)
        self._stored = run.stored
        self._extra: set[int] = set()
        self._is_last = False
        self._asked: tuple[LiveStep | None] | None = None
        """The step that was open when an operator asked for a state; None: nobody waits for one."""
        run.progress.stored_steps = self._stored.newest(run.progress.committed_steps)
        # What a coordinator before this one did not settle may still be held.
        run.progress.settled_steps = max(run.progress.initial_step, run.progress.stored_steps)

    async def keep(self) -> None:
        """Stores every state that is due, for ever."""
        while True:
            due = self._next()
            if isinstance(due, Store):
                await self._store(due)
            elif isinstance(due, Missed):
                await self._miss(due)
            else:
                await self._run.changed.wait()

    async def settle(self, steps: int) -> None:
        """Waits until the last state that is due by a step is stored or given up. No step may follow."""
        if every := self._config.store_every:
            await self._until_settled(steps - steps % every, self._run.file.timeouts.store.total_seconds())

    async def final(self, steps: int, within_s: float) -> None:
        """Has the state behind the last step stored, whether it is due or not. No step may follow.

        For a run that is stopped early: its members have been asked to publish it with their leases of the last step.
        Does nothing where the run stores no states.
        """
        if self._config.store_every:
            self._extra.add(steps)
            self._run.changed.notify()
            await self._until_settled(steps, within_s)

    def ask(self) -> None:
        """Has the state behind the next step stored, whether it is due or not, at an operator's wish."""
        for seat in self._run.epochs.able:
            seat.publish_requested = True
        self._asked = (self._run.live,)

    def published_after(self, live: LiveStep) -> None:
        """Takes note of a step after which members publish their state because they were asked to."""
        if self._asked and self._asked[0] is not live:
            self._asked = None
            self._extra.add(live.core.step + 1)

    async def close(self) -> None:
        """Ends the connections to the workers."""
        await self._group.close()

    async def _until_settled(self, steps: int, within_s: float) -> None:
        progress = self._run.progress
        if progress.settled_steps >= steps:
            return
        _log.info("waiting for the state behind step %d to be stored", steps)
        ending = asyncio.get_running_loop().call_later(min(_LAST_S, within_s / 2), self._end)
        try:
            async with asyncio.timeout(within_s):
                while progress.settled_steps < steps and self._run.epochs.able:
                    await self._run.changed.wait()
        except TimeoutError:
            _log.error("the state behind step %d was not stored within %g s", steps, within_s)
        finally:
            ending.cancel()

    def _end(self) -> None:
        """Waits for nobody any more who does not hold what others hold."""
        self._is_last = True
        self._run.changed.notify()

    def _next(self) -> Store | Missed | None:
        progress = self._run.progress
        # What was settled of steps that were taken back is not settled any more.
        progress.settled_steps = min(progress.settled_steps, progress.committed_steps)
        if not (self._config.store_every or self._extra):
            return None
        members, extra = self._members(), self._extra
        due = next_state(self._config.store_every, progress.settled_steps, members, extra, is_last=self._is_last)
        return due if due and due.steps <= progress.committed_steps else None

    async def _miss(self, due: Missed) -> None:
        """Gives a state up that nobody holds, once all have had the time to say what they hold."""
        grace = _BEATS * self._run.file.timeouts.heartbeat_interval.total_seconds()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._next() == due:
                    await self._run.changed.wait()
        if self._next() == due:
            _log.error("the state behind step %d was not stored: no worker could publish it", due.steps)
            self._settle(due.steps)

    def _settle(self, steps: int) -> None:
        """Lets the workers replace what they published."""
        self._run.progress.settled_steps = steps
        self._extra.discard(steps)
        self._run.changed.notify()

    def _members(self) -> list[Standing]:
        return [
            Standing(
                worker_id=seat.member.worker_id,
                published_steps=seat.published_steps,
                completed_steps=seat.completed_steps,
            )
            for seat in self._run.epochs.able
        ]

    async def _store(self, due: Store) -> None:
        timeout = self._run.file.timeouts.store.total_seconds()
        began = time.monotonic()
        self._run.progress.storing_steps = due.steps
        try:
            async with asyncio.timeout(timeout):
                size = await self._put(due, timeout)
            self._run.progress.stored_steps = due.steps
            seconds = time.monotonic() - began
            _log.info("stored the state behind step %d: %.1f MB in %.1f s", due.steps, size / 1e6, seconds)
        except TimeoutError:
            _log.error("the state behind step %d was not stored within %g s", due.steps, timeout)
        except _FAILURES as error:
            if self._has_lost(due):
                _log.warning("storing the state behind step %d again, without who left: %s", due.steps, error)
                return
            _log.error("the state behind step %d was not stored: %s", due.steps, error)
        except Exception:
            _log.exception("the state behind step %d was not stored", due.steps)
        finally:
            self._run.progress.storing_steps = 0
        self._settle(due.steps)
        await self._tidy(due.steps)

    def _has_lost(self, due: Store) -> bool:
        """Says whether a member that took part has left since, and another one still holds the state."""
        present = {seat.member.worker_id for seat in self._run.epochs.able if seat.published_steps == due.steps}
        return 0 < len(present & set(due.worker_ids)) < len(due.worker_ids)

    async def _put(self, due: Store, timeout_s: float) -> int:
        """Stores a state; returns its bytes."""
        await self._group.lead(self._seats(due.worker_ids))
        num_blocks = await self._group.num_blocks()
        if due.steps in self._stored.whole:  # Its steps were taken back and made again.
            await self._stored.spoil(due.steps)
        await self._remove_leftovers(due.steps, num_blocks, timeout_s)
        await self._group.check_place(due.steps, timeout_s)
        await self._stored.begin(due.steps, num_blocks)
        try:
            size = await self._group.put(due.steps, num_blocks, timeout_s)
        except Foreign:
            await self._stored.removed(due.steps)
            raise
        if due.steps > self._run.progress.committed_steps:
            raise OSError("the run went back behind it")
        await self._stored.done(due.steps)
        await self._remove_old(timeout_s)
        return size

    async def _remove_leftovers(self, steps: int, num_blocks: int, timeout_s: float) -> None:
        """Removes what is of no use, so that there is room for a state; first what is in its place.

        Raises:
            OSError: what is in its place could not be removed.
        """
        for left in sorted(self._stored.leftovers, key=lambda one: one != steps):
            try:
                await self._group.remove(left, self._stored.leftovers[left] or num_blocks, timeout_s)
            except _FAILURES as error:
                if left == steps:
                    raise
                _log.warning("what is left of the state behind step %d was not removed: %s", left, error)
            else:
                await self._stored.removed(left)

    async def _tidy(self, steps: int) -> None:
        """Removes what is there of a state that was not stored, so that the place it takes is free at once."""
        num_blocks = self._stored.leftovers.get(steps)
        if not num_blocks:
            return
        try:
            async with asyncio.timeout(_TIDY_S):
                await self._group.remove(steps, num_blocks, _TIDY_S)
        except _FAILURES as error:
            _log.warning("what is left of the state behind step %d is removed later: %s", steps, error)

    async def _remove_old(self, timeout_s: float) -> None:
        """Removes older states than the run is to keep. One that can't be removed is tried again after the next."""
        if not self._config.keep:
            return
        for steps, num_blocks in self._stored.beyond(self._config.keep).items():
            await self._stored.spoil(steps)  # First: where it is removed in part, nobody is to load it.
            try:
                await self._group.remove(steps, num_blocks, timeout_s)
            except _FAILURES as error:
                _log.warning("the older state behind step %d was not removed: %s", steps, error)
                return
            await self._stored.removed(steps)
            _log.info("removed the older state behind step %d", steps)

    def _seats(self, worker_ids: Sequence[int]) -> list[Seat]:
        """Returns the seats of members that are all still there."""
        seats = self._run.epochs.seats
        if gone := [number for number in worker_ids if number not in seats]:
            raise OSError(f"worker {gone[0]} has left")
        return [seats[number] for number in worker_ids]
