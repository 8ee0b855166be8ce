"""A worker joins in the middle of a run and is handed the state while the others train; the result is the same."""

import contextlib
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import AgentProcess, agent, module
from tests.support.coordinator import CoordinatorProcess, coordinator

SLOW_TOY = """
import os, time
from tests.support.toy_task import ToyTask


class SlowToy(ToyTask):
    num_losses = 0

    def loss(self, batch):
        self.num_losses += 1
        while self.num_losses > 24 and os.path.exists(os.environ.get("HELD", "")):
            time.sleep(0.01)
        time.sleep(float(os.environ.get("SLOW_S", "0")))
        return super().loss(batch)
"""
"""After 24 micro-batches, which are 4 steps of a worker that is alone, it waits for as long as a file is there."""

RUN: dict[str, Any] = {
    "run_id": "late",
    "num_steps": 40,
    "min_workers": 1,
    "task": {"name": "own_task:SlowToy", "options": {"dropout": 0.25, "width": 64}},
    "batch": {"samples": 12, "microbatches": 6, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05, "update": "host"},
    "evaluation": {"every_steps": 0},
    "state": {"publish_every": 10, "store_every": 10, "keep": 2, "block_bytes": 4096},
    "timeouts": {"shutdown": "10s"},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Parameters that one worker alone ends with."""
    folder = tmp_path_factory.mktemp("alone")
    extra = module(folder, SLOW_TOY)
    with coordinator(folder, RUN) as server, agent(server.address, "ant", folder, **extra) as ant:
        assert ant.end() == 0, ant.read_log()
        return parameters(ant)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[dict[str, str]]:
    """Keeps the workers that were started before from going on; yields their environment."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "held"
    file.touch()
    try:
        yield {**module(folder, SLOW_TOY), "HELD": str(file), "SLOW_S": "0.03"}
    finally:
        file.unlink()


def parameters(worker: AgentProcess) -> str:
    return next(
        line.rpartition("parameters ")[2] for line in worker.read_log().splitlines() if "left the run after" in line
    )


def ended(server: CoordinatorProcess, *workers: AgentProcess) -> set[str]:
    """Waits for the end; returns what the workers' parameters hash to."""
    for worker in workers:
        assert worker.end(90) == 0, f"{worker.read_log()}\n{server.read_log()}"
    assert server.process.wait(30) == 0, server.read_log()
    return {parameters(worker) for worker in workers}


@pytest.mark.parametrize("flags", [(), ("--attach", "always", "--blocks-engines", "grpc")], ids=["dialled", "attached"])
def test_a_late_joiner_is_handed_the_state_and_takes_its_share(
    tmp_path: Path, undisturbed: str, flags: tuple[str, ...]
):
    flags = (*flags, "--blocks-root", str(tmp_path / "blocks"))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(coordinator(tmp_path, RUN))
        with held(tmp_path) as extra:
            ant = stack.enter_context(agent(server.address, "ant", tmp_path, *flags, **extra))
            server.wait_for_log("step 3 ", 60)
            bee = stack.enter_context(agent(server.address, "bee", tmp_path, *flags, **extra))
            server.wait_for_log("worker bee joined", 60)
        server.wait_for_log("worker bee is up to date", 60)
        assert ended(server, ant, bee) == {undisturbed}
        log = server.read_log()
        assert "worker bee is up to date after" in log
        assert "was not stored" not in log
        assert "stored the state behind step 40" in log
        assert "removed the older state behind step 20" in log
        assert "got the state behind step" in bee.read_log()
        assert any(step["num_samples"] for step in bee.metrics()), bee.metrics()[-1]
        if flags[0] == "--attach":
            assert "worker ant is attached" in log


def test_when_the_worker_that_serves_the_state_dies_another_serves_it(tmp_path: Path, undisturbed: str):
    run = {**RUN, "start_workers": 2, "state": {"block_bytes": 4096}, "timeouts": {"lease": "14s"}}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(coordinator(tmp_path, run))
        with held(tmp_path) as extra:
            ant, bee = (stack.enter_context(agent(server.address, name, tmp_path, **extra)) for name in ("ant", "bee"))
            server.wait_for_log("step 3 ", 60)
            # It stands still with half of the state: whoever serves it is killed meanwhile.
            stopped = {**extra, "AYNI_FAILPOINTS": "worker.onboarding.half=stop"}
            cat = stack.enter_context(agent(server.address, "cat", tmp_path, **stopped))
            server.wait_for_log("worker cat joined", 60)
        server.wait_for_log("offered worker cat the state behind step", 60)
        cat.wait_for_log("failpoint worker.onboarding.half: stop")
        wait_until_stopped(cat.process.pid)
        first, second = (ant, bee) if "from worker ant" in line_of(server, "offered worker cat") else (bee, ant)
        first.process.kill()
        server.wait_for_log("worker cat did not get the state", 60)
        cat.process.send_signal(signal.SIGCONT)
        server.wait_for_log("worker cat is up to date", 60)
        assert ended(server, second, cat) == {undisturbed}


def wait_until_stopped(pid: int, timeout: float = 20.0) -> None:
    """Waits until a process stands still: what it says shortly before is not proof of it."""
    deadline = time.monotonic() + timeout
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, f"process {pid} goes on"
        select.select([], [], [], 0.02)


def line_of(server: CoordinatorProcess, text: str) -> str:
    return next(line for line in server.read_log().splitlines() if text in line)
