"""The layouts and peers of an `ArrayWorker`.

Whatever is named here without an underscore is for the worker itself.
"""

import asyncio
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import (
    AxisOrder,
    LayoutConfig,
    LayoutDescriptor,
    LayoutHandle,
    LayoutKind,
    LocalLayout,
    StorageKind,
    Tier,
    fingerprint,
)
from ayni.blocks.metadata import (
    Configured,
    EngineExport,
    GroupConfig,
    Imported,
    RemoteLayout,
    RemoteState,
    WorkerMetadata,
)
from ayni.blocks.transfers import TransferOptions
from ayni.errors import (
    BadRequest,
    IncompatibleLayout,
    PeerLost,
    StaleEpoch,
    UnknownBlock,
    UnknownLayout,
    UnknownPeer,
    Unsupported,
)

Array = np.ndarray


@dataclass(kw_only=True)
class World:
    """What the workers of a test share."""

    workers: dict[int, Any] = field(default_factory=dict)
    """By owner id."""
    objects: dict[tuple[str, int, bytes], bytes] = field(default_factory=dict)
    """By fingerprint, rank and key."""


class ArrayLayouts:
    """What a worker has and whom it knows."""

    worker_count = 1

    def __init__(self, world: World, shape: LayoutConfig) -> None:
        self.world = world
        self.shape = shape
        self.go = asyncio.Event()
        self.go.set()
        self.calls: list[str] = []
        self.options: TransferOptions | None = None
        """Of the last transfer."""
        self.config = GroupConfig(epoch=0, instance_id=str(uuid.uuid4()), rank=0, world_size=1)
        self.owner_id = uuid.uuid4().int & (1 << 64) - 1
        self.arrays = {LocalLayout(tier=Tier.DEVICE): self._array(shape.num_blocks)}
        self._numbers = {LocalLayout(tier=Tier.DEVICE): 0}
        self._groups: dict[str, tuple[WorkerMetadata, ...]] = {}
        self._imported: dict[int, WorkerMetadata] = {}
        world.workers[self.owner_id] = self

    async def configure_layouts(self, config: GroupConfig) -> Configured:
        self.calls.append("configure_layouts")
        if config.epoch < self.config.epoch:
            raise StaleEpoch("an older epoch", epoch=config.epoch, current_epoch=self.config.epoch)
        if config.epoch == self.config.epoch and config.epoch and config != self.config:
            raise IncompatibleLayout("other values", field="epoch", source="", destination="")
        if config != self.config:
            self.config = config
            for request in config.layouts:
                place = LocalLayout(tier=request.tier, resource_id=request.resource_id)
                self.arrays[place] = self._array(request.num_blocks)
                self._numbers[place] = 1 + max(self._numbers.values())
        return Configured(metadata=await self.export_metadata())

    async def export_metadata(self) -> tuple[WorkerMetadata, ...]:
        self.calls.append("export_metadata")
        data = self.owner_id.to_bytes(8, "little")
        return (
            WorkerMetadata(
                instance_id=self.config.instance_id,
                epoch=self.config.epoch,
                rank=self.config.rank,
                owner_id=self.owner_id,
                incarnation=1,
                address="",
                layouts=tuple(self.descriptor(place) for place in sorted(self.arrays, key=_place_order)),
                engines=(EngineExport(name="array", version=1, data=data, crc32=zlib.crc32(data)),),
                mode=self.config.mode,
            ),
        )

    async def import_metadata(self, metadata: Sequence[WorkerMetadata]) -> tuple[Imported, ...]:
        self.calls.append("import_metadata")
        (one,) = metadata
        self._check_reachable(one)
        self._imported[one.owner_id] = one
        return (Imported(layouts=tuple(layout.handle for layout in one.layouts), engine="array"),)

    async def connect_remote(
        self, instance_id: str, metadata: Sequence[WorkerMetadata], engines: Sequence[str] = ()
    ) -> tuple[RemoteLayout, ...]:
        self.calls.append("connect_remote")
        if engines and "array" not in engines:
            raise Unsupported("only arrays", field="engines", detail="")
        known = self._groups.get(instance_id)
        if known and known[0].epoch > metadata[0].epoch:
            raise StaleEpoch("an older epoch", epoch=metadata[0].epoch, current_epoch=known[0].epoch)
        for one in metadata:
            self._check_reachable(one)
        self._groups[instance_id] = tuple(sorted(metadata, key=lambda one: one.rank))
        return self._remote_layouts(instance_id)

    async def disconnect_remote(self, instance_id: str) -> bool:
        self.calls.append("disconnect_remote")
        return self._groups.pop(instance_id, None) is not None

    async def has_remote_metadata(self, instance_id: str) -> RemoteState:
        self.calls.append("has_remote_metadata")
        known = self._groups.get(instance_id)
        if not known:
            return RemoteState(connected=False)
        return RemoteState(connected=True, remote_epoch=known[0].epoch, layouts=self._remote_layouts(instance_id))

    def _array(self, num_blocks: int) -> Array:
        return np.zeros((num_blocks, self.shape.block_bytes), np.uint8)

    def array_at(self, place: LocalLayout) -> Array:
        if place.tier is Tier.OBJECT:
            raise BadRequest("the object tier has no layouts", field="tier")
        if place not in self.arrays:
            raise UnknownLayout(f"no {place}", layout=place)
        return self.arrays[place]

    def writable(self, place: LocalLayout, ids: Ids, count: int) -> Array:
        array = self.array_at(place)
        check_range(array, ids)
        check_lengths(ids, range(count))
        if len(set(ids.tolist())) != len(ids):
            raise BadRequest("a destination block comes twice", field="destination_blocks")
        return array

    def named(self, handle: LayoutHandle) -> tuple[Any, LocalLayout]:
        groups = (one for group in self._groups.values() for one in group)
        for one in (*self._imported.values(), *groups):
            for layout in one.layouts:
                if layout.handle == handle:
                    return self.world.workers[one.owner_id], layout.place
        raise UnknownPeer(f"no {handle}", instance_id="", rank="")

    def descriptor(self, place: LocalLayout) -> LayoutDescriptor:
        return LayoutDescriptor(
            handle=LayoutHandle(owner_id=self.owner_id, number=self._numbers[place]),
            tier=place.tier,
            resource_id=place.resource_id,
            config=replace(self.shape, num_blocks=len(self.arrays[place])),
            kind=LayoutKind.FULLY_CONTIGUOUS,
            axis_order=AxisOrder.NHD,
            storage=StorageKind.SYSTEM,
            fingerprint=fingerprint(self.shape, AxisOrder.NHD, "arrays"),
        )

    def _check_reachable(self, one: WorkerMetadata) -> None:
        if not any(export.name == "array" for export in one.engines):
            raise Unsupported("no engine in common", field="engines", detail="")
        if one.owner_id not in self.world.workers:
            raise PeerLost("not there", peer=one.rank, detail="")

    def _remote_layouts(self, instance_id: str) -> tuple[RemoteLayout, ...]:
        return tuple(
            RemoteLayout(
                remote_rank=one.rank,
                resource_id=layout.resource_id,
                tier=layout.tier,
                layout=layout.handle,
                engine="array",
            )
            for one in self._groups[instance_id]
            for layout in one.layouts
        )


def _place_order(place: LocalLayout) -> tuple[int, int]:
    return place.resource_id, list(Tier).index(place.tier)


def check_range(array: Array, ids: Ids) -> None:
    for block in ids.tolist():
        if block >= len(array):
            raise UnknownBlock(f"block {block} of {len(array)}", block=block, num_blocks=len(array))


def check_lengths(ids: Ids, others: Sequence[object] | Ids) -> None:
    if len(ids) != len(others):
        raise BadRequest(f"{len(ids)} and {len(others)}", field="destination_blocks")
