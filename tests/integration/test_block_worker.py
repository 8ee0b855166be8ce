"""The in-process block worker: configuration, connections, options, what is refused."""

import asyncio
import functools
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import Axis, AxisOrder, LayoutConfig, LayoutKind, LocalLayout, Tier
from ayni.blocks.metadata import EngineExport, GroupConfig, LayoutRequest, WorkerMetadata
from ayni.blocks.objects import ObjectStoreConfig, PresenceState
from ayni.blocks.sequence_hash import synthetic
from ayni.blocks.transfers import (
    AxisSlice,
    Bounce,
    ObjectKeys,
    PullPlan,
    PullShard,
    RemoteBlocks,
    TransferFailed,
    TransferOptions,
)
from ayni.errors import (
    AyniError,
    BadRequest,
    Checksum,
    Deadline,
    Incompatible,
    IncompatibleLayout,
    StaleEpoch,
    UnknownLayout,
    UnknownPeer,
    Unsupported,
)
from tests.support.array_groups import SHAPE
from tests.support.coordinator import environment
from tests.support.worker_groups import DEVICE, DISK, HOST, block_worker, service
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.worker import LocalBlockWorker
from worker_agent.serving import serving

GROUP = "6f1d7a52-0b7e-4a6c-9c3d-2f4e5a6b7c8d"


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


def group(epoch: int = 1, **changes) -> GroupConfig:
    layouts = (LayoutRequest(tier=Tier.HOST, num_blocks=16), LayoutRequest(tier=Tier.DISK, num_blocks=16))
    values = {"instance_id": GROUP, "rank": 0, "world_size": 1, "layouts": layouts, "disk_folder": "slabs"}
    return GroupConfig(epoch=epoch, **{**values, **changes})


async def filled(worker: LocalBlockWorker, place: LocalLayout, seed: int = 1) -> np.ndarray:
    config = next(e for e in (await worker.export_metadata())[0].layouts if e.place == place).config
    data = np.random.default_rng(seed).integers(0, 256, (config.num_blocks, config.block_bytes), np.uint8)
    await worker.write(place, as_ids(range(config.num_blocks)), data)
    return data


async def rows(worker: LocalBlockWorker, place: LocalLayout, *blocks: int) -> np.ndarray:
    return await worker.read(place, as_ids(blocks))


@asynchronous
async def test_a_newer_epoch_replaces_the_lower_tiers_and_an_older_one_is_refused(tmp_path: Path):
    async with block_worker(tmp_path) as worker:
        await worker.configure_layouts(group(1))
        host = (await worker.export_metadata())[0].layouts[1].handle
        answer = await worker.configure_layouts(group(2, layouts=(LayoutRequest(tier=Tier.HOST, num_blocks=4),)))
        (metadata,) = answer.metadata
        assert [layout.place for layout in metadata.layouts] == [DEVICE, HOST]
        assert metadata.layouts[1].config.num_blocks == 4
        assert metadata.layouts[1].handle != host
        with pytest.raises(StaleEpoch, match=r"epoch 1 .* is over"):
            await worker.configure_layouts(group(1))


@asynchronous
async def test_the_same_epoch_with_other_values_is_refused(tmp_path: Path):
    async with block_worker(tmp_path) as worker:
        await worker.configure_layouts(group(1))
        with pytest.raises(IncompatibleLayout, match="configured otherwise"):
            await worker.configure_layouts(group(1, layouts=()))


@asynchronous
async def test_impossible_configurations_are_refused(tmp_path: Path):
    async with block_worker(tmp_path) as worker:
        with pytest.raises(BadRequest, match="rank 2 is not one of 2"):
            await worker.configure_layouts(group(rank=2, world_size=2))
        with pytest.raises(BadRequest, match="not for device"):
            await worker.configure_layouts(group(layouts=(LayoutRequest(tier=Tier.DEVICE, num_blocks=4),)))
        with pytest.raises(UnknownLayout, match="no device layout of resource 3"):
            await worker.configure_layouts(group(layouts=(LayoutRequest(tier=Tier.HOST, num_blocks=4, resource_id=3),)))
        with pytest.raises(BadRequest, match="outside the root"):
            await worker.configure_layouts(group(disk_folder="../elsewhere"))


@asynchronous
async def test_what_the_disk_tier_holds_is_there_again_after_a_restart(tmp_path: Path):
    async with block_worker(tmp_path) as worker:
        assert not (await worker.configure_layouts(group())).disk_recovered
        data = await filled(worker, DISK)
    async with block_worker(tmp_path) as worker:
        assert (await worker.configure_layouts(group())).disk_recovered
        assert (await rows(worker, DISK, *range(16)) == data).all()


