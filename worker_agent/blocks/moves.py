"""Turns what a leader asks for into jobs: which blocks are claimed, which copies are started.  [shell]

Everything that can be refused is refused here, before a job starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import LayoutDescriptor, LocalLayout, StorageKind
from ayni.blocks.transfers import Failure, PullPlan, PullShard, RemoteBlocks, TransferOptions
from ayni.errors import AyniError, BadRequest, Unsupported
from worker_agent.blocks.engine import Link, Move, MoveResult, Ticket
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.holds import Held, Holds
from worker_agent.blocks.local_tickets import Copier
from worker_agent.blocks.memory import WHOLE, Part
from worker_agent.blocks.paths import Selection
from worker_agent.blocks.peers import Peer, Peers
from worker_agent.blocks.registry import Entry, Registry
from worker_agent.blocks.running import Job
from worker_agent.blocks.validation import Side, check_transfer

_CHECKSUMMED = "grpc"
"""Engine whose chunks can carry a checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pull:
    """One peer's part in a pull."""

    peer: Peer
    remote: LayoutDescriptor
    remote_part: Part
    local_part: Part


class Moves:
    """Makes jobs for one worker."""

    def __init__(self, registry: Registry, holds: Holds, peers: Peers, copier: Copier) -> None:
        """Takes the worker's parts."""
        self._registry, self._holds, self._peers, self._copier = registry, holds, peers, copier
        self.rank = 0

    def local(
        self,
        places: tuple[LocalLayout, LocalLayout],
        source_blocks: Ids,
        destination_blocks: Ids,
        options: TransferOptions,
    ) -> Job:
        """Returns the job that copies between two of the worker's layouts; raises what is wrong with it."""
        source, destination = self._registry.at(places[0]), self._registry.at(places[1])
        refuse(options, "write_notification", options.write_notification is not None, "for a copy within one worker")
        refuse(options, "checksum", options.checksum, "for a copy within one worker: nothing is sent")
        refuse(options, "engine", options.engine not in ("", "local"), "for a copy within one worker")
        parts = _parts(options)
        bounce = self._bounce(options)
        sides = _side(source, source_blocks, parts[0]), _side(destination, destination_blocks, parts[1])
        check_transfer(*sides, _side(bounce[0], bounce[1], WHOLE) if bounce else None)
        writes: list[Held] = [(destination, destination_blocks), *([bounce] if bounce else [])]

        async def begin(deadline: float) -> Sequence[Ticket]:
            return [
                self._copier.copy(
                    Selection(memory=source.memory, blocks=source_blocks, part=parts[0]),
                    Selection(memory=destination.memory, blocks=destination_blocks, part=parts[1]),
                    Selection(memory=bounce[0].memory, blocks=bounce[1]) if bounce else None,
                    deadline,
                )
            ]

        return Job(
            what=f"copy from the {source.place} to the {destination.place}",
            rank=self.rank,
            destination_blocks=destination_blocks,
            block_bytes=_bytes(destination.memory.geometry, parts[1]),
            engines=("local",),
            route=f"{source.place} to {destination.place}",
            claim=lambda: self._holds.take([(source, source_blocks)], writes),
            begin=begin,
        )

    def onboard(self, source: RemoteBlocks, place: LocalLayout, blocks: Ids, options: TransferOptions) -> Job:
        """Returns the job that pulls blocks of an imported layout."""
        peer, remote = self._peers.owner(source.layout)
        parts = _parts(options)
        pull = _Pull(peer=peer, remote=remote, remote_part=parts[0], local_part=parts[1])
        return self._pull([pull], source.blocks, self._registry.at(place), blocks, options)

    def pull(self, plan: PullPlan, options: TransferOptions) -> Job:
        """Returns the job that pulls blocks, or parts of them, from ranks of a connected group."""
        shards = plan.shards or (PullShard(remote_rank=self.rank),)
        place = LocalLayout(tier=plan.remote_tier, resource_id=plan.destination.resource_id)
        pulls = []
        for shard in shards:
            peer = self._peers.rank(plan.instance_id, shard.remote_rank)
            parts = _parts(options)
            pulls.append(
                _Pull(
                    peer=peer,
                    remote=peer.layout(place),
                    remote_part=replace(parts[0], slice=shard.source_slice),
                    local_part=replace(parts[1], slice=shard.destination_slice),
                )
            )
        destination = self._registry.at(plan.destination)
        job = self._pull(pulls, plan.source_blocks, destination, plan.destination_blocks, options)
        _check_filled(destination.memory.geometry, pulls, job.block_bytes, options)
        return job

    def offload(self, place: LocalLayout, blocks: Ids, to: RemoteBlocks, options: TransferOptions) -> Job:
        """Returns the job that pushes blocks into an imported layout."""
        source = self._registry.at(place)
        peer, remote = self._peers.owner(to.layout)
        refuse(options, "bounce", options.bounce is not None, "for a transfer between workers")
        parts = _parts(options)
        check_transfer(_side(source, blocks, parts[0]), _remote_side(remote, to.blocks, parts[1]))
        move = Move(
            remote=remote,
            remote_blocks=to.blocks,
            remote_part=parts[1],
            local=source.memory,
            local_blocks=blocks,
            local_part=parts[0],
            checksum=options.checksum,
            write_notification=options.write_notification,
            deadline=0.0,
        )
        name = _engine(peer, peer.pushing_engine(remote), options)

        async def begin(deadline: float) -> Sequence[Ticket]:
            link = await peer.link(name, deadline)
            return [peer.watched(link.push(replace(move, deadline=deadline)))]

        return Job(
            what=f"push from the {source.place} to {peer}",
            rank=self.rank,
            destination_blocks=to.blocks,
            block_bytes=_bytes(source.memory.geometry, parts[0]),
            engines=(name,),
            route=f"{source.place} to a peer's {remote.place}",
            claim=lambda: self._holds.take([(source, blocks)]),
            begin=begin,
        )

    def _pull(
        self, pulls: Sequence[_Pull], source_blocks: Ids, destination: Entry, blocks: Ids, options: TransferOptions
    ) -> Job:
        refuse(options, "bounce", options.bounce is not None, "for a transfer between workers")
        refuse(options, "write_notification", options.write_notification is not None, "for a pull")
        for pull in pulls:
            check_transfer(
                _remote_side(pull.remote, source_blocks, pull.remote_part), _side(destination, blocks, pull.local_part)
            )
        names = [_engine(pull.peer, pull.peer.engine_for(pull.remote), options) for pull in pulls]

        async def begin(deadline: float) -> Sequence[Ticket]:
            links = [await pull.peer.link(name, deadline) for pull, name in zip(pulls, names, strict=True)]
            moves = [
                Move(
                    remote=pull.remote,
                    remote_blocks=source_blocks,
                    remote_part=pull.remote_part,
                    local=destination.memory,
                    local_blocks=blocks,
                    local_part=pull.local_part,
                    checksum=options.checksum,
                    deadline=deadline,
                )
                for pull in pulls
            ]
            return _start_all(pulls, links, moves)

        return Job(
            what=f"pull into the {destination.place} from {', '.join(str(pull.peer) for pull in pulls)}",
            rank=self.rank,
            destination_blocks=blocks,
            block_bytes=_bytes(destination.memory.geometry, _parts(options)[1]),
            engines=tuple(dict.fromkeys(names)),
            route=f"a peer's {pulls[0].remote.place} to {destination.place}",
            claim=lambda: self._holds.take(writes=[(destination, blocks)]),
            begin=begin,
        )

    def _bounce(self, options: TransferOptions) -> Held | None:
        if options.bounce is None:
            return None
        entry = self._registry.named(options.bounce.layout)
        is_host = entry.memory.storage in (StorageKind.SYSTEM, StorageKind.PINNED)
        refuse(options, "bounce", not is_host, f"with the {entry.place}: bounce blocks must be in host memory")
        return entry, options.bounce.blocks


