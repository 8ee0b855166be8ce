"""The loops as operations of numpy, over pieces that stay in the cache from one operation to the next.  [core]

Legend: C elements in a piece, S segments or B blocks in it, K elements in a block.
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Halves = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.int8]
Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

SQUARES_SEGMENT = 8192
"""Elements whose squares are summed at once."""
SCALE_BLOCK = 256
"""Elements that share one scale."""

_LARGEST_CODE = np.float32(127)
_PIECE_BLOCKS = 256
_PIECE_ELEMENTS = _PIECE_BLOCKS * SCALE_BLOCK
_STARTS = np.arange(0, _PIECE_ELEMENTS, SCALE_BLOCK)
_SIGNED = {2: np.int16, 4: np.int32}
_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


class NumpyKernels:
    """See `ayni.kernels.current.Kernels`."""

    name = "numpy"
    sums_squares_beside = False

    def mean(self, left_C: Floats, right_C: Floats | None, weight: int, out_C: Floats, squares_S: Doubles) -> None:
        """See `Kernels`."""
        with np.errstate(over="ignore", invalid="ignore"):
            total_C = left_C if right_C is None else np.add(left_C, right_C, out=out_C)
            if weight & (weight - 1) == 0:
                # The same number, rounded once as well, in half the time.
                np.multiply(total_C, np.float32(1 / weight), out=out_C)
            else:
                np.divide(total_C, np.float32(weight), out=out_C)

    def squares(self, values_C: Floats, squares_S: Doubles) -> None:
        """See `Kernels`."""
        wide_C = np.square(values_C, dtype=np.float64)
        np.add.reduce(wide_C.reshape(-1, SQUARES_SEGMENT), axis=1, out=squares_S)

    def largest(self, bits_C: Bits) -> int:
        """See `Kernels`."""
        sign = 1 << (8 * bits_C.itemsize - 1)
        # Signed, the largest is the largest one above zero, if there is any; unsigned, the largest one below zero.
        return max(int(bits_C.view(_SIGNED[bits_C.itemsize]).max()), int(bits_C.max()) - sign)

    def to_bfloat16(self, values_C: Floats, out_C: Halves) -> None:
        """See `Kernels`."""
        with np.errstate(over="ignore", invalid="ignore"):
            out_C.view(ml_dtypes.bfloat16)[...] = values_C

    def to_int8(self, values_C: Floats, scales_B: Floats, codes_C: Codes) -> None:
        """See `Kernels`."""
        scratch_C = np.empty(min(values_C.size, _PIECE_ELEMENTS), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            scales_B[...] = _scales(_largest(values_C, scratch_C))
            divisors_B = scales_B if scales_B.all() else np.where(scales_B == 0, np.float32(1), scales_B)
            for blocks, elements, size in runs(values_C.size):
                scratch_BK = scratch_C[: elements.stop - elements.start].reshape(-1, size)
                np.divide(values_C[elements].reshape(-1, size), divisors_B[blocks, np.newaxis], out=scratch_BK)
                np.rint(scratch_BK, out=scratch_BK)
                np.copyto(codes_C[elements].reshape(-1, size), scratch_BK, casting="unsafe")

    def from_int8(self, scales_B: Floats, codes_C: Codes, out_C: Floats) -> None:
        """See `Kernels`."""
        with np.errstate(invalid="ignore", over="ignore"):
            for blocks, elements, size in runs(out_C.size):
                out_BK = out_C[elements].reshape(-1, size)
                np.copyto(out_BK, codes_C[elements].reshape(-1, size))
                np.multiply(out_BK, scales_B[blocks, np.newaxis], out=out_BK)


def _largest(values_C: Floats, scratch_C: Floats) -> Floats:
    """Returns the largest magnitude of each block, shape [B]; NaN where there is one."""
    largest_B = np.empty(-(-values_C.size // SCALE_BLOCK), np.float32)
    bits_B = largest_B.view(np.int32)
    for blocks, elements, _ in runs(values_C.size):
        piece_C = values_C[elements]
        sizes_C = np.abs(piece_C, out=scratch_C[: piece_C.size])
        # Without a sign, floats are in the order of their bits, NaN last, and whole numbers are compared much faster.
        np.maximum.reduceat(sizes_C.view(np.int32), _STARTS[: blocks.stop - blocks.start], out=bits_B[blocks])
    return largest_B


def _scales(largest_B: Floats) -> Floats:
    scales_B = largest_B / _LARGEST_CODE
    tops_B = scales_B * _LARGEST_CODE
    is_short_B = (scales_B < _SMALLEST_NORMAL) & (tops_B < largest_B)
    is_over_B = np.isinf(tops_B) & np.isfinite(largest_B)
    if is_short_B.any() or is_over_B.any():
        scales_B = np.where(is_short_B, np.nextafter(scales_B, np.float32(1)), scales_B)
        return np.where(is_over_B, np.nextafter(scales_B, np.float32(0)), scales_B)
    return scales_B


def runs(count: int) -> Iterator[tuple[slice, slice, int]]:
    """Yields which blocks of which elements are worked on at once, and how long each is: the last may be shorter."""
    whole, rest = divmod(count, SCALE_BLOCK)
    for first in range(0, whole, _PIECE_BLOCKS):
        last = min(first + _PIECE_BLOCKS, whole)
        yield slice(first, last), slice(first * SCALE_BLOCK, last * SCALE_BLOCK), SCALE_BLOCK
    if rest:
        yield slice(whole, whole + 1), slice(whole * SCALE_BLOCK, count), rest
