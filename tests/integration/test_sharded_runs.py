"""Whole runs whose workers reduce among themselves: bytes, hashes and norms as when the coordinator reduces."""

import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ayni import settings
from ayni.channels import open_channel
from ayni.run_config import RunConfig
from ayni.tensors import WIRE_DTYPES
from tests.support.agents import TOY
from tests.support.chaos_agents import TOKEN, Crew, crew, ledger
from tests.support.toy_task import toy_task
from worker_agent import bridge
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.coordinator import Coordinator
from worker_agent.training.loop import Trainer

NUM_STEPS = 6
LONGEST_RUN_S = 90.0
LIMIT = timedelta(seconds=60)
TASK = {"width": 20_000, "dropout": 0.25, "buckets": 2}
"""Two buckets of 60,003 and 120,000 elements: one segment, and two."""
RUN: dict[str, Any] = {
    "run_id": "sharded",
    "num_steps": NUM_STEPS,
    "min_workers": 1,
    "task": {"name": TOY, "options": TASK},
    "batch": {"samples": 12, "microbatches": 6, "evaluation_samples": 4},
    "optimizer": {"name": "adamw", "learning_rate": 3.0e-3, "update": "host"},
    "evaluation": {"every_steps": 3},
    "timeouts": {"heartbeat_interval": "300ms", "lease": "3s", "shutdown": "10s"},
}


@dataclass(frozen=True)
class Trace:
    """What a run leaves that must be the same, whoever reduces."""

    steps: list[tuple[int, str, float, float | None]]
    parameters: str


def trace(folder: Path) -> Trace:
    commits, facts = ledger(folder, RUN["run_id"])
    steps = [(one.step, one.gradient_hash, one.gradient_norm, one.loss) for one in commits]
    assert len(steps) == NUM_STEPS + NUM_STEPS // 3
    return Trace(steps, facts["final_parameters_sha256"])


def whole_run(folder: Path, num_workers: int, *flags: str, **changes: Any) -> Trace:
    run = {**RUN, "start_workers": num_workers, **changes}
    with crew(folder, run, agent_flags=flags) as workers:
        workers.start_coordinator()
        for name in ("ant", "bee", "cat")[:num_workers]:
            workers.start_agent(name)
        workers.finish(LONGEST_RUN_S)
        was_sharded(workers, num_workers if changes.get("topology") == "sharded" else 0)
    return trace(folder)


def was_sharded(workers: Crew, num_owners: int) -> None:
    """Confirms who reduced."""
    for name in ("ant", "bee", "cat"):
        said = f"{num_owners} of {num_owners} workers reduce gradients among themselves"
        if workers.said(name):
            assert (said in workers.said(name)) == bool(num_owners), workers.logs()


