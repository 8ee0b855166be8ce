"""What one worker has in flight over all of its contributions to slices; sums of what it says.  [shell]"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from worker_agent.changes import Change

if TYPE_CHECKING:
    from worker_agent.slice_contribution import SliceContribution

_WORKER_CHUNKS = 32
"""The same over all contributions of a worker."""


class Budget:
    """What one worker has in flight over all of its contributions."""

    def __init__(self) -> None:
        """Starts empty."""
        self.contributions: set[SliceContribution] = set()
        self.changed = Change()
        """Announced when there may be room for more."""

    @property
    def is_full(self) -> bool:
        """Whether nothing more is read than one chunk of each."""
        return sum(contribution.backlog for contribution in self.contributions) >= _WORKER_CHUNKS


def exact_sum(losses: Sequence[float]) -> float:
    """Returns the sum of the losses, rounded once; infinite when it is beyond float64."""
    try:
        return math.fsum(losses)
    except OverflowError:
        return math.inf
