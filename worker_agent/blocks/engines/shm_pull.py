"""One pull through shared memory: copies on a thread, outcome and end on the loop.  [shell]

Blocks are copied a few at a time. Before and after each time the owner must be alive and must still lend the layout,
and the versions of the blocks must be even and the same: only then do they count as done.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np

from ayni.blocks.transfers import Failure
from ayni.errors import AyniError, BlockBusy, Cancelled, Deadline, Fault
from worker_agent.blocks.engine import Move, MoveResult, Ticket
from worker_agent.blocks.engines.shm_process import PeerProcess
from worker_agent.blocks.paths import Path, Selection, path_between
from worker_agent.blocks.pool_control import is_being_written
from worker_agent.blocks.pools import MappedPool

_log = logging.getLogger(__name__)

NUM_THREADS = 2
"""One thread can't use all of a machine's memory bandwidth."""
_STEP_BYTES = 4 << 20
"""What a thread copies between two looks at the owner."""
_SHARE_BYTES = 32 << 20
"""A thread of its own is not worth it for less."""


class Lent:
    """A peer's pool, and what is checked around each copy from it."""

    def __init__(self, pool: MappedPool, process: PeerProcess, incarnation: int, epoch: int) -> None:
        """Knows the pool under one incarnation and epoch of its owner."""
        self.pool = pool
        self._process = process
        self._lent_as = incarnation, epoch

    def check(self) -> None:
        """Refuses a pool whose owner is gone or lends it no more.

        Raises:
            PeerLost: the owner has ended.
            StaleEpoch: it lends the pool no more, or lent it again.
        """
        self._process.check()
        self.pool.control.check(*self._lent_as)


class Pull:
    """One pull under way; belongs to the loop, but for `_copy_steps`."""

    def __init__(self, move: Move, lent: Lent, executor: Executor) -> None:
        """Starts the copies on threads of the executor."""
        self._loop = asyncio.get_running_loop()
        self._move, self._lent = move, lent
        self._num_blocks = len(move.local_blocks)
        part = move.local_part
        self._block_bytes = move.local.geometry.part_bytes(part.layers, part.slice, part.axis_order)
        self._is_done = np.zeros(self._num_blocks, bool)
        self._failures: dict[int, Failure] = {}
        self._stop: AyniError | None = None
        self.ticket = Ticket(cancel=lambda: self.stop(Cancelled("the pull was given up")))
        self._timer = self._loop.call_at(move.deadline, self._expire)
        self._steps = self._cut()
        self._steps_lock = threading.Lock()
        num_threads = max(1, min(NUM_THREADS, self._num_blocks * self._block_bytes // _SHARE_BYTES))
        self._copying = [executor.submit(self._copy_steps) for _ in range(num_threads)]
        self._num_copying = num_threads
        for copying in self._copying:
            copying.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._one_ended))

    def stop(self, error: AyniError) -> None:
        """Starts no further copy; what is not done fails with the error."""
        self._stop = self._stop or error
        for copying in self._copying:
            copying.cancel()

    def _expire(self) -> None:
        """Tells the outcome now; the copy in hand may still land, and counts as failed."""
        self.stop(Deadline("the pull reached its deadline", waiting_for="pull through shared memory", timeout=0))
        self._tell()

    def _one_ended(self) -> None:
        self._num_copying -= 1
        if self._num_copying:
            return
        self._timer.cancel()
        self._tell()
        self.ticket.quiesced.set_result(None)

    def _tell(self) -> None:
        if self.ticket.outcome.done():
            return
        failures, left = dict(self._failures), Failure.of(self._stop or Fault("the pull ended early", detail=""))
        for index in np.flatnonzero(~self._is_done).tolist():
            failures.setdefault(index, left)
        num_done = self._num_blocks - len(failures)
        result = MoveResult(failures=tuple(sorted(failures.items())), moved_bytes=num_done * self._block_bytes)
        self.ticket.outcome.set_result(result)

    def _copy_steps(self) -> None:
        move = self._move
        try:
            source = Selection(memory=self._lent.pool.memory, blocks=move.remote_blocks, part=move.remote_part)
            destination = Selection(memory=move.local, blocks=move.local_blocks, part=move.local_part)
            path = path_between(source, destination)
            while self._stop is None and (places := self._next_step()):
                self._copy(path, places)
        except AyniError as error:
            self._stop = self._stop or error
        except Exception as error:
            _log.exception("pull through shared memory")
            self._stop = self._stop or Fault(f"the pull broke: {error!r}", detail=repr(error))

    def _next_step(self) -> slice | None:
        with self._steps_lock:
            return next(self._steps, None)

    def _copy(self, path: Path, places: slice) -> None:
        blocks, control = self._move.remote_blocks[places], self._lent.pool.control
        self._lent.check()
        before = control.versions(blocks)
        path.copy(blocks, self._move.local_blocks[places])
        after = control.versions(blocks)
        self._lent.check()
        is_busy = is_being_written(before) | (before != after)
        for i in np.flatnonzero(is_busy).tolist():
            self._failures[places.start + i] = self._busy(int(blocks[i]))
        self._is_done[places] = ~is_busy

    def _busy(self, block: int) -> Failure:
        layout = self._move.remote.handle
        message = f"block {block} of layout {layout} was being written by its owner; ask again when that has ended"
        return Failure.of(BlockBusy(message, layout=layout, block=block))

    def _cut(self) -> Iterator[slice]:
        step = max(1, _STEP_BYTES // self._block_bytes)
        return (slice(start, start + step) for start in range(0, self._num_blocks, step))
