"""Calls of a service with any requests: drawn, made, and judged by what may come back."""

import concurrent.futures
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from ayni.errors import BY_REASON, Fault
from ayni.rpc import error_from
from ayni.v1 import coordinator_pb2, errors_pb2
from tests.support.fuzz_values import Hints, draw_message, draw_mutation
from tests.support.fuzz_wire import draw_damaged

MAX_RECEIVED = 4 << 20
"""What gRPC takes of one message."""

PATIENCE_S = 20.0
"""Longest time for an answer that nothing is waited for."""

SHORT_S = 0.1
"""Deadline of calls that may wait for others by their nature."""

Methods = Mapping[str, MethodDescriptor]
"""Methods of a server by what they are called on the wire."""

Metadata = tuple[tuple[str, str | bytes], ...]

_MOST_FRAMES = 6
_FAULT = errors_pb2.ERROR_REASON_FAULT


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call; its repr is enough to make it again."""

    method: str
    """Full path."""
    requests: tuple[bytes, ...]
    metadata: Metadata = ()
    timeout: float = PATIENCE_S
    reads: int = 1_000
    """Responses after which the caller goes away."""
    waits: bool = False
    """Whether the call may last until its deadline."""

    @property
    def name(self) -> str:
        return self.method.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A call that the server would take as it is."""

    frames: Sequence[Message]
    metadata: Metadata = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a call ended."""

    call: Call
    code: str
    details: str
    reason: str
    responses: tuple[bytes, ...]

    @property
    def refused(self) -> bool:
        """Whether a service said no; the end of a deadline is no refusal."""
        return bool(self.reason)

    @property
    def problem(self) -> str:
        """What must not be, as a sentence; empty when all is well."""
        if self.code == "OK" or (self.reason in BY_REASON and self.reason != Fault.reason):
            return ""
        allowed = {
            "DEADLINE_EXCEEDED": self.call.waits or self.call.timeout < SHORT_S,
            "CANCELLED": len(self.responses) >= self.call.reads,
            "RESOURCE_EXHAUSTED": any(len(request) > MAX_RECEIVED for request in self.call.requests),
            "UNAVAILABLE": "attached" in self.details,  # What a relay says of the worker behind it.
        }
        return "" if allowed.get(self.code) else f"{self.call.name} ended with {self.code}: {self.details}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Which calls of a service wait, and for how long they are let."""

    methods: frozenset[str]
    timeout: float = SHORT_S


def draw_call(draw: Any, method: MethodDescriptor, bases: Sequence[Base], hints: Hints) -> Call:
    """Returns a call of one method.

    Args:
        draw: see `hypothesis.strategies.composite`.
        method: its descriptor.
        bases: calls that the server would take now.
        hints: values that the server knows; "metadata" holds what may go along.
    """
    waiting: Waiting = hints["waiting"][0]
    waits = method.name in waiting.methods
    base = bases[draw(st.integers(0, 11)) % len(bases)] if bases else None
    frames = _draw_frames(draw, method, base, hints)
    own, others = base.metadata if base else (), hints["metadata"]
    other = others[draw(st.integers(0, 11)) % len(others)]
    return Call(
        method=path_of(method),
        requests=tuple(_draw_encoded(draw, frame) for frame in frames),
        metadata=other if draw(st.integers(0, 4)) == 0 else own,
        timeout=draw(st.sampled_from((0.001, 0.02))) if draw(st.integers(0, 30)) == 0 else _patience(waits, waiting),
        reads=draw(st.sampled_from((1, 3, 1_000))),
        waits=waits,
    )


def path_of(method: MethodDescriptor) -> str:
    """Returns what a method is called on the wire."""
    return f"/{method.containing_service.full_name}/{method.name}"


def make(channel: grpc.Channel, methods: Methods, call: Call) -> Ended:
    """Makes a call and waits for its end."""
    method = methods[call.method]
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    start: Any = getattr(channel, kind)(call.method)
    request = iter(call.requests) if method.client_streaming else call.requests[0]
    responses: list[bytes] = []
    try:
        if method.server_streaming:
            stream = start(request, timeout=call.timeout, metadata=call.metadata)
            for response in _limited(stream, call.reads):
                responses.append(response)
        else:
            responses.append(start(request, timeout=call.timeout, metadata=call.metadata))
    except grpc.RpcError as error:
        refusal = error_from(error)
        reason = refusal.reason if refusal else ""
        return Ended(
            call=call,
            code=error.code().name,
            details=error.details() or "",
            reason=reason,
            responses=tuple(responses),
        )
    if problem := _fault_in(method, responses):
        return Ended(call=call, code="UNKNOWN", details=problem, reason="", responses=tuple(responses))
    return Ended(call=call, code="OK", details="", reason="", responses=tuple(responses))


def make_all(
    channel: grpc.Channel,
    methods: Methods,
    burst: Sequence[Call],
    pool: concurrent.futures.Executor,
) -> list[Ended]:
    """Makes calls at the same time."""
    return list(pool.map(lambda call: make(channel, methods, call), burst))


def _limited(stream: Any, reads: int) -> Iterator[bytes]:
    for number, response in enumerate(stream, 1):
        yield response
        if number >= reads:
            stream.cancel()
            return


def _patience(waits: bool, waiting: Waiting) -> float:
    return waiting.timeout if waits else PATIENCE_S


def _draw_frames(draw: Any, method: MethodDescriptor, base: Base | None, hints: Hints) -> list[Message]:
    if base and draw(st.integers(0, 3)):
        return [draw_mutation(draw, frame, hints) for frame in base.frames]
    count = draw(st.integers(0, _MOST_FRAMES)) if method.client_streaming else 1
    return [draw_message(draw, method.input_type, hints) for _ in range(count)]


def _draw_encoded(draw: Any, message: Message) -> bytes:
    encoded = message.SerializeToString()
    return draw_damaged(draw, encoded) if draw(st.integers(0, 4)) == 0 else encoded


def _fault_in(method: MethodDescriptor, responses: Sequence[bytes]) -> str:
    """Says which answer tells of something that nobody foresaw."""
    answer = message_factory.GetMessageClass(method.output_type)
    for response in responses:
        may_hold = method.name == "Lanes" or b"\x08" + bytes([_FAULT]) in response
        if may_hold and (fault := _fault_of(answer.FromString(response))):
            return fault
    return ""


def _fault_of(message: Message) -> str:
    for field, value in message.ListFields():
        if field.name == "reason" and field.enum_type and value == _FAULT:
            return f"an answer holds a fault: {message}"
        if isinstance(value, coordinator_pb2.LaneStatus) and value.code and not value.reason:
            return f"a lane failed: {message}"
        entries = value if field.is_repeated else [value]
        if field.message_type and not field.message_type.GetOptions().map_entry:
            for entry in entries:
                if fault := _fault_of(entry):
                    return fault
    return ""
