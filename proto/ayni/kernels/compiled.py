"""The loops compiled for this machine by numba: one pass over memory where numpy makes several.  [shell]

Legend: C elements in a block, S segments or B blocks in it.

Importing this compiles, or reads what was compiled before from numba's cache: about 0.7 s, or 4 s the first time.
Nothing here is reordered (`fastmath` is off), so every operation is rounded as numpy rounds it. Squares are exact in
float64, so it makes no difference whether a compiler adds them in one instruction. Loops run without the interpreter's
lock.

What is ugly: the eight sums of `_squares_of` are written out, because only so they become one register each.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import float32, float64, int8, int32, uint16, uint32, void

from ayni.kernels.current import Bits, Codes, Doubles, Floats, Halves
from ayni.kernels.numpy_kernels import SCALE_BLOCK, SQUARES_SEGMENT

_RUN = 128
"""Squares that numpy adds in eight sums side by side."""
_RUNS = SQUARES_SEGMENT // _RUN
_LARGEST_CODE = np.float32(127)
_ROUNDS = np.float32(3 << 22)
"""Added to a small float32 and taken away again it leaves the nearest whole number, ties to even."""
_INFINITY_BITS = np.uint32(0x7F800000)
_SMALLEST_NORMAL_BITS = np.uint32(0x00800000)

Loop = Callable[..., Any]


def _compiled(signature: Any) -> Callable[[Loop], Loop]:
    """Compiles a loop at once; kept on disk where a cache can be written."""

    def decorate(loop: Loop) -> Loop:
        before, numba.core.config.SLP_VECTORIZE = numba.core.config.SLP_VECTORIZE, 1
        try:
            try:
                compiled: Loop = numba.njit(signature, cache=True, nogil=True, error_model="numpy")(loop)
            except Exception:  # No folder for a cache, no room, or a damaged one.
                compiled = numba.njit(signature, nogil=True, error_model="numpy")(loop)
            return compiled
        finally:
            numba.core.config.SLP_VECTORIZE = before

    return decorate


def _read(dtype: Any) -> Any:
    """Returns the type of an array that is only read, wherever it begins."""
    return numba.types.Array(dtype, 1, "C", readonly=True, aligned=False)


def _written(dtype: Any) -> Any:
    return numba.types.Array(dtype, 1, "C")


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _squares_of(values_C: Floats, sums: Doubles) -> float:
    """Returns the sum of the squares of one segment, added in numpy's pairs; `sums` is scratch, 8 for each run."""
    for run in range(_RUNS):
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
        for at in range(run * _RUN, (run + 1) * _RUN, 8):
            v0, v1 = float64(values_C[at]), float64(values_C[at + 1])
            v2, v3 = float64(values_C[at + 2]), float64(values_C[at + 3])
            v4, v5 = float64(values_C[at + 4]), float64(values_C[at + 5])
            v6, v7 = float64(values_C[at + 6]), float64(values_C[at + 7])
            s0 += v0 * v0
            s1 += v1 * v1
            s2 += v2 * v2
            s3 += v3 * v3
            s4 += v4 * v4
            s5 += v5 * v5
            s6 += v6 * v6
            s7 += v7 * v7
        first = run * 8
        sums[first], sums[first + 1], sums[first + 2], sums[first + 3] = s0, s1, s2, s3
        sums[first + 4], sums[first + 5], sums[first + 6], sums[first + 7] = s4, s5, s6, s7
    count = _RUNS * 4
    while count:
        for pair in range(count):
            sums[pair] = sums[2 * pair] + sums[2 * pair + 1]
        count //= 2
    total: float = sums[0]
    return total


@_compiled(void(_read(float32), _written(float64)))
def _squares(values_C: Floats, squares_S: Doubles) -> None:
    sums = np.empty(_RUNS * 8, np.float64)
    for segment in range(squares_S.size):
        squares_S[segment] = _squares_of(values_C[segment * SQUARES_SEGMENT : (segment + 1) * SQUARES_SEGMENT], sums)


@_compiled(void(_read(float32), _read(float32), float32, _written(float32), _written(float64)))
def _sum_over(left_C: Floats, right_C: Floats, weight: Any, out_C: Floats, squares_S: Doubles) -> None:
    sums = np.empty(_RUNS * 8, np.float64)
    for segment in range(squares_S.size):
        start, stop = segment * SQUARES_SEGMENT, (segment + 1) * SQUARES_SEGMENT
        left, right, out = left_C[start:stop], right_C[start:stop], out_C[start:stop]
        for at in range(SQUARES_SEGMENT):
            out[at] = (left[at] + right[at]) / weight
        squares_S[segment] = _squares_of(out, sums)


@_compiled(void(_read(float32), _read(float32), float32, _written(float32), _written(float64)))
def _sum_times(left_C: Floats, right_C: Floats, factor: Any, out_C: Floats, squares_S: Doubles) -> None:
    sums = np.empty(_RUNS * 8, np.float64)
    for segment in range(squares_S.size):
        start, stop = segment * SQUARES_SEGMENT, (segment + 1) * SQUARES_SEGMENT
        left, right, out = left_C[start:stop], right_C[start:stop], out_C[start:stop]
        for at in range(SQUARES_SEGMENT):
            out[at] = (left[at] + right[at]) * factor
        squares_S[segment] = _squares_of(out, sums)