@asynchronous
async def test_a_layout_in_use_is_not_given_back(tmp_path: Path):
    async with block_worker(tmp_path) as worker:
        (metadata,) = await worker.export_metadata()
        with worker.lending.lend(metadata.layouts[0].handle, worker.incarnation, as_ids([3]), False):
            with pytest.raises(Deadline, match="transfers with the device layout to end"):
                await worker.release(DEVICE, timeout_s=0.05)
        await worker.release(DEVICE)
        assert not (await worker.export_metadata())[0].layouts


@asynchronous
async def test_a_peer_of_an_earlier_process_start_is_refused(tmp_path: Path):
    async with block_worker(tmp_path) as worker:
        handle = (await worker.export_metadata())[0].layouts[0].handle
        with pytest.raises(StaleEpoch, match="started again"):
            with worker.lending.lend(handle, worker.incarnation ^ 1, as_ids([0]), False):
                pass


@asynchronous
async def test_bounce_blocks_are_used_and_their_neighbours_are_not(tmp_path: Path):
    async with block_worker(tmp_path) as worker:
        await worker.configure_layouts(group())
        data, host = await filled(worker, DISK, 1), await filled(worker, HOST, 2)
        bounce = Bounce(layout=(await worker.export_metadata())[0].layouts[1].handle, blocks=as_ids([4, 5]))
        options = TransferOptions(bounce=bounce)
        await worker.execute_local_transfer(DISK, DISK, [0, 1, 2], [8, 9, 10], options)
        assert (await rows(worker, DISK, 8, 9, 10) == data[:3]).all()
        assert (await rows(worker, HOST, 3, 6) == host[[3, 6]]).all()


@asynchronous
async def test_options_that_a_copy_can_not_have_are_refused_by_name(tmp_path: Path):
    async with block_worker(tmp_path) as worker:
        await worker.configure_layouts(group())
        for options, name in [
            (TransferOptions(checksum=True), "checksum"),
            (TransferOptions(write_notification=1), "write_notification"),
            (TransferOptions(engine="grpc"), "engine"),
        ]:
            with pytest.raises(TransferFailed, match=f"option {name} can't be used") as caught:
                await worker.execute_local_transfer(DEVICE, HOST, [0], [1], options)
            assert caught.value.reasons == {"UNSUPPORTED"}


@asynchronous
async def test_a_push_tells_the_owner_its_number(tmp_path: Path):
    async with block_worker(tmp_path) as one, block_worker(tmp_path) as other:
        data = await filled(one, DEVICE)
        told: list[int] = []
        other.lending.on_notify.append(told.append)
        (metadata,) = await other.export_metadata()
        await one.import_metadata([metadata])
        to = RemoteBlocks(layout=metadata.layouts[0].handle, blocks=as_ids([7, 3]))
        await one.execute_remote_offload(DEVICE, [1, 2], to, TransferOptions(write_notification=42))
        assert (await rows(other, DEVICE, 7, 3) == data[[1, 2]]).all()
        assert told == [42]


@asynchronous
async def test_checksums_go_over_grpc_even_where_memory_is_shared(tmp_path: Path):
    async with block_worker(tmp_path, "shm", "grpc") as one, block_worker(tmp_path, "shm", "grpc") as other:
        data = await filled(other, DEVICE)
        (metadata,) = await other.export_metadata()
        layouts = await one.connect_remote(metadata.instance_id, [metadata])
        assert [layout.engine for layout in layouts] == ["shm"]
        for options, engine in [
            (TransferOptions(), "shm"),
            (TransferOptions(checksum=True), "grpc"),
            (TransferOptions(engine="grpc"), "grpc"),
        ]:
            result = await one.execute_remote_onboard_for_instance(
                metadata.instance_id, Tier.DEVICE, [5], DEVICE, [6], options
            )
            assert result.outcomes[0].engines == (engine,)
            assert (await rows(one, DEVICE, 6) == data[5]).all()


