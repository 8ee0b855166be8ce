"""Real workers under topology "auto": whoever reduces which step, the run ends with the same bytes."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import TOY
from tests.support.chaos_agents import crew, ledger

NUM_STEPS = 10
LONGEST_RUN_S = 90.0
RUN: dict[str, Any] = {
    "run_id": "auto",
    "num_steps": NUM_STEPS,
    "min_workers": 1,
    "gradients": "grpc",
    "task": {"name": TOY, "options": {"width": 100_000, "buckets": 2}},
    "batch": {"samples": 12, "microbatches": 6},
    "optimizer": {"name": "adamw", "learning_rate": 3.0e-3, "update": "host"},
    "timeouts": {"heartbeat_interval": "300ms", "lease": "3s", "shutdown": "10s"},
}


def made(folder: Path, names: tuple[str, ...], topology: str) -> tuple[list[tuple[str, float]], str, list[str]]:
    """Makes the run; returns hashes and norms, the final parameters, and what the coordinator says of topologies."""
    with crew(folder, {**RUN, "start_workers": len(names), "topology": topology}) as workers:
        workers.start_coordinator()
        for name in names:
            workers.start_agent(name)
        workers.finish(LONGEST_RUN_S)
        said = [line for line in workers.said("coordinator").splitlines() if "topology auto" in line]
    commits, facts = ledger(folder, RUN["run_id"])
    return [(one.gradient_hash, one.gradient_norm) for one in commits], facts["final_parameters_sha256"], said


@pytest.mark.timeout(180)
def test_a_run_in_which_others_reduce_from_some_step_on_has_the_bytes_of_one_in_which_nobody_does(tmp_path: Path):
    star = made(tmp_path / "star", ("ant",), "star")
    auto = made(tmp_path / "auto", ("ant", "bee"), "auto")
    assert auto[:2] == star[:2]
    assert star[2] == []
    assert "star, because the links are not measured yet" in auto[2][0]
    assert "topology auto: sharded, because 3.6 MB a step among 2 workers (2 own slices) take" in auto[2][1]
