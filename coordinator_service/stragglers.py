"""When a worker counts as late.  [core]"""

import statistics
from collections import deque

_WINDOW = 64
_FEWEST = 8
_CAUTION = 4.0
"""Times the latest arrival: the deadline while the spread is not known."""
_LEAST_MAD = 0.05
"""Smallest deviation, as a part of the median: workers that arrive together are not late because of noise."""


class Arrivals:
    """How long after the start of a step workers were done, for each kind of step: the last 64."""

    def __init__(self) -> None:
        """Starts without arrivals."""
        self._seconds: dict[str, deque[float]] = {}

    def note(self, kind: str, seconds: float) -> None:
        """Notes that a worker that had something to compute was done so many seconds after the step's start.

        Late ones belong here too: the deadline follows when everything becomes slower.
        """
        self._seconds.setdefault(kind, deque(maxlen=_WINDOW)).append(seconds)

    def deadline(self, kind: str, shortest: float, longest: float, mad_factor: float) -> float:
        """Returns after how many seconds from the step's start a worker is late.

        The median plus mad_factor times the median absolute deviation, within [shortest, longest]. The deviation counts
        as at least 5 % of the median. While fewer than 8 arrivals are known: four times the latest of them, but not
        less than `shortest`; `longest` before the first.
        """
        seconds = self._seconds.get(kind, ())
        if not seconds:
            return longest
        if len(seconds) < _FEWEST:
            return min(longest, max(shortest, _CAUTION * max(seconds)))
        median = statistics.median(seconds)
        deviation = statistics.median(abs(second - median) for second in seconds)
        return min(longest, max(shortest, median + mad_factor * max(deviation, _LEAST_MAD * median)))
