"""The run's state in an embedded database: one SQLite file in the run's folder.  [shell]

WAL mode with full synchronisation: what was written has reached the disk when the call returns. A file lock keeps
other coordinators out; it ends with the process, however that ends.
"""

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator_service.sql_store import LAYOUT, TABLES, AlreadyThere, SqlStore, Statement

_NAME = "run.sqlite3"
_KIND = 0xFF
"""Bits of an error's code that say its kind; the others say more."""
_ITS_RUN = ""
"""The file holds one run, however its folder is called today."""
_LOCK_TIMEOUT_S = 10.0
"""How long a write waits for somebody who looks into the file with tools of his own."""


def open_folder(folder: Path, *, fresh: bool, to_read: bool) -> SqlStore:
    """Opens the database of a run's folder; see `store.open_folder`."""
    path = folder / _NAME
    if to_read:
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no run: there is no {path.name}")
        return _Opened(path, lock=None).store()
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _lock_or_refuse(lock, folder)
        if fresh:
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
        return _Opened(path, lock).store()
    except BaseException:
        os.close(lock)
        raise


class _Opened:
    """The file, open."""

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = str(path)
        self._lock = lock
        self._turn = threading.Lock()
        with self._errors("opened"):
            self._connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={'rwc' if lock is not None else 'ro'}",
                uri=True,
                check_same_thread=False,
                isolation_level=None,
                timeout=_LOCK_TIMEOUT_S,
            )

    def store(self) -> SqlStore:
        """Returns the run's store, once the tables are there and of this version."""
        try:
            with self._errors("opened"):
                if self._lock is not None:
                    self._connection.execute("PRAGMA journal_mode=WAL")
                    self._connection.execute("PRAGMA synchronous=FULL")
            self._prepare()
        except BaseException:
            self._connection.close()
            raise
        return SqlStore(self, _ITS_RUN)

    def rows(self, sql: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Returns what a query finds."""
        with self._errors("read"):
            return self._connection.execute(sql, values).fetchall()

    def write(self, *statements: Statement) -> None:
        """Carries out all statements or none."""
        with self._errors("written"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for sql, values in statements:
                    self._connection.execute(sql, values)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Closes the file and lets another coordinator open it. A second call does nothing."""
        with self._turn:
            self._connection.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _prepare(self) -> None:
        names = {name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'", ())}
        if not names and self._lock is not None:
            self.write(*((sql, ()) for sql in TABLES))
            _sync_folders(Path(self.path).absolute().parent)
            return
        if not names:
            raise FileNotFoundError(f"{self.path} holds no run yet")
        versions = self.rows("SELECT version FROM layout", ()) if "layout" in names else [(1,)]
        if versions != [(LAYOUT,)]:
            raise OSError(
                f"{self.path} was written by another version of this program (its tables have layout {versions[0][0]}, "
                f"this one knows {LAYOUT}): give another run_id, or --fresh to throw it away"
            )

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        """Holds the turn, and names the file in what goes wrong."""
        with self._turn:
            try:
                yield
            except sqlite3.IntegrityError as error:
                raise AlreadyThere(f"the run's state in {self.path} can't be {verb}: {error}") from error
            except sqlite3.Error as error:
                raise OSError(f"the run's state in {self.path} can't be {verb}: {error}{_remedy(error)}") from error


def _remedy(error: sqlite3.Error) -> str:
    if getattr(error, "sqlite_errorcode", 0) & _KIND not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return ""
    return "; restore it from a backup, or start again with --fresh (and state.resume_step, where a state is stored)"


def _sync_folders(folder: Path) -> None:
    """Makes a new file's name survive a power cut: its folder, and the folder that holds it."""
    for path in (folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lock_or_refuse(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(
            f"another coordinator has {folder} open; stop it, or give this run another run_id or --state-dir"
        ) from None
