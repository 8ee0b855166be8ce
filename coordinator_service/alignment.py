"""Boundaries between shards, moved to where fewer vectors have to be sent.  [core]

A worker sends one vector for each node of the canonical tree that its shard covers. Which boundaries are best is found
rank by rank (a shortest path): for each boundary a few positions are considered, the planned one and those at the
largest nodes, and the best way to each of them is kept.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ayni.tree import cover

_CANDIDATES = 10
"""Positions that are considered for one boundary. More hardly help; the work grows with the square."""

_Way = tuple[tuple[int, int, int], list[int]]
"""Workers with more than one vector, vectors, distance from the plan; and the counts so far."""


def align(counts: Sequence[int], most: Sequence[int]) -> list[int]:
    """Returns counts with which more workers send one vector, and all of them together fewer.

    A worker with nothing keeps nothing, one with something keeps something.

    Args:
        counts: planned micro-batches of each worker, by rank.
        most: most that each may get, at least its planned count.
    """
    total = sum(counts)
    ways: dict[int, _Way] = {0: ((0, 0, 0), [])}
    planned = 0
    for rank, count in enumerate(counts):
        planned += count
        if not count:
            ways = {end: (score, [*before, 0]) for end, (score, before) in ways.items()}
            continue
        low = total - sum(most[rank + 1 :])
        high = total - sum(min(1, later) for later in counts[rank + 1 :])
        options = (
            (end, list(_ways_to(end, ways, most[rank], planned, total))) for end in _positions(low, high, planned)
        )
        ways = {end: min(found) for end, found in options if found}
    return ways[total][1]


def _ways_to(end: int, ways: dict[int, _Way], most: int, planned: int, total: int) -> Iterable[_Way]:
    for start, ((scattered, vectors, moved), before) in ways.items():
        if 1 <= end - start <= most:
            own = _num_vectors(start, end, total)
            yield (scattered + (own > 1), vectors + own, moved + abs(end - planned)), [*before, end - start]


def _positions(low: int, high: int, planned: int) -> list[int]:
    """Returns the planned position and those in [low, high] at the largest nodes, the nearest first."""
    found = [planned]
    size = 1 << max(0, high.bit_length() - 1)
    while size and len(found) < _CANDIDATES:
        first = -(-max(low, 1) // size) * size
        nearest = sorted(range(first, high + 1, size), key=lambda position: (abs(position - planned), position))
        found += [position for position in nearest if position not in found]
        size //= 2
    return found[:_CANDIDATES]


@lru_cache(maxsize=1 << 14)
def _num_vectors(start: int, stop: int, num_microbatches: int) -> int:
    return len(cover(start, stop, num_microbatches))
