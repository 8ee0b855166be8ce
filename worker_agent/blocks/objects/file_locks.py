"""What processes that share a folder of objects lock, so that none trips over another.  [shell]

Files that nobody finished yet lie in a folder of their own per process, under a lock that dies with the process;
whoever comes next removes the folders of the dead. Locks are those of flock: they hold between threads too, and
between containers that share a disk.
"""

import fcntl
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.002


class Staging:
    """A folder for files that this process has not finished yet."""

    def __init__(self, root: Path, timeout_s: float) -> None:
        """Removes what dead processes left and makes a folder.

        Args:
            root: where such folders lie, one for each process.
            timeout_s: longest wait for another process that is doing the same.

        Raises:
            OSError: the folder can't be made or written, or the wait was too long.
        """
        root.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()
        with locked(root.with_name(f"{root.name}.lock"), timeout_s):
            _sweep(root)
            self._folder = root / secrets.token_hex(8)
            self._folder.mkdir()
            self._lock = _open_lock(self._folder / "lock")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def new_path(self) -> str:
        """Returns a path in the folder that was never given out before."""
        return os.path.join(self._folder, str(next(self._numbers)))

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Keeps every other holder of a lock file out.

    Raises:
        TimeoutError: another one held it for too long.
        OSError: the file can't be made.
    """
    lock = _open_lock(path)
    try:
        _wait_for(lock, path, timeout_s)
        yield
    finally:
        os.close(lock)


def _wait_for(lock: int, path: Path, timeout_s: float) -> None:
    """Takes a lock. It asks again and again, because flock waits for ever or not at all."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process holds {path} for more than {timeout_s:g} s") from None
            time.sleep(_POLL_S)


def _sweep(root: Path) -> None:
    for folder in root.iterdir():
        try:
            lock = _open_lock(folder / "lock")
        except (FileNotFoundError, NotADirectoryError):
            # Its owner is just closing it, or somebody's file strayed in here.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
