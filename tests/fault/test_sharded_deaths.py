"""Workers that reduce among themselves die, stop or are cut off in the middle of a step: nothing is lost.

Every run must end with the parameters, hashes and norms of a run to which nothing happened, reduced by the coordinator.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator_service import ledger as ledger_check
from scripts.chaos_result import count_samples
from tests.support.agents import TOY
from tests.support.chaos_agents import Crew, crew, ledger

STEPS, BATCH = 14, 12
LONGEST_RUN_S = 90.0
RUN: dict[str, Any] = {
    "run_id": "deaths",
    "seed": 5,
    "num_steps": STEPS,
    "timeouts": {"heartbeat_interval": "300ms", "lease": "2s", "accept": "5s"},
    "min_workers": 1,
    "task": {"name": TOY, "options": {"width": 20_000, "buckets": 2}},
    "batch": {"samples": BATCH, "microbatches": 6},
    "optimizer": {"name": "adamw", "learning_rate": 3.0e-3, "update": "host"},
}
SHARDED = {**RUN, "topology": "sharded"}
HALF, SENT = "worker.contribution.half", "worker.contribution.sent"

Trace = tuple[list[tuple[int, str, float]], str]


def trace(folder: Path) -> Trace:
    """Hashes, norms and the final parameters of a run that used every sample once."""
    commits, facts = ledger(folder, RUN["run_id"])
    samples = count_samples(commits, STEPS, BATCH)
    assert (samples.missing, samples.duplicated) == (0, 0)
    checked = ledger_check.check(commits, ledger_check.data_from(facts))
    assert not checked.problems
    assert (checked.steps, checked.samples_missing, checked.samples_duplicated) == (STEPS, 0, 0)
    return [(one.step, one.gradient_hash, one.gradient_norm) for one in commits], facts["final_parameters_sha256"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """One worker alone, whose gradients the coordinator reduces."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with crew(folder, RUN) as alone:
        alone.start_coordinator()
        alone.start_agent("ant")
        alone.finish(LONGEST_RUN_S)
    return trace(folder)


def start(workers: Crew, *names: str) -> None:
    workers.start_coordinator()
    for name in names:
        workers.start_agent(name)


DEATHS = {
    "before it has contributed": ("worker.lease.taken", 4),
    "in the middle of a contribution": (HALF, 9),
    "after its contribution had left": (SENT, 9),
    "while it waits for the commit": ("worker.commit.asked", 4),
    "after the commit": ("worker.commit.received", 4),
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("moment", DEATHS)
def test_an_owner_that_dies_loses_nothing(moment: str, tmp_path: Path, undisturbed: Trace):
    name, count = DEATHS[moment]
    armed = {"bee": (f"{name}=kill@{count}",)}
    with crew(tmp_path, {**SHARDED, "start_workers": 3}, agent_failpoints=armed) as workers:
        start(workers, "ant", "bee", "cat")
        workers.finish(LONGEST_RUN_S)
        assert workers.deaths == ["bee"], workers.logs()
        assert "3 of 3 workers reduce gradients among themselves" in workers.said("ant"), workers.logs()
    assert trace(tmp_path) == undisturbed


@pytest.mark.timeout(150)
def test_two_that_die_in_one_step_lose_nothing(tmp_path: Path, undisturbed: Trace):
    armed = {"bee": (f"{HALF}=kill@9",), "cat": (f"{SENT}=kill@9",)}
    with crew(tmp_path, {**SHARDED, "start_workers": 3}, agent_failpoints=armed) as workers:
        start(workers, "ant", "bee", "cat")
        workers.finish(LONGEST_RUN_S)
        assert sorted(workers.deaths) == ["bee", "cat"], workers.logs()
    assert trace(tmp_path) == undisturbed


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "place", ["coordinator.commit.ready", "coordinator.commit.told", "coordinator.assignment.sent"]
)
def test_a_coordinator_that_dies_loses_nothing(place: str, tmp_path: Path, undisturbed: Trace):
    with crew(tmp_path, {**SHARDED, "start_workers": 2}) as workers:
        workers.start_coordinator(f"{place}=kill@4")
        workers.start_agent("ant")
        workers.start_agent("bee")
        workers.finish(LONGEST_RUN_S)
        assert workers.deaths == ["coordinator"], workers.logs()
    assert trace(tmp_path) == undisturbed


def chaos_task(device_ms: float) -> dict[str, Any]:
    """A task with buckets of two segments, whose steps take as long as that."""
    options = {"num_samples": 100, "width": 96, "device_ms": device_ms}
    return {"task": {"name": "scripts.chaos_task:ChaosTask", "options": options}}


@pytest.mark.timeout(200)
def test_an_owner_that_freezes_is_left_behind_and_comes_back(tmp_path: Path):
    with crew(tmp_path / "alone", {**RUN, **chaos_task(0.0)}) as alone:
        start(alone, "ant")
        alone.finish(LONGEST_RUN_S)
    armed = {"bee": (f"{HALF}=stop@9",)}
    run = {**SHARDED, **chaos_task(60.0), "start_workers": 3}
    with crew(tmp_path / "three", run, agent_failpoints=armed) as workers:
        start(workers, "ant", "bee", "cat")
        workers.wait_for_log("bee", f"failpoint {HALF}: stop")
        workers.wait_for_log("coordinator", "worker bee left: its lease ended")
        workers.signal("bee", signal.SIGCONT)
        workers.wait_for_log("bee", "rejoined as worker")
        workers.finish(LONGEST_RUN_S)
    assert trace(tmp_path / "three") == trace(tmp_path / "alone")
