"""Steps that two workers made are made again by one, the same to the byte; a ledger that lies is found out."""

import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import TOY, agent
from tests.support.coordinator import coordinator, environment

RUN: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": 8,
    "min_workers": 2,
    "task": {"name": TOY, "options": {"width": 32, "dropout": 0.25}},
    "batch": {"samples": 12, "microbatches": 6, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05, "update": "host"},
    "evaluation": {"every_steps": 3},
    "state": {"block_bytes": 4096, "publish_every": 3, "store_every": 3},
    "timeouts": {"shutdown": "5s"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two workers have made, with states behind steps 3 and 6."""
    folder = tmp_path_factory.mktemp("original")
    with coordinator(folder, RUN) as process:
        blocks = ("--blocks-root", str(folder / "blocks"))
        with (
            agent(process.address, "ant", folder, *blocks) as ant,
            agent(process.address, "bee", folder, *blocks) as bee,
        ):
            assert (ant.end(), bee.end()) == (0, 0), process.read_log()
        assert process.process.wait(30) == 0
    return folder


def replayed(run: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "coordinator_service", "replay", "--run", str(run / "state" / "toy"), *arguments]
    worker = ["--", "--backend", "cpu", "--cache-dir", str(run / "cache"), "--blocks-root", str(run / "blocks")]
    done = subprocess.run(
        [*command, *worker], capture_output=True, text=True, timeout=120, env=environment(), cwd=run, check=False
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.timeout(180)
def test_the_whole_run_is_the_same(run, tmp_path):
    code, result, log = replayed(run, "--steps", ":", "--work-dir", str(tmp_path))
    assert code == 0, log
    assert result == {
        "steps": "0:8",
        "made_from_step": 0,
        "equal": True,
        "steps_compared": 8,
        "first_difference": None,
        "unknown": {},
        "final_parameters_equal": True,
        "caveats": [],
    }
    assert {"coordinator.log", "worker.log", "state"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("source", "first"), [("stored", 3), ("start", 0)])
def test_a_span_is_the_same(run, source, first):
    code, result, log = replayed(run, "--steps", "4:6", "--from", source)
    assert code == 0, log
    assert (result["equal"], result["made_from_step"], result["steps_compared"]) == (True, first, 2)
    assert result["final_parameters_equal"] is None


@pytest.mark.timeout(180)
def test_a_ledger_that_lies_is_found_out(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    with contextlib.closing(sqlite3.connect(tmp_path / "copy" / "state" / "toy" / "run.sqlite3")) as database:
        lie = "UPDATE commits SET record = json_set(record, '$.gradient_hash', 'a lie') WHERE step = 5"
        database.execute(lie)
        database.commit()
    code, result, log = replayed(tmp_path / "copy", "--steps", "4:6")
    assert code == 1, log
    assert not result["equal"]
    assert result["first_difference"]["step"] == 5
    assert list(result["first_difference"]["values"]) == ["gradient_hash"]
    assert result["first_difference"]["values"]["gradient_hash"][0] == "a lie"


def test_steps_that_are_not_there_are_refused(run):
    code, _, log = replayed(run, "--steps", "4:9")
    assert (code, "the run has committed steps 0:8" in log) == (2, True)


@pytest.mark.timeout(180)
def test_a_worker_that_can_not_start_is_shown(run):
    code, result, log = replayed(run, "--steps", "4:6", "--from", "4")
    assert (code, result) == (1, {})
    assert "the replay ended before its steps were there" in log
    assert "worker.log:\n" in log
    assert "they go after --, as in -- --blocks-root DIR" in log
    assert "Traceback" not in log
