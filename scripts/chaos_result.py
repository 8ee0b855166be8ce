"""What a run under chaos comes to: samples from the ledger, rates and stalls from the times of its commits."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ayni import order
from coordinator_service.store_records import CommitRecord
from scripts.chaos_schedule import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Happened:
    """An event, and when it came about."""

    event: Event
    step: int
    """Steps that were committed then."""
    unix_time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """How often the samples of the run's steps were used."""

    missing: int
    duplicated: int


def count_samples(commits: Sequence[CommitRecord], num_steps: int, batch: int) -> Samples:
    """Counts sample positions that no commit has used, and uses beyond the first.

    Micro-batches that were left out by policy count as used: the undisturbed run leaves them out too.
    """
    used = np.zeros(num_steps * batch, np.int64)
    beyond = 0
    for commit in commits:
        if commit.kind != "train":
            continue
        uses = np.zeros(commit.num_microbatches, np.int64)
        for contribution in commit.contributions:
            uses[contribution.start : contribution.stop] += 1
        for microbatch in commit.skipped:
            uses[microbatch] = max(uses[microbatch], 1)
        for microbatch, count in enumerate(uses):
            start, stop = order.microbatch_positions(
                commit.position, commit.num_samples, commit.num_microbatches, microbatch
            )
            inside = slice(min(start, len(used)), min(stop, len(used)))
            used[inside] += count
            beyond += int(count) * (stop - start - (inside.stop - inside.start))
    return Samples(missing=int((used == 0).sum()), duplicated=int(np.maximum(used - 1, 0).sum()) + beyond)


def rounding(wire_type: str) -> str:
    """Returns why final parameters can't be compared with those of one worker; empty where they can."""
    if wire_type == "float32":
        return ""
    past = ", and on what rounding kept back in each worker's steps before" if wire_type == "int8" else ""
    return f"{wire_type} rounds the sums that workers send, so parameters depend on who computed what{past}"


def steps_per_second(times: Sequence[float]) -> float:
    """Returns the rate from the first commit to the last."""
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def median_step(times: Sequence[float]) -> float:
    """Returns the time from one commit to the next, in the middle."""
    return statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0


def worst_stalls(times: Sequence[float], happened: Sequence[Happened], usual: float) -> dict[str, float]:
    """Returns the longest time without a commit for each kind of event, less the usual time of a step.

    A gap between two commits belongs to the events that came about in it, else to the last one before it.

    Args:
        times: of all commits, in order.
        happened: events in order; "nan" ones are a part of the data, and have only the gap that they came about in.
        usual: time of a step.
    """
    worst = {one.event.kind: 0.0 for one in happened}
    for begin, end in pairwise(times):
        inside = [one for one in happened if begin < one.unix_time <= end]
        before = [one for one in happened if one.unix_time <= begin and one.event.kind != "nan"]
        for one in inside or before[-1:]:
            worst[one.event.kind] = max(worst[one.event.kind], end - begin - usual)
    return {kind: round(stall, 3) for kind, stall in worst.items()}


def worst_return(times: Sequence[float], listened: Sequence[float]) -> float | None:
    """Returns the longest time from a coordinator that listens again to the next commit; None if none was restarted."""
    following = [min((time for time in times if time >= moment), default=None) for moment in listened]
    waits = [after - moment for after, moment in zip(following, listened, strict=True) if after is not None]
    return round(max(waits), 3) if waits else None
