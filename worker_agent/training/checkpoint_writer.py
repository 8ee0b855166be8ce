"""Writes checkpoints while training goes on.  [shell]

The training thread only copies to host memory; a thread of its own waits for the disk. One checkpoint is written at a
time, and an error comes up on the training thread, where it would have come without the thread.
"""

import logging
import threading
from pathlib import Path

from worker_agent.training.checkpoint import CheckpointFolder, UnwrittenCheckpoint
from worker_agent.training.task import Task
from worker_agent.training.update import Update

log = logging.getLogger(__name__)


class CheckpointWriter:
    """The checkpoints of one run on one worker. All methods are called on the training thread."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder that holds "best" and "last"."""
        self._path, self._folder = folder, CheckpointFolder(folder)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, name: str, task: Task, update: Update | None, completed_steps: int, timeout_s: float) -> Path:
        """Copies a replica's state, once the checkpoint before is written, and begins to write it; returns its folder.

        Raises:
            OSError: it could not be begun, or the one before could not be written.
        """
        self.wait(timeout_s)
        unwritten = self._folder.begin(name, task, update, completed_steps)
        self._thread = threading.Thread(target=self._write, args=(unwritten,), name="checkpoint", daemon=True)
        self._thread.start()
        return unwritten.target

    def check(self) -> None:
        """Raises what the writing of a checkpoint has ended with, if it was an error.

        Raises:
            OSError: it could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, timeout_s: float) -> None:
        """Waits until the checkpoint that is being written is on the disk.

        Raises:
            OSError: it could not be written.
            TimeoutError: it was not in time.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"a checkpoint in {self._path} was not written on this worker within {timeout_s:.0f} s"
                )
            self._thread = None
        self.check()

    def close(self, timeout_s: float) -> None:
        """Waits as `wait` does, and logs what it would raise."""
        try:
            self.wait(timeout_s)
        except OSError as error:
            log.error("%s", error)

    def _write(self, unwritten: UnwrittenCheckpoint) -> None:
        try:
            log.info("wrote %s", unwritten.write())
        except BaseException as error:
            self._error = error