@asynchronous
async def test_each_layout_uses_the_first_engine_that_reaches_it(tmp_path: Path):
    async with block_worker(tmp_path, "shm", "grpc") as one, block_worker(tmp_path, "shm", "grpc") as other:
        await other.configure_layouts(group())
        data = await filled(other, DISK)
        metadata = await other.export_metadata()
        layouts = await one.connect_remote(GROUP, metadata)
        assert {layout.tier: layout.engine for layout in layouts} == {
            Tier.DEVICE: "shm",
            Tier.HOST: "shm",
            Tier.DISK: "grpc",
        }
        await one.execute_remote_onboard_for_instance(GROUP, Tier.DISK, [0, 1], DEVICE, [2, 3])
        assert (await rows(one, DEVICE, 2, 3) == data[:2]).all()


@asynchronous
async def test_an_engine_that_only_one_side_has_is_passed_over_or_refused(tmp_path: Path):
    async with block_worker(tmp_path, "shm", "grpc") as one, block_worker(tmp_path, "grpc") as other:
        (metadata,) = await other.export_metadata()
        (layout,) = await one.connect_remote(metadata.instance_id, [metadata])
        assert layout.engine == "grpc"
        assert await one.disconnect_remote(metadata.instance_id)
        with pytest.raises(Unsupported, match="no engine reaches"):
            await one.connect_remote(metadata.instance_id, [metadata], ["shm"])
        with pytest.raises(Unsupported, match="this worker has no engine nixl"):
            await one.connect_remote(metadata.instance_id, [metadata], ["nixl"])
        assert not (await one.has_remote_metadata(metadata.instance_id)).connected


@asynchronous
async def test_what_can_not_be_a_group_is_not_connected_and_leaves_nothing(tmp_path: Path):
    async with block_worker(tmp_path) as one, block_worker(tmp_path) as other:
        (good,) = await other.export_metadata()
        broken = replace(good, engines=(EngineExport(name="grpc", version=1, data=b"{", crc32=0),))
        elsewhere = replace(good, rank=1, address="127.0.0.1:1", engines=(_dead(good.engines[0]),))
        cases: list[tuple[list[WorkerMetadata], Any]] = [
            ([], BadRequest),
            ([good, good], BadRequest),
            ([replace(good, instance_id=GROUP)], Incompatible),
            ([good, replace(good, rank=1, epoch=9)], Incompatible),
            ([broken], (BadRequest, Checksum)),
            ([good, elsewhere], AyniError),
        ]
        for metadata, error in cases:
            with pytest.raises(error):
                await one.connect_remote(good.instance_id, metadata)
            assert not (await one.has_remote_metadata(good.instance_id)).connected
        with pytest.raises(TransferFailed) as caught:
            await one.execute_remote_onboard_for_instance(good.instance_id, Tier.DEVICE, [0], DEVICE, [0])
        assert caught.value.reasons == {UnknownPeer.reason}


def _dead(export: EngineExport) -> EngineExport:
    import json
    import zlib

    data = json.dumps({"address": "127.0.0.1:1", "tls": False}).encode()
    return replace(export, data=data, crc32=zlib.crc32(data))


@pytest.mark.fact("T70")
@asynchronous
async def test_an_import_gives_the_same_handles_and_may_be_repeated(tmp_path: Path):
    async with block_worker(tmp_path) as one, block_worker(tmp_path) as other:
        await other.configure_layouts(group())
        metadata = await other.export_metadata()
        handles = tuple(layout.handle for layout in metadata[0].layouts)
        for _ in range(2):
            (imported,) = await one.import_metadata(metadata)
            assert imported.layouts == handles
            assert imported.engine == "grpc"
        with pytest.raises(BadRequest, match="imports one worker's metadata; got 2"):
            await one.import_metadata([*metadata, *metadata])


