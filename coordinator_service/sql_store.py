"""The run's state in SQL that every database understands, through an interface of three calls.  [shell]

Rows carry the run they belong to, so that one database can hold many. Nothing is ever changed but facts and the mark
`superseded`. Places for values are written `?`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from coordinator_service.store_records import CommitRecord, EpochRecord
from coordinator_service.store_rows import commit_from, epoch_from, text_of

LAYOUT = 2
"""Version of the tables; 1 had no table `layout`."""

TABLES = (
    "CREATE TABLE layout (version BIGINT NOT NULL)",
    f"INSERT INTO layout VALUES ({LAYOUT})",
    "CREATE TABLE facts (run_id TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (run_id, name))",
    "CREATE TABLE epochs (run_id TEXT NOT NULL, number BIGINT NOT NULL, record TEXT NOT NULL, "
    "PRIMARY KEY (run_id, number))",
    "CREATE TABLE commits (run_id TEXT NOT NULL, serial BIGINT NOT NULL, kind TEXT NOT NULL, step BIGINT NOT NULL, "
    "superseded TEXT, record TEXT NOT NULL, PRIMARY KEY (run_id, serial))",
    "CREATE UNIQUE INDEX commits_once ON commits (run_id, kind, step) WHERE superseded IS NULL",
)

Statement = tuple[str, Sequence[object]]


class AlreadyThere(OSError):
    """A row was not written because there is one with its key."""


class Database(Protocol):
    """A connection. Any thread may use it; one call at a time is carried out."""

    path: str
    """Where it is, for people; without secrets."""

    def rows(self, sql: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Returns what a query finds; raises OSError."""

    def write(self, *statements: Statement) -> None:
        """Carries out all statements or none; they are durable when it returns.

        Raises:
            AlreadyThere: there is a row with that key.
            OSError: the database can't do it now.
        """

    def close(self) -> None:
        """Closes the connection and whatever keeps others out."""


class SqlStore:
    """The `RunStore` of one run in a database whose tables are there."""

    def __init__(self, database: Database, run_id: str) -> None:
        """Uses a connection, which it closes in the end."""
        self._database = database
        self._run_id = run_id
        self.path = database.path

    def commit(self, record: CommitRecord) -> None:
        """Keeps a commit; does nothing if it is there already, for the answer to the first try may have been lost."""
        insert = (
            "INSERT INTO commits SELECT ?, COALESCE(MAX(serial), -1) + 1, ?, ?, NULL, ? FROM commits WHERE run_id = ?"
        )
        text = text_of(record)
        try:
            self._database.write((insert, (self._run_id, record.kind, record.step, text, self._run_id)))
        except AlreadyThere:
            query = "SELECT record FROM commits WHERE run_id = ? AND kind = ? AND step = ? AND superseded IS NULL"
            if self._database.rows(query, (self._run_id, record.kind, record.step)) != [(text,)]:
                raise

    def commits(self) -> list[CommitRecord]:
        """Returns the commits that count, in the order in which they were made."""
        return self._commits("superseded IS NULL")

    def superseded(self) -> list[CommitRecord]:
        """Returns the commits that were taken back, in the order in which they were made."""
        return self._commits("superseded IS NOT NULL")

    def last_commit(self) -> CommitRecord | None:
        """Returns the newest commit that counts; None before the first."""
        newest = self._commits("superseded IS NULL", "DESC LIMIT 1")
        return newest[0] if newest else None

    def committed_steps(self) -> int:
        """Returns one past the newest training step that counts; 0 before the first."""
        query = "SELECT COALESCE(MAX(step) + 1, 0) FROM commits WHERE run_id = ? AND kind = ? AND superseded IS NULL"
        return int(self._database.rows(query, (self._run_id, "train"))[0][0])

    def begin_epoch(self, record: EpochRecord) -> None:
        """Keeps that a membership is in force; does nothing if it is there already."""
        text = text_of(record)
        try:
            self._database.write(("INSERT INTO epochs VALUES (?, ?, ?)", (self._run_id, record.number, text)))
        except AlreadyThere:
            query = "SELECT record FROM epochs WHERE run_id = ? AND number = ?"
            if self._database.rows(query, (self._run_id, record.number)) != [(text,)]:
                raise

    def last_epoch(self) -> EpochRecord | None:
        """Returns the newest membership; None before the first."""
        query = "SELECT record FROM epochs WHERE run_id = ? ORDER BY number DESC LIMIT 1"
        rows = self._database.rows(query, (self._run_id,))
        return epoch_from(rows[0][0]) if rows else None

    def rewind(self, steps: int, reason: str) -> None:
        """Takes back all that came after the first `steps` training steps."""
        mark = (
            "UPDATE commits SET superseded = ? WHERE run_id = ? AND superseded IS NULL "
            "AND ((kind = ? AND step >= ?) OR (kind <> ? AND step > ?))"
        )
        self._database.write((mark, (reason, self._run_id, "train", steps, "train", steps)))

    def facts(self) -> dict[str, str]:
        """Returns the named values."""
        return dict(self._database.rows("SELECT name, value FROM facts WHERE run_id = ?", (self._run_id,)))

    def set_facts(self, facts: dict[str, str]) -> None:
        """Keeps named values."""
        keep = "INSERT INTO facts VALUES (?, ?, ?) ON CONFLICT (run_id, name) DO UPDATE SET value = excluded.value"
        self._database.write(*((keep, (self._run_id, name, value)) for name, value in facts.items()))

    def forget(self) -> None:
        """Removes all that is kept of the run."""
        self._database.write(
            *((f"DELETE FROM {table} WHERE run_id = ?", (self._run_id,)) for table in ("commits", "epochs", "facts"))
        )

    def close(self) -> None:
        """Closes the database and lets another coordinator open the run."""
        self._database.close()

    def _commits(self, which: str, rest: str = "") -> list[CommitRecord]:
        query = f"SELECT record FROM commits WHERE run_id = ? AND {which} ORDER BY serial {rest}"
        return [commit_from(row[0]) for row in self._database.rows(query, (self._run_id,))]
