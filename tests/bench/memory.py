"""Measures the coordinator's memory while one worker is late, and while one stands still halfway.

    python tests/bench/memory.py [--workers 4] [--numel 100000000] [--keep]

Without --workers and --numel it measures 25 and 100 million elements with 2 and 4 workers. Prints one JSON object to
standard output and progress to standard error; docs/benchmarks.md says how to read it.
"""

import argparse
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ayni.channels import open_sync_channel
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import coordinator_pb2_grpc
from tests.bench import processes, report
from tests.bench.processes import BenchFailed, WorkerProcess
from tests.support.coordinator import TOKEN, CoordinatorProcess, coordinator

PROGRAM = Path(__file__).with_name("delayed_worker.py")
WORKERS, NUMELS = (2, 4), (25_000_000, 100_000_000)
STEPS = ("together", "late", "halfway")
TIMEOUT = 300.0
STILL_SECONDS = 1.0
"""Without a byte for this long, everybody waits for the delayed worker."""
CHUNK_BYTES, WINDOW_CHUNKS = 1 << 20, 8
TRANSPORT_BYTES = 16 << 20
"""Frames of one worker inside gRPC, on their way in and out."""
ALLOCATOR_BYTES = 64 << 20
"""Freed memory that the allocator keeps (its top pad; see `ayni.rpc.tune_allocator`)."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Most bytes during the steps: of the whole process above its idle size, and held by the reducer."""

    process_bytes: int
    reducer_bytes: int


@dataclass(frozen=True)
class Stage:
    """One case in progress."""

    served: CoordinatorProcess
    stub: coordinator_pb2_grpc.CoordinatorServiceStub
    workers: list[WorkerProcess]

    def snapshot(self) -> pb.RunSnapshot:
        return self.stub.GetRun(pb.GetRunRequest(), timeout=20).snapshot

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            processes.check(self.workers)
            if time.monotonic() > deadline:
                raise BenchFailed(f"waited {TIMEOUT:g} s in vain until {what}\n{self.served.read_log()}")
            select.select([], [], [], 0.05)

    def wait_for_commit(self, steps: int) -> None:
        self.wait(f"{steps} steps are committed", lambda: self.snapshot().committed_steps == steps)

    def wait_until_still(self) -> None:
        """Waits until no worker gets on."""
        seen, since = -1, time.monotonic()

        def still() -> bool:
            nonlocal seen, since
            received = self.snapshot().received_bytes
            if received != seen:
                seen, since = received, time.monotonic()
            return time.monotonic() - since > STILL_SECONDS

        self.wait("the workers wait for the delayed one", still)


def main() -> int:
    given, measured_on = _arguments(), report.hardware()
    rows, samples = [], {}
    try:
        for numel in [given.numel] if given.numel else NUMELS:
            for count in [given.workers] if given.workers else WORKERS:
                peaks = measure(count, numel)
                rows += rows_of(count, numel, peaks)
                samples[f"{numel:,} float32, {count} workers"] = asdict(peaks)
    except BenchFailed as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1
    result = report.report("memory", rows, {"workers": given.workers, "numel": given.numel}, samples, measured_on)
    if given.keep:
        print(f"kept in {report.keep(result)}", file=sys.stderr)
    print(json.dumps(result))
    return 0


def measure(count: int, numel: int) -> Peaks:
    print(f"{numel:,} float32, {count} workers: {', '.join(STEPS)}", file=sys.stderr)
    run = {"run_id": "bench", "min_workers": count, "chunk_bytes": CHUNK_BYTES, "window_chunks": WINDOW_CHUNKS}
    with tempfile.TemporaryDirectory() as name, coordinator(Path(name), run) as served:
        common = {"--coordinator": served.address, "--workers": count, "--numel": numel, "--steps": len(STEPS)}
        shared = [str(word) for pair in common.items() for word in pair]
        arguments = [[*shared, "--rank", str(rank)] for rank in range(count)]
        with (
            processes.workers(PROGRAM, arguments, Path(name)) as started,
            open_sync_channel(served.address, TOKEN) as channel,
        ):
            return _peaks(Stage(served, coordinator_pb2_grpc.CoordinatorServiceStub(channel), started))


def rows_of(count: int, numel: int, peaks: Peaks) -> list[dict]:
    """Both peaks against what holding every worker's whole vector would take."""
    case, held = f"{numel:,} float32, {count} workers", count * numel * 4
    window = (WINDOW_CHUNKS + 1) * CHUNK_BYTES
    # The process holds two windows for each worker: what waits to be added, and what waits to be fetched.
    bounds = {"reducer": count * window, "process": count * (2 * window + TRANSPORT_BYTES) + ALLOCATOR_BYTES}
    measured = {"reducer": peaks.reducer_bytes, "process": peaks.process_bytes}
    return [
        report.row(f"coordinator's {part}, {case}", measured[part], "workers x model", held, "bytes", bound / held)
        for part, bound in bounds.items()
    ]


def _peaks(stage: Stage) -> Peaks:
    pid = stage.served.process.pid
    stage.wait("all workers have joined", lambda: stage.snapshot().state == pb.RUN_STATE_RUNNING)
    idle = _status_bytes(pid, "VmRSS")
    for step, kind in enumerate(STEPS, start=1):
        _begin(stage, kind)
        stage.wait_for_commit(step)
    return Peaks(process_bytes=_status_bytes(pid, "VmHWM") - idle, reducer_bytes=stage.snapshot().reducer_peak_bytes)


def _begin(stage: Stage, kind: str) -> None:
    """Lets the workers begin a step, and frees the delayed one once all others wait for it."""
    delayed, *others = stage.workers
    if kind != "late":
        delayed.tell("go" if kind == "together" else "halfway")
    for worker in others:
        worker.tell("go")
    if kind == "late":
        stage.wait_until_still()
        delayed.tell("go")
    elif kind == "halfway":
        stage.wait("the delayed worker has stopped itself", lambda: _process_state(delayed.pid) == "T")
        stage.wait_until_still()
        os.kill(delayed.pid, signal.SIGCONT)


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=0, help="worker processes, 2 or more (default: 2, then 4)")
    parser.add_argument("--numel", type=int, default=0, help="elements of the vector (default: 25 and 100 million)")
    parser.add_argument("--keep", action="store_true", help="also write the result to tests/bench/results")
    given = parser.parse_args()
    if given.workers == 1 or min(given.workers, given.numel) < 0:
        parser.error("--workers must be at least 2, --numel at least 1")
    return given


if __name__ == "__main__":
    sys.exit(main())
