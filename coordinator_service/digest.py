"""What is taken down of a bucket's mean while it is emitted: its hash, and the sum of its squares.  [core]"""

import math

import numpy as np
import xxhash

from ayni.tensors import Floats
from coordinator_service.sums import segment_squares


class MeanDigest:
    """Takes the chunks of one mean in offset order."""

    def __init__(self) -> None:
        """Starts empty."""
        self._hash = xxhash.xxh3_128()
        self._square_sums: list[float] = []

    def add(self, mean_C: Floats) -> None:
        """Takes the next chunk, shape [C], float32, finite; it must not change afterwards."""
        self._square_sums.extend(segment_squares(mean_C))
        self._hash.update(np.ascontiguousarray(mean_C, "<f4").data)

    def hexdigest(self) -> str:
        """Returns XXH3-128 in hex over the bytes so far: float32, little-endian."""
        return self._hash.hexdigest()

    def square_sum(self) -> float:
        """Returns the sum of the squares so far, exactly rounded from float64 sums over fixed segments."""
        return math.fsum(self._square_sums)
