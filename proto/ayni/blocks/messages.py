"""Small values of the block half as messages and back, and how what was received is checked.  [shell]

Reading a message checks all of it. What is wrong is refused with an error whose `field` is the path to the wrong field,
such as "metadata.layouts[2].tier": `within` and `each` add to the path on its way up, and `sent_by` says at last who
sent it. Values travel as they are: nothing is normalized but defaults that the schema names.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Generic, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from ayni.blocks import objects
from ayni.blocks.ids import Ids, as_ids, from_runs, to_runs
from ayni.blocks.layouts import Axis, AxisOrder, LayoutHandle, LayoutKind, LocalLayout, StorageKind, Tier
from ayni.blocks.metadata import ParallelismMode
from ayni.blocks.sequence_hash import KEY_BYTES
from ayni.blocks.transfers import AxisSlice, Failure, ObjectKeys
from ayni.errors import BY_REASON, AyniError, BadRequest, Fault, TooLarge
from ayni.v1 import errors_pb2
from ayni.v1 import worker_pb2 as pb

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MAX_SECONDS = 10**9
_REASON_PREFIX = "ERROR_REASON_"
_T = TypeVar("_T")
_E = TypeVar("_E", bound=Enum)


@contextmanager
def within(field: str) -> Iterator[None]:
    """Puts a field before the one that an error of the block names."""
    try:
        yield
    except AyniError as error:
        raise _located(error, field) from None


@contextmanager
def unnamed() -> Iterator[None]:
    """Drops the field of errors of a value that checks itself and doesn't know what it is called in a message."""
    try:
        yield
    except AyniError as error:
        error.metadata.pop("field", None)
        raise


@contextmanager
def sent_by(sender: str) -> Iterator[None]:
    """Names the sender of what could not be read, and the field again for those who see only the sentence."""
    try:
        yield
    except AyniError as error:
        field = error.metadata.get("field", "a message")
        refusal = type(error)(f"{field}, as {sender} sent it, can't be taken: {error.message}")
        refusal.metadata = error.metadata
        raise refusal from None


def field(message: Message, name: str, read: Callable[[Any], _T]) -> _T:
    """Reads a message inside a message.

    Raises:
        BadRequest: there is none.
    """
    if not message.HasField(name):
        raise BadRequest(f"{name} is required", field=name)
    with within(name):
        return read(getattr(message, name))


def optional_field(message: Message, name: str, read: Callable[[Any], _T]) -> _T | None:
    """Reads a message inside a message; None when there is none."""
    return field(message, name, read) if message.HasField(name) else None


def each(field: str, messages: Iterable[Any], read: Callable[[Any], _T]) -> tuple[_T, ...]:
    """Reads every message of a list."""
    values: list[_T] = []
    try:
        for message in messages:
            values.append(read(message))
    except AyniError as error:
        raise _located(error, f"{field}[{len(values)}]") from None
    return tuple(values)


def check_unique(field: str, values: Iterable[Hashable]) -> None:
    """Raises BadRequest when a value comes twice."""
    seen: set[Hashable] = set()
    for value in values:
        if value in seen:
            raise BadRequest(f"{value} comes twice", field=field)
        seen.add(value)


def _located(error: AyniError, field: str) -> AyniError:
    inner = error.metadata.get("field")
    error.metadata["field"] = f"{field}.{inner}" if inner else field
    return error


class Words(Generic[_E]):
    """An enum of the schema beside ours, which has the same names without the prefix and without UNSPECIFIED."""

    def __init__(self, values: type[_E], schema: Any) -> None:
        """Pairs both; a name that the schema lacks is a bug that shows at import."""
        prefix = schema.Name(0).removesuffix("UNSPECIFIED")
        self._what = values.__name__
        self._by_number: dict[int, _E] = {schema.Value(prefix + value.name): value for value in values}
        self._numbers: dict[_E, Any] = {value: number for number, value in self._by_number.items()}

    def of(self, number: int, field: str) -> _E:
        """Returns our value.

        Raises:
            BadRequest: it is unspecified, or this version doesn't know it.
        """
        value = self._by_number.get(number)
        if value is None:
            known = ", ".join(word.name for word in self._numbers)
            got = f"has the unknown number {number}" if number else "is unspecified"
            raise BadRequest(f"{self._what} {got}; it must be one of {known}", field=field)
        return value

    def or_none(self, number: int, field: str) -> _E | None:
        """Returns our value; None when unspecified. A number that this version doesn't know is refused all the same."""
        return self.of(number, field) if number else None

    def number(self, value: _E | None) -> Any:
        """Returns the schema's number; that of UNSPECIFIED for None."""
        return 0 if value is None else self._numbers[value]


