"""Which loops this process uses: those of numpy, until quicker ones have proven to give the same bytes.  [core]

Legend: C elements in a block, S segments in it.

Every loop rounds each of its operations once and in a fixed order, so which one ran shows in no byte. They may
therefore be changed at any time, between two chunks of one sum, too.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ayni.kernels import numpy_kernels

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Halves = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.int8]
Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Kernels(Protocol):
    """The loops."""

    @property
    def name(self) -> str:
        """Names them in logs."""

    @property
    def sums_squares_beside(self) -> bool:
        """Whether `mean` sums squares at no cost to speak of; otherwise it is left to whoever wants them."""

    def mean(self, left_C: Floats, right_C: Floats | None, weight: int, out_C: Floats, squares_S: Doubles) -> None:
        """Writes (left + right) / weight, and the sums of its squares where `sums_squares_beside`.

        Args:
            left_C: shape [C], C a multiple of `SQUARES_SEGMENT`; may be `out_C`.
            right_C: likewise; None where left is the whole sum.
            weight: 1 to 2**24 - 1.
            out_C: shape [C].
            squares_S: of each `SQUARES_SEGMENT` elements, in the order of `squares`.
        """

    def squares(self, values_C: Floats, squares_S: Doubles) -> None:
        """Writes the sums of squares of each `SQUARES_SEGMENT` elements, C a multiple of it, added in numpy's pairs."""

    def largest(self, bits_C: Bits) -> int:
        """Returns the bits of the largest number, without its sign; what is not finite is larger than what is.

        Args:
            bits_C: bits of floats, contiguous, shape [C], C at least 1; may begin anywhere.
        """

    def to_bfloat16(self, values_C: Floats, out_C: Halves) -> None:
        """Writes the bits of the nearest bfloat16 numbers, ties to even."""

    def to_int8(self, values_C: Floats, scales_B: Floats, codes_C: Codes) -> None:
        """Writes scales and codes of blocks of `SCALE_BLOCK`; see `ayni.quantize`.

        Scales of blocks that hold an infinity or NaN are not finite, and their codes mean nothing yet.
        """

    def from_int8(self, scales_B: Floats, codes_C: Codes, out_C: Floats) -> None:
        """Writes code times scale."""


_current: Kernels = numpy_kernels.NumpyKernels()


def kernels() -> Kernels:
    """Returns the loops in use."""
    return _current


def use(chosen: Kernels) -> Kernels:
    """Has others used from now on; returns those that were."""
    global _current
    before, _current = _current, chosen
    return before
