"""Starts real worker agents."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.coordinator import environment

TOY = "tests.support.toy_task:ToyTask"


@dataclass
class AgentProcess:
    name: str
    process: subprocess.Popen
    log: Path
    folder: Path

    def read_log(self) -> str:
        return self.log.read_text()

    def wait_for_log(self, text: str, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.read_log():
            ended = self.process.poll() is not None and text not in self.read_log()
            assert not ended, f"{self.name} ended without {text!r}:\n{self.read_log()}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s in:\n{self.read_log()}"
            select.select([], [], [], 0.02)

    def address(self) -> str:
        """Reads the one line on standard output."""
        assert self.process.stdout
        return self.process.stdout.readline().removeprefix("listening on ").strip()

    def end(self, timeout: float = 60.0) -> int:
        """Waits for the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout} s:\n{self.read_log()}") from None

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def agent(
    address: str, name: str, folder: Path, *flags: str, program: str = "worker_agent", **extra: str
) -> Iterator[AgentProcess]:
    """An agent process; killed at the end if it is still there."""
    folder.mkdir(parents=True, exist_ok=True)
    log, output = folder / f"{name}.log", folder / name
    command = [
        *(sys.executable, "-m", program, "--coordinator", address, "--name", name, "--backend", "cpu"),
        *("--cache-dir", str(folder / "cache"), "--output-dir", str(output), "--no-tensorboard", *flags),
    ]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment(**extra), cwd=folder
        )
    try:
        yield AgentProcess(name, process, log, output)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout
        process.stdout.close()


def module(folder: Path, text: str) -> dict[str, str]:
    """Writes a module `own_task` and returns the environment that makes it importable."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own_task.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join((environment()["PYTHONPATH"], str(folder)))}
