"""The run's state on disk: an embedded database, written before anything is announced.  [shell]

One SQLite file for each run, in WAL mode with full synchronisation: when `commit` returns, the commit has reached the
disk. All calls block; `commit`, which waits for
the disk, belongs off the event loop.
"""

import fcntl
import json
import os
import sqlite3
from dataclasses import asdict
from pathlib import Path

from coordinator_service.store_records import CommitRecord

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS commits (
    kind TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL, epoch INTEGER NOT NULL,
    position INTEGER NOT NULL, num_samples INTEGER NOT NULL, total_weight INTEGER NOT NULL, loss REAL,
    gradient_norm REAL NOT NULL, learning_rate REAL NOT NULL, num_correct INTEGER NOT NULL,
    num_predictions INTEGER NOT NULL, parameters_sha256 TEXT NOT NULL, shards TEXT NOT NULL, unix_time REAL NOT NULL,
    PRIMARY KEY (kind, step));
"""


class RunStore:
    """State of one run."""

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        """Opens the run's database, making it if it is not there.

        Args:
            folder: the run's own folder.
            fresh: removes an earlier run's database first, unless another coordinator has it open.

        Raises:
            OSError: the folder can't be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "run.sqlite3"
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        _lock_or_refuse(self._lock, folder)
        if fresh:
            for suffix in ("", "-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        try:
            self._connection = _open(self.path)
        except sqlite3.Error as error:
            os.close(self._lock)
            raise OSError(f"the run's state in {self.path} can't be opened: {error}") from None

    def committed_steps(self) -> int:
        """Returns how many training steps are committed."""
        row = self._connection.execute("SELECT COUNT(*) FROM commits WHERE kind = 'train'").fetchone()
        return int(row[0])

    def commits(self) -> list[CommitRecord]:
        """Returns all commits, in the order of their steps."""
        names = list(CommitRecord.__dataclass_fields__)
        rows = self._connection.execute(f"SELECT {', '.join(names)} FROM commits ORDER BY step, kind DESC")
        return [_record(dict(zip(names, row, strict=True))) for row in rows]

    def set_facts(self, facts: dict[str, str]) -> None:
        """Keeps named values, such as the configuration and the agreed fingerprints."""
        self._connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())

    def facts(self) -> dict[str, str]:
        """Returns the named values."""
        return dict(self._connection.execute("SELECT name, value FROM facts"))

    def commit(self, record: CommitRecord) -> None:
        """Keeps a commit; it is on disk when this returns.

        Raises:
            sqlite3.Error: the disk is full, or the step was committed before.
        """
        values = asdict(record) | {"shards": json.dumps(record.shards)}
        marks = ", ".join("?" for _ in values)
        self._connection.execute(
            f"INSERT INTO commits ({', '.join(values)}) VALUES ({marks})",
            list(values.values()),
        )

    def close(self) -> None:
        """Closes the database and lets another coordinator open it."""
        self._connection.close()
        os.close(self._lock)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(_SCHEMA)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _record(values: dict[str, object]) -> CommitRecord:
    shards = tuple(tuple(shard) for shard in json.loads(str(values["shards"])))
    return CommitRecord(**(values | {"shards": shards}))  # type: ignore[arg-type]


def _lock_or_refuse(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise OSError(
            f"another coordinator has {folder} open; stop it, or give this run another run_id or --state-dir"
        ) from None
