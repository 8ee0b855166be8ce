"""Live reductions: one outbox for each contribution, and when to stop reading from a fast worker.  [shell]

Each chunk of the mean is joined into one frame (one copy) that all outboxes share; an extra lease's contribution gets
none, because its worker receives the mean under its primary lease. Workers that share memory with the coordinator are
sent where the mean lies. A contribution is read no further
while its worker is `window` chunks ahead of the mean, does not fetch the mean, or fills its budget over all of its
contributions. One chunk of each contribution is always admitted: the next chunk that everybody needs can never be
stuck behind a budget, so the budget can't deadlock. Memory is bounded by workers x (budget + open contributions).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ayni import frames, tensors
from ayni.buckets import Bucket
from ayni.errors import AyniError, BadChunk, NonFinite
from ayni.reduce.chunks import checked, first_element
from ayni.reduce.mean_writer import Reduced
from ayni.shm.sources import Source, source
from coordinator_service.leases import Lease, Totals
from coordinator_service.same_host import SameHost
from coordinator_service.signals import Signal
from coordinator_service.steps import Step

_BURST = {"float32": 1 << 20}
"""Elements in shared memory that are added at a time: about a millisecond of the event loop."""
_ROUNDED_BURST = 1 << 19
"""The same where they have to be decoded, and their mean encoded."""


class Flow:
    """What one worker has in flight over all of its contributions, and its byte counts."""

    def __init__(self, limit: int) -> None:
        """Starts empty; `limit` is in chunks."""
        self.limit = limit
        self.changed = Signal()
        self.exchanges: set[Exchange] = set()
        self.received_bytes = 0
        self.sent_bytes = 0

    @property
    def full(self) -> bool:
        """Whether the budget is used up."""
        return sum(exchange.backlog for exchange in self.exchanges) >= self.limit


class LiveRound:
    """A round and everybody who contributes to it."""

    def __init__(self, bucket: Bucket, step: Step, same_host: SameHost, on_change: Signal) -> None:
        """Wraps a round of a step; `on_change` is notified when a chunk was emitted."""
        self.bucket = bucket
        self.round = step.rounds[bucket]
        self.step = step
        self.same_host = same_host
        self.exchanges: list[Exchange] = []
        self.sources: list[Source] = []
        """Contributions in shared memory that the sums may contain, or wait for."""
        self.on_torn: Callable[[LiveRound], None] = lambda live: None
        """Told when one of them was written to before it was added everywhere."""
        self._on_change = on_change

    @property
    def is_intact(self) -> bool:
        """Whether everything in shared memory that sums may contain is still what its worker has said."""
        return all(source.is_intact for source in self.sources)

    def publish(self, reduced: Sequence[Reduced]) -> None:
        """Puts finished chunks in every outbox, unless what they were made of has changed."""
        if not reduced and not self.round.complete:
            return  # Nobody has anything to do: waking all for each that begins would grow with its square.
        if reduced and not self.is_intact:
            self.on_torn(self)
            return
        chunks = [(chunk.offset, self._travelling(chunk)) for chunk in reduced]
        frames_of = {is_shared: list(self._frames(chunks, is_shared)) for is_shared in self._ways}
        for exchange in self.exchanges:
            for frame in frames_of[exchange.takes_shared]:
                exchange.push(frame)
        for exchange in self.exchanges:
            exchange.wake()
        self._on_change.notify()

    def fail(self, error: AyniError) -> None:
        """Ends every contribution with an error."""
        for exchange in self.exchanges:
            exchange.fail(error)

    def start_again(self, error: AyniError) -> None:
        """Ends every contribution, because all are to begin once more."""
        self.sources.clear()
        self.same_host.renew(self.round.wire)
        self.fail(error)

    def close(self) -> None:
        """Lets go of workers' memory, and of who is told that it was torn; the attempt is over."""
        self.sources.clear()
        self.on_torn = lambda live: None

    def exchange_of(self, lease_id: int) -> "Exchange | None":
        """Returns the stream that a lease's contribution comes through now, if there is one."""
        return next((e for e in self.exchanges if e.lease.lease_id == lease_id and not e.failed), None)

    @property
    def _ways(self) -> set[bool]:
        return {exchange.takes_shared for exchange in self.exchanges}

    def _travelling(self, chunk: Reduced) -> tensors.Bytes:
        """Returns a chunk of the mean as it travels: in its place where there is one (no copy of float32)."""
        dtype, wire = tensors.mean_dtype(self.round.spec.dtype), self.round.wire
        if wire is None:
            return np.frombuffer(tensors.encode(chunk.values_C, dtype), np.uint8)
        size = tensors.itemsize(dtype)
        data = wire[chunk.offset * size : (chunk.offset + chunk.values_C.size) * size]
        if self.round.mean_N is None:
            tensors.encode_into(chunk.values_C, dtype, data)
        return data

    def _frames(self, chunks: Sequence[tuple[int, tensors.Bytes]], is_shared: bool) -> Iterator[bytes]:
        size = tensors.itemsize(tensors.mean_dtype(self.round.spec.dtype))
        places = self.same_host.places(chunks) if is_shared else None
        if places is not None:
            for offset, place in places:
                yield frames.encode_shared_chunk(frames.CHUNK_FIELD, offset * size, 0, place)
            return
        for offset, data in chunks:
            yield frames.encode_chunk(frames.CHUNK_FIELD, offset * size, 0, data.data)


