"""Contributions to slices of owners on this host: the calls of PeerService over a Unix socket.  [shell]

A `HostCall` looks like a call of gRPC to whoever uses it. Only frames go over the socket, which say where bytes lie in
regions of either side; a connection is used again by the next call once a call has ended well.
"""

import contextlib
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from grpc import aio

from ayni.errors import AyniError, PeerLost, TooLarge, Unsupported
from ayni.shm import json_messages
from ayni.shm.folder import SocketFolder
from ayni.shm.host import SharedMemoryOffer
from ayni.shm.regions import MappedRegion, Region
from ayni.shm.sockets import credentials
from ayni.step_values import GroupMember
from ayni.v1 import coordinator_pb2 as pb
from worker_agent.faults import TransportBroken
from worker_agent.host_streams import MOST_BYTES, HostStream, Kind
from worker_agent.peer_regions import PeerRegions
from worker_agent.same_host import SharedVectors
from worker_agent.slice_offers import Terms

_log = logging.getLogger(__name__)

_MOST_CALLS = 32
"""Calls to one owner at a time; more go over gRPC, so that descriptors do not run out."""


class HostPeers:
    """Connections of this worker to owners on its host. Belongs to the event loop."""

    def __init__(self, vectors: SharedVectors, regions: PeerRegions) -> None:
        """Dials nobody yet.

        Args:
            vectors: of this worker.
            regions: of the others.
        """
        self.vectors = vectors
        self.regions = regions
        self._told = 0
        self._idle: dict[SharedMemoryOffer, list[HostStream]] = {}
        self._under_way: dict[SharedMemoryOffer, set[HostStream]] = {}

    def has_room(self, owner: GroupMember) -> bool:
        """Returns whether another call to an owner can be made this way."""
        assert owner.shared_memory
        return len(self._under_way.get(owner.shared_memory, ())) < _MOST_CALLS

    async def call(self, owner: GroupMember, secret: str, chunk_bytes: int, on_sent: Callable[[], None]) -> "HostCall":
        """Opens a call to an owner on this host.

        Args:
            owner: has said where it shares memory.
            secret: of the group.
            chunk_bytes: length of a chunk.
            on_sent: is called when everything was written.

        Raises:
            Unsupported, BadRequest, PeerLost: it can't be reached this way.
        """
        offer = owner.shared_memory
        assert offer
        idle = self._idle.get(offer, [])
        stream = idle.pop() if idle else None
        while stream and not stream.is_quiet:
            stream.close()
            stream = idle.pop() if idle else None
        stream = stream or _dial(offer, owner)
        stream.forget_lent()
        self._under_way.setdefault(offer, set()).add(stream)
        try:
            await stream.send(Kind.HELLO, secret.encode())
        except BaseException:
            self.end(owner, stream, is_clean=False)
            raise
        return HostCall(self, stream, owner, chunk_bytes, on_sent)

    def end(self, owner: GroupMember, stream: HostStream, *, is_clean: bool) -> None:
        """Takes a call's connection back, for the next one if it ended well."""
        assert owner.shared_memory
        under_way = self._under_way[owner.shared_memory]
        under_way.discard(stream)
        if not under_way:
            # An owner that has gone never comes back under the same offer.
            del self._under_way[owner.shared_memory]
        if is_clean and stream.is_open:
            self._idle.setdefault(owner.shared_memory, []).append(stream)
        else:
            stream.close()

    def enter(self, terms: Terms) -> None:
        """Hangs up on workers that are not in the group of now, and lets go of what they lent."""
        group = terms.group
        count = sum(terms.is_near(owner) for owner in group.owners if owner.worker_id != terms.worker_id)
        if count != self._told:
            self._told = count
            _log.info("slices that %d other workers reduce go through memory that is shared with them", count)
        self.regions.enter({member.worker_id for member in group.members})
        self.vectors.regroup()
        self._keep({member.shared_memory for member in group.members})

    def close(self) -> None:
        """Hangs up on everybody."""
        self._keep(set())
        for streams in list(self._under_way.values()):
            for stream in list(streams):
                stream.close()

    def _keep(self, offers: set[SharedMemoryOffer | None]) -> None:
        for offer in self._idle.keys() - offers:
            for stream in self._idle.pop(offer):
                stream.close()