TIERS = Words(Tier, pb.Tier)
STORAGE_KINDS = Words(StorageKind, pb.StorageKind)
LAYOUT_KINDS = Words(LayoutKind, pb.LayoutKind)
AXIS_ORDERS = Words(AxisOrder, pb.AxisOrder)
AXES = Words(Axis, pb.Axis)
MODES = Words(ParallelismMode, pb.ParallelismMode)
PRESENCE_STATES = Words(objects.PresenceState, pb.PresenceState)
OUTCOME_STATES = Words(objects.OutcomeState, pb.OutcomeState)


def text_of(value: str, field: str, limit: int, required: bool = False) -> str:
    """Returns a text that may be logged.

    Raises:
        BadRequest: it is empty although required, or has characters that can't be printed.
        TooLarge: it has more than `limit` characters.
    """
    if required and not value.strip():
        raise BadRequest("a text is required", field=field)
    if len(value) > limit:
        raise TooLarge(
            f"the text has {len(value)} characters; at most {limit} are taken",
            field=field,
            limit=limit,
            received=len(value),
        )
    if not value.isprintable():
        raise BadRequest(f"{value!r} has characters that can't be printed", field=field)
    return value


def instance_id_of(value: str, field: str = "instance_id") -> str:
    """Returns the id of a group; raises BadRequest unless it is a UUID in 36 lower-case characters."""
    if not _UUID.fullmatch(value):
        raise BadRequest(f"{value[:64]!r} is no UUID of 36 lower-case characters", field=field)
    return value


def epoch_of(value: int, field: str = "epoch") -> int:
    """Returns an epoch; raises BadRequest when it is negative."""
    if value < 0:
        raise BadRequest(f"epoch {value} is negative", field=field)
    return value


def seconds_of(message: Duration) -> float:
    """Returns a length of time in seconds; raises BadRequest when it is negative, malformed or above 10^9."""
    if not (0 <= message.seconds <= _MAX_SECONDS and 0 <= message.nanos < 10**9):
        raise BadRequest(f"{message.seconds} s and {message.nanos} ns are no time from 0 to 10^9 s", field="seconds")
    return message.ToTimedelta().total_seconds()


def handle_of(message: pb.LayoutHandle) -> LayoutHandle:
    """Returns a layout handle; every value is one."""
    return LayoutHandle(owner_id=message.low, number=message.high)


def handle_message(handle: LayoutHandle) -> pb.LayoutHandle:
    """Returns a layout handle as a message."""
    return pb.LayoutHandle(low=handle.owner_id, high=handle.number)


def layout_tier_of(number: int, field: str) -> Tier:
    """Returns the tier of a layout; raises BadRequest for the object tier, which has keys and no layouts."""
    tier = TIERS.of(number, field)
    if tier is Tier.OBJECT:
        raise BadRequest("the object tier has keys and no layouts; name objects by their keys", field=field)
    return tier


def place_of(message: pb.LocalLayout) -> LocalLayout:
    """Returns what a worker calls one of its layouts."""
    return LocalLayout(tier=layout_tier_of(message.tier, "tier"), resource_id=message.resource_id)


def place_message(place: LocalLayout) -> pb.LocalLayout:
    """Returns what a worker calls one of its layouts, as a message."""
    return pb.LocalLayout(tier=TIERS.number(place.tier), resource_id=place.resource_id)


def ids_of(message: pb.BlockIds) -> Ids:
    """Returns block ids; their number is bounded before a list is made."""
    with unnamed():
        return from_runs(message.starts, message.counts)


