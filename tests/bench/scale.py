"""Measures what the coordinator costs with many workers: processor time, memory, and how long an empty step takes.

    python tests/bench/scale.py [--workers 2,4,8,16,32,64,128] [--repeat 3] [--keep] [--calibrate]

Light workers, many in one process, compute nothing: they take leases and commit; contribute a vector of one element as
well; contribute 1 MB. Prints one JSON object to standard output and progress to standard error; docs/scaling.md says
how to read it. --calibrate also writes the measurements to where scripts/simulate.py reads what things cost.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.simulate_costs import HELD_OUT_WORKERS, KEPT, calibration_of
from scripts.simulate_report import reproduced
from tests.bench import report
from tests.bench.processes import BenchFailed
from tests.bench.scale_fit import fits_of, prediction_rows, rows_of
from tests.bench.scale_measure import CREWS, Case, measure_all

WORKERS = (2, 4, 8, 16, 32, 64, 128)
ELEMENTS = (0, 1, 250_000)
LONG_ELEMENTS = 2_000_000
"""8 MB, with few workers: what a chunk costs, and whether that carries over to another number of workers."""
FEW = 4
BEATS = 300
"""Heartbeats of each worker, in a case of their own."""


def main() -> int:
    given, measured_on = _arguments(), report.hardware()
    try:
        cases = measure_all(_cases(given.workers), given.repeat)
        beats = measure_all([Case(workers=given.workers[0], elements=0, beats=BEATS)], given.repeat)
    except BenchFailed as error:
        print(f"scale: {error}", file=sys.stderr)
        return 1
    beat_s = beats[0]["beat_cpu_s"]
    samples = {"cases": cases, "beat_cpu_s": beat_s, "cores": measured_on["cores"], "crews": CREWS}
    arguments = {"workers": given.workers, "repeat": given.repeat}
    result = report.report("scale", rows_of(cases, beat_s), arguments, samples, measured_on)
    _predict(result)
    for path in [*([report.keep(result)] if given.keep else []), *([_calibrate(result)] if given.calibrate else [])]:
        print(f"kept in {path}", file=sys.stderr)
    print(json.dumps(result))
    return 0


def _predict(result: dict[str, Any]) -> None:
    """Adds what scripts/simulate.py says of the same cases, with costs that are taken from them."""
    calibration = calibration_of(result)
    lines = reproduced(calibration)
    result["rows"] += prediction_rows(lines)
    result["samples"] |= {
        "fits": fits_of(result["samples"]["cases"]),
        "costs": asdict(calibration.costs),
        "reproduced": lines,
    }


def _calibrate(result: dict[str, Any]) -> Path:
    KEPT.write_text(json.dumps(result, indent=1) + "\n")
    return KEPT


def _cases(workers: Sequence[int]) -> list[Case]:
    cases = [Case(workers=count, elements=elements) for count in workers for elements in ELEMENTS]
    return cases + [Case(workers=count, elements=LONG_ELEMENTS) for count in workers if count <= FEW]


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(word) for word in text.split(",") if word.isdigit())
    fitted = [count for count in counts if count not in HELD_OUT_WORKERS]
    if len(fitted) < 2 or min(counts) < 2 or list(counts) != sorted(set(counts)):
        held_out = " and ".join(map(str, HELD_OUT_WORKERS))
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a rising list of whole numbers above 1, at least two of them other than {held_out}: 2,4,8"
        )
    return counts


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ",".join(map(str, WORKERS))
    parser.add_argument("--workers", type=_counts, default=WORKERS, help=f"numbers of workers (default: {every})")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case, of which one counts (default: 3)")
    parser.add_argument("--keep", action="store_true", help="also write the result to tests/bench/results")
    parser.add_argument("--calibrate", action="store_true", help=f"also write the result to scripts/{KEPT.name}")
    given = parser.parse_args()
    if given.repeat < 1:
        parser.error("--repeat must be at least 1")
    return given


if __name__ == "__main__":
    sys.exit(main())
