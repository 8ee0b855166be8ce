"""Measures how much of an exchange is hidden behind backward, from the timelines of real workers.

    python tests/bench/overlap.py [--workers 2] [--numel 25000000] [--layers 16] [--path grpc] [--keep]

A model of equal layers, one bucket each, computes by waiting, as a host waits for its accelerator. First it computes
nothing, which shows how long the exchange takes by itself; then --compute times as long, a third of it forward. Prints
one JSON object to standard output and progress to standard error; docs/benchmarks.md says how to read it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts import step_timeline
from scripts.step_timeline import BucketTimes
from tests.bench import processes, report
from tests.bench.processes import BenchFailed

PROGRAM = Path(__file__).with_name("overlap_worker.py")
WARM_UP = 2
"""Steps that don't count."""
GOAL_HIDDEN = 0.85
FORWARD_SHARE = 1 / 3
TIMEOUT = 600.0


@dataclass(frozen=True, kw_only=True)
class Case:
    workers: int
    numel: int
    layers: int
    steps: int
    path: str

    def __str__(self) -> str:
        return f"{self.numel:,} float32 in {self.layers} buckets {self.path}, {self.workers} workers"


def main() -> int:
    given, measured_on = _arguments(), report.hardware()
    case = Case(workers=given.workers, numel=given.numel, layers=given.layers, steps=given.steps, path=given.path)
    try:
        alone = measure(case, 0.0)
        exchange_s = exchange_of(alone)
        computing = measure(case, given.compute * exchange_s)
    except BenchFailed as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 1
    rows, samples = rows_of(case, given.compute, exchange_s, computing)
    result = report.report("overlap", rows, vars(given), samples, measured_on)
    if given.keep:
        print(f"kept in {report.keep(result)}", file=sys.stderr)
    print(json.dumps(result))
    return 0


Step = list[BucketTimes]


def measure(case: Case, compute_s: float) -> list[list[Step]]:
    """Returns for each worker the steps that count, as its timeline has them."""
    print(f"{case}: {WARM_UP} + {case.steps} steps that compute for {compute_s * 1e3:.1f} ms", file=sys.stderr)
    run = {
        "run_id": "bench",
        "min_workers": case.workers,
        "num_steps": WARM_UP + case.steps,
        "batch": {"samples": case.workers, "microbatches": case.workers},
        "optimizer": {"name": "sgd", "clip_norm": 0.0, "update": "device"},
        "audit_every": 0,
    }
    with tempfile.TemporaryDirectory() as name, processes.coordinator(Path(name), run) as served:
        flags = {
            "--coordinator": served.word(),
            "--run": json.dumps(run),
            "--numel": case.numel // case.layers,
            "--layers": case.layers,
            "--forward-s": compute_s * FORWARD_SHARE / case.layers,
            "--backward-s": compute_s * (1 - FORWARD_SHARE) / case.layers,
            "--path": case.path,
        }
        shared = [str(word) for pair in flags.items() for word in pair]
        folders = [Path(name) / f"timeline-{rank}" for rank in range(case.workers)]
        arguments = [[*shared, "--rank", str(rank), "--output", str(f)] for rank, f in enumerate(folders)]
        with processes.workers(PROGRAM, arguments, Path(name)) as started:
            processes.finish(started, TIMEOUT)
        found = [step_timeline.read_steps(folder / "timeline.jsonl") for folder in folders]
    return [[rows for step, rows in steps.items() if step >= WARM_UP] for steps in found]


def exchange_of(workers: Sequence[Sequence[Step]]) -> float:
    """Median time from the first bucket that is handed over to the last mean, of the slowest worker of each step."""
    return _median_of(workers, lambda rows: max(r.arrived for r in rows) - min(r.handed_over for r in rows))


def rows_of(case: Case, compute: float, exchange_s: float, workers: list[list[Step]]) -> tuple[list[dict], dict]:
    """Rows, and the numbers behind them."""
    exposed_s = _median_of(workers, lambda rows: step_timeline.overlap(rows).exposed)
    step_s = _median_of(workers, lambda rows: max(r.updating for r in rows) - min(r.began for r in rows))
    compute_s = _median_of(workers, lambda rows: rows[0].computed - rows[0].began)
    on_the_way_s = _median_of(workers, lambda rows: step_timeline.overlap(rows).exchange)
    what = f"compute {compute:g} x exchange, {case}"
    goal = 1 - GOAL_HIDDEN
    rows = [
        report.row(f"share of the exchange that is not hidden, {what}", exposed_s / exchange_s, "goal", goal, "", 1.0),
        report.row(f"exchange beside computing, {what}", on_the_way_s * 1e3, "alone", exchange_s * 1e3, "ms"),
        report.row(f"step without its update, {what}", step_s * 1e3, "computing", compute_s * 1e3, "ms"),
    ]
    samples = {
        "exchange_alone_ms": exchange_s * 1e3,
        "exposed_ms": exposed_s * 1e3,
        "hidden_share": 1 - exposed_s / exchange_s,
        "last_step": [step_timeline.text(steps[-1]).splitlines() for steps in workers],
    }
    return rows, samples


def _median_of(workers: Sequence[Sequence[Step]], value: Callable[[Step], float]) -> float:
    """The median over all steps of a value, of the worker for which it is largest."""
    return median(max(map(value, steps)) for steps in zip(*workers, strict=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of all layers")
    parser.add_argument("--layers", type=int, default=16, help="layers, each a bucket")
    parser.add_argument("--steps", type=int, default=12, help="steps that count")
    parser.add_argument("--compute", type=float, default=2.0, help="time of computing, in times of the exchange")
    parser.add_argument("--path", choices=("shm", "grpc"), default="grpc", help="how our gradients travel")
    parser.add_argument("--keep", action="store_true", help="also write the result to tests/bench/results")
    given = parser.parse_args()
    if min(given.workers, given.layers, given.steps) < 1 or given.numel < given.layers or given.compute <= 0:
        parser.error("--workers, --layers and --steps must be at least 1, and each layer needs an element")
    return given


if __name__ == "__main__":
    sys.exit(main())
