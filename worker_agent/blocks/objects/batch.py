"""The keys of one call under way: threads take one after another, the event loop hears of the end.  [shell]

A batch has its outcome by its deadline, whatever the store does: requests that are still out then go on in their
threads, but nothing of theirs counts any more and none of them touches a block. `quiesced` comes when no block is being
touched; the blocks are free again from then on.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from ayni.errors import AyniError, Cancelled, Deadline, Fault, StorageFailed
from worker_agent.blocks.objects.store import StoreFailed

Outcome = TypeVar("Outcome")

_LEAST_PATIENCE = 8
"""Keys in a row for which the store must fail before it is given up, however few are asked for at a time."""

_log = logging.getLogger(__name__)


class Batch(Generic[Outcome]):
    """One call's keys. Awaiting it gives their outcomes in input order; giving up the wait cancels it."""

    def __init__(self, what: str, num_keys: int, failed: Callable[[AyniError], Outcome], deadline: float) -> None:
        """Has not begun; made on the running loop.

        Args:
            what: names the call in errors, as it begins "... of 3 keys".
            num_keys: as many outcomes there will be.
            failed: returns the outcome of a key that an error happened to.
            deadline: moment on the event loop's clock.
        """
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[tuple[Outcome, ...]] = self._loop.create_future()
        self.quiesced: asyncio.Future[None] = self._loop.create_future()
        self._what = f"{what} of {num_keys} keys"
        self._failed = failed
        self._deadline = deadline
        self._outcomes: list[Outcome | None] = [None] * num_keys
        self._lock = threading.Lock()
        self._num_taken = self._num_touching = self._num_threads = self._num_lost = 0
        self._lost: AyniError | None = None
        self._has_ended = False

    def begin(self, work: Callable[[int], Outcome], threads: Executor, num_threads: int) -> "Batch[Outcome]":
        """Starts the work.

        Args:
            work: does one key, given its place; blocks; touches a block only inside `touching`.
            threads: where it is done.
            num_threads: keys that are done at the same time. As many keys in a row for which the store itself fails,
                and not a block, are taken to mean that it is gone, and the others are not tried.
        """
        self._timer = self._loop.call_at(self._deadline, self._end, self._too_late())
        self._num_threads = min(num_threads, len(self._outcomes))
        for _ in range(self._num_threads):
            threads.submit(self._run, work, max(num_threads, _LEAST_PATIENCE))
        if not self._num_threads:
            self._end(None)
        return self

    def cancel(self) -> None:
        """Ends the batch; keys not done fail with CANCELLED. Does nothing after the end."""
        self._end(Cancelled(f"the {self._what} was given up before this key was done"))

    def __await__(self) -> Generator[Any, None, tuple[Outcome, ...]]:
        """Waits for the end; returns one outcome for each key."""
        return self._wait().__await__()

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Surrounds whatever reads from or writes to a block; the batch is not quiesced inside.

        Raises:
            Cancelled: the batch has ended, so the block may be somebody else's.
        """
        with self._lock:
            if self._has_ended:
                raise Cancelled(f"the {self._what} has ended")
            self._num_touching += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_touching -= 1
                is_last = self._has_ended and not self._num_touching
            if is_last:
                self._tell(self._quiesce)

    async def _wait(self) -> tuple[Outcome, ...]:
        try:
            return await asyncio.shield(self.outcome)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _run(self, work: Callable[[int], Outcome], patience: int) -> None:
        while (place := self._take()) is not None:
            outcome = self._attempt(work, place, patience)
            with self._lock:
                self._outcomes[place] = outcome
        with self._lock:
            self._num_threads -= 1
            is_last = not self._num_threads and not self._has_ended
        if is_last:
            self._tell(self._end, None)

    def _take(self) -> int | None:
        with self._lock:
            if self._has_ended or self._num_taken == len(self._outcomes):
                return None
            self._num_taken += 1
            return self._num_taken - 1

    def _attempt(self, work: Callable[[int], Outcome], place: int, patience: int) -> Outcome:
        if self._lost:
            return self._failed(self._lost)
        try:
            outcome = work(place)
        except AyniError as error:
            self._note(error if isinstance(error, StoreFailed) else None, patience)
            return self._failed(error)
        except Exception as error:
            _log.exception("%s", self._what)
            return self._failed(Fault(f"the {self._what} failed: {error!r}", detail=repr(error)))
        self._note(None, patience)
        return outcome

    def _note(self, error: StoreFailed | None, patience: int) -> None:
        """Counts keys in a row for which the store failed; None is one for which it did not."""
        with self._lock:
            self._num_lost = self._num_lost + 1 if error else 0
            if error and self._num_lost >= patience:
                self._lost = self._lost or self._given_up(error)

    def _given_up(self, error: StoreFailed) -> StorageFailed:
        return StorageFailed(
            f"the {self._what} stopped before this key: the store stopped answering, it failed for {self._num_lost} "
            f"keys in a row, at last: {error}",
            **error.metadata,
        )

    def _end(self, error: AyniError | None) -> None:
        """Ends the batch; keys without an outcome fail with the error."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            outcomes = list(self._outcomes)
            is_quiet = not self._num_touching
        self._timer.cancel()
        self.outcome.set_result(tuple(outcome or self._failed(self._unfinished(error)) for outcome in outcomes))
        if is_quiet:
            self._quiesce()

    def _unfinished(self, error: AyniError | None) -> AyniError:
        return error or Fault(f"the {self._what} ended without this one", detail="no outcome")

    def _quiesce(self) -> None:
        if not self.quiesced.done():
            self.quiesced.set_result(None)

    def _tell(self, act: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            _log.debug("the %s ended after its event loop", self._what)

    def _too_late(self) -> Deadline:
        return Deadline(
            f"the {self._what} reached its deadline before this key was done",
            waiting_for="the object store",
            timeout=f"{max(0.0, self._deadline - self._loop.time()):.1f} s",
        )
