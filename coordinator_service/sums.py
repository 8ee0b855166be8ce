"""Arithmetic of a reduction, each operation rounded once.  [core]"""

from collections.abc import Sequence

import numpy as np

from ayni.tensors import Floats, first_non_finite

_SEGMENT = 8192
"""Elements whose squares are summed at once: few enough that BLAS does not split the sum among threads."""


def add(left_C: Floats, right_C: Floats) -> Floats:
    """Returns left + right, in place where one of them may be written. Addition of two floats commutes."""
    out = left_C if left_C.flags.writeable else right_C if right_C.flags.writeable else None
    with np.errstate(over="ignore", invalid="ignore"):  # An overflow is found, and refused by name, at the root.
        return np.add(left_C, right_C, out=out)


def divide(total_C: Floats, weight: int, out_C: Floats | None = None) -> Floats:
    """Returns total / weight, rounded once. A weight of 2**24 or more is no float32; then the quotient is float64.

    Args:
        total_C: shape [C]; is written over where it may be, unless there is `out_C`.
        weight: 1 or more.
        out_C: where the quotient goes, shape [C].
    """
    out = out_C if out_C is not None else total_C if total_C.flags.writeable else None
    if weight >= 1 << 24:
        quotient = (total_C / np.float64(weight)).astype(np.float32)
        return quotient if out_C is None else _written(out_C, quotient)
    return np.divide(total_C, np.float32(weight), out=out)


def is_finite(values_C: Floats) -> bool:
    """Returns whether there is neither NaN nor infinity. A sum of numbers that contain one is none either."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(values_C.sum())) or first_non_finite(values_C) is None


def _written(out_C: Floats, values_C: Floats) -> Floats:
    out_C[...] = values_C
    return out_C


def segment_squares(mean_C: Floats) -> list[float]:
    """Returns the sums of squares over fixed segments, in float64."""
    wide = mean_C.astype(np.float64)
    segments: Sequence[np.ndarray[tuple[int], np.dtype[np.float64]]] = [
        wide[i : i + _SEGMENT] for i in range(0, wide.size, _SEGMENT)
    ]
    return [float(np.dot(segment, segment)) for segment in segments]
