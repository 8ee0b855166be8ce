"""How a matrix product is cut so that every part fits the device.  [core]

Legend: M rows, N columns, K the dimension that is summed over; Z products of one batch; all float32.

Rows, columns and products are cut where an operand or the result is larger than a buffer may be bound. K is cut because
some drivers end every shader invocation after 65,535 turns of its loops, without a word: the parts are added on the
device, one after another, so the order of additions is the same every time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

K_PART = 16_384
"""Most of K that one dispatch sums over."""
TILE = 64
"""Rows and columns of the result that one workgroup computes."""
SMALLEST_BUFFER = 256
_MAX_GROUPS = 65_535
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a product: [z, z_stop) of the batch, rows [m, m_stop), columns [n, n_stop)."""

    z: int
    z_stop: int
    m: int
    m_stop: int
    n: int
    n_stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Z products of [M, K] with [K, N]."""

    z: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiplication and an addition each."""
        return 2 * self.z * self.m * self.n * self.k


def parts(shape: Shape, most_bytes: int) -> Iterator[Part]:
    """Yields parts whose operands and results are at most so many bytes each.

    Raises:
        ValueError: one row is larger than that.
    """
    most = min(most_bytes // _FLOAT_BYTES, 2**31 - 1)
    if shape.k > most:
        raise ValueError(f"a row of {shape.k} elements does not fit {most_bytes} bytes")
    rows = min(shape.m, max(1, most // shape.k), TILE * _MAX_GROUPS)
    columns = min(shape.n, max(1, most // max(shape.k, rows)), TILE * _MAX_GROUPS)
    if rows * columns > most:
        rows = most // columns
    largest = max(rows * shape.k, columns * shape.k, rows * columns)
    batch = min(shape.z, max(1, most // largest), _MAX_GROUPS)
    for z in range(0, shape.z, batch):
        for m in range(0, shape.m, rows):
            for n in range(0, shape.n, columns):
                yield Part(
                    z=z,
                    z_stop=min(z + batch, shape.z),
                    m=m,
                    m_stop=min(m + rows, shape.m),
                    n=n,
                    n_stop=min(n + columns, shape.n),
                )


def k_parts(k: int) -> Iterator[tuple[int, int]]:
    """Yields [start, stop) of the dispatches that sum over K."""
    for start in range(0, k, K_PART):
        yield start, min(start + K_PART, k)


def buffer_bytes(num_bytes: int) -> int:
    """Returns the size of the buffer that so many bytes are kept in: the next power of two."""
    return max(SMALLEST_BUFFER, 1 << (num_bytes - 1).bit_length())
