"""Messages of the schema with any values: drawn from protobuf descriptors.

`Hints` are values that a live server knows (ids, sessions, handles), by name of a field; they let messages come past
the first check. They are drawn by number, so that an example stays what it is when a server has other values later.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

Hints = Mapping[str, Sequence[Any]]

HINT_NUMBERS = 12
LONGEST_TEXT = 5_000
MOST_ENTRIES = 20_000
"""Entries of a list of numbers: many, and well below gRPC's limit of a message."""

_MOST_MESSAGES = 300
_MOST_LIST_BYTES = 6 << 20
"""Above gRPC's limit of a message, which is worth a try, and no more."""
_DEEPEST = 5

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_EDGES = (0, 1, 2, 3, 4, 7, 8, 9, 64, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**44, 2**53, 2**62)
_TEXTS = (
    "",
    " ",
    "x",
    "cpu",
    "file",
    "a\nb",
    "nul\0",
    "\x1b[31m",
    "\u202e",
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../b",
    ".",
    "~",
    "%s%n{0}",
    "é" * 200,
    "\U0001f40c",
    "127.0.0.1:1",
    "[::1]:0",
    "127.0.0.1:99999",
    "00000000-0000-0000-0000-000000000000",
    "inf",
    "null",
    "x" * 64,
    "0" * 64,
    "x" * LONGEST_TEXT,
)
_CHARACTERS = st.characters(exclude_categories=["Cs"])
_FLOATS = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1.7e308, -1.7e308, 3.4e38, 1e300)


def draw_mutation(draw: Any, base: Message, hints: Hints) -> Message:
    """Returns the message with up to three of its fields changed; often with none."""
    result = type(base)()
    result.CopyFrom(base)
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 2, 3)))):
        message = result
        while message.DESCRIPTOR.fields:
            field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
            if not _is_single_message(field) or not message.HasField(field.name) or not draw(st.integers(0, 3)):
                break
            message = getattr(message, field.name)
        else:
            continue
        message.ClearField(field.name)
        if draw(st.integers(0, 3)):
            _draw_field(draw, message, field, hints, 1)
    return result


def draw_message(draw: Any, descriptor: Descriptor, hints: Hints, depth: int = 0) -> Message:
    """Returns a message with any fields set to any values."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        # Deep messages get fewer fields, or examples grow too large.
        if draw(st.integers(0, 2 + depth)) <= 1:
            _draw_field(draw, message, field, hints, depth)
    return message


def _draw_field(draw: Any, message: Message, field: FieldDescriptor, hints: Hints, depth: int) -> None:
    if depth > _DEEPEST:
        return
    if field.message_type and field.message_type.GetOptions().map_entry:
        for _ in range(draw(st.integers(0, 3))):
            getattr(message, field.name)[draw(_texts())] = draw(_texts())
    elif _is_repeated(field):
        _draw_list(draw, getattr(message, field.name), field, hints, depth)
    elif field.message_type:
        sub = getattr(message, field.name)
        sub.SetInParent()
        hint = _hint(draw, field, hints)
        sub.CopyFrom(draw_message(draw, field.message_type, hints, depth + 1) if hint is None else hint)
    else:
        setattr(message, field.name, _draw_scalar(draw, field, hints))


def _draw_list(draw: Any, target: Any, field: FieldDescriptor, hints: Hints, depth: int) -> None:
    kind = draw(st.integers(0, 9))
    if field.message_type:
        hint = _hint(draw, field, hints)
        entry = draw_message(draw, field.message_type, hints, depth + 1) if hint is None else hint
        count = draw(st.integers(0, _MOST_MESSAGES)) if kind == 9 else kind % 3
        # Lists in lists of lists would take all memory before anybody could refuse them.
        target.extend([entry] * min(count, _MOST_LIST_BYTES // max(1, entry.ByteSize())))
    elif kind == 9:
        value, count = _draw_scalar(draw, field, hints), draw(st.integers(0, MOST_ENTRIES))
        size = len(value) if isinstance(value, str | bytes) else 1
        target.extend([value] * min(count, _MOST_LIST_BYTES // max(1, size)))
    else:
        target.extend(_draw_scalar(draw, field, hints) for _ in range(kind % 5))


def _draw_scalar(draw: Any, field: FieldDescriptor, hints: Hints) -> Any:
    hint = _hint(draw, field, hints)
    return draw(_scalars(field)) if hint is None else hint


def _hint(draw: Any, field: FieldDescriptor, hints: Hints) -> Any:
    owner = field.containing_type.name if field.containing_type else ""
    known = hints.get(f"{owner}.{field.name}", hints.get(field.name, ()))
    number = draw(st.integers(0, HINT_NUMBERS - 1)) if known and draw(st.integers(0, 4)) else None
    return None if number is None else known[number % len(known)]


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    numbers = tuple(value.number for value in field.enum_type.values) if field.enum_type else ()
    return _scalars_of(field.cpp_type, field.type == FieldDescriptor.TYPE_BYTES, numbers)


@functools.cache
def _scalars_of(kind: int, is_bytes: bool, numbers: tuple[int, ...]) -> st.SearchStrategy[Any]:
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from((*numbers, 99, -1, 2**31 - 1))
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from(_FLOATS) | st.floats(width=64 if kind == FieldDescriptor.CPPTYPE_DOUBLE else 32)
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        edges = [edge for edge in (*_EDGES, *(-edge for edge in _EDGES), low, high) if low <= edge <= high]
        return st.sampled_from(edges) | st.integers(low, high)
    return st.binary(max_size=200) | _large_bytes() if is_bytes else _texts()


@functools.cache
def _texts() -> st.SearchStrategy[str]:
    return st.sampled_from(_TEXTS) | st.text(_CHARACTERS, max_size=30)


def _large_bytes() -> st.SearchStrategy[bytes]:
    return st.sampled_from((24, 48, 4_096, 65_536, 1 << 20)).map(bytes)


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def _is_single_message(field: FieldDescriptor) -> bool:
    return bool(field.message_type) and not _is_repeated(field)
