"""Real agents whose coordinator, or one of whose fellows, dies in the middle of a run: the run's bytes are the same."""

import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import TOY, AgentProcess, agent, module
from tests.support.coordinator import coordinator

NUM_STEPS = 150
RUN: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": NUM_STEPS,
    "min_workers": 1,
    "start_workers": 2,
    "task": {"name": TOY, "options": {"dropout": 0.25}},
    "batch": {"samples": 10, "microbatches": 5, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05},
    "evaluation": {"every_steps": 10},
    "timeouts": {"shutdown": "10s"},
}


SLOW = """
import time
from tests.support.toy_task import ToyTask

class SlowTask(ToyTask):
    def batch(self, indices, split):
        time.sleep(0.03)
        return super().batch(indices, split)
"""
"""The same task on a slow machine, so that a worker has the time to come back."""


def parameters(ended: AgentProcess) -> str:
    """Waits for an agent to end well, and reads the hash of its parameters."""
    assert ended.end() == 0, ended.read_log()
    assert "Traceback" not in ended.read_log()
    [found] = re.findall(rf"left the run after {NUM_STEPS} steps .* parameters ([0-9a-f]+)", ended.read_log())
    return str(found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hash of the parameters after a run in which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with coordinator(folder, {**RUN, "start_workers": 1}) as server, agent(server.address, "ant", folder) as ant:
        return parameters(ant)


def test_a_coordinator_that_is_killed_and_started_again_changes_nothing(tmp_path: Path, undisturbed: str):
    run = {**RUN, "state_dir": str(tmp_path / "state")}
    with ExitStack() as stack:
        server = stack.enter_context(coordinator(tmp_path / "0", run))
        workers = [stack.enter_context(agent(server.address, name, tmp_path)) for name in ("ant", "bee")]
        for life in (1, 2):
            workers[0].wait_for_log(f"step {30 * life} of")
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            server = stack.enter_context(coordinator(tmp_path / str(life), run, "--listen", server.address))
        assert {parameters(worker) for worker in workers} == {undisturbed}
        for worker in workers:
            assert len(re.findall("rejoined as worker", worker.read_log())) == 2
        assert server.process.wait(30) == 0


def test_a_worker_that_is_killed_and_started_again_changes_nothing(tmp_path: Path, undisturbed: str):
    slow = module(tmp_path / "own", SLOW)
    run = {**RUN, "task": {**RUN["task"], "name": "own_task:SlowTask"}}
    with ExitStack() as stack:
        server = stack.enter_context(coordinator(tmp_path, run))
        ant = stack.enter_context(agent(server.address, "ant", tmp_path, **slow))
        with agent(server.address, "bee", tmp_path / "first", **slow) as bee:
            ant.wait_for_log("step 10 of")
            bee.process.send_signal(signal.SIGKILL)
        bee = stack.enter_context(agent(server.address, "bee", tmp_path / "second", **slow))
        assert {parameters(ant), parameters(bee)} == {undisturbed}
        assert "caught up with the run" in bee.read_log()


def test_a_worker_that_slept_through_a_restart_of_the_coordinator_changes_nothing(tmp_path: Path, undisturbed: str):
    run = {**RUN, "state_dir": str(tmp_path / "state")}
    with ExitStack() as stack:
        server = stack.enter_context(coordinator(tmp_path / "0", run))
        ant, bee = (stack.enter_context(agent(server.address, name, tmp_path)) for name in ("ant", "bee"))
        ant.wait_for_log("step 30 of")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        bee.process.send_signal(signal.SIGSTOP)
        server = stack.enter_context(coordinator(tmp_path / "1", run, "--listen", server.address))
        ant.wait_for_log("rejoined as worker")
        bee.process.send_signal(signal.SIGCONT)
        assert {parameters(ant), parameters(bee)} == {undisturbed}
