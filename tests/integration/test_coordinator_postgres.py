"""A coordinator whose state is in a PostgreSQL server: its commits, its ledger, its end when the server is gone."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator_service.store import open_database
from tests.support import postgres
from tests.support.coordinator import ROOT, RUN, coordinator, environment, make_step, microbatches, raw_workers


@pytest.fixture
def url() -> Iterator[str]:
    with postgres.server().database("coordinator") as url:
        yield url


def command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "coordinator_service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), cwd=ROOT)


def test_a_run_is_kept_in_the_database_and_nowhere_else(url, tmp_path: Path):
    flags = ("--state", url, "--log-level", "debug")
    with coordinator(tmp_path, RUN, *flags) as process:

        async def scenario():
            async with raw_workers(process.address, "ant", "bee") as workers:
                await make_step(workers, microbatches(5, 1000))
                for worker in workers:
                    await worker.next_frame()
                refused = await asyncio.to_thread(command, "--config", str(tmp_path / "run.yaml"), *flags)
                await make_step(workers, microbatches(5, 1000))
                for worker in workers:
                    assert (await worker.next_frame()).shutdown.finished
                    await worker.leave()
                return refused

        refused = asyncio.run(scenario())
        assert process.process.wait(20) == 0
        log = process.read_log()
    assert refused.returncode == 1
    assert "another coordinator has postgresql://127.0.0.1" in refused.stderr
    for text in (log, refused.stderr):
        assert postgres.PASSWORD not in text
        assert url not in text
    assert not (tmp_path / "state").exists()
    checked = command("ledger", "--database", url, "--run-id", "raw", "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert json.loads(checked.stdout)["steps"] == 2


def test_a_step_outlasts_a_lost_connection(url, tmp_path: Path):
    with coordinator(tmp_path, RUN, "--database", url) as process:

        async def scenario():
            async with raw_workers(process.address, "ant", "bee") as workers:
                postgres.server().execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'ayni coordinator'"
                )
                await make_step(workers, microbatches(5, 1000))

        asyncio.run(scenario())
        log = process.read_log()
    assert "step 0 can't be written, and is tried again: " in log
    assert "connected again to postgresql://127.0.0.1" in log
    assert postgres.PASSWORD not in log
    with contextlib.closing(open_database(url, "raw")) as store:
        assert [record.step for record in store.commits()] == [0]


def test_help_names_the_database():
    result = command("--help")
    assert "--database" in result.stdout
    assert "--state postgresql://... means --database" in " ".join(result.stdout.split())
