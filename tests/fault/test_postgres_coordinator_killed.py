"""A coordinator whose state is in a PostgreSQL server is killed; another goes on with the run, to the same bytes."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import postgres
from tests.support.agents import TOY, agent
from tests.support.coordinator import coordinator, environment

RUN: dict[str, Any] = {
    "run_id": "killed",
    "num_steps": 60,
    "min_workers": 2,
    "task": {"name": TOY, "options": {"width": 32, "dropout": 0.25}},
    "batch": {"samples": 12, "microbatches": 6, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05, "update": "host"},
    "timeouts": {"shutdown": "5s"},
}


@pytest.fixture
def url() -> Iterator[str]:
    with postgres.server().database("killed") as url:
        yield url


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "coordinator_service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment(), cwd=folder)


@pytest.mark.timeout(300)
def test_the_run_goes_on_where_another_host_finds_it(url, tmp_path):
    """The second coordinator has nothing of the first one's disk, only the database and the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ("--state", url, "--listen", address)
    with coordinator(tmp_path / "first", RUN, *flags) as first:
        with agent(address, "ant", tmp_path) as ant, agent(address, "bee", tmp_path) as bee:
            first.wait_for_log("step 20 committed", 60)
            first.process.kill()
            first.process.wait()
            with coordinator(tmp_path / "second", RUN, *flags) as second:
                assert (ant.end(), bee.end()) == (0, 0), second.read_log() + ant.read_log()
                assert second.process.wait(30) == 0
    where = ("--database", url, "--run-id", "killed")
    checked = command("ledger", *where, "--check", folder=tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert json.loads(checked.stdout)["steps"] == 60
    worker = ("--", "--backend", "cpu", "--cache-dir", str(tmp_path / "cache"))
    replayed = command("replay", *where, "--steps", ":", *worker, folder=tmp_path)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert json.loads(replayed.stdout)["final_parameters_equal"]
