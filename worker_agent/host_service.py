"""The slices that this worker reduces, for workers of its host: PeerService over a Unix socket.  [shell]

Who connects is asked for the secret of the exchange group, as over gRPC, and has to be the same user. What is lent is
mapped only when a member names it. A connection that breaks ends nothing: its lease begins again, or the coordinator
says that there is another group.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from ayni import frames, tensors
from ayni.errors import AyniError, BadChunk, BadRequest, Deadline, Unsupported
from ayni.shm.folder import SocketFolder, default_folder
from ayni.shm.host import SharedMemoryOffer, socket_name
from ayni.shm.json_messages import encode_refusal
from ayni.shm.memory import can_share
from ayni.shm.regions import MappedRegion
from ayni.shm.sockets import SocketServer
from ayni.shm.sources import source
from ayni.shm.this_host import this_host
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import peer_pb2
from worker_agent.host_streams import HostStream, Kind
from worker_agent.peer_messages import slice_offer_of
from worker_agent.peer_regions import PeerRegions
from worker_agent.peer_service import begin_of, complete_of
from worker_agent.slice_contribution import WINDOW_CHUNKS, SliceContribution
from worker_agent.slice_rounds import SliceRounds

_log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 4096
_BEGIN_S = 20.0
_DRAIN_S = 10.0


class HostServicer:
    """Answers calls over connections of one socket."""

    def __init__(self, rounds: SliceRounds, regions: PeerRegions) -> None:
        """Serves the rounds of this worker's slices; `regions` has what others lend."""
        self._rounds, self._regions = rounds, regions

    async def converse(self, connection: socket.socket) -> None:
        """Serves one contribution after the other, until the other side hangs up."""
        stream = HostStream(connection, "a worker of this host")
        task = asyncio.current_task()
        assert task
        stream.on_end = task.cancel
        try:
            while True:
                kind, content = await stream.receive()
                if kind != Kind.HELLO:
                    raise BadRequest("a contribution has to begin with the secret of the group", field="hello")
                await self._serve(stream, content.decode("ascii", "replace"))
                stream.forget_lent()
        finally:
            stream.on_end = lambda: None
            stream.close()

    async def _serve(self, stream: HostStream, secret: str) -> None:
        call = _Call(stream, self._regions)
        try:
            begin = begin_of(await call.first())
            contribution = await self._rounds.admit(slice_offer_of(begin), secret)
            try:
                await call.exchange(contribution)
            finally:
                contribution.close()
        except AyniError as error:
            if not stream.is_open:
                raise
            await call.refuse(error)


class _Call:
    """One contribution, from its first frame to its last."""

    def __init__(self, stream: HostStream, regions: PeerRegions) -> None:
        """Reads from a connection that has said hello."""
        self._stream, self._regions = stream, regions
        self._mapped: dict[int, MappedRegion] = {}
        self._is_whole = False

    async def first(self) -> bytes:
        """Returns the first frame."""
        try:
            async with asyncio.timeout(_BEGIN_S):
                return await self._frame() or b""
        except TimeoutError:
            sentence = f"nothing came for a slice over a socket of this host within {_BEGIN_S:g} s"
            raise Deadline(sentence, waiting_for="begin", timeout=_BEGIN_S) from None

    async def exchange(self, contribution: SliceContribution) -> None:
        """Takes what is lent, and says where the mean is, as it is made."""
        live, stream = contribution.live, self._stream
        if live.store.region is None:
            sentence = f"{contribution.offer.name}: its mean lies in no memory that others can read"
            raise Unsupported(sentence, field="gradients", detail="no shared memory")
        await self._take(contribution)
        accepted = pb.RoundAccepted(
            chunk_bytes=contribution.chunk_bytes, window_chunks=WINDOW_CHUNKS, already_held=contribution.is_held
        )
        size = tensors.itemsize(live.store.dtype)
        await stream.send(Kind.FRAME, peer_pb2.ReduceSliceResponse(accepted=accepted).SerializeToString())
        while (run := await contribution.next_chunk(is_run=True)) is not None:
            await stream.lend(live.store.region)
            place = live.store.place(*run)
            await stream.send(Kind.FRAME, frames.encode_shared_chunk(frames.CHUNK_FIELD, run[0] * size, 0, place))
        complete = peer_pb2.ReduceSliceResponse(complete=complete_of(contribution))
        await stream.send(Kind.FRAME, complete.SerializeToString())
        await stream.send(Kind.DONE)

    async def refuse(self, error: AyniError) -> None:
        """Reads on to the contribution's end, and refuses it; the connection can be used again."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                while not self._is_whole:
                    await self._frame()
        except TimeoutError:
            sentence = f"a contribution that was refused did not end within {_DRAIN_S:g} s: {error}"
            raise Deadline(sentence, waiting_for="end", timeout=_DRAIN_S) from None
        await self._stream.send(Kind.REFUSED, encode_refusal(error))

    async def _take(self, contribution: SliceContribution) -> None:
        try:
            while (frame := await self._frame()) is not None:
                if not (contribution.is_held or contribution.failed):
                    await self._arrive(contribution, frame)
        except AyniError as error:
            contribution.fail(error)
            raise

    async def _arrive(self, contribution: SliceContribution, frame: bytes) -> None:
        label, dtype = contribution.live.round.label, contribution.live.round.spec.dtype
        _, chunk = frames.decode_frame(frame)
        if not isinstance(chunk, frames.ChunkView) or chunk.shared is None:
            raise _no_place(label)
        region = await self._region(contribution.offer.worker_id, chunk.shared.region)
        found = source(label, region, chunk, chunk.shared, dtype)
        contribution.lend(chunk.part, chunk.offset_bytes // tensors.position_bytes(dtype), found)

    async def _region(self, worker_id: int, region_id: int) -> MappedRegion:
        if region_id not in self._mapped:
            lend, fd = self._stream.take_offered(region_id)
            self._mapped[region_id] = await self._regions.map(worker_id, lend, fd)
        return self._mapped[region_id]

    async def _frame(self) -> bytes | None:
        """Returns the next frame; None after the last one."""
        kind, content = await self._stream.receive()
        if kind == Kind.END:
            self._is_whole = True
            return None
        if kind != Kind.FRAME:
            raise BadRequest(f"a message of kind {kind} came where frames are expected", field="frame")
        return content


@asynccontextmanager
async def serving_host(rounds: SliceRounds, regions: PeerRegions) -> AsyncIterator[SharedMemoryOffer | None]:
    """Serves slices for workers of this host; yields where, or None where memory can't be shared."""
    try:
        if not can_share():
            raise Unsupported("this system can't share memory", field="gradients", detail="system")
        path, name = default_folder(os.environ.get("XDG_RUNTIME_DIR", "")).absolute(), socket_name(secrets.randbits(64))
        offer = SharedMemoryOffer(host=this_host(), folder=str(path), socket_name=name)
        offer.check()
        folder = SocketFolder(path, make=True)
    except AyniError as error:
        _log.info("slices of workers on this host travel over gRPC too: %s", error)
        yield None
        return
    with closing(folder):
        folder.sweep()
        server = SocketServer(folder, name, HostServicer(rounds, regions).converse, _MOST_CONNECTIONS)
        try:
            yield offer
        finally:
            await server.close()


def _no_place(label: str) -> BadChunk:
    return BadChunk(
        f"{label}: a frame over a socket of this host has to say where its bytes lie",
        field="shared",
        expected="a place",
        received="none",
        bucket=label,
    )
