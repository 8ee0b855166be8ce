"""Which micro-batches each worker computes, and why.  [core]

Theory of operation. A step's micro-batches are cut into one contiguous shard for each worker, in rank order:

1. *Exact shares*, in proportion to speed. A worker with a cap gets at most that; what it leaves goes to the others.
   When everybody is at their cap, the rest goes to all in proportion: somebody has to compute it.
2. *Whole micro-batches*, by largest remainder: less than one away from the exact share, never above a cap.
3. *Hysteresis*. The shares of the step before are kept while they are nearly as good, so that noise in the measured
   speeds moves nothing.
4. *Alignment* of new shares to the canonical tree, as long as the step takes at most 3 % longer by it.

What is ugly: a worker whose share is rounded down to nothing is not measured any more. Whoever keeps the speeds has to
forget them after a while; an unknown speed counts as the mean of the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator_service.alignment import align

_ALIGNED_DELAY = 0.03
"""How much later the slowest worker may be done because of alignment."""
_TOLERANCE = 0.125
"""Shares are kept while new ones would save less than this part of the step's time, ..."""
_TOLERATED_ROUNDING = 0.75
"""... or while nobody has more than _TOLERANCE and these micro-batches above its exact share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bid:
    """What a worker can do.

    Attributes:
        speed: samples per second; 0 when unknown.
        cap: most micro-batches of one step; 0 for no limit.
        following: whether its parameters lag behind, so that it can compute nothing.
    """

    speed: float
    cap: int = 0
    following: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Micro-batches [start, stop) of one worker, and why these, for people."""

    start: int
    stop: int
    reason: str


def plan_shards(
    num_microbatches: int, bids: Sequence[Bid], previous: Sequence[tuple[int, int]] | None = None
) -> list[Share]:
    """Cuts a step's micro-batches into one contiguous shard for each worker.

    A worker whose speed is unknown counts as fast as the mean of the known ones. Followers get nothing, unless
    everybody follows.

    Args:
        num_microbatches: micro-batches of the step, at least 0.
        bids: of each worker, by rank.
        previous: shares of the step before by rank, if the ranks are the same workers.

    Returns:
        One share for each rank; disjoint, in rank order, covering everything. A share may be empty.
    """
    speeds = _effective_speeds(bids)
    exact = _exact(num_microbatches, speeds, [bid.cap or num_microbatches for bid in bids])
    planned = _rounded(num_microbatches, exact)
    old = [stop - start for start, stop in previous or ()]
    if len(old) == len(bids) and sum(old) == num_microbatches and _may_stay(old, planned, exact, speeds, bids):
        counts, note = old, ", kept: new shares would hardly be faster"
    else:
        counts, note = _aligned(planned, speeds, bids), ", chosen so that fewer vectors are sent"
    shares, start = [], 0
    for rank, (bid, count) in enumerate(zip(bids, counts, strict=True)):
        why = note if count and count != planned[rank] else ""
        reason = _reason(bid, count, num_microbatches, speeds[rank], sum(speeds)) + why
        shares.append(Share(start=start, stop=start + count, reason=reason))
        start += count
    return shares


def _effective_speeds(bids: Sequence[Bid]) -> list[float]:
    """Returns the speeds to plan with: the mean for unknown ones, 0 for those who can compute nothing."""
    all_follow = all(bid.following for bid in bids)
    taking = [bid for bid in bids if all_follow or not bid.following]
    known = [bid.speed for bid in taking if bid.speed > 0]
    mean = sum(known) / len(known) if known else 1.0
    return [(bid.speed if bid.speed > 0 else mean) if all_follow or not bid.following else 0.0 for bid in bids]


def _exact(total: int, speeds: Sequence[float], caps: Sequence[int]) -> list[float]:
    """Returns shares in proportion to speed, none above its cap unless everybody's cap is reached."""
    free = [rank for rank, speed in enumerate(speeds) if speed > 0]
    exact, left = [0.0] * len(speeds), total
    while True:
        whole = sum(speeds[rank] for rank in free)
        capped = [rank for rank in free if left * speeds[rank] > caps[rank] * whole]
        if not capped:
            break
        for rank in capped:
            exact[rank] = float(caps[rank])
        left -= sum(caps[rank] for rank in capped)
        free = [rank for rank in free if rank not in capped]
    receivers = free or [rank for rank, speed in enumerate(speeds) if speed > 0]
    whole = sum(speeds[rank] for rank in receivers)
    for rank in receivers:
        exact[rank] += left * speeds[rank] / whole
    return exact


def _rounded(total: int, exact: Sequence[float]) -> list[int]:
    """Rounds by largest remainder; ties go to the lower rank."""
    counts = [int(share) for share in exact]
    takers = sorted(range(len(exact)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in takers[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def _may_stay(
    old: Sequence[int], planned: Sequence[int], exact: Sequence[float], speeds: Sequence[float], bids: Sequence[Bid]
) -> bool:
    """Returns whether the shares of the step before are allowed and nearly as good as new ones."""
    for count, new, share, speed, bid in zip(old, planned, exact, speeds, bids, strict=True):
        if (count and not speed) or (bid.cap and count > max(bid.cap, new)) or (not count and share >= 1):
            return False
    if _finish(old, speeds) <= (1 + _TOLERANCE) * _finish(planned, speeds):
        return True
    return all(count <= share * (1 + _TOLERANCE) + _TOLERATED_ROUNDING for count, share in zip(old, exact, strict=True))


def _finish(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Returns when the slowest worker is done, in seconds for micro-batches of one sample."""
    return max((count / speed for count, speed in zip(counts, speeds, strict=True) if count), default=0.0)


def _aligned(planned: Sequence[int], speeds: Sequence[float], bids: Sequence[Bid]) -> list[int]:
    latest = (1 + _ALIGNED_DELAY) * _finish(planned, speeds)
    most = []
    for count, speed, bid in zip(planned, speeds, bids, strict=True):
        in_time = math.floor(latest * speed)
        most.append(max(count, min(in_time, bid.cap) if bid.cap else in_time))
    return align(planned, most)


def _reason(bid: Bid, count: int, total: int, speed: float, all_speeds: float) -> str:
    if not count and bid.following:
        return "none: its parameters lag behind"
    pace = f"{speed:.4g} samples/s of {all_speeds:.4g}"
    if not count:
        return f"none: {pace} are too few for one of {total} micro-batches"
    if count == bid.cap and total * speed > bid.cap * all_speeds:
        return f"capped at {count} micro-batches by its memory"
    basis = pace if bid.speed > 0 else "no speed known yet: counted as the mean of the others"
    above = f", above its cap of {bid.cap} because nobody has room" if 0 < bid.cap < count else ""
    return f"{count} of {total} micro-batches: {basis}{above}"
