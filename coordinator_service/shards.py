"""Which micro-batches each worker computes.  [core]"""

from collections.abc import Sequence


def plan_shards(num_microbatches: int, speeds: Sequence[float]) -> list[tuple[int, int]]:
    """Cuts a step's micro-batches into one contiguous shard for each worker, in proportion to speed.

    Largest remainder: every share differs from the exact proportion by less than one micro-batch; ties go to the lower
    rank. A worker whose speed is not known yet (0) counts as fast as the mean of the known ones.

    Args:
        num_microbatches: micro-batches of the step, at least 0.
        speeds: samples per second of each worker, by rank; 0 when unknown.

    Returns:
        [start, stop) for each rank; disjoint, in rank order, covering everything. A share may be empty.
    """
    known = [speed for speed in speeds if speed > 0]
    fallback = sum(known) / len(known) if known else 1.0
    exact = _proportions(num_microbatches, [speed if speed > 0 else fallback for speed in speeds])
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(speeds)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: num_microbatches - sum(counts)]:
        counts[rank] += 1
    return _as_ranges(counts)


def _proportions(total: int, speeds: Sequence[float]) -> list[float]:
    whole = sum(speeds)
    return [total * speed / whole for speed in speeds]


def _as_ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    ranges, start = [], 0
    for count in counts:
        ranges.append((start, start + count))
        start += count
    return ranges
