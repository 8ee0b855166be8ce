"""A finished run goes on when it is given more steps: from its stored state, as if it had never ended."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import TOY, agent
from tests.support.chaos_agents import ledger
from tests.support.coordinator import coordinator, environment

RUN: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": 4,
    "min_workers": 1,
    "task": {"name": TOY, "options": {"width": 32, "dropout": 0.25}},
    "batch": {"samples": 12, "microbatches": 6, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05, "schedule": "constant", "update": "host"},
    "state": {"block_bytes": 4096, "publish_every": 2, "store_every": 2},
    "timeouts": {"shutdown": "5s"},
}


def command(folder: Path, *arguments: str) -> dict[str, Any]:
    name, *rest = arguments
    done = subprocess.run(
        [sys.executable, "-m", "coordinator_service", name, "--run", str(folder / "state" / "toy"), *rest],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(240)
def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path):
    blocks = ("--blocks-root", str(tmp_path / "blocks"))
    finals = []
    for name, num_steps in (("ant", 4), ("bee", 7)):
        with coordinator(tmp_path, {**RUN, "num_steps": num_steps}) as process:
            with agent(process.address, name, tmp_path, *blocks) as worker:
                assert worker.end() == 0, worker.read_log() + process.read_log()
            assert process.process.wait(30) == 0
        _, facts = ledger(tmp_path, "toy")
        assert (facts["finished_steps"], facts["final_parameters_steps"]) == (str(num_steps), str(num_steps))
        finals.append(facts["final_parameters_sha256"])
    assert finals[0] != finals[1]
    checked = command(tmp_path, "ledger", "--check")
    assert (checked["ok"], checked["steps"], checked["superseded"]) == (True, 7, 0)
    worker_flags = ("--", "--backend", "cpu", "--cache-dir", str(tmp_path / "cache"), *blocks)
    replayed = command(tmp_path, "replay", "--steps", ":", "--from", "start", *worker_flags)
    assert (replayed["equal"], replayed["final_parameters_equal"]) == (True, True)
