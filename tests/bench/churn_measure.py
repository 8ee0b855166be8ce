"""What a run through deaths comes to, from what its workers wrote down."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_TOGETHER_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of one worker."""

    time: float
    step: int = -1
    committed: bool = True
    samples: int = 0
    sha256: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """One kill -9."""

    name: str
    unix_time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one run came to."""

    samples_per_second: float
    median_step_s: float
    stalls_s: tuple[float, ...]
    """For each death, the longest time without a step of a worker that lived on, less the usual time of a step."""
    steps_lost: int
    """Steps that survivors computed and had to throw away."""
    distinct_replicas: int
    """Different parameters among those who reached the last step together."""
    crashes: int = 0
    """Processes that ended by themselves after another one was killed."""


def outcome_of(workers: Mapping[str, Sequence[Line]], deaths: Sequence[Death]) -> Outcome:
    """Returns what the workers' lines say."""
    steps: dict[int, tuple[float, int]] = {}
    for lines in workers.values():
        for line in lines:
            if line.step >= 0 and line.committed:
                moment, samples = steps.get(line.step, (line.time, 0))
                steps[line.step] = min(moment, line.time), max(samples, line.samples)
    times = sorted(moment for moment, _ in steps.values())
    first = min(steps)
    samples = sum(samples for step, (_, samples) in steps.items() if step != first)
    usual = statistics.median(b - a for a, b in pairwise(times))
    ends = {name: lines[-1] for name, lines in workers.items() if lines and lines[-1].sha256}
    # Who comes back after the others have ended finds nobody, and trains alone from the start: another run.
    together = min(end.time for end in ends.values()) + _TOGETHER_S + 5 * usual
    hashes = [end.sha256 for end in ends.values() if end.time <= together]
    return Outcome(
        samples_per_second=samples / (times[-1] - times[0]),
        median_step_s=usual,
        stalls_s=tuple(_stall(workers, death, usual) for death in deaths),
        steps_lost=max(sum(not line.committed for line in lines) for lines in workers.values()),
        distinct_replicas=len(set(hashes)),
    )


def _stall(workers: Mapping[str, Sequence[Line]], death: Death, usual: float) -> float:
    gaps = [0.0]
    for name, lines in workers.items():
        moments = [line.time for line in lines if line.step >= 0 and line.committed]
        before = [moment for moment in moments if moment <= death.unix_time]
        after = [moment for moment in moments if moment > death.unix_time]
        if name != death.name and before and after:
            gaps.append(after[0] - before[-1] - usual)
    return round(max(gaps), 3)
