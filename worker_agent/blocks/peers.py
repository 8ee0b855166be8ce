"""Remote workers that this worker can move blocks with, and by which engine.  [shell]

What is published works: a peer counts only after every rank of its group was reached and one block of it was read.
Connecting is all or nothing, and calls for one group run one after another. A group of which a transfer found a rank
gone does not count as connected until a transfer reaches that rank again or the group is connected again.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ayni.blocks.layouts import LayoutDescriptor, LayoutHandle, LocalLayout
from ayni.blocks.metadata import RemoteLayout, RemoteState, WorkerMetadata
from ayni.errors import (
    AyniError,
    BadRequest,
    Fault,
    Incompatible,
    PeerLost,
    StaleEpoch,
    UnknownLayout,
    UnknownPeer,
    Unsupported,
)
from worker_agent.blocks.engine import Engine, Link, MoveResult, Ticket

_log = logging.getLogger(__name__)

_GONE = {PeerLost.reason, StaleEpoch.reason}
"""What moves with a worker that has ended, or was started again, fail with."""


class Peer:
    """One remote worker."""

    def __init__(self, metadata: WorkerMetadata, engines: Mapping[str, Engine]) -> None:
        """Knows a worker and the engines that may reach it, best first; reaches nobody yet."""
        self.metadata = metadata
        self.engine = ""
        """First engine that works."""
        self.is_lost = False
        """Whether the last move that ended found the worker gone."""
        self._is_open = True
        self._routes: dict[LayoutHandle, str] = {}
        self._engines = {name: engine for name, engine in engines.items() if _fits(engine, metadata)}
        self._links: dict[str, Link] = {}
        self._lock = asyncio.Lock()

    async def connect(self, deadline: float) -> None:
        """Chooses for each layout the first engine that reaches it. A layout that none reaches can't be pulled.

        Raises:
            Unsupported: the two workers have no engine in common.
            AyniError: no engine works; what the last one said.
        """
        last: AyniError = Unsupported(
            f"no engine reaches {self}: it offers {_offers(self.metadata)}, and none of them is usable from here",
            field="engines",
            detail=_offers(self.metadata),
        )
        left = list(self.metadata.layouts)
        for name in self._engines:
            if self.engine and not left:
                break
            try:
                link = await self.link(name, deadline)
            except AyniError as error:
                _log.warning("engine %s does not reach %s: %s", name, self, error)
                last = error
                continue
            except Exception as error:
                # What a peer exports may be anything; another engine may understand it.
                _log.exception("engine %s broke on %s", name, self)
                last = Fault(f"engine {name} broke on what {self} exports: {error!r}", detail=repr(error))
                continue
            self.engine = self.engine or name
            self._routes |= {layout.handle: name for layout in left if link.reaches(layout)}
            left = [layout for layout in left if layout.handle not in self._routes]
        if not self.engine:
            raise last
        for layout in left:
            _log.warning("the %s of %s can't be pulled: no engine reaches it", layout.place, self)

    def engine_for(self, layout: LayoutDescriptor) -> str:
        """Returns the engine that pulls of a layout use; empty when none reaches it."""
        return self._routes.get(layout.handle, "")

    async def link(self, name: str, deadline: float) -> Link:
        """Returns the link through an engine; the first call opens it.

        Raises:
            Unsupported: one of the two workers does not have the engine.
            PeerLost: the worker was disconnected.
            AyniError: it does not work.
        """
        async with self._lock:
            if name not in self._links:
                self.check_engine(name)
                self._check_open()
                export = next(e for e in self.metadata.engines if e.name == name)
                link = await self._engines[name].connect(self.metadata, export, deadline)
                if not self._is_open:
                    await link.close()
                    self._check_open()
                self._links[name] = link
            return self._links[name]

    def watched(self, ticket: Ticket) -> Ticket:
        """Returns a ticket of a move with this worker, whose outcome will tell whether the worker is there."""

        def note(outcome: "asyncio.Future[MoveResult]") -> None:
            reasons = {failure.reason for _, failure in outcome.result().failures}
            self.is_lost = bool(reasons & _GONE) or (self.is_lost and bool(reasons))

        ticket.outcome.add_done_callback(note)
        return ticket

    def pushing_engine(self, layout: LayoutDescriptor) -> str:
        """Returns the engine that pushes into a layout use: the first that can and may reach it; empty for none."""
        able = [name for name, engine in self._engines.items() if engine.capabilities.can_push]
        chosen = self.engine_for(layout)
        return chosen if chosen in able else next((name for name in able if self._may_reach(name, layout)), "")

    def check_engine(self, name: str) -> None:
        """Refuses an engine that can't be used with this worker.

        Raises:
            Unsupported: one of the two workers does not have it, or there is none that could be used.
        """
        if name not in self._engines:
            what = f"engine {name!r}" if name else "no engine"
            raise Unsupported(
                f"{what} can be used for this with {self}; usable are {', '.join(self._engines) or 'none'}",
                field="options.engine",
                detail=name,
            )

    def _may_reach(self, name: str, layout: LayoutDescriptor) -> bool:
        """Says whether an engine may reach a layout; one that is not connected yet is asked when it is."""
        link = self._links.get(name)
        return link is None or link.reaches(layout)

    def layout(self, place: LocalLayout) -> LayoutDescriptor:
        """Returns the description of one of the worker's layouts.

        Raises:
            UnknownLayout: it exported none of this tier and resource.
        """
        for layout in self.metadata.layouts:
            if layout.place == place:
                return layout
        raise UnknownLayout(f"{describe(self.metadata)} exported no {place}", layout=place)

    def __str__(self) -> str:
        return describe(self.metadata)

    async def close(self) -> None:
        """Ends all links, and opens no more; no byte can land afterwards."""
        self._is_open = False
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))

    def _check_open(self) -> None:
        if not self._is_open:
            raise PeerLost(f"{self} was disconnected; connect to it again", peer=self, detail="disconnected")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    metadata: tuple[WorkerMetadata, ...]
    allowed: tuple[str, ...]
    peers: dict[int, Peer] = field(default_factory=dict)

    @property
    def is_lost(self) -> bool:
        """Whether a rank is gone."""
        return any(peer.is_lost for peer in self.peers.values())


class Peers:
    """All remote workers, by group and by handle."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """Takes this worker's engines, best first."""
        self._engines = {engine.name: engine for engine in engines}
        self._groups: dict[str, _Group] = {}
        self._singles: dict[int, Peer] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def connect(
        self, instance_id: str, metadata: Sequence[WorkerMetadata], allowed: Sequence[str], deadline: float
    ) -> tuple[RemoteLayout, ...]:
        """Connects to ranks of a group; see BlockWorker.connect_remote."""
        _check_group(instance_id, metadata)
        wanted = _Group(metadata=tuple(metadata), allowed=tuple(allowed))
        async with self._locks.setdefault(instance_id, asyncio.Lock()):
            known = self._groups.get(instance_id)
            is_same = known is not None and (known.metadata, known.allowed) == (wanted.metadata, wanted.allowed)
            if known and is_same and not known.is_lost:
                return _remote_layouts(known)
            if known:
                _check_newer(known.metadata[0], wanted.metadata[0])
            wanted.peers.update(await self._open_all(wanted, deadline))
            self._groups[instance_id] = wanted
            replaced = [single for one in metadata for single in self._taken_singles(one)]
            await _close_all([*(known.peers.values() if known else ()), *replaced])
        for peer in wanted.peers.values():
            _log.info("connected to %s through engine %s", describe(peer.metadata), peer.engine)
        return _remote_layouts(wanted)

    async def disconnect(self, instance_id: str) -> bool:
        """Forgets a group; says whether it was connected."""
        async with self._locks.setdefault(instance_id, asyncio.Lock()):
            group = self._groups.pop(instance_id, None)
            owners = [owner for owner, peer in self._singles.items() if peer.metadata.instance_id == instance_id]
            peers = [*(group.peers.values() if group else ()), *(self._singles.pop(owner) for owner in owners)]
            if peers:
                await _close_all(peers)
                _log.info("disconnected from group %s", instance_id)
        return bool(peers)

    async def import_one(self, metadata: WorkerMetadata, deadline: float) -> Peer:
        """Connects to one worker without its group. Idempotent; a newer incarnation replaces."""
        async with self._locks.setdefault(f"owner {metadata.owner_id}", asyncio.Lock()):
            known = self._singles.get(metadata.owner_id)
            if known and known.metadata == metadata and not known.is_lost:
                return known
            if known:
                _check_newer(known.metadata, metadata)
            peer = Peer(metadata, self._allowed(()))
            await _opened([peer], deadline)
            self._singles[metadata.owner_id] = peer
            await _close_all([*([known] if known else []), *self._taken_singles(metadata, but=peer)])
        return peer

    def state(self, instance_id: str) -> RemoteState:
        """Says whether a group is connected and none of its ranks was found gone."""
        group = self._groups.get(instance_id)
        if not group or group.is_lost:
            return RemoteState(connected=False)
        return RemoteState(connected=True, remote_epoch=group.metadata[0].epoch, layouts=_remote_layouts(group))

    def rank(self, instance_id: str, rank: int) -> Peer:
        """Returns a rank of a connected group.

        Raises:
            UnknownPeer: group or rank is not connected.
        """
        group = self._groups.get(instance_id)
        if group is None or rank not in group.peers:
            there = f"its ranks {sorted(group.peers)} are" if group else "none of its ranks is"
            raise UnknownPeer(
                f"rank {rank} of group {instance_id} is not connected ({there}); call ConnectRemote first",
                instance_id=instance_id,
                rank=rank,
            )
        return group.peers[rank]

    def owner(self, handle: LayoutHandle) -> tuple[Peer, LayoutDescriptor]:
        """Returns the remote worker that a layout belongs to, and the layout's description.

        Raises:
            UnknownPeer: its owner is neither imported nor connected.
        """
        peers = [*(p for group in self._groups.values() for p in group.peers.values()), *self._singles.values()]
        for peer in sorted(peers, key=lambda peer: peer.is_lost):
            for layout in peer.metadata.layouts:
                if layout.handle == handle:
                    return peer, layout
        raise UnknownPeer(
            f"no connected worker has a layout {handle}; import its owner's metadata first",
            instance_id="",
            rank="",
        )

    async def close(self) -> None:
        """Ends all connections."""
        groups, self._groups = self._groups, {}
        singles, self._singles = self._singles, {}
        await _close_all([*singles.values(), *(p for group in groups.values() for p in group.peers.values())])

    def _allowed(self, names: Sequence[str]) -> dict[str, Engine]:
        if unknown := [name for name in names if name not in self._engines]:
            raise Unsupported(
                f"this worker has no engine {', '.join(unknown)}; it has {', '.join(self._engines)}",
                field="engines",
                detail=",".join(unknown),
            )
        return {name: self._engines[name] for name in names} if names else dict(self._engines)

    async def _open_all(self, group: _Group, deadline: float) -> dict[int, Peer]:
        """Connects to every rank, or to none."""
        engines = self._allowed(group.allowed)
        peers = {metadata.rank: Peer(metadata, engines) for metadata in group.metadata}
        await _opened(list(peers.values()), deadline)
        return peers

    def _taken_singles(self, metadata: WorkerMetadata, but: Peer | None = None) -> list[Peer]:
        """Takes out the single workers that `metadata` stands for now: the same one, or an earlier start of it."""
        owners = [
            owner
            for owner, peer in self._singles.items()
            if peer is not but and (peer.is_lost or _is_same_worker(peer.metadata, metadata))
        ]
        return [self._singles.pop(owner) for owner in owners]


