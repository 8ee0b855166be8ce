"""Threads that carry out work in the order in which it came, and do not keep a process alive.  [shell]

Those of `concurrent.futures` are waited for when a program ends: one that ends because of an error would wait for
collectives that nobody answers any more.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

_Item = tuple[Callable[[], None], "Future[None]"]


class DaemonThreads:
    """A few threads with one queue."""

    def __init__(self, count: int, name: str) -> None:
        """Starts the threads when there is work for them."""
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._count, self._name = count, name
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], None]) -> "Future[None]":
        """Has work carried out; returns how it ends."""
        outcome: Future[None] = Future()
        self._queue.put((work, outcome))
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return outcome

    def finish(self) -> None:
        """Waits until all that was submitted is done, and ends the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, outcome = item
            try:
                work()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)
