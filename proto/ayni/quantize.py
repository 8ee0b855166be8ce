"""Float32 numbers as one byte each, with a scale for every block of them.  [core]

Legend: C elements in a chunk, B blocks in it, K elements in a block.

Theory of operation. A chunk is cut into blocks of 256 neighbouring elements; its last block may be shorter. A block's
scale is the largest magnitude in it divided by 127, and each element becomes the nearest multiple of it, -127 to 127
times: off by half a scale at most. A payload is the float32 scales, little-endian, and then the C codes. Chunks begin
at multiples of 256 elements of their tensor, so where a tensor is cut into chunks makes no difference to any block.

No code stands for NaN or an infinity, and what is sent must not hide one: a block that has any gets an infinite scale,
code 0 for what is finite, 1 and -1 for the infinities and -128 for NaN. Who reads it finds them where they were.

What is ugly: at both ends of float32 a scale is moved by its last bit. Next to zero bits run out, and it is rounded up,
so that no element is more than 127 times as large; at the largest numbers it is rounded down, so that 127 times the
scale is still a number.
"""

import numpy as np
import numpy.typing as npt

from ayni.errors import BadChunk
from ayni.kernels.current import kernels
from ayni.kernels.numpy_kernels import SCALE_BLOCK, runs

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]
Payload = npt.NDArray[np.uint8]

BLOCK_ELEMENTS = SCALE_BLOCK
"""Elements that share one scale."""

_SCALE = np.dtype("<f4")
_NAN_CODE = -128


def payload_bytes(num_elements: int) -> int:
    """Returns the length of a payload."""
    return num_elements + _num_blocks(num_elements) * _SCALE.itemsize


def num_elements(num_bytes: int) -> int:
    """Returns how many elements a payload of this length holds.

    Raises:
        BadChunk: no payload has this length.
    """
    count = num_bytes - -(-num_bytes // (BLOCK_ELEMENTS + _SCALE.itemsize)) * _SCALE.itemsize
    if payload_bytes(count) != num_bytes:
        raise _bad_length("whole blocks of int8 elements, each with its scale", "a scale and codes", num_bytes)
    return count


def quantize(values_C: Floats, out: Payload | None = None) -> Payload:
    """Returns the payload that stands for float32 values (one pass from memory).

    Args:
        values_C: shape [C].
        out: where the payload goes, of exactly its length; None for a new buffer.
    """
    count, num_blocks = values_C.size, _num_blocks(values_C.size)
    payload = np.empty(payload_bytes(count), np.uint8) if out is None else out
    assert payload.size == payload_bytes(count), f"a payload of {count} elements is put into {payload.size} bytes"
    scales_B = payload[: num_blocks * _SCALE.itemsize].view(_SCALE)
    codes_C = payload[num_blocks * _SCALE.itemsize :].view(np.int8)
    kernels().to_int8(values_C, scales_B, codes_C)
    if not np.isfinite(scales_B).all():
        for blocks, elements, size in runs(count):
            _mark(values_C[elements].reshape(-1, size), scales_B[blocks], codes_C[elements].reshape(-1, size))
    return payload


def dequantize(payload: bytes | memoryview | Payload, count: int, out_C: Floats | None = None) -> Floats:
    """Returns the float32 values that a payload stands for, shape [C].

    Args:
        payload: bytes of exactly that many elements.
        count: C.
        out_C: where they go, shape [C]; None for a new array.

    Raises:
        BadChunk: the payload has another length. Nothing was written.
    """
    if len(payload) != payload_bytes(count):
        raise _bad_length(f"{count} int8 elements and their scales", payload_bytes(count), len(payload))
    values_C = np.empty(count, np.float32) if out_C is None else out_C
    num_blocks = _num_blocks(count)
    scales_B = np.frombuffer(payload, _SCALE, num_blocks)
    codes_C = np.frombuffer(payload, np.int8, count, num_blocks * _SCALE.itemsize)
    return _dequantized(scales_B, codes_C, values_C)


def dequantize_part(payload: Payload, part: slice) -> Floats:
    """Returns the float32 values of some elements of a payload of whole elements.

    Args:
        payload: all of it.
        part: start and stop, in elements; start is a multiple of `BLOCK_ELEMENTS`.
    """
    num_blocks = _num_blocks(num_elements(payload.size))
    first, last = part.start // BLOCK_ELEMENTS, _num_blocks(part.stop)
    scales_B = payload[first * _SCALE.itemsize : last * _SCALE.itemsize]
    codes_C = payload[num_blocks * _SCALE.itemsize :][part]
    values_C = np.empty(part.stop - part.start, np.float32)
    return _dequantized(scales_B.view(_SCALE), codes_C.view(np.int8), values_C)


def is_finite(payload: memoryview | Payload, count: int) -> bool:
    """Returns whether a payload of so many elements stands for finite values only; looks at codes only if in doubt."""
    scales_B = np.frombuffer(payload, _SCALE, _num_blocks(count))
    with np.errstate(invalid="ignore", over="ignore"):
        tops_B = scales_B * -np.float32(_NAN_CODE)
    return bool(np.isfinite(tops_B).all()) or bool(np.isfinite(dequantize(payload, count)).all())


def _dequantized(scales_B: Floats, codes_C: Codes, values_C: Floats) -> Floats:
    kernels().from_int8(scales_B, codes_C, values_C)
    if not np.isfinite(scales_B).all():
        for blocks, elements, size in runs(values_C.size):
            _unmark(scales_B[blocks], codes_C[elements].reshape(-1, size), values_C[elements].reshape(-1, size))
    return values_C


def _mark(values_BK: Floats, scales_B: Floats, codes_BK: Codes) -> None:
    """Writes the codes and scales of blocks that are not finite."""
    is_bad_B = ~np.isfinite(scales_B)
    bad_BK = values_BK[is_bad_B]
    codes_BK[is_bad_B] = np.where(np.isnan(bad_BK), _NAN_CODE, np.isposinf(bad_BK) * 1 - np.isneginf(bad_BK) * 1)
    scales_B[is_bad_B] = np.inf


def _unmark(scales_B: Floats, codes_BK: Codes, out_BK: Floats) -> None:
    """Puts what is not finite where its codes are."""
    is_bad_B = ~np.isfinite(scales_B)
    codes_BK = codes_BK[is_bad_B]
    values_BK = np.where(codes_BK == _NAN_CODE, np.float32(np.nan), out_BK[is_bad_B])
    out_BK[is_bad_B] = np.where(codes_BK == 0, np.float32(0), values_BK)


def _num_blocks(count: int) -> int:
    return -(-count // BLOCK_ELEMENTS)


def _bad_length(what: str, expected: object, received: int) -> BadChunk:
    return BadChunk(
        f"a chunk of {received} bytes does not hold {what}", field="length", expected=expected, received=received
    )
