"""The run's state in a PostgreSQL server, for coordinators whose own disks are not durable.  [shell]

All runs of a database share the tables of its schema `ayni`; rows are keyed by the run's id. One connection is held
while the store is open, and with it an advisory lock of the session that keeps other coordinators of the run out. Lock
and connection end together: a coordinator that dies lets go. When the connection is lost the call fails, and the next
call connects again; it writes only if no other coordinator has had the run in the meantime, which its table of owners
says.

Secrets: the address may hold a password, so neither it nor what the client library says of it is ever shown. A pooler
between the two must work by session.
"""

import hashlib
import logging
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ayni.settings import SettingsError
from coordinator_service.sql_store import LAYOUT, TABLES, AlreadyThere, SqlStore, Statement
from coordinator_service.store import TakenOver

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
except ImportError:
    raise SettingsError("a database of postgresql:// needs the client library: pip install 'ayni[postgres]'") from None

_log = logging.getLogger(__name__)

_CONNECTION = {
    "connect_timeout": 3,
    "tcp_user_timeout": 5_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "application_name": "ayni coordinator",
}
"""Where the address says nothing else. Seconds, but tcp_user_timeout: milliseconds."""

_SESSION = {
    "statement_timeout": "60s",
    "lock_timeout": "2s",
    "search_path": "ayni",
    # The server's own look at whether this host lives: how soon the lock of a host that lost its power is free.
    "tcp_keepalives_idle": "10s",
    "tcp_keepalives_interval": "5s",
    "tcp_keepalives_count": "3",
}
_DURABLE = ("on", "remote_apply")
_MAKING_TABLES = 0x61796E69
_OWNERS = "CREATE TABLE owners (run_id TEXT NOT NULL PRIMARY KEY, owner TEXT NOT NULL)"

Connection = psycopg.Connection[tuple[Any, ...]]


def open_run(url: str, run_id: str, *, fresh: bool, to_read: bool) -> SqlStore:
    """Opens a run in a database; see `store.open_database`."""
    session = _Session(url, run_id, to_read)
    store = SqlStore(session, run_id)
    try:
        if to_read and not store.facts() and not store.last_commit():
            raise FileNotFoundError(f"{session.path} holds no such run")
        if fresh:
            store.forget()
    except BaseException:
        session.close()
        raise
    return store