def _start_all(pulls: Sequence[_Pull], links: Sequence[Link], moves: Sequence[Move]) -> list[Ticket]:
    """Starts one move with each peer. When one is refused, those before are ended, and all end with the refusal.

    Raises:
        AyniError: the first one was refused.
    """
    tickets: list[Ticket] = []
    for pull, link, move in zip(pulls, links, moves, strict=True):
        try:
            tickets.append(pull.peer.watched(link.pull(move)))
        except AyniError as error:
            if not tickets:
                raise
            # What has started writes to the blocks until it is quiesced, so it must not be forgotten.
            for ticket in tickets:
                ticket.cancel()
            return [_refused(len(move.local_blocks), error), *tickets]
    return tickets


def _refused(num_blocks: int, error: AyniError) -> Ticket:
    """Returns the ticket of a move that did not start."""
    ticket = Ticket(cancel=lambda: None)
    failure = Failure.of(error)
    ticket.outcome.set_result(MoveResult(failures=tuple((index, failure) for index in range(num_blocks))))
    ticket.quiesced.set_result(None)
    return ticket


def _engine(peer: Peer, chosen: str, options: TransferOptions) -> str:
    """Returns the engine of a transfer: the one it must use, else one that has checksums, else the chosen one."""
    name = options.engine or (_CHECKSUMMED if options.checksum else chosen)
    refuse(options, "checksum", options.checksum and name != _CHECKSUMMED, f"through engine {name!r}")
    peer.check_engine(name)
    return name


def refuse(options: TransferOptions, field: str, is_given: bool, where: str) -> None:
    """Refuses an option that is given where nothing can be done with it."""
    if is_given:
        value = getattr(options, field)
        raise Unsupported(f"option {field} can't be used {where}", field=f"options.{field}", detail=value)


def _parts(options: TransferOptions) -> tuple[Part, Part]:
    return (
        Part(layers=options.layers, axis_order=options.source_axis_order),
        Part(layers=options.layers, axis_order=options.destination_axis_order),
    )


def _side(entry: Entry, blocks: Ids, part: Part) -> Side:
    return Side(geometry=entry.memory.geometry, blocks=blocks, part=part, layout=entry.handle)


def _remote_side(remote: LayoutDescriptor, blocks: Ids, part: Part) -> Side:
    geometry = Geometry(config=remote.config, kind=remote.kind, axis_order=remote.axis_order)
    return Side(geometry=geometry, blocks=blocks, part=part, layout=remote.handle)


def _bytes(geometry: Geometry, part: Part) -> int:
    return geometry.part_bytes(part.layers, part.slice, part.axis_order)


def _check_filled(geometry: Geometry, pulls: Sequence[_Pull], block_bytes: int, options: TransferOptions) -> None:
    """Refuses parts that do not fill a block exactly once."""
    if len(pulls) == 1 and pulls[0].local_part.slice is None:
        return
    slices = sorted((p.local_part.slice for p in pulls if p.local_part.slice), key=lambda s: s.start)
    axes = {s.axis for s in slices}
    fits = len(slices) == len(pulls) and len(axes) == 1
    if fits:
        stops = [0, *(s.stop for s in slices)]
        fits = all(s.start == stop for s, stop in zip(slices, stops, strict=False))
        fits = fits and stops[-1] == geometry.extent(slices[0].axis)
    if not fits:
        raise BadRequest(
            f"the parts {[str(p.local_part.slice) for p in pulls]} do not fill a block exactly once", field="shards"
        )
