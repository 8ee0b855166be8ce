"""Measures what a step costs when there is nothing in it: a lease, one bucket of one element, a commit.

    python tests/bench/empty_step.py [--workers 2,8] [--steps 500] [--path grpc] [--profile 25] [--keep]

Real coordinator and worker processes. A step lasts from the last worker's commit of one step to that of the next; the
peer is one health check, the cheapest call that a gRPC server answers, made while nobody else calls. With --profile the
coordinator runs under cProfile, which makes it slower: rows are left out then, and standard error says where its time
went. Prints one JSON object to standard output and progress to standard error; docs/benchmarks.md says how to read it.
"""

import argparse
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from grpc_health.v1 import health_pb2, health_pb2_grpc

from ayni.channels import open_sync_channel
from tests.bench import processes, report
from tests.bench.processes import BenchFailed
from tests.support.coordinator import TOKEN

PROGRAM = Path(__file__).with_name("empty_worker.py")
WARM_UP = 20
"""Steps that don't count."""
GOALS_MS = {2: 2.0, 8: 4.0}
"""Median step by number of workers."""
TIMEOUT = 600.0
END_SECONDS = 60.0
CHECKS = 300
_IDLE = "<method 'poll' of 'select.epoll' objects>"


def main() -> int:
    given, measured_on = _arguments(), report.hardware()
    rows, samples = [], {}
    try:
        for workers in given.workers:
            result = measure(workers, given.steps, given.path, given.profile)
            samples[f"{workers} workers"] = result
            rows += [] if given.profile else rows_of(workers, result)
    except BenchFailed as error:
        print(f"empty_step: {error}", file=sys.stderr)
        return 1
    result = report.report("empty_step", rows, vars(given), samples, measured_on)
    if given.keep:
        print(f"kept in {report.keep(result)}", file=sys.stderr)
    print(json.dumps(result))
    return 0


def measure(workers: int, steps: int, path: str, profile: int) -> dict:
    """Returns the length of each step, that of a health check, and where the coordinator's time went, if asked for."""
    print(f"{workers} workers: {WARM_UP} + {steps} steps", file=sys.stderr)
    run = {"run_id": "bench", "min_workers": workers, "num_steps": WARM_UP + steps}
    with tempfile.TemporaryDirectory() as name:
        folder, stats = Path(name), Path(name) / "profile"
        with processes.coordinator(folder, run, profile=stats if profile else None) as served:
            address = served.word()
            check_s = health_check_seconds(address)
            arguments = [["--coordinator", address, "--rank", str(rank), "--path", path] for rank in range(workers)]
            with processes.workers(PROGRAM, arguments, folder) as started:
                commits = [worker["commits"] for worker in processes.finish(started, TIMEOUT)]
            served.end(END_SECONDS)
        found = {"step_ms": step_ms(commits), "health_check_ms": round(check_s * 1e3, 4)}
        return {**found, "profile": breakdown(stats, profile, WARM_UP + steps)} if profile else found


def step_ms(commits: Sequence[Sequence[float]]) -> list[float]:
    """Returns the length of each step that counts, from each worker's moments of commit."""
    ends = [max(moments) for moments in zip(*commits, strict=True)]
    return [round((after - before) * 1e3, 4) for before, after in pairwise(ends[WARM_UP - 1 :])]


def rows_of(workers: int, result: dict) -> list[dict]:
    """Rows about one number of workers."""
    lengths, case = result["step_ms"], f"empty step, {workers} workers"
    p50, p99 = median(lengths), quantiles(lengths, n=100, method="inclusive")[98]
    check = result["health_check_ms"]
    goal = GOALS_MS.get(workers)
    against_goal = [report.row(f"{case}, p50", p50, "goal", goal, "ms", 1.0)] if goal else []
    return [
        *against_goal,
        report.row(f"{case}, p50", p50, "one health check", check, "ms"),
        report.row(f"{case}, p99", p99, "one health check", check, "ms"),
    ]


def health_check_seconds(address: str) -> float:
    """Median time of a call that does nothing."""
    with open_sync_channel(address, TOKEN) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        seconds = []
        for _ in range(CHECKS):
            start = time.perf_counter()
            stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            seconds.append(time.perf_counter() - start)
    return median(seconds)


def breakdown(path: Path, most: int, steps: int) -> list[dict]:
    """Returns the functions that took the most time of their own, and prints them as a table."""
    entries = []
    for (file, line, function), (_, calls, own, cumulative, _) in pstats.Stats(str(path)).stats.items():  # type: ignore[attr-defined]
        if function == _IDLE:
            continue
        where = f"{'/'.join(Path(file).parts[-2:])}:{line} {function}" if line else function
        ms = {"own_ms": own * 1e3 / steps, "cumulative_ms": cumulative * 1e3 / steps}
        entries.append({"function": where, "calls": round(calls / steps, 2), **{k: round(v, 4) for k, v in ms.items()}})
    entries.sort(key=lambda entry: -entry["own_ms"])
    print("for each step:  own ms  with callees ms  calls", file=sys.stderr)
    for entry in entries[:most]:
        numbers = f"{entry['own_ms']:22.4f} {entry['cumulative_ms']:16.4f} {entry['calls']:6.1f}"
        print(f"{numbers}  {entry['function']}", file=sys.stderr)
    return entries[:most]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,8", help="worker processes, with commas (default: 2,8)")
    parser.add_argument("--steps", type=int, default=500, help="steps that count")
    parser.add_argument("--path", choices=("shm", "grpc"), default="shm", help="how our gradients travel")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="show the N functions that took most time")
    parser.add_argument("--keep", action="store_true", help="also write the result to tests/bench/results")
    given = parser.parse_args()
    try:
        given.workers = [int(number) for number in given.workers.split(",")]
    except ValueError:
        parser.error("--workers must be whole numbers")
    if min(given.workers) < 1 or given.steps < 2 or given.profile < 0:
        parser.error("--workers must be at least 1, --steps at least 2")
    return given


if __name__ == "__main__":
    sys.exit(main())
