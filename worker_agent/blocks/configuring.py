"""A worker's layouts and its place in a group: made, replaced and given back.  [shell]

What an operator made stays as it is; what a leader asked for is replaced when a newer epoch asks for something else.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ayni.blocks.layouts import LocalLayout, Tier, fingerprint
from ayni.blocks.metadata import GroupConfig, LayoutRequest, ParallelismMode
from ayni.errors import BadRequest, IncompatibleLayout, StaleEpoch
from worker_agent.blocks.engine import Engine
from worker_agent.blocks.folders import folder_under
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.holds import Holds
from worker_agent.blocks.making import made
from worker_agent.blocks.memory import Memory
from worker_agent.blocks.object_half import ObjectHalf
from worker_agent.blocks.registry import Entry, Registry, owner_id_of
from worker_agent.blocks.slab import Fsync, SlabMemory
from worker_agent.blocks.tiers import DiskPlace, make_memory
from worker_agent.blocks_config import BlocksConfig

_log = logging.getLogger(__name__)

_REPLACE_S = 60.0
"""Longest wait for transfers with a layout that is to be replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The worker's place in its group."""

    instance_id: str
    epoch: int = 0
    rank: int = 0
    mode: ParallelismMode | None = None


class Configuring:
    """Owns the registry and the memory behind it."""

    def __init__(self, config: BlocksConfig, holds: Holds, engines: Sequence[Engine], model: str) -> None:
        """Starts as a group of one, without layouts."""
        self.group = Place(instance_id=str(uuid.uuid4()))
        self.registry = Registry(owner_id_of(self.group.instance_id, 0), model)
        self._config, self._holds, self._engines, self._model = config, holds, tuple(engines), model
        self._applied: GroupConfig | None = None
        self._asked: set[LocalLayout] = set()
        self._owned: set[LocalLayout] = set()
        self._lock = asyncio.Lock()

    def register(self, place: LocalLayout, memory: Memory, device_ordinal: int = 0) -> Entry:
        """Makes memory a layout and lends it to peers."""
        entry = self.registry.add(place, memory, device_ordinal)
        self._holds.add(entry)
        self._lend(entry)
        return entry

    async def allocate(self, place: LocalLayout, geometry: Geometry, folder: str = "") -> Entry:
        """Makes memory and a layout of it."""
        disk = DiskPlace(
            root=self._config.root,
            folder=folder,
            fsync=Fsync(self._config.disk_sync),
            instance_id=self.group.instance_id if folder else "",
            rank=self.group.rank,
            fingerprint=fingerprint(geometry.config, geometry.axis_order, self._model),
        )
        memory = await made(make_memory, place, geometry, disk)
        try:
            entry = self.register(place, memory)
        except BaseException:
            memory.close()
            raise
        self._owned.add(place)
        return entry

    async def release(self, place: LocalLayout, timeout_s: float) -> None:
        """Gives a layout back once no transfer uses it."""
        entry = self.registry.at(place)
        await self._holds.idle(entry, timeout_s)
        self._holds.remove(entry)
        self.registry.remove(place)
        for engine in self._engines:
            engine.deregister(entry.handle)
        self._asked.discard(place)
        if place in self._owned:
            self._owned.discard(place)
            await asyncio.to_thread(entry.memory.close)

    async def configure(self, config: GroupConfig, objects: ObjectHalf) -> bool:
        """Takes a group's configuration; says whether all disk layouts held blocks already.

        After a failure the worker is in its old group and has none of the layouts that a leader asked for; the object
        store is the old one.

        Raises:
            StaleEpoch: a newer one is in force, of this group or of another.
            IncompatibleLayout: the same epoch was configured otherwise.
            UnknownLayout: a resource has no device layout whose shape could be taken.
            TooLarge, StorageFailed: there is not enough memory or disk, or the object store can't be reached.
        """
        async with self._lock:
            self._check(config)
            if config != self._applied:
                async with objects.opened(config.object_store) as store:
                    await self._apply(config)
                    objects.adopt(store, config)
            slabs = [entry.memory for entry in self.registry.entries() if isinstance(entry.memory, SlabMemory)]
            return bool(slabs) and all(slab.recovered for slab in slabs)

    async def close(self) -> None:
        """Gives all memory back that was made here."""
        for entry in self.registry.entries():
            if entry.place in self._owned:
                await asyncio.to_thread(entry.memory.close)
        self._owned.clear()

    def _check(self, config: GroupConfig) -> None:
        known = self._applied
        if not 0 <= config.rank < config.world_size:
            raise BadRequest(f"rank {config.rank} is not one of {config.world_size}", field="rank")
        if known is None:
            return
        if known.instance_id != config.instance_id:
            self._check_takeover(known, config)
            return
        if config.epoch < known.epoch:
            raise StaleEpoch(
                f"epoch {config.epoch} of group {config.instance_id} is over; this worker is in epoch {known.epoch}",
                epoch=config.epoch,
                current_epoch=known.epoch,
            )
        if config.epoch == known.epoch and config.epoch and config != known:
            raise IncompatibleLayout(
                f"epoch {config.epoch} was configured otherwise on this worker; use a newer epoch",
                field="epoch",
                source=known,
                destination=config,
            )

    def _check_takeover(self, known: GroupConfig, config: GroupConfig) -> None:
        """Refuses another group in an epoch that would not shut the present group's leader out."""
        if 0 < config.epoch <= known.epoch:
            raise StaleEpoch(
                f"this worker is in epoch {known.epoch} of group {known.instance_id}; "
                f"group {config.instance_id} can take it over in an epoch above {known.epoch}",
                epoch=config.epoch,
                current_epoch=known.epoch,
            )

    async def _apply(self, config: GroupConfig) -> None:
        geometries = {request: self._geometry(request) for request in config.layouts}
        folder = config.disk_folder or config.instance_id
        folder_under(self._config.root, folder)
        for place in list(self._asked):
            await self.release(place, _REPLACE_S)
        self._applied, before = None, self.group
        self._take_place(Place(instance_id=config.instance_id, epoch=config.epoch, rank=config.rank, mode=config.mode))
        try:
            for request, geometry in geometries.items():
                place = LocalLayout(tier=request.tier, resource_id=request.resource_id)
                await self.allocate(place, geometry, folder)
                self._asked.add(place)
        except BaseException:
            for place in list(self._asked):
                await self.release(place, _REPLACE_S)
            self._take_place(before)
            raise
        self._applied = config
        _log.info(
            "rank %d of %d of group %s, epoch %d: %s",
            config.rank,
            config.world_size,
            config.instance_id,
            config.epoch,
            ", ".join(str(entry.place) for entry in self.registry.entries()) or "no layouts",
        )

    def _take_place(self, place: Place) -> None:
        """Gives the worker its place in a group, and all layouts the handles that go with it."""
        self._unlend()
        self.group = place
        self.registry.rename(owner_id_of(place.instance_id, place.rank))
        for entry in self.registry.entries():
            self._lend(entry)

    def _geometry(self, request: LayoutRequest) -> Geometry:
        """Returns the shape of a lower tier: that of the resource's device layout, with as many blocks as asked."""
        if request.tier not in (Tier.HOST, Tier.DISK):
            raise BadRequest(f"a leader can ask for host and disk layouts, not for {request.tier.value}", field="tier")
        device = self.registry.at(LocalLayout(tier=Tier.DEVICE, resource_id=request.resource_id)).memory.geometry
        return Geometry(
            config=replace(device.config, num_blocks=request.num_blocks),
            kind=request.kind,
            axis_order=request.axis_order or device.axis_order,
        )

    def _lend(self, entry: Entry) -> None:
        for engine in self._engines:
            engine.register(entry.handle, entry.memory)

    def _unlend(self) -> None:
        for entry in self.registry.entries():
            for engine in self._engines:
                engine.deregister(entry.handle)