@_compiled(void(_read(float32), float32, _written(float32), _written(float64)))
def _over(total_C: Floats, weight: Any, out_C: Floats, squares_S: Doubles) -> None:
    sums = np.empty(_RUNS * 8, np.float64)
    for segment in range(squares_S.size):
        start, stop = segment * SQUARES_SEGMENT, (segment + 1) * SQUARES_SEGMENT
        total, out = total_C[start:stop], out_C[start:stop]
        for at in range(SQUARES_SEGMENT):
            out[at] = total[at] / weight
        squares_S[segment] = _squares_of(out, sums)


@_compiled(uint32(_read(uint32)))
def _largest_word(bits_C: Any) -> Any:
    largest = uint32(0)
    for at in range(bits_C.size):
        largest = max(largest, uint32(bits_C[at] & uint32(0x7FFFFFFF)))
    return largest


@_compiled(uint16(_read(uint16)))
def _largest_half(bits_C: Any) -> Any:
    largest = uint16(0)
    for at in range(bits_C.size):
        largest = max(largest, uint16(bits_C[at] & uint16(0x7FFF)))
    return largest


@_compiled(void(_read(uint32), _written(uint16)))
def _to_bfloat16(bits_C: Any, out_C: Halves) -> None:
    for at in range(out_C.size):
        bits = bits_C[at]
        nearest = bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))
        no_number = (bits & uint32(0x80000000)) | uint32(0x7FC00000)
        is_number = (bits & uint32(0x7FFFFFFF)) <= _INFINITY_BITS
        out_C[at] = uint16((nearest if is_number else no_number) >> uint32(16))


@_compiled(void(_read(float32), _read(uint32), _written(float32), _written(uint32), _written(int8)))
def _to_int8(values_C: Floats, bits_C: Any, scales_B: Floats, scale_bits_B: Any, codes_C: Codes) -> None:
    """Takes values and scales as numbers and as their bits."""
    for block in range(scales_B.size):
        start = block * SCALE_BLOCK
        stop = min(start + SCALE_BLOCK, values_C.size)
        bits, values, codes = bits_C[start:stop], values_C[start:stop], codes_C[start:stop]
        largest_bits = uint32(0)
        for at in range(bits.size):
            largest_bits = max(largest_bits, bits[at] & uint32(0x7FFFFFFF))
        scale_bits_B[block] = largest_bits
        largest = scales_B[block]
        scales_B[block] = largest / _LARGEST_CODE
        top = scales_B[block] * _LARGEST_CODE
        if scale_bits_B[block] < _SMALLEST_NORMAL_BITS and top < largest:
            scale_bits_B[block] += uint32(1)
        elif np.isinf(top) and largest_bits < _INFINITY_BITS:
            scale_bits_B[block] -= uint32(1)
        divisor = scales_B[block] if scale_bits_B[block] else float32(1)
        for at in range(values.size):
            codes[at] = int8(int32((values[at] / divisor + _ROUNDS) - _ROUNDS))


@_compiled(void(_read(float32), _read(int8), _written(float32)))
def _from_int8(scales_B: Floats, codes_C: Codes, out_C: Floats) -> None:
    for block in range(scales_B.size):
        start = block * SCALE_BLOCK
        stop = min(start + SCALE_BLOCK, out_C.size)
        scale, codes, out = scales_B[block], codes_C[start:stop], out_C[start:stop]
        for at in range(out.size):
            out[at] = float32(codes[at]) * scale


class CompiledKernels:
    """See `ayni.kernels.current.Kernels`."""

    name = f"compiled by numba {numba.__version__}"
    sums_squares_beside = True

    def mean(self, left_C: Floats, right_C: Floats | None, weight: int, out_C: Floats, squares_S: Doubles) -> None:
        """See `Kernels`."""
        if right_C is None:
            _over(left_C, np.float32(weight), out_C, squares_S)
        elif weight & (weight - 1) == 0:
            # A quotient by a power of two is the product with its reciprocal, to the bit.
            _sum_times(left_C, right_C, np.float32(1 / weight), out_C, squares_S)
        else:
            _sum_over(left_C, right_C, np.float32(weight), out_C, squares_S)

    def squares(self, values_C: Floats, squares_S: Doubles) -> None:
        """See `Kernels`."""
        _squares(values_C, squares_S)

    def largest(self, bits_C: Bits) -> int:
        """See `Kernels`."""
        return int(_largest_word(bits_C) if bits_C.itemsize == 4 else _largest_half(bits_C))

    def to_bfloat16(self, values_C: Floats, out_C: Halves) -> None:
        """See `Kernels`."""
        _to_bfloat16(values_C.view(np.uint32), out_C)

    def to_int8(self, values_C: Floats, scales_B: Floats, codes_C: Codes) -> None:
        """See `Kernels`."""
        _to_int8(values_C, values_C.view(np.uint32), scales_B, scales_B.view(np.uint32), codes_C)

    def from_int8(self, scales_B: Floats, codes_C: Codes, out_C: Floats) -> None:
        """See `Kernels`."""
        _from_int8(scales_B, codes_C, out_C)
