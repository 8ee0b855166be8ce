"""The block half of one worker: its layouts, its peers, and everything that a leader may ask of it.  [shell]

Belongs to one event loop. Refusals of a transfer are outcomes, refusals of other calls are raised.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.layouts import LayoutHandle, LocalLayout, Tier
from ayni.blocks.metadata import Configured, GroupConfig, Imported, RemoteLayout, RemoteState, WorkerMetadata
from ayni.blocks.notifications import TransferCompleteNotification
from ayni.blocks.objects import KeyOutcome, KeyReport, PresenceReport
from ayni.blocks.transfers import (
    DEFAULT_OPTIONS,
    ObjectKeys,
    PullPlan,
    RemoteDescriptor,
    TransferOptions,
)
from ayni.errors import AyniError, BadRequest
from worker_agent.blocks import object_half
from worker_agent.blocks.configuring import Configuring
from worker_agent.blocks.engine import Engine
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.holds import Holds
from worker_agent.blocks.lending import Lending
from worker_agent.blocks.local_tickets import Copier
from worker_agent.blocks.memory import WHOLE, Bytes, Memory
from worker_agent.blocks.moves import Moves
from worker_agent.blocks.object_half import ObjectHalf
from worker_agent.blocks.object_jobs import ObjectJobs, check_load, check_store
from worker_agent.blocks.peers import Peers
from worker_agent.blocks.running import Job, Traffic, Transfers
from worker_agent.blocks_config import BlocksConfig

_log = logging.getLogger(__name__)


class LocalBlockWorker:
    """A worker's block half, in its own process; see `ayni.blocks.worker.RankWorker`."""

    worker_count = 1

    def __init__(self, *, engines: Sequence[Engine], config: BlocksConfig, model: str = "") -> None:
        """Starts without layouts, as a group of its own. Call it on the running loop.

        Args:
            engines: ways to reach others and to be reached, best first.
            config: tiers and times.
            model: name of the model whose blocks these are.
        """
        self.bound = ""
        """Where the worker's service listens."""
        self.address = ""
        """Where the worker's service can be dialled; part of its metadata."""
        self.incarnation = secrets.randbits(64)
        self.config = config
        self._engines = tuple(engines)
        self._holds = Holds()
        self._objects = ObjectHalf(config.root)
        self.copier = Copier(config.copy_threads)
        self._transfers = Transfers()
        self._configuring = Configuring(config, self._holds, self._engines, model)
        self._registry = self._configuring.registry
        self._peers = Peers(self._engines)
        self._moves = Moves(self._registry, self._holds, self._peers, self.copier)
        self._object_jobs = ObjectJobs(self._registry, self._holds, self._objects)
        self.lending = Lending(self._registry, self._holds, self.incarnation)
        """What peers may do with this worker's blocks."""

    @property
    def instance_id(self) -> str:
        """UUID of the worker's group."""
        return self._configuring.group.instance_id

    @property
    def has_object_store(self) -> bool:
        """Whether a store of objects is configured."""
        return self._objects.is_open

    @property
    def layout_bytes(self) -> int:
        """Bytes of all layouts."""
        return sum(entry.descriptor.config.total_bytes for entry in self._registry.entries())

    @property
    def traffic(self) -> Mapping[str, Traffic]:
        """What transfers moved so far, by route: the one that they were given, else the two layouts."""
        return self._transfers.traffic

    def register(self, place: LocalLayout, memory: Memory, device_ordinal: int = 0) -> LayoutHandle:
        """Makes memory that is there already a layout; see `tensors.register_tensors`.

        Raises:
            BadRequest: there is a layout in this place.
        """
        return self._configuring.register(place, memory, device_ordinal).handle

    async def allocate(self, place: LocalLayout, geometry: Geometry) -> LayoutHandle:
        """Makes a layout, zeroed; one on disk is recovered if it is there.

        Raises:
            TooLarge, StorageFailed: there is not enough memory or disk.
        """
        return (await self._configuring.allocate(place, geometry)).handle

    async def release(self, place: LocalLayout, timeout_s: float = 60.0) -> None:
        """Gives a layout's memory back once no transfer uses it.

        Raises:
            Deadline: transfers used it for all of the time.
        """
        await self._configuring.release(place, timeout_s)

    async def read(self, place: LocalLayout, blocks: Ids, timeout_s: float = 60.0) -> Bytes:
        """Returns copies of whole blocks, shape [N, block bytes], once nobody writes them."""
        entry = self._registry.at(place)
        release = await self._holds.taken(timeout_s, reads=[(entry, blocks)])
        try:
            out = np.empty((len(blocks), entry.descriptor.config.block_bytes), np.uint8)
            await asyncio.to_thread(entry.memory.read, blocks, WHOLE, out)
            return out
        finally:
            release()

    async def write(self, place: LocalLayout, blocks: Ids, data: Bytes, timeout_s: float = 60.0) -> None:
        """Overwrites whole blocks with rows of `data`, shape [N, block bytes], once nobody uses them."""
        entry = self._registry.at(place)
        release = await self._holds.taken(timeout_s, writes=[(entry, blocks)])
        try:
            await asyncio.to_thread(entry.memory.write, blocks, WHOLE, data)
        finally:
            release()

    async def configure_layouts(self, config: GroupConfig) -> Configured:
        """Creates lower tiers and names the worker's place in its group; see ConfigureLayouts."""
        recovered = await self._configuring.configure(config, self._objects)
        self._moves.rank = self._object_jobs.rank = config.rank
        return Configured(metadata=await self.export_metadata(), disk_recovered=recovered)

    async def export_metadata(self) -> tuple[WorkerMetadata, ...]:
        """Returns what others need to reach this worker."""
        group = self._configuring.group
        exports = [engine.export() for engine in self._engines]
        return (
            WorkerMetadata(
                instance_id=group.instance_id,
                epoch=group.epoch,
                rank=group.rank,
                owner_id=self._registry.owner_id,
                incarnation=self.incarnation,
                address=self.address,
                layouts=tuple(entry.descriptor for entry in self._registry.entries()),
                engines=tuple(export for export in exports if export),
                mode=group.mode,
            ),
        )

    async def import_metadata(self, metadata: Sequence[WorkerMetadata]) -> tuple[Imported, ...]:
        """Makes one remote worker's layouts usable as handles."""
        if len(metadata) != 1:
            raise BadRequest(f"a single worker imports one worker's metadata; got {len(metadata)}", field="metadata")
        peer = await self._peers.import_one(metadata[0], self._connect_deadline())
        return (Imported(layouts=tuple(layout.handle for layout in metadata[0].layouts), engine=peer.engine),)

    async def connect_remote(
        self, instance_id: str, metadata: Sequence[WorkerMetadata], engines: Sequence[str] = ()
    ) -> tuple[RemoteLayout, ...]:
        """Connects to ranks of a remote group; see BlockWorker."""
        return await self._peers.connect(instance_id, metadata, engines, self._connect_deadline())

    async def disconnect_remote(self, instance_id: str) -> bool:
        """Forgets a remote group; see BlockWorker."""
        return await self._peers.disconnect(instance_id)

    async def has_remote_metadata(self, instance_id: str) -> RemoteState:
        """Says whether a remote group is connected."""
        return self._peers.state(instance_id)

    def execute_local_transfer(
        self,
        source: LocalLayout,
        destination: LocalLayout,
        source_blocks: Iterable[int],
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> TransferCompleteNotification:
        """Copies blocks between two layouts."""
        what = f"copy from the {source} to the {destination}"
        return self._start(
            what,
            destination_blocks,
            lambda blocks: self._moves.local((source, destination), as_ids(source_blocks), blocks, options),
            options,
        )

    def execute_remote_onboard(
        self,
        source: RemoteDescriptor,
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> TransferCompleteNotification:
        """Pulls blocks of an imported layout, or stored objects."""

        def make(blocks: Ids) -> Job:
            if isinstance(source, ObjectKeys):
                return self._object_jobs.load(source, destination, blocks, options)
            return self._moves.onboard(source, destination, blocks, options)

        return self._start(f"onboard into the {destination}", destination_blocks, make, options)

    def execute_remote_offload(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        destination: RemoteDescriptor,
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> TransferCompleteNotification:
        """Pushes blocks into an imported layout, or into stored objects."""
        to_objects = isinstance(destination, ObjectKeys)
        blocks = np.zeros(len(destination.keys), np.int64) if to_objects else destination.blocks  # type: ignore[union-attr]

        def make(_: Ids) -> Job:
            if isinstance(destination, ObjectKeys):
                return self._object_jobs.store(source, as_ids(source_blocks), destination, options)
            return self._moves.offload(source, as_ids(source_blocks), destination, options)

        return self._start(f"offload from the {source}", blocks, make, options)

    def execute_remote_onboard_for_instance(
        self,
        instance_id: str,
        remote_tier: Tier,
        source_blocks: Iterable[int],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> TransferCompleteNotification:
        """Pulls whole blocks from the rank of a connected group that has this worker's rank."""

        def make(blocks: Ids) -> Job:
            plan = PullPlan(
                instance_id=instance_id,
                remote_tier=remote_tier,
                source_blocks=as_ids(source_blocks),
                destination=destination,
                destination_blocks=blocks,
                shards=(),
            )
            return self._moves.pull(plan, options)

        return self._start(f"onboard into the {destination}", destination_blocks, make, options)

    def execute_remote_pull(
        self, plan: PullPlan, options: TransferOptions = DEFAULT_OPTIONS
    ) -> TransferCompleteNotification:
        """Pulls parts of blocks from several ranks of a connected group."""
        what = f"pull into the {plan.destination}"
        return self._start(what, plan.destination_blocks, lambda _: self._moves.pull(plan, options), options)

    async def has_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> PresenceReport:
        """Says for each key whether the object tier holds it."""
        tier = self._objects.tier(self._registry.at(layout))
        deadline = asyncio.get_running_loop().time() + timeout_s
        presences = tuple(await tier.has(keys, deadline) if tier else object_half.unknown(len(keys)))
        return PresenceReport(presences=presences, by_rank=(presences,))

    async def put_blocks(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        keys: Sequence[bytes],
        lock_validity_s: float | None = None,
        timeout_s: float = 60.0,
    ) -> KeyReport:
        """Stores blocks as objects."""
        entry, blocks = self._registry.at(source), as_ids(source_blocks)
        check_store(entry, keys, blocks)
        tier = self._objects.tier(entry)
        if tier is None:
            return _report(object_half.failed(len(keys)))
        release = self._holds.take(reads=[(entry, blocks)])
        deadline = asyncio.get_running_loop().time() + timeout_s
        batch = tier.put(entry.memory, blocks, keys, lock_validity_s, deadline)
        batch.quiesced.add_done_callback(lambda _: release())
        return _report(await batch)

    async def get_blocks(
        self,
        keys: Sequence[bytes],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        timeout_s: float = 60.0,
    ) -> KeyReport:
        """Loads objects into blocks."""
        entry, blocks = self._registry.at(destination), as_ids(destination_blocks)
        check_load(entry, keys, blocks)
        tier = self._objects.tier(entry)
        if tier is None:
            return _report(object_half.failed(len(keys)))
        release = self._holds.take(writes=[(entry, blocks)])
        deadline = asyncio.get_running_loop().time() + timeout_s
        batch = tier.get(keys, entry.memory, blocks, deadline)
        batch.quiesced.add_done_callback(lambda _: release())
        return _report(await batch)

    async def remove_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> KeyReport:
        """Removes stored objects."""
        tier = self._objects.tier(self._registry.at(layout))
        deadline = asyncio.get_running_loop().time() + timeout_s
        return _report(await tier.remove(keys, deadline) if tier else object_half.failed(len(keys)))

    def lend(self, handle: LayoutHandle, incarnation: int, ids: Ids, write: bool) -> AbstractContextManager[Memory]:
        """Holds blocks for a peer's stream; see `streams.Lender`."""
        return self.lending.lend(handle, incarnation, ids, write)

    def notify(self, number: int) -> None:
        """Tells whoever listens that a peer's write has ended."""
        self.lending.notify(number)

    async def close(self) -> None:
        """Ends connections and transfers, gives all memory back."""
        await self._peers.close()
        await self._transfers.drain()
        for engine in self._engines:
            await engine.close()
        await self._configuring.close()
        await self._objects.close()
        self.copier.close()

    def _start(
        self, what: str, blocks: Iterable[int], make: Callable[[Ids], Job], options: TransferOptions
    ) -> TransferCompleteNotification:
        ids = np.zeros(0, np.int64)
        try:
            ids = as_ids(blocks)
            job = make(ids)
        except AyniError as error:
            return self._transfers.refuse(what, self._moves.rank, ids, error)
        return self._transfers.start(job, options)

    def _connect_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.config.connect_timeout.total_seconds()


def _report(outcomes: Sequence[KeyOutcome]) -> KeyReport:
    return KeyReport(outcomes=tuple(outcomes), by_rank=(tuple(outcomes),))
