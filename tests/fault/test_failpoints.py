"""A process dies at every place where that leaves something half done, and is started again: nothing is lost.

Each case kills a worker or the coordinator at one named place of a run of two workers. The run must end with the
parameters of a run that nothing happened to, and with a ledger in which every sample was used once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ayni.failpoints import NAMES
from coordinator_service import ledger as ledger_check
from scripts.chaos_result import count_samples
from tests.support.chaos_agents import Crew, crew, ledger

STEPS, BATCH = 14, 12
DEVICE_MS = 20.0
LONGEST_RUN_S = 90.0

RUN: dict[str, Any] = {
    "run_id": "failpoints",
    "seed": 5,
    "num_steps": STEPS,
    "timeouts": {"heartbeat_interval": "300ms", "lease": "2s", "accept": "5s"},
    "min_workers": 1,
    "task": {"name": "scripts.chaos_task:ChaosTask", "options": {"num_samples": 100, "device_ms": DEVICE_MS}},
    "batch": {"samples": BATCH, "microbatches": 6},
    "optimizer": {"name": "adamw", "learning_rate": 3.0e-3, "update": "host"},
}
SLOW = {"task": {"name": "scripts.chaos_task:ChaosTask", "options": {"num_samples": 100, "device_ms": 5 * DEVICE_MS}}}
"""Leaves a worker that dies the time to come back before the run is over, twice if need be."""
STORED = {"state": {"publish_every": 4, "store_every": 4}}
DIES_IN_STEP = "worker.lease.taken=kill@4"
"""Makes a worker one that has to be given the run's state when it comes back."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who is armed with what."""

    coordinator: str = ""
    bee: tuple[str, ...] = ()
    """What is armed in bee's first start, its second, and so on."""
    ant: tuple[str, ...] = ()
    run: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    deaths: tuple[str, ...] = ("coordinator",)


def on_coordinator(name: str, count: int = 1, **more: Any) -> Case:
    return Case(coordinator=f"{name}=kill@{count}", **more)


def on_bee(name: str, count: int = 1, **more: Any) -> Case:
    return Case(bee=(f"{name}=kill@{count}",), deaths=("bee",), **more)


CASES = {
    "coordinator.join.admitted": on_coordinator("coordinator.join.admitted", 2),
    "coordinator.epoch.stored": on_coordinator("coordinator.epoch.stored"),
    "coordinator.assignment.sent": on_coordinator("coordinator.assignment.sent", 4),
    "coordinator.contribution.complete": on_coordinator("coordinator.contribution.complete", 12),
    "coordinator.extra.leased": on_coordinator(
        "coordinator.extra.leased", bee=(DIES_IN_STEP,), deaths=("bee", "coordinator")
    ),
    "coordinator.commit.ready": on_coordinator("coordinator.commit.ready", 4),
    "coordinator.commit.stored": on_coordinator("coordinator.commit.stored", 4),
    "coordinator.commit.told": on_coordinator("coordinator.commit.told", 7),
    "coordinator.offer.sent": on_coordinator(
        "coordinator.offer.sent", bee=(DIES_IN_STEP,), run=SLOW, deaths=("bee", "coordinator")
    ),
    "coordinator.state.blocks_put": on_coordinator("coordinator.state.blocks_put", run=STORED),
    "coordinator.state.stored": on_coordinator("coordinator.state.stored", run=STORED),
    "worker.joined": on_bee("worker.joined"),
    "worker.lease.taken": on_bee("worker.lease.taken", 4),
    "worker.contribution.half": on_bee("worker.contribution.half", 8),
    "worker.contribution.sent": on_bee("worker.contribution.sent", 8),
    "worker.commit.asked": on_bee("worker.commit.asked", 4),
    "worker.commit.received": on_bee("worker.commit.received", 4),
    "worker.updated": on_bee("worker.updated", 4),
    "worker.state.published": on_bee("worker.state.published", run=STORED),
    "worker.onboarding.half": Case(bee=(DIES_IN_STEP, "worker.onboarding.half=kill"), run=SLOW, deaths=("bee", "bee")),
    "worker.onboarding.done": Case(bee=(DIES_IN_STEP, "worker.onboarding.done=kill"), run=SLOW, deaths=("bee", "bee")),
    "worker.checkpoint.written": Case(
        ant=("worker.checkpoint.written=kill@2",), flags=("--checkpoint-every", "3"), deaths=("ant",)
    ),
    "worker.checkpoint.moved": Case(
        ant=("worker.checkpoint.moved=kill",), flags=("--checkpoint-every", "3"), deaths=("ant",)
    ),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Final parameters of one worker alone, to whom nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    task = {"name": RUN["task"]["name"], "options": {**RUN["task"]["options"], "device_ms": 0.0}}
    with crew(folder, {**RUN, "task": task}) as alone:
        alone.start_coordinator()
        alone.start_agent("ant")
        alone.finish(LONGEST_RUN_S)
    return final_hash(folder)


def final_hash(folder: Path) -> str:
    commits, facts = ledger(folder, RUN["run_id"])
    samples = count_samples(commits, STEPS, BATCH)
    assert (samples.missing, samples.duplicated) == (0, 0)
    checked = ledger_check.check(commits, ledger_check.data_from(facts))
    assert not checked.problems
    assert (checked.steps, checked.samples_missing, checked.samples_duplicated) == (STEPS, 0, 0)
    return facts["final_parameters_sha256"]


def test_every_place_has_a_case():
    assert set(CASES) == set(NAMES)


@pytest.mark.parametrize("name", list(CASES))
def test_death_at_this_place_loses_nothing(name: str, tmp_path: Path, undisturbed: str):
    case = CASES[name]
    options = {"agent_failpoints": {"ant": case.ant, "bee": case.bee}, "agent_flags": case.flags}
    with crew(tmp_path, {**RUN, "start_workers": 2, **case.run}, **options) as both:
        both.start_coordinator(case.coordinator)
        both.start_agent("ant")
        # Ant is rank 0, the one that writes checkpoints.
        both.wait_for_log("coordinator", "worker ant joined")
        both.start_agent("bee")
        both.finish(LONGEST_RUN_S)
        assert was_hit(both, name), f"nobody came to {name}:\n{both.logs()}"
        # Two that die within a moment are found in either order.
        assert sorted(both.deaths) == sorted(case.deaths), both.logs()
    assert final_hash(tmp_path) == undisturbed


def was_hit(both: Crew, name: str) -> bool:
    return any(f"failpoint {name}: kill" in both.said(process) for process in ("coordinator", "ant", "bee"))
