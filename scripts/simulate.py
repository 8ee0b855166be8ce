"""Simulates a run of many workers: how long a step takes, what bounds it, and where that saturates.

    python scripts/simulate.py --workers 1000 --parameters 10e9 --link 1Gbit [--compute 20s] [--json]

What things cost comes from a file of measurements that `tests/bench/scale.py --calibrate` wrote; docs/scaling.md says
what the model has and what it lacks. Everything is simulated event by event, for a step of each topology.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.simulate_costs import KEPT, read
from scripts.simulate_report import as_json, as_text, find
from scripts.simulate_scenario import TOPOLOGIES, WIRES, Scenario

_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "h": 3600.0}
_RATES = {
    f"{prefix}{unit}": scale * size
    for prefix, scale in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
    for unit, size in (("bit", 0.125), ("B", 1.0))
}
"""Bytes a second."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what a run comes to; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        calibration = read(given.calibration)
    except (OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    topologies = TOPOLOGIES if given.topology == "both" else (given.topology,)
    scenarios = [_scenario(given, topology) for topology in topologies]
    findings = [find(scenario, calibration.costs) for scenario in scenarios]
    if given.json:
        print(json.dumps(as_json(scenarios[0], findings, calibration)))
    else:
        print(as_text(scenarios[0], findings, calibration))
    return 0


def _scenario(given: argparse.Namespace, topology: str) -> Scenario:
    return Scenario(
        workers=given.workers,
        elements=int(given.parameters),
        wire=given.wire,
        topology=topology,
        link=given.link,
        coordinator_link=given.coordinator_link or given.link,
        latency_s=given.latency,
        compute_s=given.compute,
        inner_steps=given.inner_steps,
        buckets=given.buckets,
        overlap=given.overlap,
        beat_interval_s=given.heartbeat_interval,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    time, rate = _quantity(_TIMES), _quantity(_RATES)
    add = parser.add_argument
    add("--workers", type=_positive, required=True, help="number of workers")
    add("--parameters", type=float, required=True, help="parameters that are trained, such as 124e6")
    add("--link", type=rate, required=True, help="a worker's link, each way: 1Gbit, 100Mbit, 3GB (a second)")
    add("--coordinator-link", type=rate, help="the coordinator's link (default: as the workers')")
    add("--latency", type=time, default=2e-4, help="from one host to another (default: 200us)")
    add("--compute", type=time, default=1.0, help="computing of one inner step on a worker (default: 1s)")
    add("--topology", choices=[*TOPOLOGIES, "both"], default="both", help="how gradients travel (default: both)")
    add("--wire", choices=list(WIRES), default="float32", help="element type on the wire (default: float32)")
    add("--inner-steps", type=_positive, default=1, help="H: steps between exchanges (default: 1)")
    add("--buckets", type=_positive, default=1, help="parts of the model that travel by themselves (default: 1)")
    add("--overlap", type=_part, default=0.0, help="part of computing in which buckets get ready, 0 to 1 (default: 0)")
    add("--heartbeat-interval", type=time, default=1.0, help="timeouts.heartbeat_interval (default: 1s)")
    add("--calibration", type=Path, default=KEPT, help="file of measurements (default: the one that is kept here)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _quantity(units: Mapping[str, float]) -> Callable[[str], float]:
    def quantity(text: str) -> float:
        found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) ?([A-Za-z]*)(?:/s)?", text)
        if not found or found[2] not in units or not float(found[1]) > 0:
            known = ", ".join(unit for unit in units if unit)
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 with one of these units: {known}")
        return float(found[1]) * units[found[2]]

    return quantity


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _part(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return float(text)


if __name__ == "__main__":
    sys.exit(main())
