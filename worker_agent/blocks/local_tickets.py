"""Copies within one worker as tickets: on threads, off the event loop.  [shell]"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ayni.blocks.transfers import Failure
from ayni.errors import AyniError, Cancelled, Deadline, Fault
from worker_agent.blocks.engine import MoveResult, Ticket
from worker_agent.blocks.host_memory import HostMemory
from worker_agent.blocks.local_copy import copy
from worker_agent.blocks.paths import Selection

_log = logging.getLogger(__name__)

INLINE_BYTES = 256 << 10
"""Copies of up to so many bytes, some 50 us, are done on the event loop."""

_LAST_BATCH_S = 0.2
"""How much longer than the deadline a batch in hand may take before all of the copy counts as failed."""


class Copier:
    """The threads that copy blocks of one worker."""

    def __init__(self, num_threads: int) -> None:
        """Starts no thread yet.

        Args:
            num_threads: copies at the same time, and threads that one large copy is spread over.
        """
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="copies")

    def copy(self, source: Selection, destination: Selection, bounce: Selection | None, deadline: float) -> Ticket:
        """Starts a copy; whoever calls has validated the sides and holds their blocks.

        A small one between host layouts is done at once: it takes less time than handing it to a thread.
        """
        if _is_small(source, destination):
            return _copied(source, destination)
        running = _Running(len(destination.blocks), destination.part_bytes, deadline)
        work = partial(copy, source, destination, bounce, running.why_stopped, self._num_threads)
        running.watch(asyncio.get_running_loop().run_in_executor(self._pool, work))
        return running.ticket

    def occupy(self, work: Callable[[], object]) -> None:
        """Has a thread do something else first, for tests of transfers that take long."""
        self._pool.submit(work)

    def close(self) -> None:
        """Ends the threads; no copy is under way any more."""
        self._pool.shutdown(wait=True)


def _is_small(source: Selection, destination: Selection) -> bool:
    is_small = len(source.blocks) * source.part_bytes <= INLINE_BYTES
    return is_small and all(isinstance(side.memory, HostMemory) for side in (source, destination))


def _copied(source: Selection, destination: Selection) -> Ticket:
    """Copies now; returns a ticket that has ended."""
    failed = copy(source, destination, num_threads=1)
    ticket = Ticket(cancel=lambda: None)
    failures = tuple((index, Failure.of(error)) for index, error in failed)
    moved = (len(destination.blocks) - len(failures)) * destination.part_bytes
    ticket.outcome.set_result(MoveResult(failures=failures, moved_bytes=moved))
    ticket.quiesced.set_result(None)
    return ticket


class _Running:
    """One copy: its outcome is there by the deadline, its end is when its threads have ended."""

    def __init__(self, num_blocks: int, part_bytes: int, deadline: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._num_blocks, self._part_bytes = num_blocks, part_bytes
        self._seconds = deadline - self._loop.time()
        self._stopped: AyniError | None = None
        self._timers = [
            self._loop.call_at(deadline, self._expire),
            self._loop.call_at(deadline + _LAST_BATCH_S, self._give_up),
        ]
        self.ticket = Ticket(cancel=lambda: self._stop(Cancelled("the caller gave up the copy")))

    def why_stopped(self) -> AyniError | None:
        """Returns why no further batch is to be started. Called on the copying threads."""
        return self._stopped

    def watch(self, copying: "asyncio.Future[tuple[tuple[int, AyniError], ...]]") -> None:
        copying.add_done_callback(self._end)

    def _stop(self, error: AyniError) -> None:
        self._stopped = self._stopped or error

    def _expire(self) -> None:
        self._stop(Deadline(f"the copy did not end within {self._seconds:.3g} s", waiting_for="a copy", timeout=""))

    def _give_up(self) -> None:
        assert self._stopped
        self._tell([(index, self._stopped) for index in range(self._num_blocks)])

    def _end(self, copying: "asyncio.Future[tuple[tuple[int, AyniError], ...]]") -> None:
        for timer in self._timers:
            timer.cancel()
        try:
            self._tell(list(copying.result()))
        except AyniError as error:
            self._tell([(index, error) for index in range(self._num_blocks)])
        except Exception as error:
            _log.exception("a copy broke")
            fault = Fault(f"the copy broke: {error!r}", detail=repr(error))
            self._tell([(index, fault) for index in range(self._num_blocks)])
        self.ticket.quiesced.set_result(None)

    def _tell(self, failed: list[tuple[int, AyniError]]) -> None:
        if self.ticket.outcome.done():
            return
        failures = tuple((index, Failure.of(error)) for index, error in failed)
        moved = (self._num_blocks - len(failures)) * self._part_bytes
        self.ticket.outcome.set_result(MoveResult(failures=failures, moved_bytes=moved))
