"""A chunk of a contribution as it came, checked.  [core]"""

import zlib
from dataclasses import dataclass

import numpy as np

from ayni import tensors
from ayni.errors import BadChunk, Checksum
from ayni.frames import ChunkView, decode_frame
from ayni.reduce.packed import Values, packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """A chunk of one part.

    Attributes:
        part: index into the contribution's parts.
        offset: first element.
        values_C: what it stands for, C elements; a read-only view of the frame.
    """

    part: int
    offset: int
    values_C: Values  # noqa: N815


def arrived(frame: bytes, label: str, dtype: str, chunk_elements: int) -> Arrived:
    """Returns the chunk in a frame (no copy).

    Args:
        frame: the message.
        label: names step and bucket in errors.
        dtype: element type on the wire.
        chunk_elements: most elements of a chunk; more are refused.

    Raises:
        BadRequest: the frame is not valid protobuf.
        BadChunk: it is no chunk, too long, or begins inside an element.
        Checksum: it carries a CRC-32 that is not its own.
    """
    number, chunk = decode_frame(frame)
    if not isinstance(chunk, ChunkView) or chunk.shared is not None:
        kind = f"field {number}" if not isinstance(chunk, ChunkView) else "bytes in shared memory"
        raise _bad(label, "frame", "a chunk with data", kind)
    offset = first_element(chunk, label, dtype)
    return Arrived(part=chunk.part, offset=offset, values_C=checked(chunk, label, dtype, chunk_elements))


def first_element(chunk: ChunkView, label: str, dtype: str) -> int:
    """Returns where a chunk begins, in elements.

    Raises:
        BadChunk: inside an element.
    """
    size = tensors.position_bytes(dtype)
    if chunk.offset_bytes % size:
        raise _bad(label, "offset", f"a multiple of {size}", chunk.offset_bytes, "; it begins inside an element")
    return chunk.offset_bytes // size


def checked(chunk: ChunkView, label: str, dtype: str, chunk_elements: int) -> Values:
    """Returns the values of a chunk, C elements: a read-only view of the frame, decoded where it is added.

    Raises:
        BadChunk: it is too long, which may take four times its bytes to decode, or holds no whole elements.
        Checksum: see `_check_crc`.
    """
    most = tensors.payload_bytes(chunk_elements, dtype)
    if len(chunk.data) > most:
        raise _bad(label, "length", f"at most {most}", len(chunk.data))
    _check_crc(label, chunk)
    return packed(np.frombuffer(chunk.data, np.uint8), dtype)


def _check_crc(label: str, chunk: ChunkView) -> None:
    """Compares a chunk's bytes with its CRC-32, if it has one.

    Raises:
        Checksum: they do not match.
    """
    if chunk.crc32 is not None and zlib.crc32(chunk.data) != chunk.crc32:
        raise Checksum(
            f"{label}: the bytes of a chunk at {chunk.offset_bytes} do not match their CRC-32",
            name=label,
            expected=f"{chunk.crc32:08x}",
            received=f"{zlib.crc32(chunk.data):08x}",
        )


def _bad(label: str, field: str, expected: object, received: object, detail: str = "") -> BadChunk:
    return BadChunk(
        f"{label}: a chunk has {field} {received}; expected {expected}{detail}",
        field=field,
        expected=expected,
        received=received,
        bucket=label,
    )
