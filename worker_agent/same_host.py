"""Gradients through memory that this worker shares with a coordinator of its host.  [shell]

Where the two can share memory, frames say where bytes lie instead of carrying them. Vectors that were made for it
(`WorkerClient.new_vector`) are read by the coordinator in place; any other one is copied into a region first, and where
the wire type rounds, the bytes that would travel are put into one, chunk after chunk. A region must stay as it is until
nobody can read it any more: until the bucket's mean is complete, or the contribution was given up, which `give_up` says
in the region's header before anybody may write there again.

Belongs to the event loop, except for `SharedVectors`, which any thread may use.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

import numpy as np

from ayni import tensors
from ayni.errors import AyniError
from ayni.frames import ChunkView, SharedRange
from ayni.shm.host import SharedMemoryOffer
from ayni.shm.memory import can_share
from ayni.shm.regions import MappedRegion, Region, Regions
from worker_agent.chunks import MeanBuffer, Vector, slices
from worker_agent.faults import TransportBroken
from worker_agent.shared_regions import SharedRegions

_log = logging.getLogger(__name__)

_CONNECT_S = 10.0
_IDLE_GROUPS = 3
"""Exchange groups after which a copy's region is let go that none of them has used, as its readers do."""


class SharedVectors:
    """Vectors of this worker that a coordinator of its host can read; they outlive memberships."""

    def __init__(self, is_wanted: bool = True) -> None:
        """Makes none yet; not `is_wanted`: all vectors are ordinary memory, and gradients travel over gRPC."""
        self.is_wanted = is_wanted and can_share()
        self.regions = Regions()
        self._staging: dict[int, list[Region]] = {}
        """Regions that nobody uses, by size."""
        self._used: dict[int, int] = {}
        """Exchange group in which each of them was used last, by region."""
        self._group = 0
        self._lock = threading.Lock()

    def new(self, num_elements: int) -> Vector:
        """Returns a vector of zeros, shape [num_elements]; ordinary memory where no other can be had."""
        if not self.is_wanted:
            return np.zeros(num_elements, np.float32)
        try:
            return self.regions.vector(num_elements)
        except AyniError as error:
            _log.warning("a vector of %d elements is not shared: %s", num_elements, error)
            return np.zeros(num_elements, np.float32)

    def give_up(self, vectors: Iterable[Vector | None]) -> None:
        """Says that whoever still reads these vectors must not use what it reads."""
        for vector in vectors:
            found = None if vector is None else self.regions.find(vector)
            if found:
                found[0].renew()

    def stage(self, vector: Vector, dtype: str, chunk_bytes: int) -> Region:
        """Returns a region with a vector's bytes as they travel, chunk after chunk. Blocks the calling thread.

        Args:
            vector: shape [N].
            dtype: element type on the wire.
            chunk_bytes: length of a chunk; see `slices`.

        Raises:
            TooLarge, StorageFailed: there is no memory for it.
            BadRequest: chunks of such a length are not possible.
        """
        pieces = list(slices(vector.size, dtype, chunk_bytes, [0]))
        region, begin = self._take(tensors.payload_bytes(vector.size, dtype)), 0
        for piece in pieces:
            values_C = vector[piece.start : piece.stop]
            end = begin + tensors.payload_bytes(values_C.size, dtype)
            tensors.encode_into(values_C, dtype, region.bytes[begin:end])
            begin = end
        return region

    def _take(self, num_bytes: int) -> Region:
        try:
            # Several threads stage at a time: whether one is free and taking it is one step.
            region = self._staging.get(num_bytes, []).pop()
        except IndexError:
            region = self.regions.allocate(num_bytes)
        region.renew()
        return region

    def unstage(self, region: Region) -> None:
        """Takes a region back, whose copy nobody needs any more."""
        region.renew()
        with self._lock:
            self._used[region.id] = self._group
            self._staging.setdefault(region.size, []).append(region)

    def regroup(self) -> None:
        """Notes that another exchange group is in force: lets go of copies' regions that the last ones did not need.

        Slices of another group are of other sizes. What the coordinator was lent stays: it is of a bucket's size, and
        has to be withdrawn first.
        """
        with self._lock:
            self._group += 1
            for free in self._staging.values():
                for region in [one for one in free if not one.is_kept and self._is_idle(one)]:
                    # A thread that stages may have taken it just now.
                    with contextlib.suppress(ValueError):
                        free.remove(region)
                        del self._used[region.id]
                        self.regions.free(region)
            self._staging = {size: free for size, free in self._staging.items() if free}

    def _is_idle(self, region: Region) -> bool:
        return self._group - self._used[region.id] > _IDLE_GROUPS


