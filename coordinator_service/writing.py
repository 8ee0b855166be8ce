"""Writes to the store off the event loop, and again while the disk or the database can't.  [shell]

What the run can't go on without is written by `Writing`: everybody waits for it, and is told so. What nobody waits for
is left with `Notes`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from coordinator_service.config import RunFile
from coordinator_service.epochs import Epochs
from coordinator_service.progress import Progress
from coordinator_service.signals import Signal
from coordinator_service.sql_store import AlreadyThere
from coordinator_service.store import RunStore, TakenOver
from coordinator_service.values import Waiting

_log = logging.getLogger(__name__)

T = TypeVar("T")

_AGAIN_S = 1.0
"""Pause before what could not be written is written again."""


async def until_done(call: Callable[[], T], on_failure: Callable[[OSError], None]) -> T:
    """Makes a blocking call of the store until it succeeds.

    Args:
        call: may be made any number of times.
        on_failure: is told of each failure, and raises to give up.

    Raises:
        TakenOver, AlreadyThere: another try would be of no use.
    """
    while True:
        try:
            return await asyncio.to_thread(call)
        except (TakenOver, AlreadyThere):
            raise
        except OSError as error:
            on_failure(error)
            await asyncio.sleep(_AGAIN_S)


class Writing:
    """Writes what the run can't go on without. Nothing is lost by waiting for it, as long as a step may take."""

    def __init__(self, file: RunFile, epochs: Epochs, progress: Progress, changed: Signal) -> None:
        """Says on `epochs` and `progress` what is waited for."""
        self._limit = file.timeouts.step.total_seconds()
        self._epochs = epochs
        self._progress = progress
        self._changed = changed

    async def write(self, what: str, call: Callable[..., None], *values: object) -> None:
        """Writes something.

        Raises:
            OSError: it could not be written in time, or before the run ended.
        """
        await self._make(what, "written", partial(call, *values))

    async def read(self, what: str, call: Callable[[], T]) -> T:
        """Reads something, with the same patience."""
        return await self._make(what, "read", call)

    async def _make(self, what: str, verb: str, call: Callable[[], T]) -> T:
        began, before = time.monotonic(), self._progress.waiting

        def on_failure(error: OSError) -> None:
            if self._progress.ended or time.monotonic() - began > self._limit:
                raise error
            self._tell(f"{what} can't be {verb}, and is tried again: {error}")

        try:
            made = await until_done(call, on_failure)
        except OSError as error:
            raise OSError(f"{what} can't be {verb}: {error}") from error
        if self._progress.waiting != before:
            self._progress.waiting = before
            _log.info("%s was %s after %.0f s", what, verb, time.monotonic() - began)
        return made

    def _tell(self, reason: str) -> None:
        """Says that everybody waits for the disk or the database."""
        told = Waiting(reason=reason)
        if self._progress.waiting != told:
            self._progress.waiting = told
            _log.error("%s", reason)
            self._epochs.broadcast(told)
            self._changed.notify()


class Notes:
    """Facts that are written as soon as the store can, without anybody waiting; the newest value of each counts."""

    def __init__(self, store: RunStore) -> None:
        """Starts with nothing to write."""
        self._store = store
        self._unwritten: dict[str, str] = {}
        self._turn = asyncio.Lock()
        self._added = Signal()
        self._problem = ""
        """What was logged last."""

    def add(self, facts: Mapping[str, str]) -> None:
        """Leaves facts to be written."""
        self._unwritten.update(facts)
        self._added.notify()

    async def write(self) -> None:
        """Writes what was left, in one try.

        Raises:
            OSError: the store can't; what was left still is.
        """
        async with self._turn:
            facts = dict(self._unwritten)
            if facts:
                await asyncio.to_thread(self._store.set_facts, facts)
            self._unwritten = {k: value for k, value in self._unwritten.items() if facts.get(k) != value}

    async def keep(self) -> None:
        """Writes whatever is left, until another coordinator has the run."""
        try:
            while True:
                await self._until_written()
                await self._added.wait()
        except TakenOver as error:
            _log.error("%s", error)

    async def settle(self, within_s: float) -> None:
        """Writes what is left in the end; says so where that can't be done in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._until_written()
        except (TakenOver, TimeoutError) as error:
            names = ", ".join(sorted(self._unwritten))
            _log.error("not kept in %s: %s: %s", self._store.path, names, error or f"not within {within_s:g} s")

    async def _until_written(self) -> None:
        while self._unwritten:
            try:
                await self.write()
            except TakenOver:
                raise
            except OSError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    _log.warning("%s: kept later: %s", ", ".join(sorted(self._unwritten)), error)
                await asyncio.sleep(_AGAIN_S)
            else:
                self._problem = ""
