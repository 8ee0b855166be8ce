"""Drives a group of workers as one.  [shell]

Every call goes to all ranks with the same arguments: a block id means the same block on each of them. Lists are checked
once, before any rank is asked; everything else is checked by the workers, and what one of them refuses is its own
outcome. The group's notification tells when the last rank has ended.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.metadata import (
    Configured,
    GroupConfig,
    Imported,
    RemoteLayout,
    RemoteState,
    WorkerMetadata,
)
from ayni.blocks.notifications import EventManager
from ayni.blocks.objects import KeyReport, PresenceReport
from ayni.blocks.transfers import (
    DEFAULT_OPTIONS,
    ObjectKeys,
    RemoteBlocks,
    RemoteDescriptor,
    TransferOptions,
    TransferOutcome,
    TransferResult,
)
from ayni.blocks.worker import Notification, RankWorker
from ayni.errors import AyniError, BadRequest, UnknownPeer
from coordinator_service.admission import ConnectRules
from coordinator_service.aggregation import Asked, divide, join_keys, join_presences
from coordinator_service.block_lists import check_keys, check_lengths, check_pairs
from coordinator_service.connections import Connections
from coordinator_service.fan_out import FanOut, RankCall, ask_every, ask_for_keys, group_call
from coordinator_service.own_group import OwnGroup
from coordinator_service.parallelism import ParallelismTemplate, Templates
from coordinator_service.pull_plan import GroupPull
from coordinator_service.remote_groups import LocalGroup

_log = logging.getLogger(__name__)

Begin = Callable[[int, TransferOptions], Notification]
"""Starts a transfer on one rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """How a group behaves."""

    rules: ConnectRules = field(default_factory=ConnectRules)
    """What a remote group must have."""
    templates: Templates = field(default_factory=dict)
    """How other resources than the primary one are shared; what is not given is derived from the layouts."""
    call_timeout_s: float = 60.0
    """Longest wait for an answer to a call that has no deadline of its own."""


DEFAULT_SETTINGS = GroupSettings()


