"""What each thing costs, from a file of measurements that `tests/bench/scale.py` wrote.

Processor times are sums of costs, so the costs come out of least squares in which every case counts by its relative
error and no cost is below 0. The two waits, for the disk and for a message to be noticed, are those with which the
simulated steps take as long as the measured ones. Cases that `held_out` names have no part in either, and show what
the costs are worth.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.simulate_scenario import Bench, Costs, Scenario, Share
from scripts.simulate_steps import Outcome
from scripts.simulate_topologies import simulate

KEPT = Path(__file__).with_name("simulate_calibration.json")
HELD_OUT_WORKERS = (4, 32)
_SQUARES_FROM = 32
"""Workers from which on a cost for each pair of workers shows."""
_WAITS_UP_TO = 8
"""Workers; with more of them the coordinator is never idle, and waits do not show."""
_ROUNDS = 6
_STEP_S = 1e-5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What was measured with so many workers and elements, a step.

    Attributes:
        workers: light ones.
        elements: of the vector; 0: only leases and commits.
        step_s: from one commit to the next, where nothing else disturbs it.
        coordinator_cpu_s: processor time of the coordinator.
        workers_cpu_s: processor time of all workers together.
        bench: what they ran on.
    """

    workers: int
    elements: int
    step_s: float
    coordinator_cpu_s: float
    workers_cpu_s: float
    bench: Bench

    @property
    def scenario(self) -> Scenario:
        """The same to be simulated."""
        return Scenario(workers=self.workers, elements=self.elements, bench=self.bench)

    @property
    def is_held_out(self) -> bool:
        """Whether it has no part in the costs."""
        return self.workers in HELD_OUT_WORKERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The measurements of one machine, and the costs that follow."""

    cases: tuple[Case, ...]
    costs: Costs
    made_on: str


def read(path: Path) -> Calibration:
    """Reads a file of measurements.

    Raises:
        OSError: it can't be read.
        ValueError: it is no such file, or has too few cases.
    """
    text = path.read_text(encoding="utf-8")
    try:
        return calibration_of(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def calibration_of(result: dict[str, Any]) -> Calibration:
    """Returns what a result of `tests/bench/scale.py` holds.

    Raises:
        ValueError: it is no such result, or has too few cases.
    """
    try:
        samples = result["samples"]
        bench = Bench(cores=samples["cores"], crews=samples["crews"])
        cases = tuple(_case(line, bench) for line in samples["cases"])
        made_on = f"{result['hardware']['processor']}, {samples['cores']} cores, commit {result['commit']}"
        beat_s = float(samples["beat_cpu_s"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no result of tests/bench/scale.py: {error!r}") from error
    return Calibration(cases=cases, costs=fit(cases, beat_s), made_on=made_on)


def fit(cases: Sequence[Case], beat_s: float) -> Costs:
    """Returns the costs.

    Raises:
        ValueError: there are too few cases.
    """
    costs = replace(processor_costs(cases), beat_s=beat_s)
    few = [case for case in cases if not case.is_held_out and case.workers <= _WAITS_UP_TO]
    return _with_waits(few, costs)


def processor_costs(cases: Sequence[Case]) -> Costs:
    """Returns what takes processor time.

    Raises:
        ValueError: there are too few cases.
    """
    fitted = [case for case in cases if not case.is_held_out]
    if len(fitted) < 6 or len({case.workers for case in fitted}) < 2:
        raise ValueError(
            f"{len(fitted)} cases are too few to tell costs from: measure without a vector, with one of 1 element and "
            "with a longer one, each with two numbers of workers or more"
        )
    coordinator = _share(fitted, lambda case: case.coordinator_cpu_s, squares=True)
    worker = _share(fitted, lambda case: case.workers_cpu_s, squares=False)
    return Costs(coordinator=coordinator, worker=worker)


def _share(cases: Sequence[Case], measured: Callable[[Case], float], *, squares: bool) -> Share:
    has_long = any(case.scenario.in_chunks > 1 for case in cases)
    has_squares = squares and max(case.workers for case in cases) >= _SQUARES_FROM
    names = ["commit_s", "stream_s", "byte_s", *(["chunk_s"] if has_long else []), *(["step_s"] if squares else [])]
    names += ["commit_square_s", "stream_square_s"] if has_squares else []
    rows = np.array([[_feature(case, name) for name in names] for case in cases])
    values = np.array([measured(case) for case in cases])
    costs = non_negative(rows / values[:, None], np.ones(len(cases)))
    return Share(**dict(zip(names, costs.tolist(), strict=True)))


def _feature(case: Case, name: str) -> float:
    """Returns how often a case has a cost."""
    streams = case.workers if case.elements else 0
    return {
        "step_s": 1.0,
        "commit_s": case.workers,
        "stream_s": streams,
        "chunk_s": case.workers * case.scenario.in_chunks,
        "byte_s": 4.0 * case.workers * case.elements,
        "commit_square_s": case.workers**2,
        "stream_square_s": streams * case.workers,
    }[name]


def non_negative(rows: Floats, values: Floats) -> Floats:
    """Returns the least-squares solution; what comes out negative is left out, the most negative first."""
    kept = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, kept], values, rcond=None)[0]
        if not kept or found.min() >= 0:
            solution = np.zeros(rows.shape[1])
            solution[kept] = found
            return solution
        kept.pop(int(found.argmin()))


def _with_waits(cases: Sequence[Case], costs: Costs) -> Costs:
    """Finds both waits by Gauss-Newton on the relative errors of the steps' times."""
    waits = np.zeros(2)
    for _ in range(_ROUNDS):
        now = _errors(cases, costs, waits)
        slopes = np.stack([(_errors(cases, costs, waits + move) - now) / _STEP_S for move in _STEP_S * np.eye(2)], 1)
        waits = np.maximum(0.0, waits - np.linalg.lstsq(slopes, now, rcond=None)[0])
    return replace(costs, store_s=float(waits[0]), hop_s=float(waits[1]))


def _errors(cases: Sequence[Case], costs: Costs, waits: Floats) -> Floats:
    tried = replace(costs, store_s=float(waits[0]), hop_s=float(waits[1]))
    return np.array([simulate(case.scenario, tried).step_s / case.step_s - 1 for case in cases])


def _case(line: dict[str, Any], bench: Bench) -> Case:
    return Case(
        workers=int(line["workers"]),
        elements=int(line["elements"]),
        step_s=float(line["step_s"]),
        coordinator_cpu_s=float(line["coordinator_cpu_s"]),
        workers_cpu_s=float(line["workers_cpu_s"]),
        bench=bench,
    )


def predictions(calibration: Calibration) -> list[tuple[Case, Outcome]]:
    """Returns every measured case, simulated."""
    return [(case, simulate(case.scenario, calibration.costs)) for case in calibration.cases]
