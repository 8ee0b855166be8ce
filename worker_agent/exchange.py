"""One bucket's stream: the contribution out, the mean in.  [shell]

Legend: N elements in a bucket.

One call is one contribution to one reduction. Nothing is sent before the coordinator has accepted it; then writer and
reader run beside each other, because the mean of the first chunk may come before the last one has left. The reader
alone decides how the call ended: a writer whose stream breaks stops, and the reader learns the status.

Copies: one per chunk out (joining the frame), one per chunk in (into the prepared vector).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from grpc import aio

from ayni import failpoints, tensors
from ayni.errors import BadRequest
from ayni.frames import CHUNK_FIELD, ChunkView, decode_frame, encode_chunk
from ayni.tensors import TensorSpec
from ayni.v1 import coordinator_pb2 as pb
from worker_agent.chunks import MeanBuffer, Vector, slices
from worker_agent.faults import TransportBroken

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a reduction ended."""

    num_contributors: int
    total_weight: int
    global_loss: float | None
    num_correct: int
    num_predictions: int


async def exchange(call: Stream, contribution: Contribution, traffic: Traffic) -> Outcome:
    """Contributes to one reduction and receives its mean.

    Args:
        call: a fresh call; it has ended when this returns or raises.
        contribution: what to send, and where the mean goes. With a total weight of 0 the mean is zeros. Nothing is
            sent that the coordinator holds already.
        traffic: is added to.

    Raises:
        AyniError: the coordinator sent something wrong.
        grpc.aio.AioRpcError: the coordinator refused, or the transport broke.
        TransportBroken: the stream ended without a verdict.
    """
    try:
        await _write(call, contribution.begin, traffic)
        accepted = await _accepted(call, contribution, traffic)
        async with asyncio.TaskGroup() as group:
            group.create_task(_send_parts(call, contribution, accepted, traffic))
            receiving = group.create_task(_receive(call, contribution, traffic))
        return receiving.result()
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    finally:
        call.cancel()


async def _accepted(call: Stream, contribution: Contribution, traffic: Traffic) -> pb.RoundAccepted:
    """Waits for leave to send, which says how long chunks must be."""
    number, content = await _read(call, contribution, traffic)
    if number != _ACCEPTED or isinstance(content, ChunkView):
        raise _out_of_order(contribution, number)
    return pb.RoundAccepted.FromString(bytes(content))


async def _send_parts(call: Stream, contribution: Contribution, accepted: pb.RoundAccepted, traffic: Traffic) -> None:
    spec, parts = contribution.spec, contribution.parts
    with_weight = [index for index, part in enumerate(parts) if part is not None and not accepted.already_held]
    pieces = list(slices(spec.num_elements, spec.dtype, accepted.chunk_bytes, with_weight))
    for index, piece in enumerate(pieces):
        if index == len(pieces) // 2:
            failpoints.hit("worker.contribution.half")
        vector_N = parts[piece.part]
        assert vector_N is not None
        payload = tensors.encode(vector_N[piece.start : piece.stop], spec.dtype)
        if not await _write(call, encode_chunk(CHUNK_FIELD, piece.offset_bytes, piece.part, payload), traffic):
            return
    if not call.done():
        await call.done_writing()
    failpoints.hit("worker.contribution.sent")


async def _receive(call: Stream, contribution: Contribution, traffic: Traffic) -> Outcome:
    out = contribution.out
    mean = None if out is None else MeanBuffer(contribution.name, contribution.spec.dtype, out)
    while True:
        number, content = await _read(call, contribution, traffic)
        if isinstance(content, ChunkView):
            if mean is None:
                raise _out_of_order(contribution, number)
            mean.add(content)
        elif number == _COMPLETE:
            return await _finish(call, mean, pb.RoundComplete.FromString(bytes(content)))
        else:
            raise _out_of_order(contribution, number)


async def _finish(call: Stream, mean: MeanBuffer | None, complete: pb.RoundComplete) -> Outcome:
    if mean:
        mean.finish(complete.total_weight)
    await call.read()
    return Outcome(
        num_contributors=complete.num_contributors,
        total_weight=complete.total_weight,
        global_loss=complete.global_loss if complete.HasField("global_loss") else None,
        num_correct=complete.num_correct,
        num_predictions=complete.num_predictions,
    )


async def _read(call: Stream, contribution: Contribution, traffic: Traffic) -> tuple[int, ChunkView | memoryview]:
    frame = await call.read()
    if not isinstance(frame, bytes):
        raise TransportBroken(f"the coordinator ended the stream of {contribution.name} before it was complete")
    traffic.received_bytes += len(frame)
    return decode_frame(frame)


async def _write(call: Stream, frame: bytes, traffic: Traffic) -> bool:
    """Sends a frame; returns False where the call is over, whose status the reader learns."""
    try:
        await call.write(frame)
    except (grpc.RpcError, asyncio.InvalidStateError):
        return False
    traffic.sent_bytes += len(frame)
    return True


def _out_of_order(contribution: Contribution, number: int) -> BadRequest:
    return BadRequest(
        f"the coordinator sent frame kind {number} out of order in the stream of {contribution.name}", field="frame"
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the earliest error of a group."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
