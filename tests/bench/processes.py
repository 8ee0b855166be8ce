"""Worker processes of a bench: started together, watched together, and never left behind."""

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.coordinator import environment

POLL_SECONDS = 0.1
LOG_TAIL = 3000


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


@contextlib.contextmanager
def workers(program: Path, arguments: list[list[str]], folder: Path) -> Iterator[list[WorkerProcess]]:
    """One process of `program` for each list of arguments; killed at the end if they are still there."""
    started: list[WorkerProcess] = []
    try:
        for rank, given in enumerate(arguments):
            started.append(_start(f"worker {rank}", [sys.executable, str(program), *given], folder / f"worker-{rank}"))
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


def _start(name: str, command: list[str], stem: Path) -> WorkerProcess:
    output, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    with output.open("w") as stdout, log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env=environment(GLOO_SOCKET_IFNAME="lo"),
        )
    return WorkerProcess(name, process, output, log)
