"""Real agents and coordinators that die at named places and are started again.

Agents are forked from a server process that has loaded torch, which saves each of them some seconds; each runs
`python -m worker_agent`'s own main function, with its log in a file.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import yaml

from ayni.failpoints import VARIABLE
from coordinator_service.store import open_folder
from coordinator_service.store_records import CommitRecord
from tests.support.coordinator import ROOT, TOKEN, environment

PRELOADED = ["tests.support.chaos_preload", "scripts.chaos_task"]
_POLL_S = 0.02
_START_S = 60.0
_MOST_FAILURES = 20


def fork_server() -> ForkServerContext:
    """The server that agents are forked from; it lives as long as the test process."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_agent(arguments: Sequence[str], log: Path, extra: dict[str, str]) -> None:
    """Runs an agent in a forked process, as a new process would."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(environment(**extra))
    os.chdir(log.parent)
    # Failpoints are read when the module is loaded, which was before the fork.
    import importlib

    from ayni import failpoints

    importlib.reload(failpoints)
    from worker_agent.__main__ import main

    sys.exit(main(arguments))


@dataclass(eq=False)
class Crew:
    """One run's coordinator and agents; whoever dies is started again."""

    folder: Path
    run: dict[str, Any]
    coordinator_failpoints: str = ""
    agent_failpoints: dict[str, Sequence[str]] = field(default_factory=dict)
    """For each agent, what is armed in its first start, its second, and so on."""
    agent_flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self.run))
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]
        self._context = fork_server()
        self._agents: dict[str, ForkServerProcess] = {}
        self._starts: dict[str, int] = {}
        self._log_starts: dict[str, int] = {}
        """Where in its log an agent's latest start begins, in bytes."""
        self._coordinator: subprocess.Popen | None = None
        self.deaths: list[str] = []
        """Who was killed, in order."""
        self._failures = 0

    def start_coordinator(self, failpoints: str = "", *flags: str) -> None:
        """Starts it and waits until it listens."""
        command = [
            *(sys.executable, "-m", "coordinator_service", "--config", str(self.folder / "run.yaml")),
            *("--listen", f"127.0.0.1:{self._port}", "--state-dir", str(self.folder / "state"), *flags),
        ]
        with self.log("coordinator").open("a") as log:
            self._coordinator = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(**({VARIABLE: failpoints} if failpoints else {})),
                cwd=self.folder,
            )
        assert self._coordinator.stdout
        ready, _, _ = select.select([self._coordinator.stdout], [], [], _START_S)
        line = self._coordinator.stdout.readline() if ready else ""
        assert line.startswith("listening on "), self.logs()

    def start_agent(self, name: str) -> None:
        """Starts an agent; what is armed depends on how often it was started."""
        start = self._starts.get(name, 0)
        self._starts[name] = start + 1
        self._log_starts[name] = self.log(name).stat().st_size if start else 0
        armed = self.agent_failpoints.get(name, ())
        extra = {VARIABLE: armed[start]} if start < len(armed) else {}
        arguments = [
            *("--coordinator", f"127.0.0.1:{self._port}", "--name", name, "--backend", "cpu", "--no-tensorboard"),
            *("--output-dir", str(self.folder / name), "--cache-dir", str(self.folder / "cache")),
            *("--blocks-root", str(self.folder / "blocks"), *self.agent_flags),
            *("--gradients", "grpc" if name == "bee" else "auto"),
        ]
        process = self._context.Process(target=run_agent, args=(arguments, self.log(name), extra), name=name)
        process.start()
        self._agents[name] = process

    @property
    def address(self) -> str:
        """Where the coordinator listens."""
        return f"127.0.0.1:{self._port}"

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to an agent."""
        process = self._agents[name]
        assert process.pid
        os.kill(process.pid, number)

    def wait_for_log(self, name: str, text: str, timeout: float = 30.0) -> None:
        """Waits until a process has logged something."""
        deadline = time.monotonic() + timeout
        while text not in self.said(name):
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s in:\n{self.logs()}"
            self.look_after()
            select.select([], [], [], _POLL_S)

    def finish(self, timeout: float) -> None:
        """Starts again whoever dies, until the run is over and everybody has ended well."""
        deadline = time.monotonic() + timeout
        assert self._coordinator
        while self._coordinator.poll() is None or self._coordinator.returncode < 0:
            assert time.monotonic() < deadline, f"the run did not end within {timeout} s:\n{self.logs()}"
            self.look_after()
            select.select([], [], [], _POLL_S)
        assert self._coordinator.returncode == 0, self.logs()
        for name, process in self._agents.items():
            while process.is_alive() and not self._came_too_late(name):
                assert time.monotonic() < deadline, f"{name} did not end within {timeout} s:\n{self.logs()}"
                process.join(_POLL_S)
            if process.is_alive():
                process.kill()
            else:
                assert process.exitcode == 0, f"{name} ended with {process.exitcode}:\n{self.logs()}"

    def _came_too_late(self, name: str) -> bool:
        """Whether an agent that was started again goes on trying to reach a run that is over."""
        said = self.log(name).read_bytes()[self._log_starts[name] :]
        return self._starts[name] > 1 and said.rfind(b"worker_agent.contact: try") > said.rfind(b"worker_agent.member")

    def look_after(self) -> None:
        """Starts again whoever was killed."""
        if self._coordinator and self._coordinator.poll() == -signal.SIGKILL:
            self.deaths.append("coordinator")
            assert self._coordinator.stdout
            self._coordinator.stdout.close()
            self.start_coordinator()
        for name, process in tuple(self._agents.items()):
            if process.exitcode == -signal.SIGKILL:
                self.deaths.append(name)
                self.start_agent(name)
            elif process.exitcode:
                # As a supervisor would: its name may belong to the process before it for as long as a lease lasts.
                self._failures += 1
                assert self._failures < _MOST_FAILURES, self.logs()
                self.start_agent(name)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        return self.log(name).read_text() if self.log(name).exists() else ""

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """Kills what is left."""
        for process in self._agents.values():
            if process.is_alive():
                process.kill()
            process.join()
        if self._coordinator:
            self._coordinator.kill()
            self._coordinator.wait()
            assert self._coordinator.stdout
            self._coordinator.stdout.close()


@contextlib.contextmanager
def crew(folder: Path, run: dict[str, Any], **options: Any) -> Iterator[Crew]:
    """A crew whose processes are gone at the end."""
    made = Crew(folder, run, **options)
    try:
        yield made
    finally:
        made.close()


def ledger(folder: Path, run_id: str) -> tuple[list[CommitRecord], dict[str, str]]:
    """Commits and facts that a run left."""
    with contextlib.closing(open_folder(folder / "state" / run_id, to_read=True)) as store:
        return store.commits(), store.facts()


__all__ = ["ROOT", "TOKEN", "Crew", "crew", "fork_server", "ledger"]
