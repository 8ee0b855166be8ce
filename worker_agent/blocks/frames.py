"""Frames that carry bytes of blocks: joined in one copy, parsed in place.  [core]

Theory of operation. ReadBlocksResponse and WriteBlocksRequest have one field in common, a BlockChunk with bulk data.
Its small fields are joined with views of the blocks, which is the only copy that a sender makes; a receiver gets a
view of the frame that it can copy into a block. On the wire both are ordinary protobuf, and what any conforming
encoder writes is understood; see `ayni.frames`.

Ugly: a list of block ids may come packed, unpacked or both, so a chunk may have many fields. They are bounded by the
number of blocks that one chunk may name.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ayni import frames
from ayni.errors import BadRequest, Checksum, TooLarge
from ayni.frames import FIXED32, LENGTH, VARINT, Buffer, varint

BEGIN, CHUNK, COMPLETE = 1, 2, 3
"""Field numbers of a frame's kinds; a write has no COMPLETE."""

DEFAULT_CHUNK_BYTES = 1 << 20
"""What a reader gets that does not say how much it wants."""
MAX_CHUNK_BYTES = 2 << 20
"""Most bytes of data in one chunk, and what we ask for and send: a tenth cheaper than half of it. A frame then stays
below gRPC's limit of 4 MiB, whatever its ids are."""

MAX_CHUNK_BLOCKS = 1 << 16
"""Most blocks that one chunk may name."""

_KINDS = (BEGIN, CHUNK, COMPLETE)
_STREAM_OFFSET, _INDEX, _BLOCKS, _LAYER_START, _LAYER_STOP, _OFFSET, _CRC32, _DATA = 1, 2, 3, 4, 5, 6, 7, 15
_LONGEST = 10
"""Bytes of the longest number."""
_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockChunk:
    """A `BlockChunk` whose data is a view of the frame that it came in."""

    stream_offset_bytes: int = 0
    index: int = 0
    blocks: Sequence[int]
    layer_start: int = 0
    layer_stop: int = 0
    offset_bytes: int = 0
    crc32: int | None = None
    data: memoryview

    def check_sum(self, peer: str) -> None:
        """Compares the data with its checksum, where it has one.

        Raises:
            Checksum: they differ; `peer` says who sent it.
        """
        if self.crc32 is not None and (found := zlib.crc32(self.data)) != self.crc32:
            raise Checksum(
                f"a chunk from {peer} was damaged on its way: bytes {self.stream_offset_bytes} to "
                f"{self.stream_offset_bytes + len(self.data)} of the stream do not match their CRC-32",
                name=f"chunk at {self.stream_offset_bytes}",
                expected=f"{self.crc32:08x}",
                received=f"{found:08x}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkHead:
    """The small fields of a chunk that is to be sent."""

    stream_offset_bytes: int
    index: int
    blocks: Sequence[int]
    layers: tuple[int, int]
    offset_bytes: int = 0


def encode_block_chunk(head: ChunkHead, payload: Sequence[Buffer], checksum: bool = False) -> bytes:
    """Returns a whole frame of a read or write; copies the payload once.

    Fields are in number order and defaults are left out, as a generated class writes them.

    Args:
        head: the small fields.
        payload: the data, in pieces.
        checksum: give the data's CRC-32 along.
    """
    size = sum(map(len, payload))
    small = b"".join(
        (
            _scalar(_STREAM_OFFSET, head.stream_offset_bytes),
            _scalar(_INDEX, head.index),
            _with_length(_BLOCKS, packed(head.blocks)),
            _scalar(_LAYER_START, head.layers[0]),
            _scalar(_LAYER_STOP, head.layers[1]),
            _scalar(_OFFSET, head.offset_bytes),
            bytes((_CRC32 << 3 | FIXED32,)) + _crc32(payload).to_bytes(4, "little") if checksum else b"",
            bytes((_DATA << 3 | LENGTH,)) + varint(size) if size else b"",
        )
    )
    return b"".join((bytes((CHUNK << 3 | LENGTH,)), varint(len(small) + size), small, *payload))


def decode_block_frame(frame: bytes) -> tuple[int, "BlockChunk | memoryview"]:
    """Returns which kind of frame this is, and its content in place.

    Returns:
        (CHUNK, the chunk), or (BEGIN or COMPLETE, the sub-message's bytes). (0, empty) when it is none of these.

    Raises:
        BadRequest: the bytes are not valid protobuf.
        TooLarge: a chunk names too many blocks.
    """
    kind, pieces = frames.current_field(frame, _KINDS)
    return kind, _chunk(pieces) if kind == CHUNK else frames.joined(pieces)


def packed(values: Iterable[int]) -> bytes:
    """Returns numbers in base-128 form, one after the other."""
    result = bytearray()
    for value in values:
        while value > 0x7F:
            result.append(value & 0x7F | 0x80)
            value >>= 7
        result.append(value)
    return bytes(result)


def unpacked(data: memoryview) -> list[int]:
    """Returns the numbers that are packed in `data`.

    Raises:
        BadRequest: the last one is cut short, or one is longer than 10 bytes.
        TooLarge: they take more bytes than MAX_CHUNK_BLOCKS of them may.
    """
    values, value, shift = list[int](), 0, 0
    _check_count(len(data), MAX_CHUNK_BLOCKS * _LONGEST)
    for byte in data:
        value |= (byte & 0x7F) << shift
        if byte > 0x7F:
            shift += 7
            continue
        if shift >= 7 * _LONGEST:
            break
        values.append(value & _UINT64)
        value = shift = 0
    if shift:
        raise BadRequest("a frame has a block id that is cut short or longer than 10 bytes", field="blocks")
    return values


def _chunk(pieces: Iterable[memoryview]) -> BlockChunk:
    scalars: dict[int, int] = {}
    blocks: list[int] = []
    crc32, data = None, memoryview(b"")
    for piece in pieces:
        for number, wire_type, value in frames.fields(piece, frames.MAX_FIELDS + MAX_CHUNK_BLOCKS):
            if isinstance(value, int):
                if number == _BLOCKS:
                    blocks.append(value)
                scalars[number] = value
            elif (number, wire_type) == (_BLOCKS, LENGTH):
                blocks += unpacked(value)
            elif (number, wire_type) == (_CRC32, FIXED32):
                crc32 = int.from_bytes(value, "little")
            elif (number, wire_type) == (_DATA, LENGTH):
                data = value
    _check_count(len(blocks), MAX_CHUNK_BLOCKS)
    return BlockChunk(
        stream_offset_bytes=scalars.get(_STREAM_OFFSET, 0),
        index=scalars.get(_INDEX, 0),
        blocks=blocks,
        layer_start=scalars.get(_LAYER_START, 0) & 0xFFFFFFFF,
        layer_stop=scalars.get(_LAYER_STOP, 0) & 0xFFFFFFFF,
        offset_bytes=scalars.get(_OFFSET, 0),
        crc32=crc32,
        data=data,
    )


def _scalar(number: int, value: int) -> bytes:
    return bytes((number << 3 | VARINT,)) + varint(value) if value else b""


def _with_length(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | LENGTH,)) + varint(len(content)) + content if content else b""


def _crc32(payload: Iterable[Buffer]) -> int:
    result = 0
    for piece in payload:
        result = zlib.crc32(piece, result)
    return result


def _check_count(count: int, limit: int) -> None:
    if count > limit:
        raise TooLarge(
            f"a chunk names more than {MAX_CHUNK_BLOCKS} blocks", field="blocks", limit=MAX_CHUNK_BLOCKS, received=count
        )