class _Session:
    """Connections, one after the other, for one run."""

    def __init__(self, url: str, run_id: str, to_read: bool) -> None:
        self._address = _read_address(url)
        self._secrets = [str(self._address[name]) for name in ("password", "sslpassword") if self._address.get(name)]
        self._run_id = run_id
        self._to_read = to_read
        self._owner = uuid.uuid4().hex
        self._has_claimed = False
        self.path = f"{_place(self._address)}, run {run_id}"
        self._turn = threading.Lock()
        self._is_closed = False
        self._connection: Connection | None = None
        with self._using("opened"):
            pass

    def rows(self, sql: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Returns what a query finds."""
        with self._using("read") as connection:
            return connection.execute(_marked(sql), values).fetchall()

    def write(self, *statements: Statement) -> None:
        """Carries out all statements or none."""
        with self._using("written") as connection, connection.transaction():
            for sql, values in statements:
                connection.execute(_marked(sql), values)

    def close(self) -> None:
        """Closes the connection and lets another coordinator open the run. A second call does nothing."""
        with self._turn:
            self._is_closed = True
            if self._connection:
                self._connection.close()

    @contextmanager
    def _using(self, verb: str) -> Iterator[Connection]:
        """Holds the turn, connects if that is needed, and names the database in what goes wrong."""
        with self._turn:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = self._connected()
                yield self._connection
            except psycopg.errors.UniqueViolation as error:
                raise AlreadyThere(self._sentence(error, verb)) from None
            except psycopg.Error as error:
                raise OSError(self._sentence(error, verb)) from None

    def _connected(self) -> Connection:
        """Returns a new connection that has the run, or may read it."""
        if self._is_closed:
            raise OSError(f"the run's state in {self.path} is closed")
        connection = psycopg.connect(**{**_CONNECTION, **self._address}, autocommit=True)
        try:
            for name, value in _SESSION.items():
                connection.execute("SELECT set_config(%s, %s, false)", (name, value))
            if self._to_read:
                self._restrict(connection)
            else:
                self._take(connection)
            self._check_layout(connection)
        except BaseException:
            connection.close()
            raise
        if self._connection:
            _log.warning("connected again to %s", self.path)
        return connection

    def _restrict(self, connection: Connection) -> None:
        connection.execute("SET default_transaction_read_only = on")
        if not _has_tables(connection):
            raise FileNotFoundError(f"{self.path} holds no such run")

    def _take(self, connection: Connection) -> None:
        """Keeps other coordinators out, and sees that commits are durable and the tables there."""
        self._insist_on_durability(connection)
        key = int.from_bytes(hashlib.sha256(f"ayni run {self._run_id}".encode()).digest()[:8], "big", signed=True)
        try:
            connection.execute("SELECT pg_advisory_lock(%s)", (key,))
        except psycopg.errors.LockNotAvailable:
            raise OSError(
                f"another coordinator has {self.path} open; stop it, or give this run another run_id. The database "
                "lets go of a coordinator whose host has vanished after half a minute"
            ) from None
        _make_tables(connection)
        self._claim(connection)

    def _claim(self, connection: Connection) -> None:
        """Notes who has the run; refuses where another coordinator has had it since."""
        if self._has_claimed:
            rows = connection.execute("SELECT owner FROM owners WHERE run_id = %s", (self._run_id,)).fetchall()
            if rows != [(self._owner,)]:
                raise TakenOver(f"another coordinator has gone on with {self.path}: stop this one")
            return
        connection.execute(
            "INSERT INTO owners VALUES (%s, %s) ON CONFLICT (run_id) DO UPDATE SET owner = excluded.owner",
            (self._run_id, self._owner),
        )
        self._has_claimed = True

    def _insist_on_durability(self, connection: Connection) -> None:
        query = "SELECT current_setting('synchronous_commit'), current_setting('fsync')"
        ((commits, disk),) = connection.execute(query).fetchall()
        if commits not in _DURABLE:
            connection.execute("SET synchronous_commit = on")
        if disk != "on":
            _log.warning("%s has fsync switched off: a power cut there may lose steps", self.path)

    def _check_layout(self, connection: Connection) -> None:
        versions = connection.execute("SELECT version FROM layout").fetchall()
        if versions != [(LAYOUT,)]:
            raise OSError(
                f"{self.path} was written by another version of this program (its tables have layout {versions[0][0]}, "
                f"this one knows {LAYOUT}): give another database"
            )

    def _sentence(self, error: psycopg.Error, verb: str) -> str:
        text = " ".join(str(error).split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return f"the run's state in {self.path} can't be {verb}: {text}"


def _has_tables(connection: Connection) -> bool:
    # Not to_regclass, which may answer from what the session remembers of the time before it waited for a lock.
    query = "SELECT COUNT(*) FROM pg_tables WHERE schemaname = 'ayni' AND tablename = 'layout'"
    return connection.execute(query).fetchall() == [(1,)]


def _make_tables(connection: Connection) -> None:
    if _has_tables(connection):
        return
    with connection.transaction():
        # Coordinators of two runs may come to a new database at the same time.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING_TABLES,))
        if not _has_tables(connection):
            for sql in ("CREATE SCHEMA IF NOT EXISTS ayni", *TABLES, _OWNERS):
                connection.execute(_marked(sql))


def _read_address(url: str) -> dict[str, Any]:
    """Returns the parts of an address. Its errors say nothing of it: a misplaced sign makes a password a host."""
    try:
        given = {name: value for name, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.Error:
        given = {}
    ports = [port for port in str(given.get("port", "")).split(",") if port]
    misplaced = [name for name in ("host", "dbname") if "@" in str(given.get(name, ""))]
    if not given or misplaced or not all(port.isdecimal() for port in ports):
        raise SettingsError(
            "database can't be read: it must look like postgresql://USER@HOST:PORT/DATABASE, with signs such as / and "
            "@ in a user name or password written as %2F and %40"
        )
    return given


def _place(given: Mapping[str, Any]) -> str:
    host, port = (str(given.get(name, "")) for name in ("host", "port"))
    return f"postgresql://{host}{f':{port}' if port else ''}/{given.get('dbname', '')}"


def _marked(sql: str) -> Any:
    return sql.replace("?", "%s")
