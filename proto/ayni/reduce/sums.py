"""Arithmetic of a reduction, each operation rounded once.  [core]

What is done with a chunk goes over it in blocks that stay in the processor's cache from one operation to the next: a
large gradient's sum is bound by memory, not by arithmetic.
"""

import math
from dataclasses import dataclass

import numpy as np

from ayni.kernels.current import Kernels, kernels
from ayni.kernels.numpy_kernels import SQUARES_SEGMENT
from ayni.tensors import Floats, first_non_finite

SQUARES = SQUARES_SEGMENT
"""Elements whose squares are summed at once."""
BLOCK = 65536
"""Elements that pass from one operation to the next in the cache; a multiple of `SQUARES`."""
_LINE_ELEMENTS = 16
_INFINITY_BITS = 0x7F800000


def add(left_C: Floats, right_C: Floats) -> Floats:
    """Returns left + right, in place where one of them may be written. Addition of two floats commutes."""
    out = _writable(left_C, right_C)
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
    with np.errstate(over="ignore", invalid="ignore"):
        if weight >= 1 << 24:
            quotient = (total_C / np.float64(weight)).astype(np.float32)
            return quotient if out_C is None else _written(out_C, quotient)
        if weight & (weight - 1) == 0:
            # The same number, rounded once as well, in half the time.
            return np.multiply(total_C, np.float32(1 / weight), out=out)
        return np.divide(total_C, np.float32(weight), out=out)


@dataclass(frozen=True, eq=False, slots=True)
class Mean:
    """What was seen of a quotient while it was made.

    Attributes:
        square_sums: of each whole `SQUARES` elements from the first on; empty where nobody has summed them.
        bad: the first element that is beyond float32; None for none.
    """

    square_sums: list[float]
    bad: int | None


def mean(left_C: Floats, right_C: Floats | None, weight: int, out_C: Floats, *, check: bool = True) -> Mean:
    """Writes (left + right) / weight, each operation rounded once; quickest for `BLOCK` elements.

    Args:
        left_C: shape [C]; may be `out_C`.
        right_C: likewise; None where left is the whole sum.
        weight: 1 or more.
        out_C: where the quotient goes, shape [C].
        check: whether to look for what is beyond float32, where it is not seen anyway.
    """
    if weight >= 1 << 24:
        # Such a weight is no float32.
        divide(left_C if right_C is None else add(left_C, right_C), weight, out_C)
        return Mean([], first_non_finite(out_C))
    square_sums = _mean_of_block(kernels(), left_C, right_C, weight, out_C)
    if not _looks_finite(square_sums, out_C, check=check):
        return Mean([], first_non_finite(out_C))
    return Mean(square_sums, None)


def out_for(left_C: Floats, right_C: Floats | None) -> Floats:
    """Returns memory that (left + right) / weight may be written to, shape [C]: one of them, or new one."""
    # Compiled loops are quicker where they do not write what they read.
    return aligned(left_C.size) if kernels().sums_squares_beside else _writable(left_C, right_C)


def _mean_of_block(loops: Kernels, left_C: Floats, right_C: Floats | None, weight: int, out_C: Floats) -> list[float]:
    """Writes the quotient; returns the sums of squares of its whole segments, if they cost nothing."""
    end = out_C.size // SQUARES * SQUARES
    squares_S = np.empty(end // SQUARES)
    if end:
        right = None if right_C is None else right_C[:end]
        loops.mean(left_C[:end], right, weight, out_C[:end], squares_S)
    if end < out_C.size:
        rest_C = left_C[end:]
        if right_C is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                rest_C = np.add(rest_C, right_C[end:], out=out_C[end:])
        divide(rest_C, weight, out_C[end:])
    return squares_S.tolist() if loops.sums_squares_beside else []


def _looks_finite(square_sums: list[float], out_C: Floats, *, check: bool) -> bool:
    """Returns whether a block is finite: a square of a finite float32 is far from the largest float64."""
    if not square_sums:
        return not check or is_finite(out_C)
    rest_C = out_C[len(square_sums) * SQUARES :]
    return all(map(math.isfinite, square_sums)) and (not rest_C.size or is_finite(rest_C))


def is_finite(values_C: Floats) -> bool:
    """Returns whether there is neither NaN nor infinity. A sum of numbers that contain one is none either."""
    return kernels().largest(values_C.view(np.uint32)) < _INFINITY_BITS


def _writable(left_C: Floats, right_C: Floats | None) -> Floats:
    if left_C.flags.writeable:
        return left_C
    return right_C if right_C is not None and right_C.flags.writeable else aligned(left_C.size)


def aligned(num_elements: int) -> Floats:
    """Returns memory that begins with a line of the cache: half the time of an addition into any other."""
    spare = np.empty(num_elements + _LINE_ELEMENTS, np.float32)
    start = -spare.ctypes.data // 4 % _LINE_ELEMENTS
    return spare[start : start + num_elements]


def _written(out_C: Floats, values_C: Floats) -> Floats:
    out_C[...] = values_C
    return out_C


def segment_squares(mean_C: Floats) -> list[float]:
    """Returns the sums of squares over fixed segments, in float64.

    A square of a float32 is exact in float64. numpy adds in pairs, in the same order on every processor; BLAS does not.
    """
    end = mean_C.size // SQUARES * SQUARES
    squares_S = np.empty(end // SQUARES)
    if end:
        kernels().squares(mean_C[:end], squares_S)
    sums: list[float] = squares_S.tolist()
    return sums + ([float(np.add.reduce(np.square(mean_C[end:], dtype=np.float64)))] if end < mean_C.size else [])
