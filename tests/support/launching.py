"""What tests of launchers share: a run, its plain local result, and a way to leave no process behind."""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coordinator_service.store import open_folder
from tests.support.coordinator import ROOT, TOKEN
from tests.support.gated_task import GATED

RUN: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": 40,
    "min_workers": 1,
    "task": {"name": GATED, "options": {"dropout": 0.25}},
    "batch": {"samples": 10, "microbatches": 5, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05},
    "timeouts": {"shutdown": "20s", "lease": "6s", "accept": "8s"},
}
MARK = "AYNI_TEST_MARK"
"""Every process of a test carries it in its environment, however it was started, so that it can be found and ended."""
PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "sbatch": "slurm-client",
    "scontrol": "slurm-client",
    "scancel": "slurm-client",
    "sinfo": "slurm-client",
    "mpirun": "openmpi-bin",
}
"""The Debian package of each program."""


@dataclass
class Place:
    """A folder for one test, short enough for the names of sockets, and the environment of its processes."""

    folder: Path
    mark: str
    port: int

    @property
    def run_file(self) -> Path:
        return self.folder / "run.yaml"

    def environment(self, **extra: str) -> dict[str, str]:
        outer = {key: value for key, value in os.environ.items() if not key.startswith(("AYNI_", "SLURM_", "RAY_"))}
        return {
            **outer,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "proto"))),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder),
            "AYNI_TOKEN_FILE": str(self.folder / "run.token"),
            "AYNI_BACKEND": "cpu",
            "AYNI_TENSORBOARD": "false",
            "AYNI_CACHE_DIR": str(self.folder / "cache"),
            MARK: self.mark,
            **extra,
        }

    @property
    def gate(self) -> Path:
        return self.folder / "gate"

    def gated(self, after: int = 6) -> dict[str, str]:
        """What makes each agent wait before a micro-batch until the gate opens."""
        return {"AYNI_TEST_GATE": str(self.gate), "AYNI_TEST_GATE_AFTER": str(after)}

    def wait_at_gate(self, count: int, timeout: float = 120.0) -> list[int]:
        """Waits until so many agents are at the gate; returns their process ids."""
        self.wait_for(lambda: len(list(self.folder.glob("gate.*"))) == count, f"{count} agents at the gate", timeout)
        return [int(path.suffix[1:]) for path in self.folder.glob("gate.*")]

    def final_parameters(self) -> str:
        """The hash that all workers had at the end, as the coordinator wrote it down."""
        with contextlib.closing(open_folder(self.folder / "state" / "toy", to_read=True)) as store:
            assert store.committed_steps() == yaml.safe_load(self.run_file.read_text())["num_steps"]
            return store.facts()["final_parameters_sha256"]

    def processes(self) -> dict[int, str]:
        """The command lines of all processes with this test's mark, by process id."""
        return {pid: line for pid, line in _command_lines() if f"{MARK}={self.mark}".encode() in _environ(pid)}

    def name_of(self, pid: int, variable: str) -> str:
        """What a process has as a variable of its environment."""
        return dict(line.partition("=")[::2] for line in _environ(pid).decode().split("\0")).get(variable, "")

    def wait_for(
        self, condition: Callable[[], object], what: str, timeout: float = 60.0, log: Path | None = None
    ) -> None:
        """Waits for a condition; where it does not come true in time, fails and shows a log."""
        deadline = time.monotonic() + timeout
        while not condition():
            said = f" in:\n{log.read_text()}" if log and time.monotonic() >= deadline else ""
            assert time.monotonic() < deadline, f"not within {timeout} s: {what}{said}"
            select.select([], [], [], 0.05)


@contextlib.contextmanager
def place(run: Mapping[str, Any] = RUN) -> Iterator[Place]:
    """A place with a run file and a token; whatever was started in it is ended, and its files are gone."""
    folder = Path(tempfile.mkdtemp(prefix="ayni-", dir="/tmp"))
    folder.chmod(0o711)  # munged lets everybody reach its socket, or does not start.
    found = Place(folder=folder, mark=uuid.uuid4().hex, port=free_port())
    found.run_file.write_text(yaml.safe_dump({"state_dir": str(folder / "state"), **run}))
    token = folder / "run.token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    try:
        yield found
    finally:
        end_all(found)
        shutil.rmtree(folder)


def end_all(where: Place, patience: float = 5.0) -> None:
    """Ends every process of a place: politely, then not."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + seconds
        for pid in where.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while where.processes() and time.monotonic() < deadline:
            select.select([], [], [], 0.05)
    assert not where.processes(), f"these could not be ended: {where.processes()}"


def _command_lines() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if line := (folder / "cmdline").read_bytes():
                    yield int(folder.name), line.replace(b"\0", b" ").decode(errors="replace").strip()


def _environ(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(name: str) -> str:
    """The path of a launcher's program; fails, naming the package, where it is missing."""
    found = shutil.which(name, path=os.pathsep.join((os.environ["PATH"], "/usr/sbin")))
    assert found, f"{name} is missing, which this test needs: apt-get install {PACKAGES[name]}"
    return found


def finish(
    where: Place, *command: str, timeout: float = 180.0, code: int = 0, extra: Mapping[str, str] | None = None
) -> str:
    """Runs a launcher to its end and returns all that it and its agents wrote."""
    log = where.folder / "launcher.log"
    with start(where, log, *command, **(extra or {})) as process:
        try:
            ended = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{command[0]} did not end within {timeout} s:\n{log.read_text()}") from None
    assert ended == code, f"{command[0]} ended with {ended}:\n{log.read_text()}"
    return log.read_text()


@contextlib.contextmanager
def start(where: Place, log: Path, *command: str, **extra: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts a process with the place's mark in the place's folder."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=where.environment(**extra),
            cwd=where.folder,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def agent_command(where: Place, *flags: str) -> list[str]:
    """An agent as any launcher starts it: rank 0 starts the coordinator."""
    return ["-m", "worker_agent", "--launch-run", str(where.run_file), "--launch-port", str(where.port), *flags]


PYTHON = sys.executable
