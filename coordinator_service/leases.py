"""Leases of a step, and what is said about them.  [core]"""

from dataclasses import dataclass

from ayni.buckets import Bucket
from ayni.reduce.mean_writer import Reduced


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Micro-batches [start, stop) that one worker computes in one attempt of a step."""

    lease_id: int
    worker_id: int
    worker_name: str
    start: int
    stop: int
    is_extra: bool = False
    """Whether it came in addition to the worker's primary lease, which carries the mean."""
    rival_of: int | None = None
    """Late lease that this one races with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One attempt of one step, under one membership."""

    epoch: int
    step: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Which lease a worker speaks of."""

    moment: Moment
    lease_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over the micro-batches of a step.

    Attributes:
        total_weight: what the gradient sums are divided by.
        global_loss: sum of losses over total_weight; None unless all losses are known; 0 without weight.
        skipped: micro-batches that were left out because their values were not finite.
    """

    total_weight: int
    global_loss: float | None
    num_correct: int
    num_predictions: int
    skipped: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What the end of leases, or the beginning of a contribution, has changed.

    Attributes:
        reduced: chunks that became complete, by bucket.
        restarted: buckets that everybody has to contribute to again.
        ended: leases that are over now.
    """

    reduced: tuple[tuple[Bucket, tuple[Reduced, ...]], ...] = ()
    restarted: tuple[Bucket, ...] = ()
    ended: tuple[Lease, ...] = ()
