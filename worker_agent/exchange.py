"""One bucket's stream: the contribution out, the mean in.  [shell]

Legend: N elements in a bucket.

One call is one contribution to one reduction. On a stream nothing is sent before the coordinator has accepted it; then
writer and reader run beside each other, because the mean of the first chunk may come before the last one has left. The
reader alone decides how the call ended: a writer whose stream breaks stops, and the reader learns the status. On a
lane, where little is sent, it leaves at once and whole.

Copies: one per chunk out (joining the frame), one per chunk in (into the prepared vector). Through shared memory: none
out, one in.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from ayni import failpoints, tensors
from ayni.errors import BadRequest
from ayni.frames import CHUNK_FIELD, ChunkView, SharedRange, decode_frame, encode_chunk, encode_shared_chunk
from ayni.tensors import TensorSpec
from ayni.v1 import coordinator_pb2 as pb
from worker_agent.chunks import MeanBuffer, Vector, slices
from worker_agent.contributions import Offer
from worker_agent.faults import TransportBroken
from worker_agent.host_calls import HostCall
from worker_agent.lanes import Lane, Stream
from worker_agent.same_host import SharedParts, SharesMemory, Sharing, add_shared
from worker_agent.session import ExchangeTimes

Call = Stream | Lane | HostCall
"""A contribution's call, whose frames are encoded messages on both sides."""
Dial = Callable[[int], Call]
"""Makes the call for a contribution whose parts are so many bytes in frames; 0: they lie in shared memory."""

_ACCEPTED, _COMPLETE = 1, 3
_HALF, _SENT = "worker.contribution.half", "worker.contribution.sent"


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
    offer: Offer | None = None
    """What it was made of; None for a part of one."""


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
    dial: Dial,
    contribution: Contribution,
    traffic: Traffic,
    same_host: SharesMemory | None = None,
    chunk_bytes: int = 0,
) -> Outcome:
    """Contributes to one reduction and receives its mean.

    Args:
        dial: makes the call, which has ended when this returns or raises.
        contribution: what to send, and where the mean goes. With a total weight of 0 the mean is zeros. Nothing is
            sent that the coordinator holds already.
        traffic: is added to.
        same_host: what is shared with who reduces; None for nothing.
        chunk_bytes: length of a chunk in this run; 0 for not known.

    Raises:
        AyniError: the coordinator sent something wrong, or refused.
        grpc.aio.AioRpcError: the coordinator refused, or the transport broke.
        TransportBroken: the stream ended without a verdict.
    """
    spec = contribution.spec
    is_shared = spec.dtype == "float32" or chunk_bytes > 0
    shared = await same_host.regions() if same_host and is_shared else None
    parts = SharedParts(shared, same_host.vectors) if shared and same_host else None
    try:
        places = await parts.place(_present(contribution.parts), spec.dtype, chunk_bytes) if parts else None
        call = dial(spec.num_elements * tensors.position_bytes(spec.dtype) if places is None else 0)
        try:
            return await _Exchange(call, contribution, shared, traffic).run(places)
        finally:
            call.cancel()
    finally:
        if parts:
            parts.close()


