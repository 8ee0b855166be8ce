"""What a simulated run comes to: how long a step takes, what bounds it, and from how many workers on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from scripts.simulate_costs import Calibration, predictions
from scripts.simulate_scenario import Costs, Scenario
from scripts.simulate_steps import SMALL_BYTES
from scripts.simulate_topologies import simulate

TOLERANCE = 0.15
"""Largest relative error of a case that counts as reproduced."""
OVERHEAD = 0.1
"""Part of a step that the exchange may take where inner steps are recommended."""
_MOST_WORKERS = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One topology.

    Attributes:
        topology: which.
        step_s: one step, with all its inner steps.
        computing_s: the part of it that every worker computes.
        busy: part of the step in which each resource works.
        bound_by: the resource that works most, the workers' computing included.
        limits: for each resource, most workers with whom it works no longer than a worker computes.
        inner_steps: fewest for which the exchange takes OVERHEAD of a step or less.
    """

    topology: str
    step_s: float
    computing_s: float
    busy: dict[str, float]
    bound_by: str
    limits: dict[str, int]
    inner_steps: int

    @property
    def efficiency(self) -> float:
        """Part of the step that is computing."""
        return self.computing_s / self.step_s


def find(scenario: Scenario, costs: Costs) -> Finding:
    """Simulates a run and says what bounds it."""
    outcome = simulate(scenario, costs)
    hides = scenario.overlap > 0 and scenario.inner_steps == 1
    bare = simulate(replace(scenario, overlap=0.0), costs) if hides else outcome
    exchange_s = max(0.0, bare.step_s - scenario.computing_s)
    busy = {name: seconds / outcome.step_s for name, seconds in outcome.busy_s.items()}
    everything = {**busy, "computing": scenario.computing_s / outcome.step_s}
    return Finding(
        topology=scenario.topology,
        step_s=outcome.step_s,
        computing_s=scenario.computing_s,
        busy=busy,
        bound_by=max(everything, key=lambda name: everything[name]),
        limits={name: _most_workers(scenario, costs, name) for name in busy},
        inner_steps=max(1, math.ceil(exchange_s * (1 - OVERHEAD) / (OVERHEAD * scenario.compute_s))),
    )


def demands(scenario: Scenario, costs: Costs) -> dict[str, float]:
    """Returns the seconds of a step for which each resource works, as a sum; the simulation must come to the same."""
    count = scenario.workers
    slow = 1 / max(1e-3, 1 - count * costs.beat_s / scenario.beat_interval_s)
    hub, worker = costs.coordinator, costs.worker
    moved = scenario.in_bytes + scenario.out_bytes
    sizes = moved, scenario.in_chunks + scenario.out_chunks
    control_s = hub.step_s + count * hub.commit(count)
    if scenario.topology == "star":
        return {
            "the coordinator's processor": slow
            * (control_s + count * (scenario.buckets * hub.stream(count) + hub.one_way(*sizes))),
            "the coordinator's link": count * max(scenario.in_bytes, scenario.out_bytes) / scenario.coordinator_link,
            "a worker's processor": worker.commit_s + scenario.buckets * worker.stream_s + worker.one_way(*sizes),
            "a worker's link": max(scenario.in_bytes, scenario.out_bytes) / scenario.link,
        }
    part = (count - 1) / count
    streams_s = (count - 1) * scenario.buckets * (worker.stream_s + hub.stream(1))
    return {
        "the coordinator's processor": slow * control_s,
        "the coordinator's link": 2 * count * SMALL_BYTES / scenario.coordinator_link,
        "a worker's processor": worker.commit_s + streams_s + part * (worker.one_way(*sizes) + hub.one_way(*sizes)),
        "a worker's link": part * moved / scenario.link,
    }


