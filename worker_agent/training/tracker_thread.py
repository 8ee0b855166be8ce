"""A thread on which one tracker is told numbers, so that no step waits for it.  [shell]

A tracker's package tries for minutes to reach a server that has gone, and all workers would wait for the one that does.
All that concerns a tracker happens on its thread, since what has begun is known to that thread only (MLflow).
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Steps whose numbers wait for a slow tracker; those of further steps are left out."""


class Tracker(Protocol):
    """What numbers are told to."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Takes the numbers of a step."""

    def close(self) -> None:
        """Says that there are no more."""


class TrackerThread:
    """Tells one tracker; one that fails is let go of with a warning."""

    def __init__(self, name: str, begin: Callable[[], Tracker]) -> None:
        """Has the tracker begin; `begun` says how that ends.

        Args:
            name: for sentences.
            begin: begins the tracker's run.
        """
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Mapping[str, float], int] | None] = queue.SimpleQueue()
        self._is_live = True
        self._num_left_out = 0
        self.begun: Future[None] = Future()
        """Done when the tracker has begun; raises what kept it from that."""
        self._thread = threading.Thread(target=self._run, args=(begin,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Has the numbers of a step told, in turn; returns at once."""
        if not self._is_live:
            return
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put((values, step))
            return
        if not self._num_left_out:
            log.warning(
                "tracker %s is %d steps behind; numbers from step %d on are left out", self._name, MOST_WAITING, step
            )
        self._num_left_out += 1

    def close(self, deadline: float) -> None:
        """Ends the tracker's run after the numbers that wait.

        Args:
            deadline: in `time.monotonic`; what is not told by then may be missing.
        """
        self._queue.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning(
                "tracker %s is still busy; the numbers of about %d steps are missing", self._name, self._behind()
            )

    def _behind(self) -> int:
        return self._queue.qsize() + self._num_left_out

    def _run(self, begin: Callable[[], Tracker]) -> None:
        try:
            tracker = begin()
        except BaseException as error:
            self._is_live = False
            self.begun.set_exception(error)
            return
        self.begun.set_result(None)
        self._tell(tracker)

    def _tell(self, tracker: Tracker) -> None:
        while (item := self._queue.get()) is not None:
            values, step = item
            try:
                tracker.log(values, step)
            except Exception as error:
                log.warning("tracker %s failed at step %d and gets no more numbers: %s", self._name, step, error)
                self._is_live = False
                return
        try:
            tracker.close()
        except Exception as error:
            log.warning("tracker %s could not be ended: %s", self._name, error)
