"""Which worker writes checkpoints: the coordinator says it with each commit, so that one does whoever dies."""

import asyncio
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tests.support.agents import TOY, agent
from tests.support.chaos_agents import ledger
from tests.support.coordinator import RUN, coordinator, make_step, microbatches, raw_workers
from worker_agent.training.checkpoint import STATE_FILE

TOY_RUN: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": 4,
    "min_workers": 1,
    "start_workers": 2,
    "task": {"name": TOY},
    "batch": {"samples": 12, "microbatches": 6, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05, "schedule": "constant"},
    "evaluation": {"every_steps": 2},
    "timeouts": {"shutdown": "5s"},
}


def test_commits_and_the_end_name_the_first_worker_that_is_up_to_date(tmp_path: Path):
    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee):
            _, _, first = await make_step([ant, bee], microbatches(5, 1000))
            for worker in (ant, bee):
                await worker.next_frame()
            answers = await asyncio.gather(*(w.commit(dict.fromkeys(w.leased, 0), 0) for w in (ant, bee)))
            shutdowns = [(await w.next_frame()).shutdown for w in (ant, bee)]
            return [first, *answers], shutdowns

    with coordinator(tmp_path, RUN) as process:
        commits, shutdowns = asyncio.run(scenario(process.address))
    assert {message.checkpoint_writer for message in [*commits, *shutdowns]} == {"ant"}


def test_another_worker_writes_both_checkpoints_where_the_first_dies_in_the_last_evaluation(tmp_path: Path):
    """That is the sixth lease that the first worker takes."""
    with coordinator(tmp_path, TOY_RUN) as process:
        with agent(process.address, "ant", tmp_path, AYNI_FAILPOINTS="worker.lease.taken=kill@6") as ant:
            process.wait_for_log("worker ant joined", 60)
            with agent(process.address, "bee", tmp_path) as bee:
                assert (ant.end(), bee.end()) == (-9, 0), process.read_log() + bee.read_log()
        assert process.process.wait(30) == 0
    commits, _ = ledger(tmp_path, "toy")
    evaluations = {record.step: record.best for record in commits if record.kind == "evaluate"}
    assert evaluations[4], "the run's losses must be such that this evaluation is the best so far"
    written = {name: steps_of(tmp_path / "bee" / "checkpoints" / name) for name in ("best", "last")}
    assert written == {"best": 4, "last": 4}


def steps_of(checkpoint: Path) -> int:
    with safe_open(checkpoint / STATE_FILE, framework="numpy") as file:
        return int(file.metadata()["completed_steps"])
