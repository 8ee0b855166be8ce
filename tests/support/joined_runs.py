"""Programs with loops of their own, on threads of this process or as processes of their own."""

import contextlib
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.coordinator import ROOT, TOKEN, CoordinatorProcess, environment
from worker_agent.integrations import JoinedRun, join

OWN: dict[str, Any] = {"run_id": "own", "timeouts": {"shutdown": "1s"}}
"""A run without end, for programs that choose their own data."""


_DRAWS = threading.Lock()
"""Threads share torch's generator."""


def settings(server: CoordinatorProcess, name: str) -> dict[str, str]:
    return {"AYNI_COORDINATOR": server.address, "AYNI_TOKEN": TOKEN, "AYNI_NAME": name}


def joined(server: CoordinatorProcess, model: nn.Module, name: str, **options: Any) -> JoinedRun:
    return join(model, environ=settings(server, name), **options)


def small_model(seed: int = 0) -> nn.Sequential:
    with _DRAWS:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def side_by_side(work: Callable[[int], Any], count: int) -> list[Any]:
    """Calls a function with 0, 1, ... on a thread each; an error of any is raised after all have ended.

    It is printed at once: the others may wait in vain for the one that failed.
    """

    def told(index: int) -> Any:
        try:
            return work(index)
        except BaseException:
            traceback.print_exc()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(told, index) for index in range(count)]
    return [future.result() for future in futures]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@contextlib.contextmanager
def programs(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> Iterator[list[Any]]:
    """Python programs as processes, killed at the end if they are still there."""
    started = []
    try:
        for command, extra in zip(commands, environments, strict=True):
            started.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment(**extra),
                    cwd=ROOT,
                )
            )
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def outputs(processes: Sequence[Any], timeout: float = 90.0) -> list[str]:
    """Waits for all, and returns what they wrote; fails with it where one failed."""
    texts = [process.communicate(timeout=timeout)[0] for process in processes]
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text
    return texts


def example(name: str) -> str:
    return str(Path("examples") / name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