class HostCall:
    """One call; the part of `aio.StreamStreamCall` that is used of it, and regions of both sides."""

    def __init__(
        self, peers: HostPeers, stream: HostStream, owner: GroupMember, chunk_bytes: int, on_sent: Callable[[], None]
    ) -> None:
        """Use `HostPeers.call`."""
        self.vectors = peers.vectors
        self.name = f"worker {owner.worker_name}"
        self._peers, self._stream, self._owner = peers, stream, owner
        self._chunk_bytes, self._on_sent = chunk_bytes, on_sent
        self._has_sent_all = self._is_over = False
        self._mapped: dict[int, MappedRegion] = {}

    @property
    def accepted(self) -> pb.RoundAccepted:
        """What the owner says to every contribution, known before it is asked."""
        return pb.RoundAccepted(chunk_bytes=self._chunk_bytes)

    def without(self, part_bytes: int) -> "HostCall":
        """Returns this, if nothing of the parts has to travel; raises Unsupported otherwise."""
        if part_bytes:
            sentence = f"parts for {self.name} lie in no memory that it can read"
            raise Unsupported(sentence, field="gradients", detail="no shared memory")
        return self

    async def regions(self) -> "HostCall":
        """Returns what lends and borrows; see `same_host.SameHost.regions`."""
        return self

    async def lend(self, region: Region) -> None:
        """Lets the owner read a region of this worker; where it is gone, the call's reader learns it."""
        with contextlib.suppress(PeerLost):
            await self._stream.lend(region)

    async def borrow(self, region_id: int) -> MappedRegion:
        """Returns a region of the owner, mapped.

        Raises:
            BadRequest: it lent none.
            PeerLost: it is not what it should be.
        """
        if region_id not in self._mapped:
            lend, fd = self._stream.take_offered(region_id)
            self._mapped[region_id] = await self._peers.regions.map(self._owner.worker_id, lend, fd)
        return self._mapped[region_id]

    async def write(self, frame: bytes) -> None:
        """Sends a frame; nothing happens where the call is over, as its reader learns.

        Raises:
            TooLarge: frames of this length do not go over the socket.
        """
        if len(frame) > MOST_BYTES:
            raise TooLarge(
                f"a frame of {len(frame)} bytes for {self.name}: at most {MOST_BYTES} go over a socket of this host",
                field="frame",
                limit=MOST_BYTES,
                received=len(frame),
            )
        with contextlib.suppress(PeerLost):
            await self._stream.send(Kind.FRAME, frame)

    async def done_writing(self) -> None:
        """Says that no more frames come."""
        with contextlib.suppress(PeerLost):
            await self._stream.send(Kind.END)
            self._has_sent_all = True
            self._on_sent()

    async def read(self) -> object:
        """Returns the next frame; `aio.EOF` after the last one.

        Raises:
            AyniError: the owner refused.
            TransportBroken: the connection broke.
        """
        if self._is_over:
            return aio.EOF
        try:
            kind, content = await self._stream.receive()
        except AyniError as error:
            raise TransportBroken(f"the call to {self.name} over its socket broke: {error}") from error
        if kind == Kind.FRAME:
            return content
        self._finish(is_clean=self._has_sent_all and kind in (Kind.DONE, Kind.REFUSED))
        if kind == Kind.REFUSED:
            json_messages.decode_answer(content, "refusal", _no_refusal)
        if kind != Kind.DONE:
            raise TransportBroken(f"{self.name} said something over its socket that nobody asked for")
        return aio.EOF

    def done(self) -> bool:
        """Returns whether the call is over."""
        return self._is_over

    def cancel(self) -> bool:
        """Gives the call up; nothing happens where it is over."""
        return self._finish(is_clean=False)

    def _finish(self, *, is_clean: bool) -> bool:
        if self._is_over:
            return False
        self._is_over = True
        self._mapped.clear()
        self._peers.end(self._owner, self._stream, is_clean=is_clean)
        return True


def _no_refusal(values: object) -> None:
    raise ValueError(f"{values!r} is no refusal")


def _dial(offer: SharedMemoryOffer, owner: GroupMember) -> HostStream:
    with closing(SocketFolder(Path(offer.folder), make=False)) as folder:
        connection = folder.dial(offer.socket_name)
    try:
        credentials(connection)
        return HostStream(connection, f"worker {owner.worker_name}")
    except BaseException:
        connection.close()
        raise
