"""A worker whose device is lost in the middle of a run leaves it, and says so; the run's bytes are the same."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ayni.process import TEMPORARY
from tests.support.agents import TOY, AgentProcess, agent, module
from tests.support.coordinator import CoordinatorProcess, coordinator

NUM_STEPS = 60
RUN: dict[str, Any] = {
    "run_id": "lost",
    "num_steps": NUM_STEPS,
    "min_workers": 1,
    "start_workers": 2,
    "task": {"name": "own_task:SlowTask", "options": {"dropout": 0.25}},
    "batch": {"samples": 10, "microbatches": 5, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05, "update": "host"},
    # Nobody waits for it: silence would be noticed after the test's end.
    "timeouts": {"shutdown": "10s", "lease": "100s", "accept": "200s"},
    "stragglers": {"shortest": "100s", "longest": "100s"},
}
SLOW = """
import time
from pathlib import Path
from tests.support.toy_task import ToyTask

class SlowTask(ToyTask):
    def batch(self, indices, split):
        time.sleep(0.5 if Path("slow").exists() else 0.0)
        return super().batch(indices, split)
"""
"""Leaves a worker the time to come back, while there is a file in the agents' folder."""

LOSSES = {
    "cuda": "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported.",
    "wgpu": "Validation Error\n\nCaused by:\n  In wgpuQueueWriteBuffer\n    Parent device is lost",
}


def parameters(ended: AgentProcess) -> str:
    assert ended.end() == 0, ended.read_log()
    [found] = re.findall(rf"left the run after {NUM_STEPS} steps .* parameters ([0-9a-f]+)", ended.read_log())
    return str(found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = {**RUN, "start_workers": 1, "task": {**RUN["task"], "name": TOY}}
    with coordinator(folder, run) as server, agent(server.address, "ant", folder) as ant:
        return parameters(ant)


@contextmanager
def two(folder: Path, backend: str, told: str) -> Iterator[tuple[CoordinatorProcess, AgentProcess, AgentProcess]]:
    """A run of ant on the CPU, and of bee whose GPU is lost in its first step."""
    slow = module(folder / "own", SLOW)
    with ExitStack() as stack:
        server = stack.enter_context(coordinator(folder, RUN))
        ant = stack.enter_context(agent(server.address, "ant", folder, **slow))
        loses = {"program": "tests.support.fake_gpu_agent", "LOSE_AT": "5", "LOSE_WITH": told}
        yield (
            server,
            ant,
            stack.enter_context(agent(server.address, "bee", folder, "--backend", backend, **slow, **loses)),
        )


@pytest.mark.parametrize("backend", LOSSES)
def test_a_worker_that_was_told_its_device_ends_to_be_started_again(tmp_path: Path, undisturbed: str, backend: str):
    with two(tmp_path, backend, LOSSES[backend]) as (server, ant, bee):
        assert bee.end() == TEMPORARY, bee.read_log()
        ant.wait_for_log("step 20 of")
        assert parameters(ant) == undisturbed
        assert server.process.wait(30) == 0
        [said] = [line for line in bee.read_log().splitlines() if "was lost" in line]
        assert f"the device of backend {backend} (A GPU) was lost" in said
        assert "start this worker again" in said
        assert "Traceback" not in bee.read_log()


def test_where_auto_has_chosen_the_device_the_worker_goes_on_with_the_cpu(tmp_path: Path, undisturbed: str):
    (tmp_path / "slow").touch()
    with two(tmp_path, "auto", LOSSES["cuda"]) as (server, ant, bee):
        bee.wait_for_log("caught up with the run", 100)
        (tmp_path / "slow").unlink()
        assert {parameters(ant), parameters(bee)} == {undisturbed}
        assert server.process.wait(30) == 0
        [said] = [line for line in bee.read_log().splitlines() if "was lost" in line]
        assert "WARNING" in said
        assert "this worker starts again with --backend cpu" in said
        assert len(re.findall("loaded in .* on cuda", bee.read_log())) == 1
        assert len(re.findall("loaded in .* on cpu", bee.read_log())) == 1


def test_another_error_of_a_gpu_is_a_failure_as_ever(tmp_path: Path, undisturbed: str):
    with two(tmp_path, "auto", "CUDA error: device-side assert triggered") as (_, ant, bee):
        assert bee.end() == 1, bee.read_log()
        assert "device-side assert" in bee.read_log()
        assert parameters(ant) == undisturbed
