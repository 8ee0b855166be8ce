"""Arithmetic of a reduction, each operation rounded once.  [core]

What is done with a chunk goes over it in blocks that stay in the processor's cache from one operation to the next: a
large gradient's sum is bound by memory, not by arithmetic.
"""

import numpy as np

from ayni.tensors import Floats, first_non_finite

SQUARES = 8192
"""Elements whose squares are summed at once."""
BLOCK = 65536
"""Elements that pass from one operation to the next in the cache; a multiple of `SQUARES`."""
_LINE_ELEMENTS = 16
_INFINITY_BITS, _MINUS_INFINITY_BITS = 0x7F800000, 0xFF800000


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
    if weight >= 1 << 24:
        quotient = (total_C / np.float64(weight)).astype(np.float32)
        return quotient if out_C is None else _written(out_C, quotient)
    if weight & (weight - 1) == 0:
        # The same number, rounded once as well, in half the time.
        return np.multiply(total_C, np.float32(1 / weight), out=out)
    return np.divide(total_C, np.float32(weight), out=out)


def mean(
    left_C: Floats, right_C: Floats | None, weight: int, out_C: Floats | None = None, *, check: bool = True
) -> tuple[Floats, int | None]:
    """Returns (left + right) / weight, each operation rounded once.

    Args:
        left_C: shape [C]; may be written over.
        right_C: likewise; None where left is the whole sum.
        weight: 1 or more.
        out_C: where the quotient goes, shape [C]; None for anywhere.
        check: whether to look for what is beyond float32.

    Returns:
        The quotient, and the first element of it that is beyond float32; then what follows it is not written.
    """
    out = out_C if out_C is not None else _writable(left_C, right_C)
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        total = left_C[block]
        if right_C is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                total = np.add(total, right_C[block], out=out[block])
        divide(total, weight, out[block])
        if check and not is_finite(out[block]):
            return out, start + (first_non_finite(out[block]) or 0)
    return out, None


def is_finite(values_C: Floats) -> bool:
    """Returns whether there is neither NaN nor infinity. A sum of numbers that contain one is none either."""
    bits_C = values_C.view(np.uint32)
    return bool(bits_C.view(np.int32).max() < _INFINITY_BITS and bits_C.max() < _MINUS_INFINITY_BITS)


def _writable(left_C: Floats, right_C: Floats | None) -> Floats:
    if left_C.flags.writeable:
        return left_C
    return right_C if right_C is not None and right_C.flags.writeable else _aligned(left_C.size)


def _aligned(num_elements: int) -> Floats:
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
    wide = np.square(mean_C, dtype=np.float64)
    end = wide.size // SQUARES * SQUARES
    sums: list[float] = np.add.reduce(wide[:end].reshape(-1, SQUARES), axis=1).tolist()
    return sums + ([float(np.add.reduce(wide[end:]))] if end < wide.size else [])
