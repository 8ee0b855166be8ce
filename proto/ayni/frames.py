"""Hot frames: ordinary protobuf on the wire, joined and parsed without a protobuf runtime.  [core]

Theory of operation. The messages that carry bulk data look alike: an outer message with one `oneof` of
sub-messages, one of which is a `Chunk`. A generated class would copy the payload into a message object, and again
when it is serialized. Here a frame is joined from [small fields | payload] in one copy, and parsed in place: the
payload is a view of the received bytes.

Any conforming encoder may write the fields in any order, repeat scalar fields (the last one counts), split the
sub-message (parts are merged), leave out defaults and add fields that we do not know; all of that is understood. What
is not valid protobuf is refused with `BadRequest`.

`fields`, `current_field` and `varint` are for the other kinds of chunk that are joined and parsed like this one.

Ugly: groups (wire types 3 and 4) are refused although protobuf allows them as unknown fields; no proto3 encoder
writes them.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from ayni.errors import BadRequest

CHUNK_FIELD = 2
"""Field number of `chunk` in every gradient request and response."""

_KINDS = frozenset({1, CHUNK_FIELD, 3})
"""Fields of the oneof of these messages; a request lacks the last one. Any other field is one that we do not know."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Wire types."""

_ALIGNMENT = 8
"""Bytes; enough for every element type."""

_PADDINGS = (b"", *(b"\x22" + bytes([size]) + bytes(size) for size in range(1, 2 * _ALIGNMENT)))
"""What may stand before the payload: nothing, or the padding field. One fits, even where a length grows by a byte."""

MAX_FIELDS = 256
"""Fields of one message, unknown ones included; a frame of ours has five."""

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class SharedRange:
    """Bytes in a region of the sender's memory."""

    region: int
    offset_bytes: int
    length_bytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class ChunkView:
    """A `Chunk` whose data is a view of the frame that it came in, or lies in shared memory."""

    offset_bytes: int
    part: int
    crc32: int | None
    data: memoryview
    shared: SharedRange | None = None


def varint(value: int) -> bytes:
    """Returns the base-128 form of a number in [0, 2**64)."""
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def encode_chunk(field_number: int, offset_bytes: int, part: int, payload: Buffer, crc32: int | None = None) -> bytes:
    """Returns a whole message whose field `field_number` is a Chunk; copies the payload once.

    Defaults are left out, and fields are in number order, as a generated class writes them. Padding brings the payload
    to a multiple of 8 bytes from the frame's start.
    """
    small = b"".join(
        (
            b"\x08" + varint(offset_bytes) if offset_bytes else b"",
            b"\x10" + varint(part) if part else b"",
            b"" if crc32 is None else b"\x1d" + crc32.to_bytes(4, "little"),
        )
    )
    last = b"\x2a" + varint(len(payload)) if len(payload) else b""
    tag = varint(field_number << 3 | LENGTH)
    for padding in _PADDINGS:
        inner = small + padding + last
        head = tag + varint(len(inner) + len(payload)) + inner
        if len(head) % _ALIGNMENT == 0 or not last:
            break
    return b"".join((head, payload))


def encode_shared_chunk(field_number: int, offset_bytes: int, part: int, shared: SharedRange) -> bytes:
    """Returns a whole message whose field `field_number` is a Chunk with bytes in shared memory."""
    numbers = (shared.region, shared.offset_bytes, shared.length_bytes, shared.generation)
    place = _numbers(numbers)
    inner = _numbers((offset_bytes, part)) + b"\x32" + varint(len(place)) + place
    return varint(field_number << 3 | LENGTH) + varint(len(inner)) + inner


def _numbers(values: Iterable[int]) -> bytes:
    """Returns varint fields 1, 2, ...; defaults are left out."""
    return b"".join(varint(number << 3) + varint(value) for number, value in enumerate(values, 1) if value)


