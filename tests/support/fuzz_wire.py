"""Encoded messages damaged as no encoder would write them: cut, flipped, spliced, with wrong types and lengths."""

from typing import Any

from hypothesis import strategies as st

from ayni.frames import varint

_PLACES = 1 << 16
_LONGEST = 2_000
_OVERLONG = b"\xff" * 10 + b"\x01"
_PIECES = (
    b"",
    b"\x00",
    b"\x80",
    _OVERLONG,
    b"\x0b\x0c",  # an empty group
    b"\x0b" * 200,  # groups in groups
    b"\x0a\xff\xff\xff\xff\x0f",  # a length of 4 GiB
    b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x0a\x02\xff\xfe",  # a text that is no UTF-8
    b"\x12\x03\xed\xa0\x80",  # half of a surrogate pair
    b"\x1a\x04\xf8\x88\x80\x80",
    b"\x0d\x00\x00",
    b"\x09\x01",
    b"\x08" + b"\x80" * 9 + b"\x01",
    b"\x07",
    b"\xf8\xff\xff\xff\x0f\x01",  # the highest field number
    b"\x0a\x00" * 2_000,
)
_INSERTED = st.sampled_from(_PIECES) | st.binary(max_size=12)


def draw_damaged(draw: Any, encoded: bytes) -> bytes:
    """Returns the message with one to four changes."""
    for _ in range(draw(st.integers(1, 4))):
        encoded = _CHANGES[draw(st.integers(0, len(_CHANGES) - 1))](draw, encoded)
    return encoded


def nested(depth: int, field_number: int) -> bytes:
    """A message in a message, so many times."""
    result = b""
    for _ in range(depth):
        result = varint(field_number << 3 | 2) + varint(len(result)) + result
    return result


def _place(draw: Any, data: bytes) -> int:
    """A place in the data. What is drawn does not depend on them, so that an example is the same whenever it runs."""
    return draw(st.integers(0, _PLACES)) * len(data) // _PLACES


def _cut(draw: Any, data: bytes) -> bytes:
    return data[: _place(draw, data)]


def _flip(draw: Any, data: bytes) -> bytes:
    place, bit = _place(draw, data), draw(st.integers(0, 7))
    return data[:place] + bytes([byte ^ 1 << bit for byte in data[place : place + 1]]) + data[place + 1 :]


def _insert(draw: Any, data: bytes) -> bytes:
    place = _place(draw, data)
    return data[:place] + draw(_INSERTED) + data[place:]


def _repeat(draw: Any, data: bytes) -> bytes:
    start, length = _place(draw, data), draw(st.integers(0, _LONGEST))
    piece = data[start : start + length]
    return data[: start + length] + piece * draw(st.integers(1, 20)) + data[start + length :]


def _nest(draw: Any, data: bytes) -> bytes:
    return data + nested(draw(st.sampled_from((1, 50, 99, 101, 500))), draw(st.integers(1, 15)))


def _twice(_draw: Any, data: bytes) -> bytes:
    return data * 2 if len(data) < 1 << 20 else data


_CHANGES = (_cut, _flip, _insert, _repeat, _nest, _twice)
