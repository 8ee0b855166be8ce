"""Processes of a bench: started together, watched together, and never left behind."""

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from tests.support.coordinator import environment

POLL_SECONDS = 0.1
START_SECONDS = 60.0
LOG_TAIL = 3000
PROFILED = Path(__file__).with_name("profiled.py")


class BenchFailed(Exception):
    """A process of the bench failed; the message has the end of its log."""


@dataclass
class WorkerProcess:
    name: str
    process: subprocess.Popen
    output: Path
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str) -> None:
        """Writes a line to the worker's standard input."""
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def result(self) -> dict:
        """The JSON object that the worker printed at its end."""
        return json.loads(self.output.read_text())

    def tail(self) -> str:
        return self.log.read_text()[-LOG_TAIL:]


@dataclass
class Program:
    """A process that prints "listening on WORD"; WORD is what others need to reach it."""

    name: str
    process: subprocess.Popen
    log: Path

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], folder: Path, prefix: Sequence[str] = (), **variables: str
    ) -> Self:
        """Starts `command` in this Python; `prefix` is a command that runs it, as one that enters a namespace."""
        log = folder / f"{name.replace(' ', '-')}.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*prefix, sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment(**variables),
                cwd=folder,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def word(self) -> str:
        """Waits until the process is ready.

        Raises:
            BenchFailed: it ended, or took too long.
        """
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline() if ready else ""
        if not line.startswith("listening on "):
            raise BenchFailed(f"{self.name} did not start: {line}\n{self.log.read_text()[-LOG_TAIL:]}")
        return line.split()[-1]

    def end(self, seconds: float) -> None:
        """Waits until it has ended by itself."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise BenchFailed(
                f"{self.name} did not end within {seconds:g} s\n{self.log.read_text()[-LOG_TAIL:]}"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()


def coordinator(
    folder: Path, run: dict, *flags: str, prefix: Sequence[str] = (), profile: Path | None = None
) -> Program:
    """Starts a coordinator; its word is its address. `profile` gets what cProfile saw, once it has ended by itself.

    Its loops are compiled before it listens, so that no measurement has that in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump({"state_dir": str(folder / "state"), **run}))
    module = [str(PROFILED), str(profile)] if profile else ["-m", "coordinator_service"]
    command = [*module, "--config", str(folder / "run.yaml"), *flags]
    return Program.start("coordinator", command, folder, prefix, AYNI_KERNELS="compiled")


@contextlib.contextmanager
def workers(
    program: Path, arguments: list[list[str]], folder: Path, prefixes: Sequence[Sequence[str]] = (), **variables: str
) -> Iterator[list[WorkerProcess]]:
    """One process of `program` for each list of arguments; killed at the end if they are still there.

    `prefixes` has for each a command that runs it; `variables` are set in the environment of all.
    """
    started: list[WorkerProcess] = []
    try:
        for rank, given in enumerate(arguments):
            command = [*(prefixes[rank] if prefixes else ()), sys.executable, str(program), *given]
            started.append(_start(f"worker {rank}", command, folder / f"worker-{rank}", variables))
        yield started
    finally:
        for worker in started:
            worker.process.kill()
            worker.process.wait()
            assert worker.process.stdin
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.close()


def finish(started: list[WorkerProcess], timeout: float) -> list[dict]:
    """Waits until all have ended well and returns what they printed.

    Raises:
        BenchFailed: one failed, or they took too long.
    """
    deadline = time.monotonic() + timeout
    while any(worker.process.poll() is None for worker in started):
        check(started)
        if time.monotonic() > deadline:
            raise BenchFailed(f"the workers took longer than {timeout:g} s\n" + "\n".join(w.tail() for w in started))
        select.select([], [], [], POLL_SECONDS)
    check(started)
    return [worker.result() for worker in started]


def check(started: list[WorkerProcess]) -> None:
    """Raises BenchFailed when a worker has failed."""
    for worker in started:
        if code := worker.process.poll():
            raise BenchFailed(f"{worker.name} ended with exit code {code}:\n{worker.tail()}")


def _start(name: str, command: list[str], stem: Path, variables: dict[str, str]) -> WorkerProcess:
    output, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    with output.open("w") as stdout, log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env=environment(**{"GLOO_SOCKET_IFNAME": "lo", **variables}),
        )
    return WorkerProcess(name, process, output, log)