def decode_frame(frame: bytes) -> tuple[int, "ChunkView | memoryview"]:
    """Returns which field of the frame's oneof is set, and its content in place.

    Returns:
        (CHUNK_FIELD, ChunkView), or (another field number, the sub-message's bytes); (0, empty) when none is set.
        As protobuf says, the last field of a oneof counts, and repeated occurrences of the same one are merged.

    Raises:
        BadRequest: the bytes are not valid protobuf.
    """
    current, pieces = current_field(frame, _KINDS)
    if current == CHUNK_FIELD:
        return current, _chunk(pieces)
    return current, joined(pieces)


def current_field(frame: bytes, known: Container[int] | None = None) -> tuple[int, list[memoryview]]:
    """Returns which field of the frame's oneof is set, and the pieces of its content in place, not merged.

    Args:
        frame: the message.
        known: numbers of the oneof's fields; None takes every sub-message for one of them.

    Raises:
        BadRequest: the bytes are not valid protobuf.
    """
    current, pieces = 0, list[memoryview]()
    for number, wire_type, value in fields(memoryview(frame)):
        if wire_type != LENGTH or (known is not None and number not in known):
            continue
        assert isinstance(value, memoryview)
        if number != current:
            current, pieces = number, []
        pieces.append(value)
    return current, pieces


def joined(pieces: list[memoryview]) -> memoryview:
    """Returns a sub-message's pieces as one; copies only where there are several."""
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _chunk(pieces: list[memoryview]) -> ChunkView:
    offset_bytes, part, crc32, data, shared = 0, 0, None, memoryview(b""), list[memoryview]()
    for piece in pieces:
        for number, wire_type, value in fields(piece):
            if (number, wire_type) == (1, VARINT):
                assert isinstance(value, int)
                offset_bytes = value
            elif (number, wire_type) == (2, VARINT):
                assert isinstance(value, int)
                part = value & 0xFFFFFFFF
            elif (number, wire_type) == (3, FIXED32):
                assert isinstance(value, memoryview)
                crc32 = int.from_bytes(value, "little")
            elif (number, wire_type) == (5, LENGTH):
                assert isinstance(value, memoryview)
                data = value
            elif (number, wire_type) == (6, LENGTH):
                assert isinstance(value, memoryview)
                shared.append(value)
    return ChunkView(offset_bytes, part, crc32, data, _shared_range(shared) if shared else None)


def _shared_range(pieces: list[memoryview]) -> SharedRange:
    numbers = [0, 0, 0, 0]
    for piece in pieces:
        for number, wire_type, value in fields(piece):
            if wire_type == VARINT and number <= len(numbers):
                assert isinstance(value, int)
                numbers[number - 1] = value
    return SharedRange(*numbers)


def fields(data: memoryview, max_fields: int = MAX_FIELDS) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yields (field number, wire type, value); the value of anything but a varint is a view.

    Raises:
        BadRequest: the bytes are not valid protobuf, or there are more fields than that.
    """
    position, end, count = 0, len(data), 0
    while position < end:
        count += 1
        if count > max_fields:
            raise BadRequest(f"a frame has more than {max_fields} fields", field="frame")
        tag, position = read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise BadRequest(f"a frame has the impossible field number {number}", field="frame")
        if wire_type == VARINT:
            value, position = read_varint(data, position)
            yield number, wire_type, value
            continue
        length, position = _payload_length(data, position, wire_type)
        if length > end - position:
            raise BadRequest(
                f"a frame is cut short: field {number} wants {length} bytes and {end - position} are left",
                field="frame",
            )
        yield number, wire_type, data[position : position + length]
        position += length


def _payload_length(data: memoryview, position: int, wire_type: int) -> tuple[int, int]:
    if wire_type == LENGTH:
        return read_varint(data, position)
    if wire_type in (FIXED32, FIXED64):
        return (4 if wire_type == FIXED32 else 8), position
    raise BadRequest(f"a frame has a field of wire type {wire_type}, which proto3 does not write", field="frame")


def read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Returns the number that begins at a position, and the position after it; raises BadRequest."""
    result = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise BadRequest("a frame is cut short inside a number", field="frame")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & 0xFFFFFFFFFFFFFFFF, position
    raise BadRequest("a frame has a number of more than 10 bytes", field="frame")
