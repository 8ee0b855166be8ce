"""A move from its start to the moment when no byte can land any more.  [shell]

An engine writes only the copying, as a coroutine that marks what is done. This adds the rest: the outcome is there by
the deadline, whatever the coroutine does; then the coroutine is told to end; when it has ended the move is quiesced.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from ayni.blocks.transfers import Failure
from ayni.errors import AyniError, Cancelled, Deadline, Fault, PeerLost
from worker_agent.blocks.engine import Move, MoveResult, Ticket
from worker_agent.blocks.stream_order import Flags

_log = logging.getLogger(__name__)


class Progress:
    """Which pairs of a move are done, and what is known of the others."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        """Starts with none done."""
        self.is_done: Flags = np.zeros(num_blocks, np.bool_)
        self.settle: Callable[[], Coroutine[None, None, None]] | None = None
        """Returns once no byte can land, where the end of the copying does not tell; None: it does."""
        self._block_bytes = block_bytes
        self._failures: dict[int, Failure] = {}

    def fail(self, first: int, failures: Mapping[int, Failure]) -> None:
        """Says why pairs are not done; their places are counted from pair `first`."""
        for index, failure in failures.items():
            self.is_done[first + index] = False
            self._failures.setdefault(first + index, failure)

    def result(self, why: AyniError) -> MoveResult:
        """Returns how it ended; `why` holds for every pair that is not done and of which nothing else is known."""
        rest = Failure.of(why)
        undone = np.flatnonzero(~self.is_done).tolist()
        return MoveResult(
            failures=tuple((index, self._failures.get(index, rest)) for index in undone),
            moved_bytes=(len(self.is_done) - len(undone)) * self._block_bytes,
        )


CarryOut = Callable[[Progress], Coroutine[None, None, None]]
"""Copies, and marks in the progress what is done. Cancelled, it ends once no byte of it can land."""


class MovesUnderWay:
    """The moves of one link."""

    def __init__(self, peer: str) -> None:
        """`peer` is named in errors."""
        self._peer = peer
        self._running: set[_Running] = set()

    def start(self, move: Move, carry_out: CarryOut) -> Ticket:
        """Starts a move."""
        part = move.local_part
        block_bytes = move.local.geometry.part_bytes(part.layers, part.slice, part.axis_order)
        running = _Running(move, Progress(len(move.local_blocks), block_bytes), self._peer)
        running.task = asyncio.get_running_loop().create_task(running.live(carry_out))
        self._running.add(running)
        running.task.add_done_callback(lambda _task: self._running.discard(running))
        return running.ticket

    async def end(self) -> None:
        """Ends all moves with PEER_LOST; returns once no byte can land, or nobody can be asked any more."""
        for running in self._running:
            running.end(PeerLost(f"{self._peer} was forgotten", peer=self._peer, detail="forgotten"))
        if tasks := [running.task for running in self._running if running.task]:
            await asyncio.wait(tasks)


class _Running:
    def __init__(self, move: Move, progress: Progress, peer: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[AyniError] = self._loop.create_future()
        self._forgotten: asyncio.Future[None] = self._loop.create_future()
        self._move, self._progress, self._peer = move, progress, peer
        self._began = self._loop.time()
        self.ticket = Ticket(lambda: self.stop(Cancelled(f"the caller gave up the transfer with {peer}")))
        self.task: asyncio.Task[None] | None = None

    def stop(self, why: AyniError) -> None:
        if not self._stopped.done():
            self._stopped.set_result(why)

    def end(self, why: AyniError) -> None:
        self.stop(why)
        if not self._forgotten.done():
            self._forgotten.set_result(None)

    async def live(self, carry_out: CarryOut) -> None:
        work = self._loop.create_task(carry_out(self._progress))
        try:
            left = max(0.0, self._move.deadline - self._loop.time())
            first: set[asyncio.Future[Any]] = {work, self._stopped}
            await asyncio.wait(first, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            self.ticket.outcome.set_result(self._progress.result(self._why(work)))
            await _ended(work)
            await self._settle()
        finally:
            await _ended(work)
            self.ticket.quiesced.set_result(None)

    async def _settle(self) -> None:
        """Waits until no byte can land, at most until the peer is forgotten."""
        if self._progress.settle is None:
            return
        settling = self._loop.create_task(self._progress.settle())
        either: set[asyncio.Future[Any]] = {settling, self._forgotten}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if error := await _ended(settling):
            _log.error("can't say whether bytes may still land at %s", self._peer, exc_info=error)

    def _why(self, work: "asyncio.Task[None]") -> AyniError:
        if not work.done():
            return self._stopped.result() if self._stopped.done() else self._late()
        error = None if work.cancelled() else work.exception()
        if isinstance(error, AyniError):
            return error
        if error:
            _log.error("a transfer with %s broke", self._peer, exc_info=error)
        return Fault(f"the transfer with {self._peer} ended unexpectedly: {error!r}", detail=repr(error))

    def _late(self) -> Deadline:
        seconds = self._loop.time() - self._began
        what = f"the transfer with {self._peer}"
        return Deadline(f"{what} did not end within {seconds:.3g} s", waiting_for=what, timeout=seconds)


async def _ended(task: "asyncio.Task[None]") -> BaseException | None:
    """Ends a task; returns its error."""
    task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() else task.exception()
