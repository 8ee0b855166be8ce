"""What rounding on the wire has kept back of a worker's sums, for the next step to bring along.  [core]

Legend: N elements in a bucket.

Theory of operation. In a step a worker has the true sums g and the residual r of the steps before. It sends s, which is
g + r rounded for the wire, and once the step is committed the residual is g + r - s. So over any number of steps what
was sent, plus the residual, is what was true: rounding delays parts of a gradient and loses none. Residuals are in
units of sums, not of means, so they stay right when the worker's share of the micro-batches changes.

There is one residual for each bucket. A lease's sums are several parts, of which only the first that has weight takes
the residual along; the rounding of all of them makes the next one. `correct` is called once for each lease that brings
the residual, before anything is sent: sums that were corrected are sent again as they are, which gives the same bytes.
`commit` is called once the step is committed, and only then does the residual change; an attempt that led to nothing
leaves it as it was.

A residual is a worker's own, and belongs to the parameters that its step ended with. Who takes over another worker's
parameters begins with zeros. Who leaves takes its residual along: what one step's rounding kept back, half a scale of
each part at most, however many steps it was there.

Both go through vectors in pieces that stay in the cache, and that begin where blocks with one scale do.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ayni import tensors
from ayni.buckets import Bucket
from worker_agent.session import Vector

_PIECE_ELEMENTS = 64 * 1024

ROUNDED = ("int8",)
"""Wire types that a worker keeps residuals for."""


class ErrorFeedback:
    """One worker's residuals."""

    def __init__(self, wire_type: str, num_elements: Mapping[Bucket, int]) -> None:
        """Starts with zeros.

        Args:
            wire_type: element type that the sums travel in.
            num_elements: N of each bucket.
        """
        self._wire_type = wire_type
        self.residuals: dict[Bucket, Vector] = {b: np.zeros(n, np.float32) for b, n in num_elements.items()}

    def correct(self, bucket: Bucket, parts: Sequence[Vector | None]) -> None:
        """Adds a bucket's residual to the first of the parts that has weight, in place."""
        first_N = next((part_N for part_N in parts if part_N is not None), None)
        if first_N is not None:
            # A sum beyond float32 is found, and refused by name, where it is reduced.
            with np.errstate(over="ignore"):
                np.add(first_N, self.residuals[bucket], out=first_N)

    def commit(self, bucket: Bucket, parts: Sequence[Vector | None]) -> None:
        """Replaces a bucket's residual by what rounding keeps back of corrected parts that count now.

        Where no part has weight the residual has not been sent, and stays.
        """
        sent = [part_N for part_N in parts if part_N is not None]
        residual_N = self.residuals[bucket]
        scratch = np.empty(min(_PIECE_ELEMENTS, residual_N.size), np.float32)
        for piece in _pieces(residual_N.size if sent else 0):
            for number, part_N in enumerate(sent):
                kept_C = self._kept_back(part_N[piece], scratch)
                np.add(residual_N[piece] if number else np.float32(0), kept_C, out=residual_N[piece])

    def forget(self) -> None:
        """Begins with zeros again."""
        for residual_N in self.residuals.values():
            residual_N.fill(0)

    def copies(self) -> dict[Bucket, Vector]:
        """Returns copies of all residuals."""
        return {bucket: residual_N.copy() for bucket, residual_N in self.residuals.items()}

    def restore(self, residuals: Mapping[Bucket, Vector]) -> None:
        """Goes on from residuals that were kept; they have the buckets and lengths of these."""
        for bucket, residual_N in self.residuals.items():
            residual_N[...] = residuals[bucket]

    def _kept_back(self, values_C: Vector, scratch: Vector) -> Vector:
        """Returns values less what arrives of them, in `scratch`. The difference of two so near numbers is exact."""
        kept_C = scratch[: values_C.size]
        tensors.decode_into(tensors.encode(values_C, self._wire_type), self._wire_type, kept_C)
        return np.subtract(values_C, kept_C, out=kept_C)


def _pieces(num_elements: int) -> Iterator[slice]:
    for start in range(0, num_elements, _PIECE_ELEMENTS):
        yield slice(start, min(start + _PIECE_ELEMENTS, num_elements))