class SameHost:
    """What one membership shares with the coordinator."""

    def __init__(self, offer: SharedMemoryOffer | None, session: str, vectors: SharedVectors) -> None:
        """Connects when it is first needed.

        Args:
            offer: what Join said; None: the coordinator shares nothing.
            session: of the membership.
            vectors: of this worker.
        """
        self.vectors = vectors
        self._offer = offer if vectors.is_wanted else None
        self._session = session
        self._connecting: asyncio.Task[SharedRegions | None] | None = None

    async def regions(self) -> SharedRegions | None:
        """Returns the connection, or None: then gradients travel over gRPC."""
        if self._offer is None:
            return None
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(self._offer))
        shared = await asyncio.shield(self._connecting)
        return shared if shared is not None and shared.is_open else None

    async def close(self) -> None:
        """Ends the connection."""
        connecting, self._connecting, self._offer = self._connecting, None, None
        if connecting is None:
            return
        connecting.cancel()
        (shared,) = await asyncio.gather(connecting, return_exceptions=True)
        if isinstance(shared, SharedRegions):
            await shared.close()

    async def _connect(self, offer: SharedMemoryOffer) -> SharedRegions | None:
        try:
            shared = await SharedRegions.connect(offer, self._session, _CONNECT_S, self.vectors.regions)
        except AyniError as error:
            _log.info("gradients travel over gRPC: %s", error)
            return None
        _log.info("gradients go through memory that is shared with the coordinator")
        return shared


class Sharing(Protocol):
    """What a contribution needs of who reduces it in shared memory."""

    @property
    def name(self) -> str:
        """Names who reduces."""

    async def lend(self, region: Region) -> None:
        """Has a region of this worker mapped there."""

    async def borrow(self, region_id: int) -> MappedRegion:
        """Returns a region from there, mapped."""


class SharesMemory(Protocol):
    """Who may share memory with this worker."""

    @property
    def vectors(self) -> SharedVectors:
        """Of this worker."""

    async def regions(self) -> Sharing | None:
        """Returns the connection, or None: then gradients travel over gRPC."""


class SharedParts:
    """One contribution's parts in shared memory."""

    def __init__(self, shared: Sharing, vectors: SharedVectors) -> None:
        """Starts without parts."""
        self._shared = shared
        self._vectors = vectors
        self._staged: list[asyncio.Future[Region]] = []

    async def place(self, parts: Mapping[int, Vector], dtype: str, chunk_bytes: int) -> dict[int, SharedRange] | None:
        """Returns where the coordinator finds each part, none of which may change before `close`.

        None where they can't be shared: then they have to be sent.

        Args:
            parts: by number.
            dtype: element type on the wire.
            chunk_bytes: length of a chunk.
        """
        try:
            return {index: await self._place(part, dtype, chunk_bytes) for index, part in parts.items()}
        except AyniError as error:
            _log.warning("a contribution travels over gRPC: %s", error)
            return None

    async def _place(self, part: Vector, dtype: str, chunk_bytes: int) -> SharedRange:
        found = self._vectors.regions.find(part) if dtype == "float32" else None
        region, offset = found or (await self._stage(part, dtype, chunk_bytes), 0)
        generation = region.generation
        await self._shared.lend(region)
        return SharedRange(region.id, offset, tensors.payload_bytes(part.size, dtype), generation)

    def close(self) -> None:
        """Takes copies back; the coordinator reads them no more, or must not use what it reads."""
        while self._staged:
            staged = self._staged.pop()
            if staged.done():
                self._unstage(staged)
            else:
                staged.add_done_callback(self._unstage)

    async def _stage(self, part: Vector, dtype: str, chunk_bytes: int) -> Region:
        """Copies a part on a thread. Whoever gives up waiting stops no copy: `close` takes it back when it is there."""
        stage = partial(self._vectors.stage, part, dtype, chunk_bytes)
        staged = asyncio.get_running_loop().run_in_executor(None, stage)
        self._staged.append(staged)
        return await asyncio.shield(staged)

    def _unstage(self, staged: "asyncio.Future[Region]") -> None:
        if not staged.cancelled() and staged.exception() is None:
            self._vectors.unstage(staged.result())


async def add_shared(shared: Sharing | None, mean: MeanBuffer, chunk: ChunkView, place: SharedRange) -> None:
    """Copies a run of the mean out of the memory of who reduces.

    Raises:
        TransportBroken: there is no such run, it can't be read, or it was written to meanwhile.
        BadChunk: the run does not follow the one before.
    """
    if shared is None:
        raise TransportBroken("the coordinator says where a mean lies, and shares no memory with this worker")
    try:
        region = await shared.borrow(place.region)
    except AyniError as error:
        raise TransportBroken(f"the memory of {shared.name} with a mean can't be read: {error}") from error
    stop = place.offset_bytes + place.length_bytes
    if stop > region.size:
        raise TransportBroken(f"{shared.name} says that a mean ends at byte {stop} of {region.size} of its memory")
    data = region.bytes[place.offset_bytes : stop].data
    mean.add(ChunkView(chunk.offset_bytes, chunk.part, None, data))
    if region.generation != place.generation:
        raise TransportBroken(f"{shared.name} went on before this worker had read the mean")
