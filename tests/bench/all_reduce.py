"""Measures our all-reduce against Gloo's on the same processes, and against a copy and a bare socket.

    python tests/bench/all_reduce.py --workers 2 --numel 1378050 [--repeat 20] [--wire float32] [--keep]

Without --workers and --numel it measures 1,378,050 and 25,000,000 elements with 2 and 4 workers. Prints one JSON object
to standard output and progress to standard error; docs/benchmarks.md says how to read it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import processes, report
from tests.support.coordinator import coordinator

PROGRAM = Path(__file__).with_name("exchange_worker.py")
WORKERS, NUMELS = (2, 4), (1_378_050, 25_000_000)
WARM_UP = 2
"""Repetitions that don't count."""
TIMEOUT = 600.0
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    workers: int
    numel: int
    repeat: int
    wire: str

    def __str__(self) -> str:
        return f"{self.numel:,} {self.wire}, {self.workers} workers"


def main() -> int:
    given, measured_on = _arguments(), report.hardware()
    rows, samples = [], {}
    try:
        for case in _cases(given):
            results = measure(case)
            rows += rows_of(case, results)
            samples[str(case)] = results
    except processes.BenchFailed as error:
        print(f"all_reduce: {error}", file=sys.stderr)
        return 1
    arguments = {"workers": given.workers, "numel": given.numel, "repeat": given.repeat, "wire": given.wire}
    result = report.report("all_reduce", rows, arguments, samples, measured_on)
    if given.keep:
        print(f"kept in {report.keep(result)}", file=sys.stderr)
    print(json.dumps(result))
    return 0


def measure(case: Case) -> list[dict]:
    """What each worker printed.

    Raises:
        BenchFailed: a worker failed, or two hold different means.
    """
    print(f"{case}: {WARM_UP} + {case.repeat} repetitions", file=sys.stderr)
    steps = WARM_UP + case.repeat
    run = {"min_workers": case.workers, "num_steps": steps, "wire_type": case.wire, "run_id": "bench"}
    with tempfile.TemporaryDirectory() as name, coordinator(Path(name), run) as served:
        common = {
            "--coordinator": served.address,
            "--coordinator-pid": served.process.pid,
            "--store": Path(name) / "store",
            "--workers": case.workers,
            "--numel": case.numel,
            "--warm-up": WARM_UP,
            "--repeat": case.repeat,
            "--wire": case.wire,
        }
        shared = [str(word) for pair in common.items() for word in pair]
        arguments = [[*shared, "--rank", str(rank)] for rank in range(case.workers)]
        with processes.workers(PROGRAM, arguments, Path(name)) as started:
            results = processes.finish(started, TIMEOUT)
    if len({result["mean_sha256"] for result in results}) > 1:
        raise processes.BenchFailed(f"{case}: the workers hold different means")
    return results


def rows_of(case: Case, results: list[dict]) -> list[dict]:
    """Rows about one case. A repetition took as long as its slowest worker, and the processor time of all."""
    seconds = {name: _slowest(results, name) for name in ("ours", "gloo", "copy", "tcp")}
    cpu = {name: _cpu(results, name) for name in ("ours", "gloo", "tcp")}
    commits = zip(*(result["commit_seconds"] for result in results), strict=True)
    commit = median(max(seconds) for seconds in commits)
    vector_gb = case.numel * 4 / 1e9
    repeated_gb = vector_gb * results[0]["repeats"]
    socket_gb = 2 * case.workers * case.numel * ITEM_BYTES[case.wire] / 1e9
    ours, gloo = seconds["ours"] * 1e3, seconds["gloo"] * 1e3
    rate, gradient_gb = socket_gb / seconds["ours"], case.workers * vector_gb
    return [
        report.row(f"all-reduce of {case}", ours, "torch gloo", gloo, "ms"),
        report.row(f"all-reduce and commit of {case}", ours + commit * 1e3, "torch gloo", gloo, "ms"),
        report.row(f"bytes through sockets, {case}", rate, "tcp loopback", repeated_gb / seconds["tcp"], "GB/s"),
        report.row(f"bytes through sockets, {case}", rate, "numpy copy", repeated_gb / seconds["copy"], "GB/s"),
        report.row(
            f"processor time per GB of gradients, {case}",
            cpu["ours"] / gradient_gb,
            "torch gloo",
            cpu["gloo"] / gradient_gb,
            "s/GB",
        ),
        report.row(
            f"processor time per GB through sockets, {case}",
            cpu["ours"] / socket_gb,
            "tcp loopback",
            cpu["tcp"] / repeated_gb,
            "s/GB",
        ),
    ]


def _slowest(results: list[dict], name: str) -> float:
    return median(max(seconds) for seconds in _repetitions(results, name, "seconds"))


def _cpu(results: list[dict], name: str) -> float:
    """Processor time of all workers and, with ours, of the coordinator."""
    workers = [sum(seconds) for seconds in _repetitions(results, name, "cpu_seconds")]
    coordinator_too = results[0]["samples"][name]["coordinator_cpu_seconds"] if name == "ours" else [0.0] * len(workers)
    return median(worker + its for worker, its in zip(workers, coordinator_too, strict=True))


def _repetitions(results: list[dict], name: str, value: str) -> Iterator[tuple[float, ...]]:
    """Yields the workers' values of each repetition."""
    return zip(*(result["samples"][name][value] for result in results), strict=True)


def _cases(given: argparse.Namespace) -> list[Case]:
    return [
        Case(
            workers=workers,
            numel=numel,
            repeat=given.repeat or (20 if numel < 10_000_000 else 8),
            wire=given.wire,
        )
        for numel in ([given.numel] if given.numel else NUMELS)
        for workers in ([given.workers] if given.workers else WORKERS)
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=0, help="worker processes, 2 or more (default: 2, then 4)")
    parser.add_argument("--numel", type=int, default=0, help="elements of the vector (default: 1378050, then 25000000)")
    parser.add_argument("--repeat", type=int, default=0, help="repetitions that count (default: by size)")
    parser.add_argument("--wire", choices=list(ITEM_BYTES), default="float32", help="element type on our wire")
    parser.add_argument("--keep", action="store_true", help="also write the result to tests/bench/results")
    given = parser.parse_args()
    if given.workers == 1 or min(given.workers, given.numel, given.repeat) < 0:
        parser.error("--workers must be at least 2, --numel and --repeat at least 1")
    return given


if __name__ == "__main__":
    sys.exit(main())