class Exchange:
    """One lease's contribution to one round."""

    def __init__(self, live: LiveRound, lease: Lease, flow: Flow, window: int) -> None:
        """Registers with the round and the worker's budget; `window` is in chunks."""
        self.flow = flow
        self.lease = lease
        self._live = live
        self._window = window
        self.takes_shared = live.same_host.is_connected(lease.worker_id)
        """Whether the worker is sent where the mean lies."""
        self._is_shared: bool | None = None
        """Whether the contribution lies in shared memory; None before its first chunk."""
        self._outbox: deque[bytes] = deque()
        self._mail = Signal()
        """Notified when there is something to send, or nothing any more. Its own: a worker has many exchanges."""
        self.failure: asyncio.Future[AyniError] = asyncio.get_running_loop().create_future()
        """Done when the contribution was refused or given up."""
        live.exchanges.append(self)
        flow.exchanges.add(self)

    @property
    def backlog(self) -> int:
        """Chunk positions ahead of the mean whose bytes are held here."""
        return 0 if self._is_shared else self._live.round.backlog(self.lease.lease_id)

    @property
    def bucket(self) -> Bucket:
        """Which reduction of the step."""
        return self._live.bucket

    @property
    def is_held(self) -> bool:
        """Whether nothing is to be sent, because the micro-batches came with another lease."""
        return self._live.round.is_held(self.lease.lease_id)

    @property
    def is_standing(self) -> bool:
        """Whether the worker is the one that has to do something next: send, or fetch the mean."""
        return bool(self._outbox) or (not self.finished_sending and self._has_room())

    @property
    def label(self) -> str:
        """Names step and bucket, for people."""
        return self._live.round.label

    @property
    def step(self) -> Step:
        """The attempt that the contribution belongs to."""
        return self._live.step

    @property
    def failed(self) -> bool:
        """Whether the contribution was refused or given up."""
        return self.failure.done()

    @property
    def num_contributors(self) -> int:
        """Workers that contributed to the round."""
        return self._live.round.num_contributors

    def totals(self) -> Totals:
        """Returns the sums over the step's micro-batches."""
        return self._live.step.totals()

    @property
    def finished_sending(self) -> bool:
        """Whether all bytes of the contribution came."""
        return self._live.round.finished_sending(self.lease.lease_id)

    async def contribute(self, frame: bytes, *, is_whole: bool = False) -> None:
        """Adds the chunk in a frame, or those that it says the place of (no copy of a float32 payload).

        Args:
            frame: carries the chunk.
            is_whole: whether a chunk that carries its data must be a whole part, since nobody stops a sender of more.

        Raises:
            BadChunk, NonFinite, BadRequest, Checksum: the frame is refused; nothing of it was added.
        """
        chunk = self._parse(frame)
        self.flow.received_bytes += len(frame)
        label, dtype = self._live.round.label, self._live.round.spec.dtype
        offset = first_element(chunk, label, dtype)
        if chunk.shared is not None:
            await self._add_shared(chunk, chunk.shared, offset)
            return
        if is_whole and self._live.round.spec.num_elements > self._live.round.chunk_elements:
            raise self._bad(
                "a gradient of several chunks came on a lane; it needs a stream of its own", "a part", "more"
            )
        values = checked(chunk, label, dtype, self._live.round.chunk_elements)
        self._live.publish(self._live.round.contribute(self.lease.lease_id, chunk.part, offset, values))

    async def _add_shared(self, chunk: frames.ChunkView, shared: frames.SharedRange, offset: int) -> None:
        """Adds chunk by chunk out of the worker's memory; lets others have a turn in between."""
        region, dtype = self._live.same_host.lent(self.lease.worker_id, shared.region), self._live.round.spec.dtype
        found = source(self._live.round.label, region, chunk, shared, dtype)
        self._live.sources.append(found)
        finished: list[Reduced] = []
        burst = max(1, _BURST.get(dtype, _ROUNDED_BURST) // self._live.round.chunk_elements)
        for number, values in enumerate(found.pieces(self._live.round.chunk_elements), 1):
            try:
                finished += self._live.round.contribute(self.lease.lease_id, chunk.part, offset, values)
            except NonFinite:
                if self._live.is_intact:
                    raise
                self._live.on_torn(self._live)
                return
            offset += values.size
            if number % burst == 0:
                self._live.publish(finished)
                finished = []
                await asyncio.sleep(0)
                if self.failed:
                    return
        self._live.publish(finished)

    def _parse(self, frame: bytes) -> frames.ChunkView:
        field_number, chunk = frames.decode_frame(frame)
        if not isinstance(chunk, frames.ChunkView):
            raise self._bad(f"a frame with field {field_number} came where a chunk was expected", "chunk", field_number)
        is_shared = chunk.shared is not None
        if self._is_shared is None:
            self._is_shared = is_shared
        elif self._is_shared != is_shared:
            raise self._bad("a contribution came in part in frames and in part in shared memory", "one way", "both")
        return chunk

    def _bad(self, sentence: str, expected: object, received: object) -> BadChunk:
        label = self._live.round.label
        return BadChunk(f"{label}: {sentence}", field="frame", expected=expected, received=received, bucket=label)

    async def room(self) -> None:
        """Waits until the next chunk may be read. Ends at once when the contribution failed."""
        while not self.failed and not self._has_room():
            await self.flow.changed.wait()

    async def next_frame(self) -> bytes | None:
        """Waits for the next frame of the mean; None after the last.

        Raises:
            AyniError: the contribution was refused or given up.
        """
        while not self._outbox:
            if self.failed:
                raise self.failure.result()
            if self._live.round.complete:
                return None
            await self._mail.wait()
        frame = self._outbox.popleft()
        self.flow.sent_bytes += len(frame)
        self.flow.changed.notify()
        return frame

    def push(self, frame: bytes) -> None:
        """Puts a frame in the outbox, unless the mean goes another way."""
        if not self.failed and not self.lease.is_extra:
            self._outbox.append(frame)

    def fail(self, error: AyniError) -> None:
        """Ends the contribution; what is in the outbox is dropped. The first error counts."""
        if not self.failed:
            self.failure.set_result(error)
        self._outbox.clear()
        self.wake()

    def wake(self) -> None:
        """Has whoever sends the mean, or waits for room, look again."""
        self._mail.notify()
        self.flow.changed.notify()

    def close(self) -> None:
        """Leaves the worker's budget."""
        self.flow.exchanges.discard(self)
        if self in self._live.exchanges:
            self._live.exchanges.remove(self)
        self.flow.changed.notify()

    def _has_room(self) -> bool:
        if self._is_shared:
            return True
        ahead = self.backlog
        if ahead == 0:
            return len(self._outbox) < self._window
        return ahead < self._window and len(self._outbox) < self._window and not self.flow.full
