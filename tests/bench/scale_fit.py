"""What the measurements of `scale.py` show: rows, and whether a cost grows with the square of the workers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.bench import report
from tests.bench.scale_measure import Case

CHUNK_BYTES, WINDOW_CHUNKS, TRANSPORT_BYTES = 1 << 20, 8, 16 << 20
MEMORY_BOUND = 2 * (WINDOW_CHUNKS + 1) * CHUNK_BYTES + TRANSPORT_BYTES
"""Bytes of the coordinator for each worker: both windows, and what gRPC holds (docs/benchmarks.md, memory.py)."""
LARGEST_SQUARE = 0.1
"""Part of a cost that may come from the square before it counts as quadratic."""
TOLERANCE = 1.15
_LEAST_WORKERS, _FEWEST_POINTS = 16, 4

Measured = dict[str, Any]


def fit(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Fits constant + linear + square to (workers, seconds), each by its relative error.

    Returns:
        `verdict`, a sentence; and where there are enough points the three seconds, `square_error_s`, the square's
        standard error, and `square_part`, its part of the cost at the most workers.
    """
    if len(points) < _FEWEST_POINTS or points[-1][0] < _LEAST_WORKERS:
        return {"verdict": f"too few workers (at most {points[-1][0]}) to tell a square from a line"}
    workers, seconds = np.array(points, np.float64).T
    rows = np.stack([np.ones_like(workers), workers, workers**2], 1) / seconds[:, None]
    found, residual, *_ = np.linalg.lstsq(rows, np.ones_like(seconds), rcond=None)
    variance = float(residual[0]) / (len(points) - rows.shape[1])
    error = float(np.sqrt(variance * np.linalg.inv(rows.T @ rows)[2, 2]))
    part = float(found[2] * workers[-1] ** 2 / seconds[-1])
    names = ("constant_s", "linear_s", "square_s")
    return {
        **dict(zip(names, found.tolist(), strict=True)),
        "square_error_s": error,
        "square_part": part,
        "verdict": _verdict(points[-1][0], float(found[2]), error, part),
    }


def _verdict(most: int, square: float, error: float, part: float) -> str:
    if square > 2 * error and part > LARGEST_SQUARE:
        return f"quadratic: {part:.0%} of the cost with {most} workers comes from the square"
    return (
        f"no quadratic term: {part:.0%} of the cost with {most} workers, within its error or below {LARGEST_SQUARE:.0%}"
    )


def fits_of(cases: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Returns the fit of the coordinator's processor time of a step for each length of vector, and of joining."""
    series = {_kind(group[0]): _points(group, "coordinator_cpu_s") for group in _groups(cases)}
    shortest = _groups(cases)[0]
    return {name: fit(points) for name, points in {**series, "joining": _points(shortest, "join_cpu_s")}.items()}


def rows_of(cases: Sequence[Measured], beat_s: float) -> list[dict]:
    """Returns a row for each question that the cases answer."""
    rows = [line for group in _groups(cases) for line in _group_rows(group)]
    shortest = _groups(cases)[0]
    rows.append(_each(shortest, "joining", "join_cpu_s"))
    rows.append(report.row("heartbeat", 1e3 * beat_s, "lease and commit", _marginal_ms(shortest), "ms"))
    return rows


def _group_rows(group: Sequence[Measured]) -> list[dict]:
    kind = _kind(group[0])
    workers, resident = np.array(_points(group, "resident_bytes"), np.float64).T
    slope = float(np.polyfit(workers, resident, 1)[0])
    return [
        _each(group, f"{kind}: coordinator's processor", "coordinator_cpu_s"),
        *_square(group),
        report.row(f"{kind}: memory for each worker", slope / 2**20, "bound", MEMORY_BOUND / 2**20, "MiB", 1.0),
        *(_step(case) for case in group),
    ]


def _square(group: Sequence[Measured]) -> list[dict]:
    """How much of the cost comes from the square; nothing where too few points say anything of it."""
    most, found = group[-1], fit(_points(group, "coordinator_cpu_s"))
    if "square_s" not in found:
        return []
    case = f"{_kind(most)}: square at {most['workers']} workers"
    square_ms, whole_ms = 1e3 * found["square_s"] * most["workers"] ** 2, 1e3 * most["coordinator_cpu_s"]
    return [report.row(case, square_ms, "all of it", whole_ms, "ms", LARGEST_SQUARE)]


def _each(group: Sequence[Measured], what: str, name: str) -> dict:
    """How a cost for each worker compares between the most and the fewest workers."""
    many, few = group[-1], group[0]
    ours, theirs = (1e3 * case[name] / case["workers"] for case in (many, few))
    case = f"{what} for each of {many['workers']} workers"
    return report.row(case, ours, f"each of {few['workers']}", theirs, "ms", 1.0)


def _step(case: Measured) -> dict:
    label = str(Case(workers=case["workers"], elements=case["elements"]))
    return report.row(f"{label}: p99 of a step", 1e3 * case["p99_s"], "p50", 1e3 * case["p50_s"], "ms")


def prediction_rows(lines: Sequence[dict[str, Any]]) -> list[dict]:
    """Returns a row for each case that scripts/simulate.py was asked about."""
    return [_prediction(line) for line in lines]


def _prediction(line: dict[str, Any]) -> dict:
    label = str(Case(workers=line["workers"], elements=line["elements"]))
    note = ", which no cost was taken from" if line["held_out"] else ""
    row = report.row(f"{label}: step{note}", 1e3 * line["measured_s"], "simulated", 1e3 * line["predicted_s"], "ms")
    return {**row, "goal": TOLERANCE, "met": 1 / TOLERANCE <= row["ratio"] <= TOLERANCE}


def _groups(cases: Sequence[Measured]) -> list[list[Measured]]:
    """Returns the cases by length of vector, each with its workers rising; two or more numbers of workers each."""
    lengths = sorted({case["elements"] for case in cases})
    groups = [sorted((c for c in cases if c["elements"] == length), key=_workers) for length in lengths]
    return [group for group in groups if len(group) > 1]


def _kind(case: Measured) -> str:
    return str(Case(workers=1, elements=case["elements"])).partition(",")[0]


def _points(group: Sequence[Measured], name: str) -> list[tuple[int, float]]:
    return [(case["workers"], case[name]) for case in group]


def _marginal_ms(group: Sequence[Measured]) -> float:
    few, many = group[0], group[-1]
    return 1e3 * (many["coordinator_cpu_s"] - few["coordinator_cpu_s"]) / (many["workers"] - few["workers"])


def _workers(case: Measured) -> int:
    return case["workers"]
