"""The mean of one bucket as it is finished: written to its place, taken down, and copied to where it is wanted.  [core]

Legend: N elements in the bucket, C elements in a chunk or in several.

All of it is done block by block, so that a block comes from memory once and is still in the cache when it is hashed and
copied.
"""

from dataclasses import dataclass

import numpy as np

from ayni.reduce.digest import SEGMENT
from ayni.reduce.packed import Values, elements_of, out_for
from ayni.reduce.places import MeanPlace
from ayni.reduce.refusals import overflow
from ayni.reduce.sums import BLOCK, mean
from ayni.tensors import Floats, first_non_finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """A finished chunk of the mean.

    Attributes:
        offset: first element.
        values_C: shape [C], float32.
    """

    offset: int
    values_C: Floats  # noqa: N815


class MeanWriter:
    """Writes one mean, in offset order."""

    def __init__(self, label: str, place: MeanPlace) -> None:
        """Starts empty.

        Args:
            label: names step and bucket in errors.
            place: where the mean is put together and taken down.
        """
        self.place = place
        self.copies: list[Floats] = []
        """Where the mean is wanted besides, each of shape [N]; good as far as the mean was told."""
        self._label = label
        self.restart()

    def restart(self) -> None:
        """Starts from the first element again."""
        self.emitted = 0
        self.digest = self.place.new_digest()

    def write(self, offset: int, values_C: Values, other_C: Values | None, weight: int) -> Reduced:
        """Writes values / weight, or (values + other) / weight, from element `offset` on.

        Raises:
            NonFinite: the sum is beyond float32.
        """
        size, mean_N = values_C.size, self.place.mean_N
        out_C = out_for(values_C, other_C) if mean_N is None else mean_N[offset : offset + size]
        squares: list[float] = []
        for start in range(0, size, BLOCK):
            block = slice(start, min(start + BLOCK, size))
            other = None if other_C is None else elements_of(other_C, block)
            squares += self._write_block(offset + start, elements_of(values_C, block), other, weight, out_C[block])
        if not self.digest.looks_at_once:
            self.digest.add(out_C, squares)
        self.emitted += size
        return Reduced(offset=offset, values_C=out_C)

    def take_down_zeros(self, num_elements: int) -> None:
        """Takes down a mean of nothing, which nobody is sent."""
        for start in range(0, num_elements, SEGMENT):
            self.digest.add(np.zeros(min(SEGMENT, num_elements - start), np.float32))
        self.emitted = num_elements

    def _write_block(
        self, offset: int, values_C: Floats, other_C: Floats | None, weight: int, out_C: Floats
    ) -> list[float]:
        """Writes a part, and takes it down if that is done at once; returns its sums of squares, if known."""
        digest = self.digest
        found = mean(values_C, other_C, weight, out_C, check=not digest.looks_at_once)
        bad = found.bad
        if bad is None and digest.looks_at_once:
            digest.add(out_C, found.square_sums)
            bad = None if digest.is_finite else first_non_finite(out_C)
        if bad is not None:
            raise overflow(self._label, offset + bad, out_C[bad])
        for copy_N in self.copies:
            copy_N[offset : offset + out_C.size] = out_C
        return found.square_sums
