"""Writes checkpoints while training goes on.  [shell]

The training thread only copies to host memory; a thread of its own waits for the disk. One checkpoint is written at a
time, and an error comes up on the training thread, where it would have come without the thread. Residuals have a thread
of their own, because every worker has some, and not every worker writes checkpoints.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from worker_agent.training.checkpoint import CheckpointFolder
from worker_agent.training.residual_files import UnwrittenResiduals
from worker_agent.training.task import Task
from worker_agent.training.update import Update

log = logging.getLogger(__name__)

_CHECKPOINT, _RESIDUALS = "checkpoint", "residuals"
_NOUNS = {_CHECKPOINT: "a checkpoint", _RESIDUALS: "a file of residuals"}


class CheckpointWriter:
    """The checkpoints of one run on one worker. All methods are called on the training thread."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder that holds "best" and "last"."""
        self._path, self._folder = folder, CheckpointFolder(folder)
        self._threads: dict[str, threading.Thread] = {}
        self._error: BaseException | None = None

    def start(self, name: str, task: Task, update: Update | None, completed_steps: int, timeout_s: float) -> Path:
        """Copies a replica's state, once the checkpoint before is written, and begins to write it; returns its folder.

        Raises:
            OSError: it could not be begun, or the one before could not be written.
        """
        self._wait_for(_CHECKPOINT, timeout_s)
        self.check()
        unwritten = self._folder.begin(name, task, update, completed_steps)
        self._begin(_CHECKPOINT, unwritten.write)
        return unwritten.target

    def start_residuals(self, residuals: UnwrittenResiduals, timeout_s: float) -> None:
        """Begins to write residuals, once those before are written. Where they can't be, that is logged."""
        self._wait_for(_RESIDUALS, timeout_s)
        self._begin(_RESIDUALS, lambda: residuals.write(self._path))

    def check(self) -> None:
        """Raises what the writing of a checkpoint has ended with, if it was an error.

        Raises:
            OSError: it could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, timeout_s: float) -> None:
        """Waits until what is being written is on the disk.

        Raises:
            OSError: it could not be written.
            TimeoutError: it was not in time.
        """
        for kind in tuple(self._threads):
            self._wait_for(kind, timeout_s)
        self.check()

    def close(self, timeout_s: float) -> None:
        """Waits as `wait` does, and logs what it would raise."""
        try:
            self.wait(timeout_s)
        except OSError as error:
            log.error("%s", error)

    def _wait_for(self, kind: str, timeout_s: float) -> None:
        thread = self._threads.get(kind)
        if thread is None:
            return
        thread.join(timeout_s)
        if thread.is_alive():
            raise TimeoutError(
                f"{_NOUNS[kind]} in {self._path} was not written on this worker within {timeout_s:.0f} s"
            )
        del self._threads[kind]

    def _begin(self, kind: str, write: Callable[[], Path | None]) -> None:
        thread = self._threads[kind] = threading.Thread(target=self._write, args=(write,), name=kind, daemon=True)
        thread.start()

    def _write(self, write: Callable[[], Path | None]) -> None:
        try:
            if path := write():
                log.info("wrote %s", path)
        except BaseException as error:
            self._error = error
