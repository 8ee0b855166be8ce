"""Measures one case of `scale.py`: a coordinator process, light workers in a few processes, some steps."""

import itertools
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.bench import processes
from tests.support.coordinator import CoordinatorProcess, coordinator

PROGRAM = Path(__file__).with_name("scale_crew.py")
CREWS = 2
"""Processes that the workers are in."""
WARM_UP = 5
"""Steps that don't count."""
TIMEOUT = 900.0
QUIET_CORES = 0.2
"""What other programs may take of a machine that counts as quiet."""
_REPEATED = ("p10_s", "p50_s", "p99_s", "coordinator_cpu_s", "workers_cpu_s", "other_load_cores")
_STEPS_OF_ALL, _FEWEST, _MOST = 1500, 40, 300


@dataclass(frozen=True, kw_only=True)
class Case:
    """So many workers, and so many elements; 0 of them: only leases and commits."""

    workers: int
    elements: int
    beats: int = 0
    """Heartbeats of each worker before the first step. Only in a case of one crew they are all that goes on then."""

    @property
    def steps(self) -> int:
        """Steps that count."""
        return min(_MOST, max(_FEWEST, _STEPS_OF_ALL // self.workers))

    def __str__(self) -> str:
        kinds = {0: "lease and commit", 1: "control"}
        return f"{kinds.get(self.elements, f'{4e-6 * self.elements:g} MB')}, {self.workers} workers"


def measure_all(cases: Sequence[Case], repeat: int) -> list[dict[str, Any]]:
    """Measures all cases, one after the other, as often as that.

    Raises:
        BenchFailed: a process failed.
    """
    rounds = [[_said(case, _once(case)) for case in cases] for _ in range(repeat)]
    return [_best(runs) for runs in zip(*rounds, strict=True)]


def _best(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the run of a case that counts: the one of the least processor time, since what disturbs only adds to it.

    `step_s` is what a step takes that nothing disturbs: on a busy machine quick steps show that, not the usual ones.
    """
    best = min(runs, key=lambda run: run["coordinator_cpu_s"] + run["workers_cpu_s"])
    step_s = min(run["p50_s" if run["other_load_cores"] < QUIET_CORES else "p10_s"] for run in runs)
    return {**best, "step_s": step_s, "repeats": {name: [run[name] for run in runs] for name in _REPEATED}}


def _once(case: Case) -> dict[str, Any]:
    began, busy, ours = time.monotonic(), _busy_seconds(), _own_seconds()
    with tempfile.TemporaryDirectory() as name, coordinator(Path(name), _run(case)) as served:
        before = time.clock_gettime(~served.process.pid << 3 | 2)
        with processes.workers(PROGRAM, _arguments(case, served), Path(name)) as started:
            crews = processes.finish(started, TIMEOUT)
    seconds = time.monotonic() - began
    others = (_busy_seconds() - busy) - (_own_seconds() - ours)
    return {
        "workers": case.workers,
        "elements": case.elements,
        **_times(crews[0]["marks"][WARM_UP:]),
        "workers_cpu_s": sum(_per_step(crew["marks"][WARM_UP:], "cpu_seconds") for crew in crews),
        "join_cpu_s": crews[0]["joined"]["coordinator_cpu_seconds"] - before,
        "beat_cpu_s": _beat_s(case, crews[0]),
        "resident_bytes": crews[0]["resident_bytes"],
        "idle_bytes": crews[0]["idle_bytes"],
        "other_load_cores": round(max(0.0, others / seconds), 3),
    }


def _times(marks: list[dict[str, float]]) -> dict[str, float]:
    steps = [late["seconds"] - early["seconds"] for early, late in itertools.pairwise(marks)]
    return {
        "p10_s": quantiles(steps, n=10, method="inclusive")[0],
        "p50_s": median(steps),
        "p99_s": quantiles(steps, n=100, method="inclusive")[98],
        "coordinator_cpu_s": _per_step(marks, "coordinator_cpu_seconds"),
    }


def _per_step(marks: list[dict[str, float]], name: str) -> float:
    return (marks[-1][name] - marks[0][name]) / (len(marks) - 1)


def _beat_s(case: Case, crew: dict[str, Any]) -> float:
    """Returns the coordinator's processor time for one heartbeat; 0 where there were none."""
    spent = crew["beaten"]["coordinator_cpu_seconds"] - crew["joined"]["coordinator_cpu_seconds"]
    return spent / (case.workers * case.beats) if case.beats else 0.0


def _run(case: Case) -> dict[str, Any]:
    """A run in which nobody is late or lost, however slow the machine is."""
    return {
        "run_id": "scale",
        "num_steps": WARM_UP + 1 + case.steps,
        "min_workers": case.workers,
        "max_workers": case.workers,
        "batch": {"samples": case.workers, "microbatches": case.workers},
        "stragglers": {"shortest": "100s", "longest": "100s"},
        "timeouts": {"lease": "200s", "accept": "201s"},
    }


def _arguments(case: Case, served: CoordinatorProcess) -> list[list[str]]:
    crews = 1 if case.beats else min(CREWS, case.workers)
    firsts = [case.workers * crew // crews for crew in range(crews + 1)]
    common = {
        "--coordinator": served.address,
        "--coordinator-pid": served.process.pid,
        "--workers": case.workers,
        "--elements": case.elements,
        "--steps": WARM_UP + 1 + case.steps,
        "--beats": case.beats,
    }
    shared = [str(word) for pair in common.items() for word in pair]
    pairs = itertools.pairwise(firsts)
    return [[*shared, "--first", str(first), "--count", str(end - first)] for first, end in pairs]


def _said(case: Case, run: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{case}: p50 {1e3 * run['p50_s']:.3g} ms, p99 {1e3 * run['p99_s']:.3g} ms, coordinator's processor "
        f"{1e3 * run['coordinator_cpu_s']:.3g} ms a step; other programs took {run['other_load_cores']:g} cores",
        file=sys.stderr,
    )
    return run


def _busy_seconds() -> float:
    """Processor time of all programs of the machine."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Processor time of this program and of the processes that it has waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime
