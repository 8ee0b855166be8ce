"""Real runs of topology torch: all workers have the same parameters, about those of a star."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import TOY, AgentProcess, agent
from tests.support.coordinator import coordinator
from worker_agent.torch_exchange import WARNING

NUM_STEPS = 12
RUN: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": NUM_STEPS,
    "min_workers": 1,
    "task": {"name": TOY, "options": {"dropout": 0.25}},
    "batch": {"samples": 12, "microbatches": 6, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05},
    "evaluation": {"every_steps": 5},
    "timeouts": {"shutdown": "10s"},
}


def parameters(ended: AgentProcess) -> str:
    """Waits for an agent to end well, and reads the hash of its parameters."""
    assert ended.end() == 0, ended.read_log()
    assert "Traceback" not in ended.read_log()
    [found] = re.findall(rf"left the run after {NUM_STEPS} steps .* parameters ([0-9a-f]+)", ended.read_log())
    return str(found)


def losses(ended: AgentProcess) -> list[float]:
    return [line["loss"] for line in ended.metrics() if line["kind"] == "train"]


def trained(folder: Path, topology: str, names: tuple[str, ...]) -> tuple[str, list[float], list[str]]:
    """Returns the parameters' hash, equal on all workers, the losses and the workers' logs."""
    run = {**RUN, "topology": topology, "start_workers": len(names)}
    with ExitStack() as stack:
        server = stack.enter_context(coordinator(folder, run))
        agents = [stack.enter_context(agent(server.address, name, folder)) for name in names]
        [common] = {parameters(one) for one in agents}
        assert server.process.wait(30) == 0
        return common, losses(agents[0]), [one.read_log() for one in agents]


@pytest.fixture(scope="module")
def star(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one worker alone with a coordinator that reduces: the same bytes as any number of workers."""
    _, found, _ = trained(tmp_path_factory.mktemp("star"), "star", ("ant",))
    return found


@pytest.mark.parametrize("names", [("ant",), ("ant", "bee"), ("ant", "bee", "cow")], ids=len)
def test_workers_of_a_torch_group_train_what_a_star_does(tmp_path: Path, star: list[float], names: tuple[str, ...]):
    _, torch, logs = trained(tmp_path, "torch", names)
    assert len(torch) == NUM_STEPS
    assert torch == pytest.approx(star, rel=1e-4)
    assert all(log.count(WARNING) == 1 for log in logs)