def _most_workers(scenario: Scenario, costs: Costs, resource: str) -> int:
    def fits(workers: int) -> bool:
        return demands(replace(scenario, workers=workers), costs)[resource] <= scenario.computing_s

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """Returns the largest whole number that fits, where every smaller one does; 0 when 1 does not."""
    low, high = 0, 1
    while high < _MOST_WORKERS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def reproduced(calibration: Calibration) -> list[dict[str, Any]]:
    """Returns each measured case beside what the simulation says of it."""
    return [
        {
            "workers": case.workers,
            "elements": case.elements,
            "held_out": case.is_held_out,
            "measured_s": case.step_s,
            "predicted_s": outcome.step_s,
            "error": outcome.step_s / case.step_s - 1,
            "coordinator_error": outcome.busy_s["the coordinator's processor"] / case.coordinator_cpu_s - 1,
        }
        for case, outcome in predictions(calibration)
    ]


def as_json(scenario: Scenario, findings: Sequence[Finding], calibration: Calibration) -> dict[str, Any]:
    """Returns everything as one JSON object."""
    return {
        "scenario": {name: value for name, value in asdict(scenario).items() if name not in ("topology", "bench")},
        "findings": [{**asdict(finding), "efficiency": finding.efficiency} for finding in findings],
        "costs": asdict(calibration.costs),
        "made_on": calibration.made_on,
        "reproduced": reproduced(calibration),
    }


def as_text(scenario: Scenario, findings: Sequence[Finding], calibration: Calibration) -> str:
    """Returns everything as lines for people."""
    return "\n".join(
        [*_question(scenario, calibration), *(line for one in findings for line in _answer(scenario, one))]
    )


def _question(scenario: Scenario, calibration: Calibration) -> list[str]:
    errors = [abs(line["error"]) for line in reproduced(calibration)]
    good = sum(error <= TOLERANCE for error in errors)
    inner = f"{scenario.inner_steps} inner steps of " if scenario.inner_steps > 1 else ""
    return [
        f"{scenario.workers:,} workers, {scenario.elements:,} parameters as {scenario.wire} "
        f"({_bytes(scenario.in_bytes)} from each, {_bytes(scenario.out_bytes)} to each), "
        f"{inner}{_time(scenario.compute_s)} of computing",
        f"links: workers {_rate(scenario.link)}, coordinator {_rate(scenario.coordinator_link)}, "
        f"{_time(scenario.latency_s)} apart",
        f"costs: {calibration.made_on}; {good} of {len(errors)} measured cases within {TOLERANCE:.0%}",
    ]


def _answer(scenario: Scenario, finding: Finding) -> list[str]:
    busy = sorted(finding.busy.items(), key=lambda pair: -pair[1])
    part = _percent(finding.efficiency)
    return [
        "",
        f"{finding.topology}: a step takes {_time(finding.step_s)}, and computing is {part} of it",
        f"  bound by   {finding.bound_by}",
        *(f"  busy       {name} {_percent(part)}" for name, part in busy),
        *(f"  saturates  {name} {_limit(limit)}" for name, limit in finding.limits.items()),
        f"  exchange in at most {OVERHEAD:.0%} of a step: {_inner(finding.inner_steps)}",
    ]


def _limit(workers: int) -> str:
    if workers >= _MOST_WORKERS // 2:
        return "with no number of workers"
    return f"above {workers:,} worker{'s' if workers > 1 else ''}" if workers else "from the first worker on"


def _inner(steps: int) -> str:
    return f"{steps:,} inner steps or more (local_update)" if steps > 1 else "as it is"


def _time(seconds: float) -> str:
    return _scaled(seconds, ((172_800.0, 86_400.0, "days"), (7200.0, 3600.0, "h"), (1.0, 1.0, "s"), (0.0, 1e-3, "ms")))


def _bytes(count: float) -> str:
    return _scaled(count, ((1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (0.0, 1.0, "B")))


def _scaled(value: float, units: Sequence[tuple[float, float, str]]) -> str:
    """Returns a value in the first of its units; each is given with the least value that it is for."""
    _, size, unit = next(one for one in units if value >= one[0])
    return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:,.0f} {unit}"


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %" if part >= 1e-4 else "less than 0.01 %"


def _rate(bytes_per_s: float) -> str:
    return "without limit" if math.isinf(bytes_per_s) else f"{8 * bytes_per_s / 1e9:.3g} Gbit/s"
