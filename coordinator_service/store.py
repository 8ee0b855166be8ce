"""The run's state, written before anything is announced: what a store can do, and which one is opened.  [shell]

A store is exclusive: while one coordinator has a run open to write, another is refused. Whoever only reads (`to_read`)
may do so at any time, also while the run goes on.
"""

from pathlib import Path
from typing import Protocol

from ayni.settings import SettingsError
from coordinator_service.config import RunFile
from coordinator_service.store_records import CommitRecord, EpochRecord

_SCHEMES = ("postgresql://", "postgres://")


class TakenOver(OSError):
    """Another coordinator has had the run since this one lost its connection; this one must end."""


class RunStore(Protocol):
    """State of one run. All calls block, any thread may make them, and what they write is durable when they return.

    Every call raises OSError where the database can't do it: the disk is full, the connection is lost, another commit
    of the step is there. What was to be written is then there whole or not at all; the same call may be made again, and
    does nothing if it is there. A lost connection is opened again by the next call, unless another coordinator has had
    the run in the meantime: TakenOver.
    """

    path: str
    """Where the state is, for people; without secrets."""

    def commit(self, record: CommitRecord) -> None:
        """Keeps a commit."""

    def commits(self) -> list[CommitRecord]:
        """Returns the commits that count, in the order in which they were made: an evaluation after its training."""

    def superseded(self) -> list[CommitRecord]:
        """Returns the commits that were taken back by `rewind`, in the order in which they were made."""

    def last_commit(self) -> CommitRecord | None:
        """Returns the newest commit that counts; None before the first."""

    def committed_steps(self) -> int:
        """Returns one past the newest training step that counts; 0 before the first."""

    def begin_epoch(self, record: EpochRecord) -> None:
        """Keeps that a membership is in force; its number must be a new one."""

    def last_epoch(self) -> EpochRecord | None:
        """Returns the newest membership; None before the first."""

    def rewind(self, steps: int, reason: str) -> None:
        """Takes back all that came after the first `steps` training steps; it is kept, and counts no more.

        The evaluation after those steps still counts.
        """

    def facts(self) -> dict[str, str]:
        """Returns the named values."""

    def set_facts(self, facts: dict[str, str]) -> None:
        """Keeps named values, such as the configuration and the agreed fingerprints; all of them or none."""

    def close(self) -> None:
        """Closes the database and lets another coordinator open the run."""


def open_store(file: RunFile) -> RunStore:
    """Opens a run's state to write it, making it if it is not there.

    Raises:
        SettingsError: the database has an address that this version does not know.
        OSError: the state can't be made or written, another coordinator has it open, or another version wrote it.
    """
    if not file.database:
        return open_folder(file.state_dir / file.run_id, fresh=file.fresh)
    return open_database(file.database, file.run_id, fresh=file.fresh)


def open_folder(folder: Path, *, fresh: bool = False, to_read: bool = False) -> RunStore:
    """Opens the state that a run keeps in its own folder.

    Args:
        folder: the run's folder: state_dir/run_id.
        fresh: removes what an earlier run left, unless another coordinator has it open.
        to_read: only reads what is there.

    Raises:
        OSError: as `open_store`; with `to_read` also where there is no run.
    """
    from coordinator_service import sqlite_store

    return sqlite_store.open_folder(folder, fresh=fresh, to_read=to_read)


def open_database(url: str, run_id: str, *, fresh: bool = False, to_read: bool = False) -> RunStore:
    """Opens the state that a run keeps in a database server.

    Raises:
        SettingsError: the address is of no database that this version knows, or its client library is not installed.
        OSError: as `open_folder`.
    """
    if not url.startswith(_SCHEMES):
        raise SettingsError("database must begin with postgresql://, as in postgresql://USER@HOST/DATABASE")
    from coordinator_service import postgres_store

    return postgres_store.open_run(url, run_id, fresh=fresh, to_read=to_read)
