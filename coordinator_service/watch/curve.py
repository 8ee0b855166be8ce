"""Curves that stay short however long the run is, and how long steps took.  [core]"""

from bisect import bisect_left
from collections import deque

from coordinator_service.watch.view import Point

MOST_POINTS = 400
_FRESH = 100
"""The newest points are all kept."""
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper ends of the classes of durations, in seconds."""


class Curve:
    """Points in order; when there are too many, every other one of the older ones goes."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        """Starts without points."""
        self._most = most
        self._old: list[Point] = []
        self._new: deque[Point] = deque()
        self._every, self._passed = 1, 0

    def add(self, point: Point) -> None:
        """Adds the newest point. Points of steps that were taken back go."""
        if self._new and point.step <= self._new[-1].step:
            self.cut(point.step)
        self._new.append(point)
        if len(self._new) > min(_FRESH, self._most // 2):
            self._age(self._new.popleft())

    def cut(self, step: int) -> None:
        """Drops the points from this step on."""
        self._old = [point for point in self._old if point.step < step]
        self._new = deque(point for point in self._new if point.step < step)

    def points(self) -> tuple[Point, ...]:
        """Returns them, oldest first."""
        return (*self._old, *self._new)

    def _age(self, point: Point) -> None:
        if self._passed % self._every == 0:
            self._old.append(point)
        self._passed += 1
        if len(self._old) > self._most - min(_FRESH, self._most // 2):
            self._old, self._every, self._passed = self._old[::2], 2 * self._every, 1


class Durations:
    """Counts durations by class."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Counts one."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns (upper end, how many were at most that long), the last one without end."""
        sums, so_far = [], 0
        for bound, count in zip((*BOUNDS, None), self.counts, strict=True):
            so_far += count
            sums.append(("+Inf" if bound is None else repr(bound), float(so_far)))
        return sums