def listed_ids(message: Message, name: str) -> Ids:
    """Returns the block ids in a field of a message; none when the field is absent, which some clients write so."""
    ids = optional_field(message, name, ids_of)
    return as_ids(()) if ids is None else ids


def ids_message(ids: Ids) -> pb.BlockIds:
    """Returns block ids as runs."""
    runs = to_runs(ids)
    return pb.BlockIds(starts=runs.starts, counts=runs.counts)


def keys_of(message: pb.ObjectKeys) -> tuple[bytes, ...]:
    """Returns keys of objects; raises BadRequest when the last one is cut off."""
    packed = message.sequence_hashes
    if len(packed) % KEY_BYTES:
        raise BadRequest(f"{len(packed)} bytes are no whole number of {KEY_BYTES}-byte keys", field="sequence_hashes")
    return tuple(packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES))


def keys_message(keys: Iterable[bytes]) -> pb.ObjectKeys:
    """Returns keys as a message; raises BadRequest when one is not 24 bytes long, since it would shift the others."""
    keys = tuple(keys)
    if wrong := [place for place, key in enumerate(keys) if len(key) != KEY_BYTES]:
        raise BadRequest(
            f"key {wrong[0]} has {len(keys[wrong[0]])} bytes; a sequence hash has {KEY_BYTES}",
            field=f"keys[{wrong[0]}]",
        )
    return pb.ObjectKeys(sequence_hashes=b"".join(keys))


def object_keys_of(message: pb.ObjectKeys) -> ObjectKeys:
    """Returns stored objects."""
    return ObjectKeys(keys=keys_of(message))


def layers_of(message: pb.LayerRange) -> tuple[int, int]:
    """Returns first layer and one past the last; raises BadRequest when there is none between."""
    if message.start >= message.stop:
        raise BadRequest(f"the layer range ({message.start}, {message.stop}) is empty or reversed", field="stop")
    return message.start, message.stop


def layers_message(layers: tuple[int, int]) -> pb.LayerRange:
    """Returns a layer range as a message."""
    return pb.LayerRange(start=layers[0], stop=layers[1])


def slice_of(message: pb.AxisSlice) -> AxisSlice:
    """Returns a part of an axis; raises BadRequest when it is empty."""
    if message.start >= message.stop:
        raise BadRequest(f"the slice {message.start}..{message.stop} is empty or reversed", field="stop")
    return AxisSlice(axis=AXES.of(message.axis, "axis"), start=message.start, stop=message.stop)


def slice_message(part: AxisSlice) -> pb.AxisSlice:
    """Returns a part of an axis as a message."""
    return pb.AxisSlice(axis=AXES.number(part.axis), start=part.start, stop=part.stop)


def failure_of(message: pb.Failure) -> Failure:
    """Returns why something failed. An unknown reason becomes UNSPECIFIED, with its number as metadata."""
    metadata = dict(message.metadata)
    word = _reason_word(message.reason)
    if word not in BY_REASON:
        word, metadata["reason"] = AyniError.reason, str(message.reason)
    return Failure(reason=word, message=message.message, metadata=tuple(sorted(metadata.items())))


def failure_message(failure: Failure) -> pb.Failure:
    """Returns why something failed, as a message. An unknown reason becomes FAULT, with the word as metadata."""
    metadata = {key: _carried(value) for key, value in failure.metadata}
    word = failure.reason
    if word not in BY_REASON:
        word, metadata["detail"] = Fault.reason, failure.reason
    reason = errors_pb2.ErrorReason.Value(_REASON_PREFIX + word)
    return pb.Failure(reason=reason, message=_carried(failure.message), metadata=metadata)


def error_of(failure: Failure) -> AyniError:
    """Returns what a status of this refusal is made from."""
    error = BY_REASON.get(failure.reason, Fault)(failure.message)
    error.metadata = dict(failure.metadata)
    return error


def _reason_word(number: int) -> str:
    known = errors_pb2.ErrorReason.DESCRIPTOR.values_by_number.get(number)
    return known.name.removeprefix(_REASON_PREFIX) if known else AyniError.reason


def _carried(text: str) -> str:
    """Returns a text that protobuf takes: one made from a file's name may hold what is no character."""
    return text.encode("utf-8", "replace").decode()
