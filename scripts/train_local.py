"""Runs a whole job on this machine: one coordinator and N workers, each a process of its own.

Usage: `python scripts/train_local.py --run runs/bbc.yaml --workers 2`. Each process writes a log file into the output
folder; standard error shows all lines of the coordinator, and those of the workers but for their line per step. The
last line on standard output is one JSON object. Ctrl-C ends all of them gracefully.
"""

import argparse
import contextlib
import json
import math
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO

from ayni.process import load_yaml
from ayni.run_config import RunConfig
from ayni.settings import SettingsError, from_mapping
from coordinator_service.store import open_folder

ROOT = Path(__file__).resolve().parent.parent
STEP_LINES = " INFO worker_agent.progress:"
"""What every worker logs of every step; the coordinator's line says the same once."""


@dataclass
class Child:
    """A process and the thread that copies its log."""

    name: str
    process: subprocess.Popen
    copier: threading.Thread
    committed: threading.Event
    """Set when the process has logged a commit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        run, output = _describe(given)
    except SettingsError as error:
        print(f"train_local: {error}", file=sys.stderr)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    started = time.monotonic()
    with _interruptible(children), _token_file(output) as token:
        fewest = min(run.min_workers, given.workers)
        coordinator, address = _start_coordinator(given, fewest, output, token)
        children.append(coordinator)
        for number in range(given.workers if address else 0):
            children.append(_start_worker(number, address, given, output, token))
        codes = _wait(children, fewest)
    if any(codes):
        failed = ", ".join(f"{c.name} ended with {code}" for c, code in zip(children, codes, strict=True) if code)
        print(f"train_local: {failed}; see the log above and {output}", file=sys.stderr)
        return 1
    print(json.dumps(_result(run, given.workers, output, time.monotonic() - started)), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run file (YAML), such as runs/bbc.yaml")
    parser.add_argument("--workers", type=_positive, default=2, help="worker processes (default: 2)")
    parser.add_argument("--backend", default="auto", help="backend of the workers: auto, cuda, wgpu or cpu")
    parser.add_argument(
        "--output-dir", type=Path, help="folder for state, checkpoints and metrics (default: out/RUN_ID)"
    )
    parser.add_argument("--coordinator-flag", action="append", default=[], metavar="FLAG", help="passed on; repeatable")
    parser.add_argument("--worker-flag", action="append", default=[], metavar="FLAG", help="passed on; repeatable")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _describe(given: argparse.Namespace) -> tuple[RunConfig, Path]:
    """Returns the run and the output folder."""
    known = {field.name for field in fields(RunConfig)}
    run = from_mapping(RunConfig, {key: value for key, value in load_yaml(given.run).items() if key in known})
    return run, (given.output_dir or Path("out") / run.run_id).resolve()


def _start_coordinator(given: argparse.Namespace, fewest: int, output: Path, token: Path) -> tuple[Child, str]:
    command = [
        *(sys.executable, "-m", "coordinator_service", "--config", str(given.run), "--token-file", str(token)),
        *("--listen", "127.0.0.1:0", "--state-dir", str(output / "state"), "--fresh"),
        *("--start-workers", str(given.workers), "--min-workers", str(fewest), *given.coordinator_flag),
    ]
    child = _spawn("coordinator", command, output, stdout=subprocess.PIPE)
    assert child.process.stdout
    line = child.process.stdout.readline()
    child.process.stdout.close()
    return child, line.split()[-1] if line.startswith("listening on ") else ""


def _start_worker(number: int, address: str, given: argparse.Namespace, output: Path, token: Path) -> Child:
    name = f"worker-{number}"
    command = [
        *(sys.executable, "-m", "worker_agent", "--coordinator", address, "--token-file", str(token)),
        *("--name", name, "--backend", given.backend, "--output-dir", str(output / name), *given.worker_flag),
    ]
    return _spawn(name, command, output, stdout=subprocess.DEVNULL)


def _spawn(name: str, command: list[str], output: Path, stdout: int) -> Child:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
    )
    assert process.stderr
    committed = threading.Event()
    copied = (process.stderr, name, output / f"{name}.log", committed)
    copier = threading.Thread(target=_copy, args=copied, daemon=True)
    copier.start()
    return Child(name, process, copier, committed)


def _copy(stream: IO[str], name: str, log: Path, committed: threading.Event) -> None:
    with stream, log.open("w") as file:
        for line in stream:
            if " committed: " in line:
                committed.set()
            file.write(line)
            file.flush()
            if STEP_LINES not in line:
                sys.stderr.write(f"[{name}] {line}")
                sys.stderr.flush()


def _wait(children: list[Child], fewest: int) -> list[int]:
    """Waits for all processes. Ends the others when workers fail that nobody will replace.

    Before the first commit every worker is needed; from then on `fewest`.
    """
    coordinator, *workers = children
    endings: queue.Queue[Child] = queue.Queue()

    def watch(child: Child) -> None:
        child.process.wait()
        endings.put(child)

    for child in children:
        threading.Thread(target=watch, args=(child,), daemon=True).start()
    stopping = False
    for _ in children:
        endings.get()
        alive = sum(worker.process.poll() is None or worker.process.returncode == 0 for worker in workers)
        needed = fewest if coordinator.committed.is_set() else len(workers)
        if alive < needed and coordinator.process.poll() is None and not stopping:
            stopping = True
            print(f"train_local: {alive} of {len(workers)} workers are left, {needed} are needed", file=sys.stderr)
            _terminate(children)
    for child in children:
        child.copier.join(timeout=5)
    return [child.process.returncode for child in children]


def _terminate(children: list[Child]) -> None:
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()


@contextlib.contextmanager
def _interruptible(children: list[Child]) -> Iterator[None]:
    """Passes SIGINT and SIGTERM on to all processes, and leaves none behind."""

    def forward(number: int, _frame: object) -> None:
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
                child.process.wait()


@contextlib.contextmanager
def _token_file(folder: Path) -> Iterator[Path]:
    """A join token for this job alone, readable by this user alone."""
    path = folder / "join.token"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_urlsafe())
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _result(run: RunConfig, workers: int, output: Path, wall: float) -> dict[str, object]:
    with contextlib.closing(open_folder(output / "state" / run.run_id, to_read=True)) as store:
        steps, facts = store.committed_steps(), store.facts()
        evaluations = [commit for commit in store.commits() if commit.kind == "evaluate"]
    last = evaluations[-1] if evaluations else None
    loss = last.loss if last else None
    result = {
        "task": run.task.name,
        "workers": workers,
        "steps": steps,
        "accuracy": round(last.num_correct / last.num_predictions, 4) if last and last.num_predictions else None,
        "loss": loss,
        "wall_s": round(wall, 1),
        "parameters_sha256": facts.get("final_parameters_sha256", ""),
    }
    if loss is not None and run.task.options.get("tokenizer") == "bytes":
        result["bits_per_byte"] = round(loss / math.log(2), 4)
    return result


if __name__ == "__main__":
    sys.exit(main())