async def _opened(peers: Sequence[Peer], deadline: float) -> None:
    """Connects to all workers, or leaves no link open: not when one fails, and not when the caller gives up."""
    try:
        results = await asyncio.gather(*(peer.connect(deadline) for peer in peers), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
    except BaseException:
        await _close_all(peers)
        raise


def _is_same_worker(one: WorkerMetadata, other: WorkerMetadata) -> bool:
    is_same_place = bool(one.address) and one.address == other.address
    return is_same_place or (one.instance_id, one.rank) == (other.instance_id, other.rank)


def describe(metadata: WorkerMetadata) -> str:
    """Names a remote worker in a sentence."""
    where = f" at {metadata.address}" if metadata.address else ""
    return f"rank {metadata.rank} of group {metadata.instance_id}{where}"


def _fits(engine: Engine, metadata: WorkerMetadata) -> bool:
    return any((export.name, export.version) == (engine.name, engine.version) for export in metadata.engines)


def _offers(metadata: WorkerMetadata) -> str:
    return ", ".join(f"{export.name} {export.version}" for export in metadata.engines) or "no engine"


def _check_group(instance_id: str, metadata: Sequence[WorkerMetadata]) -> None:
    if not metadata:
        raise BadRequest(f"no rank of group {instance_id} was given", field="ranks")
    ranks = [one.rank for one in metadata]
    if len(set(ranks)) != len(ranks):
        raise BadRequest(f"group {instance_id} was given with ranks {ranks}; each may come once", field="ranks")
    for one in metadata:
        if one.instance_id != instance_id:
            raise Incompatible(
                f"{describe(one)} was given as a rank of group {instance_id}",
                field="instance_id",
                coordinator=instance_id,
                worker=one.instance_id,
            )
        if one.epoch != metadata[0].epoch:
            raise Incompatible(
                f"{describe(one)} has epoch {one.epoch}, but rank {ranks[0]} has {metadata[0].epoch}; export all ranks "
                "again",
                field="epoch",
                coordinator=metadata[0].epoch,
                worker=one.epoch,
            )


def _check_newer(known: WorkerMetadata, offered: WorkerMetadata) -> None:
    """Refuses what is older than what is known."""
    if offered.epoch < known.epoch:
        raise StaleEpoch(
            f"{describe(offered)} was exported in epoch {offered.epoch}, but epoch {known.epoch} is connected already",
            epoch=offered.epoch,
            current_epoch=known.epoch,
        )


def _remote_layouts(group: _Group) -> tuple[RemoteLayout, ...]:
    return tuple(
        RemoteLayout(
            remote_rank=rank,
            resource_id=layout.resource_id,
            tier=layout.tier,
            layout=layout.handle,
            engine=peer.engine_for(layout),
        )
        for rank, peer in sorted(group.peers.items())
        for layout in peer.metadata.layouts
    )


async def _close_all(peers: Iterable[Peer]) -> None:
    await asyncio.gather(*(peer.close() for peer in peers))
