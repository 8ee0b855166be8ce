"""Who computes the micro-batches of a worker that died or is late.  [core]

Each micro-batch goes to whoever would be done with it first. For equal pieces of work that gives the earliest end that
there is. Then the micro-batches are dealt out in order, so that everybody's are as contiguous as the gaps allow.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Taker:
    """A worker that can take more.

    Attributes:
        speed: micro-batches per second; 0 when unknown, which counts as the mean of the others.
        free_in: seconds until it is done with what it has.
        room: micro-batches that it may still take; -1 for no limit.
    """

    worker_id: int
    speed: float
    free_in: float = 0.0
    room: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Micro-batches [start, stop) for a worker."""

    worker_id: int
    start: int
    stop: int


def split_orphans(ranges: Sequence[tuple[int, int]], takers: Sequence[Taker]) -> list[Grant]:
    """Gives micro-batches to workers so that the last one is done as early as possible.

    Room is respected as long as anybody has some. What is left then goes to all, since somebody has to compute it.

    Args:
        ranges: micro-batches [start, stop), disjoint.
        takers: who can take some; the order has no influence.

    Returns:
        Grants in order of micro-batches, each inside one range, all of them covering every range exactly. Empty when
        there are no takers.
    """
    if not takers:
        return []
    ordered = sorted(takers, key=lambda taker: taker.worker_id)
    counts = _counts(sum(stop - start for start, stop in ranges), ordered)
    return list(_dealt(sorted(ranges), [(taker.worker_id, counts[taker.worker_id]) for taker in ordered]))


def _counts(total: int, takers: Sequence[Taker]) -> dict[int, int]:
    """Returns how many micro-batches each worker gets."""
    known = [taker.speed for taker in takers if taker.speed > 0]
    mean = sum(known) / len(known) if known else 1.0
    speeds = {taker.worker_id: taker.speed if taker.speed > 0 else mean for taker in takers}
    counts = {taker.worker_id: 0 for taker in takers}
    free = {taker.worker_id: taker.free_in for taker in takers}
    room = {taker.worker_id: total if taker.room < 0 else taker.room for taker in takers}
    left = total
    for limits in (room, dict.fromkeys(room, total)):
        queue = [(free[worker] + (counts[worker] + 1) / speeds[worker], worker) for worker in room]
        queue = [(done, worker) for done, worker in queue if counts[worker] < limits[worker]]
        heapq.heapify(queue)
        while queue and left:
            _, worker = heapq.heappop(queue)
            counts[worker] += 1
            left -= 1
            if counts[worker] < limits[worker]:
                heapq.heappush(queue, (free[worker] + (counts[worker] + 1) / speeds[worker], worker))
    return counts


def _dealt(ranges: Sequence[tuple[int, int]], counts: Sequence[tuple[int, int]]) -> Iterator[Grant]:
    """Deals the micro-batches out in order, worker after worker."""
    waiting = iter(counts)
    worker_id, left = next(waiting)
    for start, stop in ranges:
        while start < stop:
            while not left:
                worker_id, left = next(waiting)
            end = min(stop, start + left)
            yield Grant(worker_id=worker_id, start=start, stop=end)
            start, left = end, left - (end - start)
