"""Values that are not finite: where the first one is, and sums of squares that do not overflow.  [core]

Legend: N elements in a vector.

Both go through a vector in blocks that stay in the cache.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]

BLOCK_ELEMENTS = 32 * 1024
"""Elements that are looked at in one go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A value that is not finite."""

    index: int
    value: float


def first_problem(values_N: Vector) -> Problem | None:
    """Returns the first value that is NaN or infinite; None if there is none."""
    for start in range(0, values_N.size, BLOCK_ELEMENTS):
        is_finite = np.isfinite(values_N[start : start + BLOCK_ELEMENTS])
        if not is_finite.all():
            index = start + int(is_finite.argmin())
            return Problem(index=index, value=float(values_N[index]))
    return None


def square_sum(values_N: Vector) -> float:
    """Returns the sum of the squares; NaN or infinite if a value is."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, values_N.size, BLOCK_ELEMENTS):
            block = values_N[start : start + BLOCK_ELEMENTS]
            squares = float(np.dot(block, block))
            # The square of a value that float32 holds may be too large for it.
            total += squares if np.isfinite(squares) else float(np.square(block, dtype=np.float64).sum())
    return total
