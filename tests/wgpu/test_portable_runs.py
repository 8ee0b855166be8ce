"""Real runs: a worker on backend wgpu and one on the CPU train one model, with the same parameters at every step."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import AgentProcess, agent
from tests.support.coordinator import coordinator
from tests.support.portable_training import ENGINES, PRETRAIN, write_files

NUM_STEPS = 6
MAX_LOSS_DIFF = 1e-4
"""The equality program's bound."""
RUN: dict[str, Any] = {
    "num_steps": NUM_STEPS,
    "seed": 11,
    "audit_every": 1,
    "task": {"name": PRETRAIN.name, "options": {**PRETRAIN.options, "evaluation_windows": 8}},
    "batch": {"samples": 16, "microbatches": 16, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2},
    # The first step compiles shaders, which is no reason to leave a worker behind.
    "stragglers": {"shortest": "100s", "longest": "100s"},
    "timeouts": {"shutdown": "20s"},
}


def on(engine: str) -> tuple[str, ...]:
    return ("--backend", "wgpu", "--allow-software-gpu", "--wgpu-engine", engine, "--offload-min-flops", "0")


def trained(folder: Path, files: Path, workers: dict[str, tuple[str, ...]]) -> tuple[list[AgentProcess], str]:
    """Returns the workers that have ended, and the coordinator's log."""
    run = {**RUN, "run_id": folder.name, "artifacts": str(files)} | dict.fromkeys(
        ("min_workers", "start_workers"), len(workers)
    )
    with ExitStack() as stack:
        server = stack.enter_context(coordinator(folder, run))
        agents = [
            stack.enter_context(agent(server.address, name, folder, *flags, TORCHVULKAN_PIPELINE_CACHE="0"))
            for name, flags in workers.items()
        ]
        for one in agents:
            assert one.end(200) == 0, one.read_log()
        assert server.process.wait(30) == 0
        return agents, server.read_log()


def parameters(ended: AgentProcess) -> str:
    [found] = re.findall(rf"left the run after {NUM_STEPS} steps .* parameters ([0-9a-f]+)", ended.read_log())
    return str(found)


def losses(ended: AgentProcess) -> list[float]:
    return [line["loss"] for line in ended.metrics()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def plain(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one worker on the CPU."""
    [only], _ = trained(tmp_path_factory.mktemp("plain"), files, {"cow": ()})
    return losses(only)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gpu_and_a_cpu_worker_train_one_model(tmp_path: Path, files: Path, plain: list[float], engine: str):
    # With a cap each of them gets a quarter of every step at least, however unlike their speeds are.
    cap = ("--max-microbatches", "12")
    workers = {"ant": (*on(engine), *cap), "bee": ("--backend", "cpu", *cap)}
    (gpu, cpu), said = trained(tmp_path / "mixed", files, workers)
    assert parameters(gpu) == parameters(cpu)
    assert losses(gpu) == losses(cpu)
    assert len(losses(gpu)) == NUM_STEPS + 1
    assert max(abs(own - other) for own, other in zip(losses(gpu), plain, strict=True)) <= MAX_LOSS_DIFF
    assert losses(gpu)[-1] < losses(gpu)[0]
    assert "optimizer update runs on the host (backends: cpu, wgpu)" in said
    shares = [[line["num_microbatches"] for line in one.metrics() if line["kind"] == "train"] for one in (gpu, cpu)]
    assert [sum(step) for step in zip(*shares, strict=True)] == [16] * NUM_STEPS
    assert min(min(one) for one in shares) >= 4, shares
    # No audit has found a difference.
    assert not re.search("differ|left behind|expelled|no member any more", said)
    assert f"({engine}" in gpu.read_log() or f", {engine})" in gpu.read_log()
    assert "is a software driver" in gpu.read_log() or "software" not in gpu.read_log()
    assert "ran on the CPU because" not in gpu.read_log()


def test_a_gpu_worker_that_comes_late_takes_the_state_of_a_cpu_worker(tmp_path: Path, files: Path):
    run = {**RUN, "run_id": "late", "artifacts": str(files), "min_workers": 1, "start_workers": 1, "num_steps": 400}
    with coordinator(tmp_path, run) as server, agent(server.address, "bee", tmp_path) as cpu:
        cpu.wait_for_log("step 2 of 400")
        flags = (*on(ENGINES[0]), "--no-tensorboard")
        with agent(server.address, "ant", tmp_path, *flags, TORCHVULKAN_PIPELINE_CACHE="0") as gpu:
            server.wait_for_log("worker ant is up to date", 100)
            assert "could not be taken" not in gpu.read_log()
