"""What is taken down of a mean while it is emitted: its hash, and the sum of its squares.  [core]

The hash of a mean is XXH3-128 over the concatenated XXH3-128 digests of each `SEGMENT` elements, so that owners of
slices that are cut at multiples of `SEGMENT` take down its parts, and whoever has them all knows the hash. The sum of
squares is the exactly rounded sum of float64 sums over every `SQUARES` elements; as an *expansion*, a few floats whose
exact sum is that of all of these, it loses nothing on the way. Neither depends on how long chunks are.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from ayni.reduce.sums import SQUARES, is_finite, segment_squares
from ayni.tensors import Floats

SEGMENT = 65536
"""Elements of a mean that one digest covers; slices of a mean begin at multiples of it."""

DIGEST_BYTES = 16
"""Bytes of one digest."""


class MeanDigest:
    """Takes the chunks of one mean, or of a slice of one, in offset order."""

    looks_at_once = True
    """Whether `is_finite` speaks of a chunk as soon as it was added."""

    def __init__(self) -> None:
        """Starts empty."""
        self.is_finite = True
        """Whether all that was taken so far is neither NaN nor infinite: their squares say it."""
        self._num_elements = 0
        self._hash = xxhash.xxh3_128()
        """Over the segment that is not whole yet."""
        self._digests: list[bytes] = []
        self._square_sums: list[float] = []
        self._rest_C: Floats | None = None
        """Elements after the last multiple of `SQUARES`."""

    def add(self, mean_C: Floats, square_sums: Sequence[float] = ()) -> None:
        """Takes the next chunk.

        Args:
            mean_C: shape [C], float32; it must not change afterwards.
            square_sums: of each whole `SQUARES` elements of it, where all are known; see `sums.mean`.
        """
        self._add_hash(np.ascontiguousarray(mean_C, "<f4"))
        self._add_squares(mean_C, square_sums)
        self._num_elements += mean_C.size

    @property
    def num_elements(self) -> int:
        """Elements so far."""
        return self._num_elements

    def hexdigest(self) -> str:
        """Returns the hash of the mean so far in hex, over its bytes as float32, little-endian."""
        return join_digests(self.digests())

    def digests(self) -> list[bytes]:
        """Returns XXH3-128 of every `SEGMENT` elements so far; the last one may cover fewer."""
        return [*self._digests, self._hash.digest()] if self._num_elements % SEGMENT else list(self._digests)

    def square_sum(self) -> float:
        """Returns the sum of the squares so far, exactly rounded from float64 sums over fixed segments."""
        return math.fsum(self._all_squares())

    def square_expansion(self) -> list[float]:
        """Returns the same sum without rounding: floats whose exact sum it is, the largest first."""
        return expansion(self._all_squares())

    def _add_hash(self, mean_C: Floats) -> None:
        start = 0
        while start < mean_C.size:
            room = SEGMENT - (self._num_elements + start) % SEGMENT
            piece_C = mean_C[start : start + room]
            self._hash.update(piece_C.data)
            if piece_C.size == room:
                self._digests.append(self._hash.digest())
                self._hash.reset()
            start += piece_C.size

    def _add_squares(self, mean_C: Floats, known: Sequence[float]) -> None:
        """Copies only where a chunk does not end at a multiple of `SQUARES`."""
        whole_C = mean_C if self._rest_C is None else np.concatenate([self._rest_C, mean_C])
        end = whole_C.size // SQUARES * SQUARES
        # What is known is of segments that begin with the chunk; of some only where loops were changed on the way.
        is_known = self._rest_C is None and len(known) == end // SQUARES
        sums = known if is_known else segment_squares(whole_C[:end])
        self._square_sums.extend(sums)
        self._rest_C = whole_C[end:].copy() if end < whole_C.size else None
        # A square of a finite float32 is far from the largest float64.
        if not (all(map(math.isfinite, sums)) and (self._rest_C is None or is_finite(self._rest_C))):
            self.is_finite = False

    def _all_squares(self) -> list[float]:
        return self._square_sums + ([] if self._rest_C is None else segment_squares(self._rest_C))


def join_digests(digests: Iterable[bytes]) -> str:
    """Returns the hash, in hex, of the mean whose segments have these digests, in order."""
    return xxhash.xxh3_128(b"".join(digests)).hexdigest()


def expansion(numbers: Sequence[float]) -> list[float]:
    """Returns few floats whose exact sum is that of `numbers`: their rounded sum, then that of what it leaves, ..."""
    found: list[float] = []
    while (rest := math.fsum([*numbers, *(-part for part in found)])) != 0.0:
        found.append(rest)
    return found
