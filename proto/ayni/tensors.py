"""Arrays to bytes and back; the element types of the contract.  [core]

Legend: N elements in a tensor, C elements in a chunk.

The core speaks in float32 elements, the wire in little-endian bytes; this file alone converts. A float32 tensor is
never copied here on a little-endian machine: encoding and decoding are views.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ayni.errors import BadChunk

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A flat tensor as it travels.

    Attributes:
        dtype: name in DTYPES.
        num_elements: N, at least 1.
        component_sizes: elements of each component; empty means one component.
    """

    dtype: str
    num_elements: int
    component_sizes: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Length on the wire."""
        return self.num_elements * itemsize(self.dtype)


DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float64": np.dtype("<f8"),
}
"""Element type for each name; the name is the DType value's without its prefix, in lower case."""

WIRE_DTYPES = ("float32", "bfloat16", "float16")
"""Element types that gradients travel in. int8 needs scales and error feedback, and is refused until it has them."""


def itemsize(dtype: str) -> int:
    """Returns the bytes of one element."""
    return DTYPES[dtype].itemsize


def encode(values_C: Floats, dtype: str) -> memoryview:
    """Returns the wire bytes of float32 values.

    Args:
        values_C: shape [C], float32, contiguous.
        dtype: name in WIRE_DTYPES. Rounds to nearest even; a value outside float16's range becomes infinite.

    Returns:
        A view of `values_C` for float32; a new buffer else (one copy).
    """
    with np.errstate(over="ignore"):
        wire = values_C.astype(DTYPES[dtype], copy=False)
    return wire.view(np.uint8).data


def decode(data: bytes | memoryview, dtype: str) -> Floats:
    """Returns the float32 values of wire bytes, shape [C].

    Returns:
        A read-only view of `data` for float32; a new array else (one copy).

    Raises:
        BadChunk: the length is not a multiple of the element size.
    """
    size = itemsize(dtype)
    if len(data) % size:
        raise BadChunk(
            f"a chunk of {len(data)} bytes does not hold whole {dtype} elements of {size} bytes",
            field="length",
            expected=f"a multiple of {size}",
            received=len(data),
        )
    return np.frombuffer(data, DTYPES[dtype]).astype(np.float32, copy=False)


def decode_into(data: bytes | memoryview, dtype: str, out_C: Floats) -> None:
    """Writes the float32 values of wire bytes to `out_C`, shape [C] (one copy).

    Raises:
        BadChunk: `data` does not hold exactly C elements.
    """
    if len(data) != out_C.size * itemsize(dtype):
        raise BadChunk(
            f"a chunk of {len(data)} bytes does not hold {out_C.size} {dtype} elements",
            field="length",
            expected=out_C.size * itemsize(dtype),
            received=len(data),
        )
    out_C[...] = np.frombuffer(data, DTYPES[dtype])


def first_non_finite(values_C: Floats) -> int | None:
    """Returns the index of the first NaN or infinity, or None."""
    finite = np.isfinite(values_C)
    return None if finite.all() else int(np.argmin(finite))