class _Exchange:
    """One call."""

    def __init__(self, call: Call, contribution: Contribution, shared: Sharing | None, traffic: Traffic) -> None:
        self._call, self._contribution, self._shared = call, contribution, shared
        self._passing = _Passing(traffic)

    async def run(self, places: Mapping[int, SharedRange] | None) -> Outcome:
        """Contributes and receives; `places` says where the parts lie, None: they are sent."""
        await self._write(self._contribution.begin)
        if isinstance(self._call, Lane | HostCall):
            await self._send(places, self._call.accepted)
            return await self._receive(is_accepted=False)
        accepted = await self._accepted()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(places, accepted))
                receiving = group.create_task(self._receive(is_accepted=True))
            return receiving.result()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _accepted(self) -> pb.RoundAccepted:
        """Waits for leave to send, which says how long chunks must be."""
        number, content = await self._read()
        if number != _ACCEPTED or isinstance(content, ChunkView):
            raise self._out_of_order(number)
        self._passing.accepted = time.perf_counter()
        return pb.RoundAccepted.FromString(bytes(content))

    async def _send(self, places: Mapping[int, SharedRange] | None, accepted: pb.RoundAccepted) -> None:
        """Sends the parts, or where they lie."""
        if not accepted.already_held:
            count, frames = self._pieces(accepted.chunk_bytes) if places is None else _places(places)
            for index, (frame, shared_bytes) in enumerate(frames):
                if index == count // 2:
                    await self._mark(_HALF)
                if not await self._write(frame):
                    return
                self._passing.traffic.shared_bytes += shared_bytes
        if not self._call.done():
            await self._call.done_writing()
        await self._mark(_SENT)

    def _pieces(self, chunk_bytes: int) -> tuple[int, Iterator[tuple[bytes, int]]]:
        """Returns how many frames carry the parts, and the frames, each with 0."""
        spec, parts = self._contribution.spec, self._contribution.parts
        pieces = list(slices(spec.num_elements, spec.dtype, chunk_bytes, sorted(_present(parts))))

        def frames() -> Iterator[tuple[bytes, int]]:
            for piece in pieces:
                vector_N = parts[piece.part]
                assert vector_N is not None
                payload = tensors.encode(vector_N[piece.start : piece.stop], spec.dtype)
                yield encode_chunk(CHUNK_FIELD, piece.offset_bytes, piece.part, payload), 0

        return len(pieces), frames()

    async def _mark(self, failpoint: str) -> None:
        """Marks a place, where everything that was written has left."""
        if isinstance(self._call, Lane) and failpoints.is_armed(failpoint):
            await self._call.left()
        failpoints.hit(failpoint)

    async def _receive(self, *, is_accepted: bool) -> Outcome:
        out, passing = self._contribution.out, self._passing
        mean = None if out is None else MeanBuffer(self._contribution.name, self._contribution.spec.dtype, out)
        while True:
            number, content = await self._read()
            if isinstance(content, ChunkView):
                if mean is None:
                    raise self._out_of_order(number)
                passing.first = passing.first or time.perf_counter()
                await self._add(mean, content)
                passing.last = time.perf_counter()
            elif number == _COMPLETE:
                return await self._finish(mean, pb.RoundComplete.FromString(bytes(content)))
            elif number == _ACCEPTED and not is_accepted:
                is_accepted, passing.accepted = True, time.perf_counter()
            else:
                raise self._out_of_order(number)

    async def _add(self, mean: MeanBuffer, chunk: ChunkView) -> None:
        if chunk.shared is None:
            mean.add(chunk)
        else:
            await add_shared(self._shared, mean, chunk, chunk.shared)
            self._passing.traffic.shared_bytes += chunk.shared.length_bytes

    async def _finish(self, mean: MeanBuffer | None, complete: pb.RoundComplete) -> Outcome:
        if mean:
            mean.finish(complete.total_weight)
        await self._call.read()
        return Outcome(
            num_contributors=complete.num_contributors,
            total_weight=complete.total_weight,
            global_loss=complete.global_loss if complete.HasField("global_loss") else None,
            num_correct=complete.num_correct,
            num_predictions=complete.num_predictions,
            times=self._passing.times(),
        )

    async def _read(self) -> tuple[int, ChunkView | memoryview]:
        frame = await self._call.read()
        if not isinstance(frame, bytes):
            name = self._contribution.name
            raise TransportBroken(f"the coordinator ended the stream of {name} before it was complete")
        self._passing.traffic.received_bytes += len(frame)
        return decode_frame(frame)

    async def _write(self, frame: bytes) -> bool:
        """Sends a frame; returns False where the call is over, whose status the reader learns."""
        try:
            await self._call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return False
        self._passing.traffic.sent_bytes += len(frame)
        self._passing.sent = time.perf_counter()
        return True

    def _out_of_order(self, number: int) -> BadRequest:
        name = self._contribution.name
        return BadRequest(
            f"the coordinator sent frame kind {number} out of order in the stream of {name}", field="frame"
        )


def _present(parts: Sequence[Vector | None]) -> dict[int, Vector]:
    """Returns the parts that have weight, by number."""
    return {index: part for index, part in enumerate(parts) if part is not None}


def _places(places: Mapping[int, SharedRange]) -> tuple[int, Iterator[tuple[bytes, int]]]:
    """Returns how many frames say where the parts lie, and the frames, each with the bytes that it speaks of."""
    frames = (
        (encode_shared_chunk(CHUNK_FIELD, 0, index, place), place.length_bytes) for index, place in places.items()
    )
    return len(places), frames


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the earliest error of a group."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
