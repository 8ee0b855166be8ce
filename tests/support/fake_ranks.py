"""Ranks that really move bytes, in numpy arrays of this process, and that can be told to fail, wait and hang.

Arrays of a layout have the shape [B, L, O, T, H, D] of two-byte elements. Every element of a rank's layout says which
rank of which group it came from, and where: rank, block, layer, outer part and head are all in it.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ayni.blocks.calls import call_id
from ayni.blocks.ids import Ids, as_ids
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
    ParallelismDescriptor,
    ParallelismMode,
    RemoteLayout,
    RemoteState,
)
from ayni.blocks.metadata import WorkerMetadata as Metadata
from ayni.blocks.notifications import EventManager
from ayni.blocks.objects import KeyOutcome, KeyReport, OutcomeState, Presence, PresenceReport, PresenceState
from ayni.blocks.slices import block_extents, translate
from ayni.blocks.transfers import (
    DEFAULT_OPTIONS,
    BlockFailure,
    Failure,
    ObjectKeys,
    PullPlan,
    PullShard,
    RemoteBlocks,
    TransferOptions,
    TransferOutcome,
    TransferResult,
    refused,
)
from ayni.errors import AyniError, Cancelled, Fault, StaleEpoch, UnknownLayout, UnknownPeer

INSTANCE = "0b5a3c8e-1111-4222-8333-444455556666"
HOST = LocalLayout(tier=Tier.HOST)
DEVICE = LocalLayout(tier=Tier.DEVICE)


def config_of(num_heads: int = 8, num_blocks: int = 16, **changes: Any) -> LayoutConfig:
    """Returns a small shape: 2 layers, 2 outer parts, pages of 2 tokens, heads of 4 elements of 2 bytes."""
    shape: dict[str, Any] = {"num_layers": 2, "outer_dim": 2, "page_size": 2, "inner_dim": num_heads * 4}
    return LayoutConfig(**(shape | {"num_heads": num_heads, "num_blocks": num_blocks} | changes))


def descriptor_of(
    config: LayoutConfig,
    tier: Tier = Tier.HOST,
    order: AxisOrder = AxisOrder.NHD,
    handle: LayoutHandle | None = None,
    resource_id: int = 0,
) -> LayoutDescriptor:
    return LayoutDescriptor(
        handle=handle or LayoutHandle(owner_id=0, number=0),
        tier=tier,
        resource_id=resource_id,
        config=config,
        kind=LayoutKind.FULLY_CONTIGUOUS,
        axis_order=order,
        storage=StorageKind.SYSTEM,
        fingerprint=fingerprint(config, order, "tiny"),
    )


def blob(rank: int = 0, **changes: Any) -> Metadata:
    """Returns what an unstamped worker exports, with device and host layouts of 2 heads."""
    layouts = tuple(
        descriptor_of(config_of(2), tier, handle=LayoutHandle(owner_id=rank, number=number))
        for number, tier in enumerate((Tier.DEVICE, Tier.HOST))
    )
    export = EngineExport(name="shm", version=1, data=bytes([rank]), crc32=rank)
    values: dict[str, Any] = {"instance_id": INSTANCE, "epoch": 3, "rank": 0, "owner_id": rank, "incarnation": 9}
    values |= {"address": f"127.0.0.1:{5000 + rank}", "layouts": layouts, "engines": (export,)}
    return Metadata(**(values | changes))


@dataclass
class Fabric:
    """All ranks that can reach one another, and the objects that they share."""

    ranks: dict[int, "FakeRank"] = field(default_factory=dict)
    objects: dict[tuple[int, bytes], np.ndarray] = field(default_factory=dict)


class FakeRank:
    """A worker in this process."""

    worker_count = 1

    def __init__(
        self,
        fabric: Fabric,
        rank: int,
        instance_id: str,
        config: LayoutConfig,
        tiers: Sequence[Tier] = (Tier.DEVICE, Tier.HOST),
        mode: ParallelismMode | None = None,
        epoch: int = 1,
        order: AxisOrder = AxisOrder.NHD,
    ) -> None:
        self.fabric = fabric
        self.owner_id = zlib.crc32(f"{instance_id}/{rank}".encode())
        fabric.ranks[self.owner_id] = self
        places = [LocalLayout(tier=tier) for tier in tiers]
        self.arrays = {place: _values(config, zlib.crc32(f"{self.owner_id}/{place}".encode())) for place in places}
        self.metadata = Metadata(
            instance_id=instance_id,
            epoch=epoch,
            rank=rank,
            owner_id=self.owner_id,
            incarnation=self.owner_id + 1,
            address="",
            layouts=tuple(
                descriptor_of(config, tier, order, LayoutHandle(owner_id=self.owner_id, number=number))
                for number, tier in enumerate(tiers)
            ),
            mode=mode,
        )
        self.object_rank = rank
        self.remotes: dict[str, dict[int, Metadata]] = {}
        self.imported: list[Metadata] = []
        self.calls: list[tuple[str, Any]] = []
        """What was asked for, in order."""
        self.call_ids: list[str] = []
        self.raises: dict[str, Exception] = {}
        """By method: what it raises."""
        self.key_errors: dict[bytes, AyniError] = {}
        """By key: why it can't be stored or loaded."""
        self.fails: dict[int, AyniError] = {}
        """By place in a transfer's lists: why that block fails."""
        self.gate: asyncio.Event | None = None
        """Transfers, connects and puts wait for it."""
        self.arrived = asyncio.Event()
        """Set when a transfer has begun."""
        self.connecting = asyncio.Event()
        """Set when a connect has begun."""
        self.result: TransferResult | None = None
        """What transfers end with, in place of the truth."""
        self.is_frozen = False
        """Does not react to being cancelled."""
        self.copying: Callable[[], None] = lambda: None
        """Called in the copying thread before a copy."""

    async def configure_layouts(self, config: GroupConfig) -> Configured:
        self._note("configure_layouts", config)
        self.metadata = replace(
            self.metadata, instance_id=config.instance_id, epoch=config.epoch, rank=config.rank, mode=config.mode
        )
        return Configured(metadata=(self.metadata,), disk_recovered=config.rank != 1)

    async def export_metadata(self) -> tuple[Metadata, ...]:
        self._note("export_metadata", None)
        return (self.metadata,)

    async def import_metadata(self, metadata: Sequence[Metadata]) -> tuple[Imported, ...]:
        self._note("import_metadata", tuple(metadata))
        self.imported += metadata
        return tuple(Imported(layouts=tuple(d.handle for d in m.layouts), engine="fake") for m in metadata)

    async def connect_remote(
        self, instance_id: str, metadata: Sequence[Metadata], engines: Sequence[str] = ()
    ) -> tuple[RemoteLayout, ...]:
        self._note("connect_remote", tuple(metadata))
        self.connecting.set()
        if self.gate:
            await self.gate.wait()
        known = self.remotes.get(instance_id)
        if known and metadata[0].epoch < next(iter(known.values())).epoch:
            raise StaleEpoch("older", epoch=metadata[0].epoch, current_epoch=0)
        self.remotes[instance_id] = {one.rank: one for one in metadata}
        return tuple(
            RemoteLayout(remote_rank=one.rank, resource_id=0, tier=d.tier, layout=d.handle, engine="fake")
            for one in metadata
            for d in one.layouts
        )

    async def disconnect_remote(self, instance_id: str) -> bool:
        self._note("disconnect_remote", instance_id)
        return self.remotes.pop(instance_id, None) is not None

    async def has_remote_metadata(self, instance_id: str) -> RemoteState:
        self._note("has_remote_metadata", instance_id)
        known = self.remotes.get(instance_id)
        epoch = next(iter(known.values())).epoch if known else 0
        return RemoteState(connected=known is not None, remote_epoch=epoch)

    def execute_local_transfer(
        self,
        source: LocalLayout,
        destination: LocalLayout,
        source_blocks: Iterable[int],
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Any:
        self._note("execute_local_transfer", options)
        sources, ids = as_ids(source_blocks), as_ids(destination_blocks)

        def copy(i: int) -> None:
            self.array(destination)[ids[i]] = self.array(source)[sources[i]]

        return self._run(ids, copy, options)

    def execute_remote_onboard(
        self, source: Any, destination: LocalLayout, destination_blocks: Iterable[int], options: Any = DEFAULT_OPTIONS
    ) -> Any:
        self._note("execute_remote_onboard", source)
        ids = as_ids(destination_blocks)

        def copy(i: int) -> None:
            if isinstance(source, RemoteBlocks):
                self.array(destination)[ids[i]] = self._remote(source.layout)[source.blocks[i]]
            else:
                self.array(destination)[ids[i]] = self.fabric.objects[self.object_rank, source.keys[i]]

        return self._run(ids, copy, options)

    def execute_remote_offload(
        self, source: LocalLayout, source_blocks: Iterable[int], destination: Any, options: Any = DEFAULT_OPTIONS
    ) -> Any:
        self._note("execute_remote_offload", destination)
        sources = as_ids(source_blocks)
        is_objects = isinstance(destination, ObjectKeys)

        def copy(i: int) -> None:
            if is_objects:
                self.fabric.objects[self.object_rank, destination.keys[i]] = self.array(source)[sources[i]].copy()
            else:
                self._remote(destination.layout)[destination.blocks[i]] = self.array(source)[sources[i]]

        return self._run(as_ids([0] * len(sources)) if is_objects else destination.blocks, copy, options)

    def execute_remote_onboard_for_instance(self, *arguments: Any) -> Any:
        raise NotImplementedError("the group asks for planned pulls only")

    def execute_remote_pull(self, plan: PullPlan, options: TransferOptions = DEFAULT_OPTIONS) -> Any:
        self._note("execute_remote_pull", (plan, options))

        def copy(i: int) -> None:
            for shard in plan.shards:
                self._pull(plan, shard, i, options.layers or (0, None))

        return self._run(plan.destination_blocks, copy, options)

    async def has_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> PresenceReport:
        self._note("has_blocks", tuple(keys))
        states = [(self.object_rank, key) in self.fabric.objects for key in keys]
        return PresenceReport(
            presences=tuple(Presence(state=PresenceState.PRESENT if s else PresenceState.ABSENT) for s in states)
        )

    async def put_blocks(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        keys: Sequence[bytes],
        lock_validity_s: float | None = None,
        timeout_s: float = 60.0,
    ) -> KeyReport:
        self._note("put_blocks", tuple(keys))
        if self.gate:
            await self.gate.wait()
        outcomes = []
        for key, block in zip(keys, source_blocks, strict=True):
            is_new = (self.object_rank, key) not in self.fabric.objects
            if key not in self.key_errors:
                self.fabric.objects[self.object_rank, key] = self.array(source)[block].copy()
            outcomes.append(self._key_outcome(key, OutcomeState.DONE if is_new else OutcomeState.ALREADY_PRESENT))
        return KeyReport(outcomes=tuple(outcomes))

    async def get_blocks(
        self,
        keys: Sequence[bytes],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        timeout_s: float = 60.0,
    ) -> KeyReport:
        self._note("get_blocks", tuple(keys))
        outcomes = []
        for key, block in zip(keys, destination_blocks, strict=True):
            value = self.fabric.objects.get((self.object_rank, key))
            if value is None:
                outcomes.append(KeyOutcome(state=OutcomeState.ABSENT))
                continue
            self.array(destination)[block] = value
            outcomes.append(self._key_outcome(key, OutcomeState.DONE))
        return KeyReport(outcomes=tuple(outcomes))

    async def remove_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> KeyReport:
        self._note("remove_blocks", tuple(keys))
        for key in keys:
            self.fabric.objects.pop((self.object_rank, key), None)
        return KeyReport(outcomes=tuple(self._key_outcome(key, OutcomeState.DONE) for key in keys))

    def array(self, place: LocalLayout) -> np.ndarray:
        if place not in self.arrays:
            raise UnknownLayout(f"no {place}", layout=place)
        return self.arrays[place]

    def named(self, method: str) -> list[Any]:
        """Returns what a method was asked for, call by call."""
        return [asked for name, asked in self.calls if name == method]

    def _note(self, method: str, asked: Any) -> None:
        self.calls.append((method, asked))
        self.call_ids.append(call_id.get())
        if method in self.raises:
            raise self.raises[method]

    def _key_outcome(self, key: bytes, state: OutcomeState) -> KeyOutcome:
        if error := self.key_errors.get(key):
            return KeyOutcome(state=OutcomeState.FAILED, failure=Failure.of(error))
        return KeyOutcome(state=state, size_bytes=64)

    def _remote(self, handle: LayoutHandle) -> np.ndarray:
        known = [*self.imported, *(one for group in self.remotes.values() for one in group.values())]
        if not any(d.handle == handle for one in known for d in one.layouts):
            raise UnknownPeer(f"{handle} is not connected with", instance_id="", rank="")
        owner = self.fabric.ranks[handle.owner_id]
        return owner.array(next(d.place for d in owner.metadata.layouts if d.handle == handle))

    def _pull(self, plan: PullPlan, shard: PullShard, i: int, layers: tuple[int, int | None]) -> None:
        remote = self.remotes[plan.instance_id][shard.remote_rank]
        place = LocalLayout(tier=plan.remote_tier, resource_id=plan.destination.resource_id)
        source = next(d for d in remote.layouts if d.place == place)
        own = next(d for d in self.metadata.layouts if d.place == plan.destination)
        parts = translate(shard, block_extents(source.config), block_extents(own.config))
        there, here = (slice(p.start, p.stop) for p in parts) if parts else (slice(None), slice(None))
        rows = slice(*layers)
        values = self._remote(source.handle)[plan.source_blocks[i]][rows, :, :, there]
        self.array(plan.destination)[plan.destination_blocks[i]][rows, :, :, here] = values

    def _run(self, ids: Ids, copy: Callable[[int], None], options: TransferOptions) -> Any:
        event = EventManager().new_event()
        cancelled = asyncio.Event()

        async def live() -> None:
            self.arrived.set()
            if self.gate:
                waits = [asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(cancelled.wait())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            error = Cancelled("given up") if cancelled.is_set() else None
            event.trigger(await asyncio.to_thread(self._copy_all, ids, copy, error))

        self.task = asyncio.get_running_loop().create_task(live())
        event.notification.on_cancel = (lambda: None) if self.is_frozen else cancelled.set
        return event.notification

    def _copy_all(self, ids: Ids, copy: Callable[[int], None], error: AyniError | None) -> TransferResult:
        self.copying()
        if self.result:
            return self.result
        failures = []
        for i, block in enumerate(ids.tolist()):
            try:
                if why := error or self.fails.get(i):
                    raise why
                copy(i)
            except UnknownPeer as unknown:
                return TransferResult(outcomes=(refused(0, ids.tolist(), unknown),))
            except AyniError as why:
                failures.append(_failure(i, block, why))
            except Exception as fault:  # A test that went wrong ends instead of hanging.
                failures.append(_failure(i, block, Fault(repr(fault), detail="")))
        outcome = TransferOutcome(
            rank=self.metadata.rank + 100,  # The group puts its own rank.
            num_done=len(ids) - len(failures),
            failures=tuple(failures),
            transferred_bytes=len(ids) - len(failures),
        )
        return TransferResult(outcomes=(outcome,))


def stamp_of(one: Metadata) -> ParallelismDescriptor:
    """Returns the stamp of a worker that has one."""
    assert one.parallelism is not None
    return one.parallelism


def make_group(
    fabric: Fabric, instance_id: str, num_ranks: int, total_heads: int = 16, **arguments: Any
) -> list[FakeRank]:
    """Returns a group that divides `total_heads` heads, or where each rank holds them all."""
    is_divided = arguments.get("mode") is not ParallelismMode.REPLICATED_DATA
    config = config_of(total_heads // num_ranks if is_divided else total_heads, **arguments.pop("shape", {}))
    return [FakeRank(fabric, rank, instance_id, config, **arguments) for rank in range(num_ranks)]


def _failure(index: int, block: int, error: AyniError) -> BlockFailure:
    return BlockFailure(index=index, block=block, failure=Failure.of(error))


def _values(config: LayoutConfig, seed: int) -> np.ndarray:
    shape = (config.num_blocks, config.num_layers, config.outer_dim, config.page_size, config.num_heads or 1, 4)
    places = np.arange(np.prod(shape), dtype=np.uint32)
    assert len(places) <= 1 << 16
    return (places | np.uint32((seed & 0xFFFF) << 16)).reshape(shape)