@pytest.fixture(scope="module")
def by_coordinator(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """One worker alone, in float32: the same bytes as any number of workers."""
    return whole_run(tmp_path_factory.mktemp("star"), 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_among_themselves_make_the_same_bytes(num_workers: int, tmp_path: Path, by_coordinator: Trace):
    assert whole_run(tmp_path, num_workers, topology="sharded") == by_coordinator


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("wire_type", "num_workers"), [("bfloat16", 3), ("int8", 2)])
def test_the_same_in_fewer_bits(wire_type: str, num_workers: int, tmp_path: Path):
    """Rounded contributions depend on who computes what, so everybody has one micro-batch in both runs."""
    flags = ("--max-microbatches", "1")
    batch = {**RUN["batch"], "microbatches": num_workers, "evaluation_samples": 12}
    changes = {"wire_type": wire_type, "batch": batch}
    traces = [
        whole_run(tmp_path / topology, num_workers, *flags, topology=topology, **changes)
        for topology in ("star", "sharded")
    ]
    assert traces[0] == traces[1]


SLOW: dict[str, Any] = {
    "name": "scripts.chaos_task:ChaosTask",
    "options": {"num_samples": 100, "width": 96, "device_ms": 60.0},
}
"""Blocks of two segments, and steps that leave a worker the time to join."""


@pytest.mark.timeout(120)
def test_a_worker_that_joins_late_takes_part(tmp_path: Path):
    traces = []
    for topology, names in (("star", ["ant"]), ("sharded", ["ant", "bee"])):
        task = SLOW if topology == "sharded" else {**SLOW, "options": {**SLOW["options"], "device_ms": 0.0}}
        run = {**RUN, "topology": topology, "task": task, "num_steps": 2 * NUM_STEPS, "evaluation": {}}
        with crew(tmp_path / topology, run) as workers:
            workers.start_coordinator()
            workers.start_agent(names.pop(0))
            workers.wait_for_log("ant", "step 1 of")
            for name in names:
                workers.start_agent(name)
            workers.finish(LONGEST_RUN_S)
            assert ("2 of 2 workers reduce gradients" in workers.said("ant")) == bool(names), workers.logs()
        commits, facts = ledger(tmp_path / topology, RUN["run_id"])
        traces.append(
            ([(one.step, one.gradient_hash, one.gradient_norm) for one in commits], facts["final_parameters_sha256"])
        )
    assert traces[0] == traces[1]


@pytest.mark.timeout(120)
def test_a_worker_that_nobody_can_dial_takes_part_and_owns_nothing(tmp_path: Path, by_coordinator: Trace):
    with crew(tmp_path, {**RUN, "start_workers": 2, "topology": "sharded"}) as workers:
        workers.start_coordinator()
        workers.start_agent("ant")
        trained = train(workers.address, peer_listen="")
        workers.finish(LONGEST_RUN_S)
        assert "1 of 2 workers reduce gradients among themselves" in workers.said("ant"), workers.logs()
    assert trace(tmp_path) == by_coordinator
    assert trained == by_coordinator.parameters


@pytest.mark.timeout(120)
def test_an_owner_whose_address_leads_nowhere_loses_its_slices(tmp_path: Path, by_coordinator: Trace):
    with crew(tmp_path, {**RUN, "start_workers": 2, "topology": "sharded"}) as workers:
        workers.start_coordinator()
        workers.start_agent("ant")
        trained = train(workers.address, peer_address="127.0.0.1:1")
        workers.finish(LONGEST_RUN_S)
        assert "loop, which reduces slices, can't be reached from here" in workers.said("ant"), workers.logs()
        assert "1 of 2 workers reduce gradients among themselves" in workers.said("ant"), workers.logs()
    assert (trace(tmp_path), trained) == (by_coordinator, by_coordinator.parameters)


@pytest.mark.timeout(120)
def test_a_loop_of_ones_own_may_listen_and_owns_slices(tmp_path: Path, by_coordinator: Trace):
    with crew(tmp_path, {**RUN, "start_workers": 2, "topology": "sharded"}) as workers:
        workers.start_coordinator()
        workers.start_agent("ant")
        trained = train(workers.address, peer_listen="127.0.0.1:0")
        workers.finish(LONGEST_RUN_S)
        was_sharded(workers, 2)
    assert (trace(tmp_path), trained) == (by_coordinator, by_coordinator.parameters)


def train(address: str, **changes: Any) -> str:
    """Trains to the end in this process, through WorkerClient; returns the hash of the parameters."""

    async def ask() -> str:
        async with open_channel(address, TOKEN) as channel:
            return (await Coordinator(channel, address).get_run("", LIMIT)).config_json

    config = settings.from_mapping(RunConfig, json.loads(bridge.shared().wait(ask(), 60.0, "GetRun")))
    task = toy_task(config.seed, **TASK)
    trainer = Trainer(task, config)
    joining = ClientConfig(
        coordinator=address,
        token=TOKEN,
        worker_name="loop",
        elastic=True,
        wire_types=WIRE_DTYPES,
        task_fingerprint=task.fingerprint(),
        dataset_fingerprint=task.dataset_fingerprint(),
        num_training_samples=task.num_samples,
        num_evaluation_samples=task.num_evaluation_samples,
        num_buckets=len(task.buckets),
        exchange_timeout=LIMIT,
        shard_timeout=LIMIT,
        **changes,
    )
    with WorkerClient.connect(joining, 0, "cpu") as client:
        result = trainer.train(client, lambda event: None)
        client.close("done", result.parameters_sha256)
    return result.parameters_sha256
