"""One bucket's stream: the contribution out, the mean in.  [shell]

Legend: N elements in a bucket.

One call is one contribution to one reduction. Nothing is sent before the coordinator has accepted it; then writer and
reader run beside each other, because the mean of the first chunk may come before the last one has left. The reader
alone decides how the call ended: a writer whose stream breaks stops, and the reader learns the status.

Copies: one per chunk out (joining the frame), one per chunk in (into the prepared vector). Through shared memory: none
out, one in.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from grpc import aio

from ayni import failpoints, tensors
from ayni.errors import BadRequest
from ayni.frames import CHUNK_FIELD, ChunkView, decode_frame, encode_chunk, encode_shared_chunk
from ayni.tensors import TensorSpec
from ayni.v1 import coordinator_pb2 as pb
from worker_agent.chunks import MeanBuffer, Vector, slices
from worker_agent.faults import TransportBroken
from worker_agent.same_host import SameHost, SharedParts, add_shared
from worker_agent.session import ExchangeTimes
from worker_agent.shared_regions import SharedRegions

Stream = aio.StreamStreamCall[bytes, bytes]
"""A call whose frames are encoded messages on both sides."""

_ACCEPTED, _COMPLETE = 1, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What one worker brings to one reduction."""

    name: str
    """Names the bucket in errors."""
    begin: bytes
    """The encoded first frame."""
    spec: TensorSpec
    """Of the vectors, as they travel."""
    parts: Sequence[Vector | None]
    """One vector for each tree node of the shard, shape [N]; None for a node without weight."""
    out: Vector | None
    """Receives the mean, shape [N]; None where none is sent."""


@dataclass(kw_only=True, slots=True)
class Traffic:
    """Bytes of frames that have passed; read from any thread, written by the loop's."""

    sent_bytes: int = 0
    received_bytes: int = 0
    shared_bytes: int = 0
    """What was read from, or written to, memory shared with the coordinator instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a reduction ended."""

    num_contributors: int
    total_weight: int
    global_loss: float | None
    num_correct: int
    num_predictions: int
    times: ExchangeTimes = field(default=ExchangeTimes(), compare=False)


@dataclass(slots=True)
class _Passing:
    """One exchange as it passes."""

    traffic: Traffic
    begun: float = field(default_factory=time.perf_counter)
    accepted: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def times(self) -> ExchangeTimes:
        return ExchangeTimes(begun=self.begun, accepted=self.accepted, sent=self.sent, first=self.first, last=self.last)


async def exchange(
    call: Stream, contribution: Contribution, traffic: Traffic, same_host: SameHost | None = None
) -> Outcome:
    """Contributes to one reduction and receives its mean.

    Args:
        call: a fresh call; it has ended when this returns or raises.
        contribution: what to send, and where the mean goes. With a total weight of 0 the mean is zeros. Nothing is
            sent that the coordinator holds already.
        traffic: is added to.
        same_host: what is shared with the coordinator; None for nothing.

    Raises:
        AyniError: the coordinator sent something wrong.
        grpc.aio.AioRpcError: the coordinator refused, or the transport broke.
        TransportBroken: the stream ended without a verdict.
    """
    shared = await same_host.regions() if same_host and contribution.spec.dtype == "float32" else None
    parts = SharedParts(shared, same_host.vectors) if shared and same_host else None
    passing = _Passing(traffic)
    try:
        await _write(call, contribution.begin, passing)
        accepted = await _accepted(call, contribution, passing)
        passing.accepted = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            if parts:
                group.create_task(_send_places(call, contribution, accepted, parts, passing))
            else:
                group.create_task(_send_parts(call, contribution, accepted, passing))
            receiving = group.create_task(_receive(call, contribution, passing, shared))
        return receiving.result()
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    finally:
        call.cancel()
        if parts:
            parts.close()


async def _accepted(call: Stream, contribution: Contribution, passing: _Passing) -> pb.RoundAccepted:
    """Waits for leave to send, which says how long chunks must be."""
    number, content = await _read(call, contribution, passing)
    if number != _ACCEPTED or isinstance(content, ChunkView):
        raise _out_of_order(contribution, number)
    return pb.RoundAccepted.FromString(bytes(content))


