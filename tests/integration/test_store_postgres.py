"""What is particular to the state in a PostgreSQL server: its connection, its lock, its secrets."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from ayni.settings import SettingsError
from coordinator_service.store import TakenOver, open_database
from tests.support import postgres
from tests.support.commits import commit
from tests.support.coordinator import environment


@pytest.fixture
def url() -> Iterator[str]:
    with postgres.server().database("particular") as url:
        yield url


def refusal(url: str) -> str:
    with pytest.raises((OSError, SettingsError)) as caught:
        open_database(url, "toy")
    parts = (str(caught.value), repr(caught.value), repr(caught.value.__cause__))
    assert not any(secret in part for part in parts for secret in (postgres.PASSWORD, "hush"))
    return str(caught.value)


def break_connections() -> None:
    postgres.server().execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'ayni coordinator'"
    )


def test_a_lost_connection_refuses_the_commit_and_the_next_try_connects_again(url):
    with contextlib.closing(open_database(url, "toy")) as store:
        store.commit(commit(0))
        for step in (1, 2):
            break_connections()
            with pytest.raises(OSError, match="can't be written") as caught:
                store.commit(commit(step))
            assert f"127.0.0.1:{postgres.server().port}/particular, run toy" in str(caught.value)
            assert postgres.PASSWORD not in repr(caught.value)
            store.commit(commit(step))
        assert "another coordinator has" in refusal(url)
        assert store.commits() == [commit(0), commit(1), commit(2)]


def test_who_lost_the_run_to_another_coordinator_writes_no_more(url):
    with contextlib.closing(open_database(url, "toy")) as store:
        store.commit(commit(0))
        break_connections()
        with contextlib.closing(open_database(url, "toy")) as other:
            with pytest.raises(OSError, match="can't be written"):
                store.commit(commit(1))
            with pytest.raises(OSError, match=r"another coordinator has .* open"):
                store.commit(commit(1))
            other.commit(commit(1, attempt=7))
        for _ in range(2):
            with pytest.raises(TakenOver, match=r"another coordinator has gone on with .*, run toy: stop this one"):
                store.commit(commit(2))
    with contextlib.closing(open_database(url, "toy")) as store:
        assert store.commits() == [commit(0), commit(1, attempt=7)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_server_that_stops_refuses_the_commit_until_it_is_back(url, number):
    server = postgres.server()
    with contextlib.closing(open_database(url, "toy")) as store:
        store.commit(commit(0))
        server.stop(number)
        try:
            for _ in range(2):
                with pytest.raises(OSError, match="can't be written"):
                    store.commit(commit(1))
            assert "can't be opened: connection failed" in refusal(url)
        finally:
            server.start_again()
        store.commit(commit(1))
        assert store.commits() == [commit(0), commit(1)]


def test_a_reader_connects_again_too(url):
    with contextlib.closing(open_database(url, "toy")) as store:
        store.commit(commit(0))
    with contextlib.closing(open_database(url, "toy", to_read=True)) as reader:
        break_connections()
        with pytest.raises(OSError, match="can't be read"):
            reader.commits()
        assert reader.commits() == [commit(0)]
        with pytest.raises(OSError, match="read-only"):
            reader.commit(commit(1))


def test_a_coordinator_that_is_killed_lets_go(url):
    code = (
        "import sys; from coordinator_service.store import TakenOver, open_database; "
        "store = open_database(sys.argv[1], 'toy'); print('open', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, url],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout
    assert process.stdin
    try:
        assert process.stdout.readline() == "open\n"
        assert "another coordinator has" in refusal(url)
        process.kill()
        began = time.monotonic()
        open_database(url, "toy").close()
        assert time.monotonic() - began < 2.0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


def test_runs_share_a_database_and_may_come_to_a_new_one_together(url):
    def run(name: str) -> list[int]:
        with contextlib.closing(open_database(url, name)) as store:
            for step in range(len(name)):
                store.commit(commit(step))
            return [record.step for record in store.commits()]

    names = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(run, names)) == [list(range(len(name))) for name in names]


def test_commits_wait_for_the_disk_whatever_the_server_does_by_default(url):
    postgres.server().execute("ALTER DATABASE particular SET synchronous_commit = off")
    with contextlib.closing(open_database(url, "toy")) as store:
        assert store._database.rows("SHOW synchronous_commit", ()) == [("on",)]  # type: ignore[attr-defined]
    postgres.server().execute("ALTER DATABASE particular SET synchronous_commit = remote_apply")
    with contextlib.closing(open_database(url, "toy")) as store:
        assert store._database.rows("SHOW synchronous_commit", ()) == [("remote_apply",)]  # type: ignore[attr-defined]


def test_tables_of_another_version_are_refused(url):
    open_database(url, "toy").close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE ayni.layout SET version = 3")
    assert "layout 3, this one knows 2" in refusal(url)


def test_a_database_without_a_run_can_not_be_read_and_stays_empty(url):
    with pytest.raises(FileNotFoundError):
        open_database(url, "toy", to_read=True)
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT to_regnamespace('ayni')").fetchone() == (None,)


def test_refusals_say_where_and_never_the_password(url):
    server = postgres.server()
    assert 'database "none" does not exist' in refusal(server.url("none"))
    assert "password authentication failed" in refusal(server.url(password="hush-hush"))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        said = refusal(f"postgresql://ayni:hush@127.0.0.1:{port}/x")
    assert f"the run's state in postgresql://127.0.0.1:{port}/x, run toy can't be opened: connection failed" in said


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ayni:pa/hush@host/x",
        "postgresql://ayni:12/hush@host/x",
        "postgresql://ayni:pa@hush@host/x",
        "postgresql://ayni:x@host:12hush/x",
        "postgresql://ayni:x@host/x?hush=1",
        "postgresql://ayni:%zzhush@host/x",
    ],
)
def test_an_address_that_makes_no_sense_is_not_shown(url):
    assert "must look like postgresql://USER@HOST:PORT/DATABASE" in refusal(url)


def test_other_databases_are_refused():
    assert "must begin with postgresql://" in refusal("mysql://ayni:hush@host/x")
