"""Arithmetic of a reduction, each operation rounded once.  [core]"""

from collections.abc import Sequence

import numpy as np

from ayni.tensors import Floats

_SEGMENT = 8192
"""Elements whose squares are summed at once: few enough that BLAS does not split the sum among threads."""


def add(left_C: Floats, right_C: Floats) -> Floats:
    """Returns left + right, in place where one of them may be written. Addition of two floats commutes."""
    out = left_C if left_C.flags.writeable else right_C if right_C.flags.writeable else None
    with np.errstate(over="ignore", invalid="ignore"):  # An overflow is found, and refused by name, at the root.
        return np.add(left_C, right_C, out=out)


def divide(total_C: Floats, weight: int) -> Floats:
    """Returns total / weight, rounded once. A weight of 2**24 or more is no float32; then the quotient is float64."""
    if weight >= 1 << 24:
        return (total_C / np.float64(weight)).astype(np.float32)
    out = total_C if total_C.flags.writeable else None
    return np.divide(total_C, np.float32(weight), out=out)


def segment_squares(mean_C: Floats) -> list[float]:
    """Returns the sums of squares over fixed segments, in float64."""
    wide = mean_C.astype(np.float64)
    segments: Sequence[np.ndarray[tuple[int], np.dtype[np.float64]]] = [
        wide[i : i + _SEGMENT] for i in range(0, wide.size, _SEGMENT)
    ]
    return [float(np.dot(segment, segment)) for segment in segments]