async def _send_parts(call: Stream, contribution: Contribution, accepted: pb.RoundAccepted, passing: _Passing) -> None:
    spec, parts = contribution.spec, contribution.parts
    with_weight = _to_send(contribution, accepted)
    pieces = list(slices(spec.num_elements, spec.dtype, accepted.chunk_bytes, with_weight))
    for index, piece in enumerate(pieces):
        if index == len(pieces) // 2:
            failpoints.hit("worker.contribution.half")
        vector_N = parts[piece.part]
        assert vector_N is not None
        payload = tensors.encode(vector_N[piece.start : piece.stop], spec.dtype)
        if not await _write(call, encode_chunk(CHUNK_FIELD, piece.offset_bytes, piece.part, payload), passing):
            return
    await _sent(call)


async def _send_places(
    call: Stream, contribution: Contribution, accepted: pb.RoundAccepted, shared: SharedParts, passing: _Passing
) -> None:
    """Says where the parts lie: one frame for each. Sends them where that can't be."""
    parts = {
        index: part for index in _to_send(contribution, accepted) if (part := contribution.parts[index]) is not None
    }
    places = await shared.place(parts)
    if places is None:
        await _send_parts(call, contribution, accepted, passing)
        return
    for index, place in places.items():
        failpoints.hit("worker.contribution.half")
        if not await _write(call, encode_shared_chunk(CHUNK_FIELD, 0, index, place), passing):
            return
        passing.traffic.shared_bytes += place.length_bytes
    await _sent(call)


def _to_send(contribution: Contribution, accepted: pb.RoundAccepted) -> list[int]:
    """Returns the parts that have weight and are not there already."""
    parts = contribution.parts
    return [index for index, part in enumerate(parts) if part is not None and not accepted.already_held]


async def _sent(call: Stream) -> None:
    if not call.done():
        await call.done_writing()
    failpoints.hit("worker.contribution.sent")


async def _receive(
    call: Stream, contribution: Contribution, passing: _Passing, shared: SharedRegions | None
) -> Outcome:
    out = contribution.out
    mean = None if out is None else MeanBuffer(contribution.name, contribution.spec.dtype, out)
    while True:
        number, content = await _read(call, contribution, passing)
        if isinstance(content, ChunkView):
            if mean is None:
                raise _out_of_order(contribution, number)
            passing.first = passing.first or time.perf_counter()
            if content.shared is None:
                mean.add(content)
            else:
                await add_shared(shared, mean, content, content.shared)
                passing.traffic.shared_bytes += content.shared.length_bytes
            passing.last = time.perf_counter()
        elif number == _COMPLETE:
            return await _finish(call, mean, pb.RoundComplete.FromString(bytes(content)), passing)
        else:
            raise _out_of_order(contribution, number)


async def _finish(call: Stream, mean: MeanBuffer | None, complete: pb.RoundComplete, passing: _Passing) -> Outcome:
    if mean:
        mean.finish(complete.total_weight)
    await call.read()
    return Outcome(
        num_contributors=complete.num_contributors,
        total_weight=complete.total_weight,
        global_loss=complete.global_loss if complete.HasField("global_loss") else None,
        num_correct=complete.num_correct,
        num_predictions=complete.num_predictions,
        times=passing.times(),
    )


async def _read(call: Stream, contribution: Contribution, passing: _Passing) -> tuple[int, ChunkView | memoryview]:
    frame = await call.read()
    if not isinstance(frame, bytes):
        raise TransportBroken(f"the coordinator ended the stream of {contribution.name} before it was complete")
    passing.traffic.received_bytes += len(frame)
    return decode_frame(frame)


async def _write(call: Stream, frame: bytes, passing: _Passing) -> bool:
    """Sends a frame; returns False where the call is over, whose status the reader learns."""
    try:
        await call.write(frame)
    except (grpc.RpcError, asyncio.InvalidStateError):
        return False
    passing.traffic.sent_bytes += len(frame)
    passing.sent = time.perf_counter()
    return True


def _out_of_order(contribution: Contribution, number: int) -> BadRequest:
    return BadRequest(
        f"the coordinator sent frame kind {number} out of order in the stream of {contribution.name}", field="frame"
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the earliest error of a group."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
