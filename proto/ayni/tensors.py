"""Arrays to bytes and back; the element types of the contract.  [core]

Legend: N elements in a tensor, C elements in a chunk.

The core speaks in float32 elements, the wire in little-endian bytes; this file alone converts. A float32 tensor is
never copied here on a little-endian machine: encoding and decoding are views.

Contributions in int8 are blocks that share a scale (`ayni.quantize`), so a chunk's bytes are not a multiple of an
element's. Such chunks are cut, and their places told, as those of the float32 numbers that they stand for. Sums are
made in float32 as ever, and their mean travels in bfloat16: that is one rounding, the same for everybody, where a mean
in int8 would need a residual of its own.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ayni import quantize
from ayni.errors import BadChunk
from ayni.kernels.current import kernels

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


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
        """Length on the wire; with int8 of the float32 numbers that are summed."""
        return self.num_elements * position_bytes(self.dtype)


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

MEAN_DTYPES = ("float32", "bfloat16", "float16")
"""Element types that means travel in."""

WIRE_DTYPES = (*MEAN_DTYPES, "int8")
"""Element types that contributions travel in."""


_INFINITE = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits of the infinity of types with two bytes; NaN has larger ones, every finite number smaller ones."""


def itemsize(dtype: str) -> int:
    """Returns the bytes of one element."""
    return DTYPES[dtype].itemsize


def mean_dtype(dtype: str) -> str:
    """Returns the element type that the mean of contributions in `dtype` travels in."""
    return "bfloat16" if dtype == "int8" else dtype


def position_bytes(dtype: str) -> int:
    """Returns the bytes that an element counts for in `Chunk.offset_bytes` and in the length that chunks are cut to."""
    return itemsize("float32" if dtype == "int8" else dtype)


def scale_block_elements(dtype: str) -> int:
    """Returns how many neighbouring elements share one scale; 0 for a type without scales."""
    return quantize.BLOCK_ELEMENTS if dtype == "int8" else 0


def payload_bytes(num_elements: int, dtype: str) -> int:
    """Returns the bytes of a chunk of so many elements."""
    return quantize.payload_bytes(num_elements) if dtype == "int8" else num_elements * itemsize(dtype)


def encode(values_C: Floats, dtype: str) -> memoryview:
    """Returns the wire bytes of float32 values.

    Args:
        values_C: shape [C], float32, contiguous.
        dtype: name in WIRE_DTYPES. Rounds to nearest even; a value outside float16's range becomes infinite. With int8
            the values must begin at a multiple of `scale_block_elements` of their tensor.

    Returns:
        A view of `values_C` for float32; a new buffer else (one copy).
    """
    if dtype == "float32":
        return values_C.astype(DTYPES[dtype], copy=False).view(np.uint8).data
    wire = np.empty(payload_bytes(values_C.size, dtype), np.uint8)
    encode_into(values_C, dtype, wire)
    return wire.data


def encode_into(values_C: Floats, dtype: str, out: Bytes) -> None:
    """Writes the wire bytes of float32 values to `out`, which has exactly their length (one copy); see `encode`."""
    if dtype == "int8":
        quantize.quantize(values_C, out)
    elif dtype == "bfloat16":
        kernels().to_bfloat16(values_C, out.view(np.uint16))
    else:
        with np.errstate(over="ignore"):
            out.view(DTYPES[dtype])[...] = values_C


def decode(data: bytes | memoryview | Bytes, dtype: str) -> Floats:
    """Returns the float32 values of wire bytes, shape [C].

    Returns:
        A read-only view of `data` for float32; a new array else (one copy).

    Raises:
        BadChunk: the length is not a multiple of the element size.
    """
    if dtype == "int8":
        return quantize.dequantize(data, quantize.num_elements(len(data)))
    if len(data) % itemsize(dtype):
        raise _not_whole(len(data), dtype)
    return np.frombuffer(data, DTYPES[dtype]).astype(np.float32, copy=False)


def decode_part(data: Bytes, dtype: str, part: slice) -> Floats:
    """Returns the float32 values of some elements of wire bytes, which hold whole elements.

    Args:
        data: all bytes.
        dtype: name in WIRE_DTYPES.
        part: start and stop, in elements; with int8 start is a multiple of `scale_block_elements`.
    """
    if dtype == "int8":
        return quantize.dequantize_part(data, part)
    size = itemsize(dtype)
    return decode(data[part.start * size : part.stop * size], dtype)


def decode_into(data: bytes | memoryview, dtype: str, out_C: Floats) -> None:
    """Writes the float32 values of wire bytes to `out_C`, shape [C] (one copy).

    Raises:
        BadChunk: `data` does not hold exactly C elements.
    """
    expected = payload_bytes(out_C.size, dtype)
    if len(data) != expected:
        raise BadChunk(
            f"a chunk of {len(data)} bytes does not hold {out_C.size} {dtype} elements",
            field="length",
            expected=expected,
            received=len(data),
        )
    if dtype == "int8":
        quantize.dequantize(data, out_C.size, out_C)
    else:
        out_C[...] = np.frombuffer(data, DTYPES[dtype])


def count_elements(num_bytes: int, dtype: str) -> int:
    """Returns how many elements wire bytes of this length hold.

    Raises:
        BadChunk: they are no whole elements.
    """
    if dtype == "int8":
        return quantize.num_elements(num_bytes)
    count, rest = divmod(num_bytes, itemsize(dtype))
    if rest:
        raise _not_whole(num_bytes, dtype)
    return count


def is_finite(data: Bytes, dtype: str) -> bool:
    """Returns whether wire bytes, which hold whole elements, stand for finite values only; without decoding them."""
    if dtype == "int8":
        return quantize.is_finite(data, quantize.num_elements(data.size))
    if dtype == "float32":
        return first_non_finite(data.view(DTYPES[dtype])) is None
    return not data.size or kernels().largest(data.view(np.dtype("<u2"))) < _INFINITE[dtype]


def first_non_finite(values_C: Floats) -> int | None:
    """Returns the index of the first NaN or infinity, or None."""
    finite = np.isfinite(values_C)
    return None if finite.all() else int(np.argmin(finite))


def _not_whole(num_bytes: int, dtype: str) -> BadChunk:
    size = itemsize(dtype)
    return BadChunk(
        f"a chunk of {num_bytes} bytes does not hold whole {dtype} elements of {size} bytes",
        field="length",
        expected=f"a multiple of {size}",
        received=num_bytes,
    )
