"""One run with example workers: a real coordinator process, and a process for each worker."""

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from scripts.interop_builds import EXAMPLES, ROOT, InteropError, folder_of

RUN_FILE = EXAMPLES / "run.yaml"
START_LIMIT_S = 60
RUN_LIMIT_S = 120
END_LIMIT_S = 5
KILL_AFTER = "step 5 committed"
"""What the coordinator has logged when the worker that is to die is killed."""
REASON = "TOKEN_REFUSED"


@dataclass
class Job:
    """The processes of a run, by name, and how they ended."""

    folder: Path
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    endings: "queue.Queue[str]" = field(default_factory=queue.Queue)
    readers: list[threading.Thread] = field(default_factory=list)
    """What takes down the coordinator's log."""

    def start(self, name: str, command: Sequence[str], **streams: Any) -> subprocess.Popen:
        """Starts a process whose error output goes to a log, unless `streams` says otherwise."""
        paths = os.pathsep.join((str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        log = self.folder / f"{name}.log"
        with log.open("w") as errors:
            given = {"stdin": subprocess.DEVNULL, "stderr": errors, "env": environment, **streams}
            process = subprocess.Popen(command, **given)
        self.processes[name] = process
        threading.Thread(target=self._await, args=(name,), daemon=True).start()
        return process

    def _await(self, name: str) -> None:
        self.processes[name].wait()
        self.endings.put(name)

    def tail(self, name: str) -> str:
        """Returns the last lines that a process has logged."""
        log = self.folder / f"{name}.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-10:])


def run_workers(languages: Mapping[str, str], folder: Path, *, victim: str = "") -> dict[str, dict[str, Any]]:
    """Runs the workers to the end and returns what each of them printed.

    Args:
        languages: the language of each worker, by the worker's name.
        folder: where logs, outputs and the coordinator's state go.
        victim: name of a worker that is killed in the middle of the run; it prints nothing.

    Raises:
        InteropError: a process failed or the run took too long; the end of its log is quoted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _job(folder) as job, _token_file(folder) as token:
        address, may_kill = _start_coordinator(job, len(languages), token)
        for name, language in languages.items():
            program = str(folder_of(language) / "worker")
            flags = ("--coordinator", address, "--token-file", str(token), "--name", name)
            with (folder / f"{name}.json").open("w") as output:
                job.start(name, [program, *flags], stdout=output)
        deadline = time.monotonic() + RUN_LIMIT_S
        if victim:
            if not may_kill.wait(RUN_LIMIT_S):
                raise InteropError(f"the run did not get to {KILL_AFTER!r}:\n{job.tail('coordinator')}")
            job.processes[victim].kill()
        _wait(job, deadline, victim)
    return {name: _printed(folder / f"{name}.json", name) for name in languages if name != victim}


def refuse_workers(languages: Sequence[str], folder: Path) -> None:
    """Starts a worker of each language with a wrong token.

    Raises:
        InteropError: one of them does not end with 1, or its log doesn't have the reason of the refusal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _job(folder) as job, _token_file(folder, "right") as right, _token_file(folder, "wrong") as wrong:
        address, _ = _start_coordinator(job, len(languages), right)
        for language in languages:
            flags = ("--coordinator", address, "--token-file", str(wrong), "--name", language)
            job.start(language, [str(folder_of(language) / "worker"), *flags], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + RUN_LIMIT_S
        for language in languages:
            try:
                code = job.processes[language].wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise InteropError(f"{language} did not end although its token is wrong") from None
            if code != 1 or REASON not in job.tail(language):
                raise InteropError(f"{language} ended with {code}, and its log lacks {REASON}:\n{job.tail(language)}")


@contextlib.contextmanager
def _job(folder: Path) -> Iterator[Job]:
    job = Job(folder)
    try:
        yield job
    finally:
        for process in job.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()
        for reader in job.readers:
            reader.join(END_LIMIT_S)


def _start_coordinator(job: Job, workers: int, token: Path) -> tuple[str, threading.Event]:
    """Returns its address, and what is set when it has logged KILL_AFTER."""
    command = [
        *(sys.executable, "-m", "coordinator_service", "--config", str(RUN_FILE), "--token-file", str(token)),
        *("--listen", "127.0.0.1:0", "--state-dir", str(job.folder / "state"), "--fresh"),
        *("--start-workers", str(workers)),
    ]
    process = job.start("coordinator", command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    said, may_kill = queue.Queue[str](), threading.Event()
    copied = (process.stderr, job.folder / "coordinator.log", may_kill)
    job.readers += [
        threading.Thread(target=_copy, args=copied, daemon=True),
        threading.Thread(target=lambda stream: said.put(stream.readline()), args=(process.stdout,), daemon=True),
    ]
    for reader in job.readers:
        reader.start()
    try:
        line = said.get(timeout=START_LIMIT_S)
    except queue.Empty:
        line = ""
    if not line.startswith("listening on "):
        raise InteropError(f"the coordinator did not start:\n{job.tail('coordinator')}")
    return line.split()[-1], may_kill


def _copy(stream: IO[str], log: Path, may_kill: threading.Event) -> None:
    with stream, log.open("w") as file:
        for line in stream:
            file.write(line)
            file.flush()
            if KILL_AFTER in line:
                may_kill.set()
    may_kill.set()


@contextlib.contextmanager
def _token_file(folder: Path, name: str = "join") -> Iterator[Path]:
    path = folder / f"{name}.token"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_urlsafe())
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _wait(job: Job, deadline: float, victim: str) -> None:
    for _ in job.processes:
        try:
            name = job.endings.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            left = sorted(name for name, process in job.processes.items() if process.poll() is None)
            raise InteropError(f"the run took more than {RUN_LIMIT_S} s; still there: {', '.join(left)}") from None
        code = job.processes[name].returncode
        if code and name != victim:
            raise InteropError(f"{name} ended with {code}; the end of {job.folder / name}.log:\n{job.tail(name)}")


def _printed(path: Path, name: str) -> dict[str, Any]:
    lines = path.read_text().splitlines()
    try:
        return dict(json.loads(lines[-1]))
    except (IndexError, ValueError) as error:
        raise InteropError(f"the last line that {name} printed is no JSON object; see {path}") from error