class SpmdParallelWorkers:
    """A group of workers, one for each rank; see `ayni.blocks.worker.BlockWorker` for what each method does.

    A leader that takes over workers that were configured before calls `export_metadata` first: from then on it knows
    their layouts and how they share the model.
    """

    def __init__(
        self,
        workers: Sequence[RankWorker],
        events: EventManager | None = None,
        template: ParallelismTemplate | None = None,
        settings: GroupSettings = DEFAULT_SETTINGS,
    ) -> None:
        """Takes the workers in rank order.

        Args:
            workers: near or far ones; the group does not close them.
            events: makes the group's notifications.
            template: how the primary resource is shared; None: derived from the layouts where they say enough.
            settings: everything else.

        Raises:
            ValueError: the template is for another number of workers.
        """
        if template and template.tp_size != len(workers):
            raise ValueError(f"the template is for {template.tp_size} ranks, but there are {len(workers)} workers")
        self._workers = tuple(workers)
        self._events = events or EventManager()
        self._timeout_s = settings.call_timeout_s
        self._group = OwnGroup(len(workers), template, settings.templates)
        self._fan_out = FanOut(self._events)
        self._connections = Connections(self._workers, settings.rules, settings.call_timeout_s)

    @property
    def workers(self) -> tuple[RankWorker, ...]:
        """The workers, in rank order."""
        return self._workers

    @property
    def worker_count(self) -> int:
        """Ranks of the group."""
        return len(self._workers)

    @property
    def connections(self) -> Connections:
        """The remote groups that this one is connected with."""
        return self._connections

    async def configure_layouts(self, config: GroupConfig) -> Configured:
        """Configures every rank as its place demands; rank and world_size of `config` are not read."""
        self._group.check_config(config)
        configs = [replace(config, rank=rank, world_size=self.worker_count) for rank in range(self.worker_count)]
        calls = [partial(worker.configure_layouts, own) for worker, own in zip(self._workers, configs, strict=True)]
        answers = await ask_every("configuring layouts", calls, self._timeout_s)
        self._group.configured(config.epoch)
        metadata = self._group.install([answer.metadata for answer in answers], config.mode)
        recovered = bool(answers) and all(answer.disk_recovered for answer in answers)
        return Configured(metadata=metadata, disk_recovered=recovered)

    async def export_metadata(self) -> tuple[WorkerMetadata, ...]:
        """Returns every rank's metadata in rank order, stamped when it is known how the primary resource is shared."""
        calls = [worker.export_metadata for worker in self._workers]
        return self._group.install(await ask_every("exporting metadata", calls, self._timeout_s))

    async def import_metadata(self, metadata: Sequence[WorkerMetadata]) -> tuple[Imported, ...]:
        """Gives entry i to rank i. Connects no group: only handles can be used."""
        if len(metadata) != self.worker_count:
            message = f"{len(metadata)} entries were given to a group of {self.worker_count}; entry i goes to rank i"
            raise BadRequest(message, field="metadata")
        calls = [partial(worker.import_metadata, [one]) for worker, one in zip(self._workers, metadata, strict=True)]
        answers = await ask_every("importing metadata", calls, self._timeout_s)
        self._group.remember_imported(metadata)
        return tuple(imported for answer in answers for imported in answer)

    async def connect_remote(
        self, instance_id: str, metadata: Sequence[WorkerMetadata], engines: Sequence[str] = ()
    ) -> tuple[RemoteLayout, ...]:
        """Connects all ranks, or none, after the remote group passed all gates; see `admission` and `gates`."""
        with group_call():
            return await self._connections.connect(instance_id, metadata, engines, self._known)

    async def disconnect_remote(self, instance_id: str) -> bool:
        """Makes all ranks forget a remote group."""
        with group_call():
            return await self._connections.disconnect(instance_id)

    async def has_remote_metadata(self, instance_id: str) -> RemoteState:
        """Says whether a remote group is connected on every rank."""
        with group_call():
            return await self._connections.state(instance_id)

    def execute_local_transfer(
        self,
        source: LocalLayout,
        destination: LocalLayout,
        source_blocks: Iterable[int],
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """Copies the same blocks on every rank."""

        def prepare(ids: Ids) -> Begin:
            sources = as_ids(source_blocks)
            check_pairs(len(sources), ids)
            return lambda rank, options: self._workers[rank].execute_local_transfer(
                source, destination, sources, ids, options
            )

        return self._start("local transfer", destination_blocks, options, prepare)

    def execute_remote_onboard(
        self,
        source: RemoteDescriptor,
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """Pulls on every rank: from the counterpart of the named layout, or each rank's own objects."""

        def prepare(ids: Ids) -> Begin:
            check_pairs(_num_items(source), ids)
            sources = self._on_each_rank(source)
            return lambda rank, options: self._workers[rank].execute_remote_onboard(
                sources[rank], destination, ids, options
            )

        return self._start("remote onboard", destination_blocks, options, prepare)

    def execute_remote_offload(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        destination: RemoteDescriptor,
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """Pushes on every rank: into the counterpart of the named layout, or into each rank's own objects."""
        if isinstance(destination, ObjectKeys):
            return self._offload_objects(source, source_blocks, destination, options)

        def prepare(ids: Ids) -> Begin:
            sources = as_ids(source_blocks)
            check_pairs(len(sources), ids)
            destinations = self._on_each_rank(destination)
            return lambda rank, options: self._workers[rank].execute_remote_offload(
                source, sources, destinations[rank], options
            )

        return self._start("remote offload", destination.blocks, options, prepare)

    def execute_remote_onboard_for_instance(
        self,
        instance_id: str,
        remote_tier: Tier,
        source_blocks: Iterable[int],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """Pulls on every rank its part of the blocks: from its counterpart, or from several remote ranks."""

        def prepare(ids: Ids) -> Begin:
            group = self._connections.group(instance_id)
            sources = as_ids(source_blocks)
            check_pairs(len(sources), ids)
            if not len(ids):
                return self._nothing
            pull = GroupPull(
                instance_id=instance_id,
                remote_tier=remote_tier,
                source_blocks=sources,
                destination=destination,
                destination_blocks=ids,
            )
            plans = group.plan(pull)
            return lambda rank, options: self._workers[rank].execute_remote_pull(plans[rank], options)

        return self._start(f"onboard from group {instance_id}", destination_blocks, options, prepare)

    async def has_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> PresenceReport:
        """Returns rank 0's answer for each key, with every rank's beside it."""
        calls = [partial(worker.has_blocks, layout, tuple(keys), timeout_s) for worker in self._workers]
        answers = await ask_for_keys("has_blocks", calls, timeout_s)
        report = join_presences(len(keys), answers)
        if report.disagreements:
            _log.warning("ranks disagree on %d of %d keys in %s", len(report.disagreements), len(keys), layout)
        return report

    async def put_blocks(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        keys: Sequence[bytes],
        lock_validity_s: float | None = None,
        timeout_s: float = 60.0,
    ) -> KeyReport:
        """Stores each rank's part of each block or, where each rank holds everything, divides the keys among ranks."""
        sources = as_ids(source_blocks)
        check_lengths("source blocks", len(sources), "keys", len(keys))
        check_keys(keys)
        shares = divide(len(keys), self.worker_count, self._group.local.mode)
        calls = [
            partial(worker.put_blocks, source, sources[_places(share)], _of(keys, share), lock_validity_s, timeout_s)
            for worker, share in zip(self._workers, shares, strict=True)
        ]
        return join_keys(len(keys), shares, await ask_for_keys("put_blocks", calls, timeout_s))

    async def get_blocks(
        self,
        keys: Sequence[bytes],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        timeout_s: float = 60.0,
    ) -> KeyReport:
        """Loads on every rank its part of each block."""
        ids = as_ids(destination_blocks)
        check_pairs(len(keys), ids)
        calls = [partial(worker.get_blocks, tuple(keys), destination, ids, timeout_s) for worker in self._workers]
        shares = [range(len(keys))] * self.worker_count
        return join_keys(len(keys), shares, await ask_for_keys("get_blocks", calls, timeout_s))

    async def remove_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> KeyReport:
        """Removes each rank's objects or, where all ranks share them, divides the keys among ranks."""
        shares = divide(len(keys), self.worker_count, self._group.local.mode)
        calls = [
            partial(worker.remove_blocks, layout, _of(keys, share), timeout_s)
            for worker, share in zip(self._workers, shares, strict=True)
        ]
        return join_keys(len(keys), shares, await ask_for_keys("remove_blocks", calls, timeout_s))

    async def close(self) -> None:
        """Gives up what is under way; the workers stay as they are."""
        await self._connections.close()
        await self._fan_out.close()

    def _start(
        self,
        what: str,
        destination_blocks: Iterable[int],
        options: TransferOptions,
        prepare: Callable[[Ids], Begin],
        shares: Sequence[range] | None = None,
    ) -> Notification:
        """Starts a transfer on all ranks once `prepare` has checked it.

        Args:
            what: names the transfer in errors.
            destination_blocks: what is written; zeros for objects.
            options: for all ranks.
            prepare: checks, and returns what starts one rank.
            shares: places of the pairs that each rank is asked for; None: all.
        """
        ranks = range(self.worker_count)
        asked = [Asked(rank=rank, destination_blocks=as_ids(())) for rank in ranks]
        try:
            ids = as_ids(destination_blocks)
            asked = [Asked(rank=rank, destination_blocks=ids) for rank in ranks]
            begin = prepare(ids)
            own_options = [self._group.options_on(rank, options) for rank in ranks]
        except AyniError as error:
            return self._fan_out.refuse(what, asked, error)
        if shares is not None:
            places = [_places(share) for share in shares]
            asked = [Asked(rank=r, destination_blocks=ids[places[r]], places=places[r]) for r in ranks]
        calls = [RankCall(asked=one, start=partial(begin, one.rank, own_options[one.rank])) for one in asked]
        with group_call():
            return self._fan_out.start(what, calls, options)

    def _offload_objects(
        self, source: LocalLayout, source_blocks: Iterable[int], objects: ObjectKeys, options: TransferOptions
    ) -> Notification:
        """Stores objects; where each rank holds everything, each stores a share."""
        shares = divide(len(objects.keys), self.worker_count, self._group.local.mode)

        def prepare(ids: Ids) -> Begin:
            sources = as_ids(source_blocks)
            check_lengths("source blocks", len(sources), "keys", len(ids))
            check_keys(objects.keys)
            return lambda rank, options: self._workers[rank].execute_remote_offload(
                source, sources[_places(shares[rank])], ObjectKeys(keys=_of(objects.keys, shares[rank])), options
            )

        return self._start("remote offload", [0] * len(objects.keys), options, prepare, shares)

    def _on_each_rank(self, descriptor: RemoteDescriptor) -> list[RemoteDescriptor]:
        """Returns what each rank reads or writes where a caller named one remote layout."""
        if isinstance(descriptor, ObjectKeys) or self.worker_count == 1:
            return [descriptor] * self.worker_count
        handles = self._group.imported(descriptor.layout) or self._connections.counterparts(descriptor.layout)
        if handles is None:
            message = (
                f"no connected or imported group has layout {descriptor.layout}; call connect_remote or "
                "import_metadata first"
            )
            raise UnknownPeer(message, instance_id="", rank="")
        return [RemoteBlocks(layout=handle, blocks=descriptor.blocks) for handle in handles]

    def _nothing(self, rank: int, options: TransferOptions) -> Notification:
        """Ends a transfer of no blocks without asking anybody."""
        return self._events.completed(TransferResult(outcomes=(TransferOutcome(rank=rank, num_done=0),)))

    async def _known(self) -> LocalGroup:
        await self.export_metadata()
        return self._group.local


def _places(share: range) -> Ids:
    return as_ids(share)


def _of(keys: Sequence[bytes], share: range) -> tuple[bytes, ...]:
    return tuple(keys[place] for place in share)


def _num_items(descriptor: RemoteDescriptor) -> int:
    return len(descriptor.keys) if isinstance(descriptor, ObjectKeys) else len(descriptor.blocks)
