"""Whether the norm of a contribution is far from what is usual.  [core]"""

import math
import statistics
from collections import deque

_WINDOW = 64
_FEWEST = 16
_MAD_FACTOR = 10.0
_LEAST_MAD = math.log(4.0) / _MAD_FACTOR
"""Smallest deviation of the logarithms: what is less than 4 times the median never alarms."""


class NormHistory:
    """The last 64 norms.

    Logarithms are compared, because norms change by factors as training goes on. Only large norms alarm: a small one
    hardly changes the mean.
    """

    def __init__(self) -> None:
        """Starts without norms."""
        self._logs: deque[float] = deque(maxlen=_WINDOW)

    def is_outlier(self, norm: float) -> bool:
        """Notes a norm and returns whether it is far above the ones before it.

        Far: by more than 10 median absolute deviations of the logarithms, and by more than a factor of 4. Nothing is
        far before 16 norms are known. A norm of 0 says nothing and is not noted; one that is not finite is far always.

        Args:
            norm: of a contribution, divided by its weight so that shares have no influence.
        """
        if not math.isfinite(norm):
            return True
        if norm <= 0:
            return False
        found = len(self._logs) >= _FEWEST and self._is_far(math.log(norm))
        self._logs.append(math.log(norm))
        return found

    def _is_far(self, log: float) -> bool:
        median = statistics.median(self._logs)
        deviation = statistics.median(abs(known - median) for known in self._logs)
        return log - median > _MAD_FACTOR * max(deviation, _LEAST_MAD)