@asynchronous
async def test_slices_of_two_ranks_fill_each_block_once_in_another_axis_order(tmp_path: Path):
    half = replace(SHAPE, inner_dim=SHAPE.inner_dim // 2, num_heads=1)
    async with (
        block_worker(tmp_path, order=AxisOrder.HND) as one,
        block_worker(tmp_path, shape=half) as left,
        block_worker(tmp_path, shape=half) as right,
    ):
        parts = []
        for rank, worker in enumerate((left, right)):
            await worker.configure_layouts(group(rank=rank, world_size=2, layouts=(), disk_folder=""))
            parts.append(await filled(worker, DEVICE, rank))
        metadata = [(await worker.export_metadata())[0] for worker in (left, right)]
        await one.connect_remote(GROUP, metadata)
        shards = tuple(
            PullShard(
                remote_rank=rank,
                destination_slice=AxisSlice(axis=Axis.HEAD_COUNT, start=rank, stop=rank + 1),
            )
            for rank in (0, 1)
        )
        plan = PullPlan(
            instance_id=GROUP,
            remote_tier=Tier.DEVICE,
            source_blocks=as_ids([4, 5]),
            destination=DEVICE,
            destination_blocks=as_ids([9, 2]),
            shards=shards,
        )
        await one.execute_remote_pull(plan)
        shape = (2, SHAPE.num_layers, SHAPE.outer_dim, SHAPE.page_size, 1, -1)
        whole = np.concatenate([part[[4, 5]].reshape(shape) for part in parts], axis=4)
        assert (await rows(one, DEVICE, 9, 2) == whole.transpose(0, 1, 2, 4, 3, 5).reshape(2, -1)).all()
        with pytest.raises(TransferFailed, match="do not fill a block exactly once"):
            await one.execute_remote_pull(replace(plan, shards=shards[:1]))


@asynchronous
async def test_without_an_object_store_nothing_is_known_and_nothing_is_stored(tmp_path: Path):
    async with block_worker(tmp_path) as worker:
        keys = [bytes(synthetic("a", 1)), bytes(synthetic("a", 2))]
        assert {p.state for p in (await worker.has_blocks(DEVICE, keys)).presences} == {PresenceState.UNKNOWN}
        report = await worker.put_blocks(DEVICE, [0, 1], keys)
        assert [outcome.failure and outcome.failure.reason for outcome in report.outcomes] == ["UNSUPPORTED"] * 2
        with pytest.raises(TransferFailed, match="no object store"):
            await worker.execute_remote_onboard(ObjectKeys(keys=tuple(keys)), DEVICE, [0, 1])


@asynchronous
async def test_objects_of_another_kind_of_layout_are_interchangeable_and_of_another_order_are_not(tmp_path: Path):
    store = ObjectStoreConfig(kind="file", bucket="objects")
    separate = Geometry(config=SHAPE, kind=LayoutKind.LAYER_SEPARATE_BLOCK_SECOND, axis_order=AxisOrder.NHD)
    keys = [bytes(synthetic("b", number)) for number in range(3)]
    async with block_worker(tmp_path) as one, block_worker(tmp_path, order=AxisOrder.HND) as other:
        for worker in (one, other):
            await worker.configure_layouts(group(layouts=(), object_store=store))
        data = await filled(one, DEVICE)
        assert (await one.put_blocks(DEVICE, [0, 1, 2], keys)).is_done
        third = LocalLayout(tier=Tier.HOST, resource_id=1)
        await one.allocate(third, separate)
        assert (await one.get_blocks(keys, third, [5, 6, 7])).is_done
        assert (await rows(one, third, 5, 6, 7) == data[:3]).all()
        presences = (await other.has_blocks(DEVICE, keys)).presences
        assert {presence.state for presence in presences} == {PresenceState.ABSENT}


@asynchronous
async def test_a_device_layout_of_many_small_allocations(tmp_path: Path):
    shape = LayoutConfig(num_blocks=8, num_layers=64, outer_dim=1, page_size=1, inner_dim=3, dtype_width_bytes=1)
    async with block_worker(tmp_path, shape=shape, order=AxisOrder.UNKNOWN) as worker:
        data = await filled(worker, DEVICE)
        assert (await rows(worker, DEVICE, *range(8)) == data).all()


@asynchronous
async def test_a_peer_whose_first_block_can_not_be_read_is_connected_all_the_same(tmp_path: Path):
    geometry = Geometry(config=SHAPE, axis_order=AxisOrder.NHD)
    async with serving(service(tmp_path / "peer")) as peer:
        await peer.allocate(DISK, geometry)
    async with serving(service(tmp_path / "peer")) as peer, block_worker(tmp_path) as worker:
        await peer.allocate(DISK, geometry)
        data = np.full((1, SHAPE.block_bytes), 7, np.uint8)
        await peer.write(DISK, as_ids([3]), data)
        (metadata,) = await peer.export_metadata()
        await worker.connect_remote(metadata.instance_id, [metadata])
        onboard = worker.execute_remote_onboard_for_instance(metadata.instance_id, Tier.DISK, [0, 3], DEVICE, [4, 5])
        result = await onboard.result()
        assert [(f.index, f.failure.reason) for f in result.outcomes[0].failures] == [(0, "STORAGE_FAILED")]
        assert (await rows(worker, DEVICE, 5) == data).all()


def test_a_worker_without_an_accelerator_starts_without_torch():
    program = (
        "import sys, worker_agent.serving, worker_agent.agent, worker_agent.blocks.engines.shm; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], env=environment(), timeout=60).returncode == 0
