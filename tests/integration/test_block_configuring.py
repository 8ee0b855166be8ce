"""What a worker is left with when a configuration is refused, given up or overtaken; and which peers it keeps."""

import asyncio
import contextlib
import gc
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.metadata import GroupConfig, LayoutRequest
from ayni.blocks.objects import ObjectStoreConfig, PresenceState
from ayni.blocks.sequence_hash import synthetic
from ayni.blocks.transfers import Bounce, RemoteBlocks, TransferFailed, TransferOptions
from ayni.channels import open_channel
from ayni.errors import AyniError, IncompatibleLayout, StaleEpoch, StorageFailed, TooLarge
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.support.array_groups import GROUPS, SHAPE, TOKEN
from tests.support.worker_groups import DEVICE, DISK, HOST, block_worker
from worker_agent.blocks import configuring, tiers
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.worker import LocalBlockWorker

STORE = ObjectStoreConfig(kind="file", bucket="objects")
HOSTS = (LayoutRequest(tier=Tier.HOST, num_blocks=16),)


def config(epoch: int, **changes) -> GroupConfig:
    values = {"instance_id": GROUPS[0], "rank": 0, "world_size": 1, "layouts": HOSTS, "disk_folder": "slabs"}
    return GroupConfig(epoch=epoch, **{**values, **changes})


def keys() -> list[bytes]:
    return [bytes(synthetic("configuring", 0))]


async def places(worker: LocalBlockWorker) -> list[LocalLayout]:
    return [layout.place for layout in (await worker.export_metadata())[0].layouts]


def open_files() -> int:
    """Counts the pools and slabs that this process has open."""
    gc.collect()
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum("memfd:ayni-blocks" in link or ".slab" in link for link in links)


def test_a_refused_configuration_does_not_touch_the_object_store(tmp_path: Path):
    async def test() -> None:
        async with block_worker(tmp_path) as worker:
            good = config(1, object_store=STORE)
            await worker.configure_layouts(good)
            await worker.put_blocks(DEVICE, [0], keys())
            for refused in (replace(good, rank=1, world_size=2), replace(good, object_store=None)):
                with pytest.raises(IncompatibleLayout):
                    await worker.configure_layouts(refused)
                assert (await worker.has_blocks(DEVICE, keys())).presences[0].state is PresenceState.PRESENT

    asyncio.run(test())


def test_a_store_that_can_not_be_opened_leaves_everything_as_it_was(tmp_path: Path):
    (tmp_path / "objects").write_text("in the way")

    async def test() -> None:
        async with block_worker(tmp_path) as worker:
            await worker.configure_layouts(config(1))
            with pytest.raises(StorageFailed):
                await worker.configure_layouts(config(2, object_store=STORE, layouts=()))
            assert await places(worker) == [DEVICE, HOST]
            assert (await worker.export_metadata())[0].epoch == 1

    asyncio.run(test())


def test_another_group_takes_over_in_a_newer_epoch_only(tmp_path: Path):
    async def test() -> None:
        async with block_worker(tmp_path) as worker:
            first, second = [GrpcBlockWorker.dial(worker.address, TOKEN) for _ in range(2)]
            await first.configure_layouts(config(3))
            with pytest.raises(StaleEpoch, match="can take it over in an epoch above 3"):
                await second.configure_layouts(config(3, instance_id=GROUPS[1]))
            await second.configure_layouts(config(4, instance_id=GROUPS[1]))
            with pytest.raises(TransferFailed) as caught:
                await first.execute_local_transfer(DEVICE, HOST, [0], [1])
            assert caught.value.reasons == {"STALE_EPOCH"}
            await second.execute_local_transfer(DEVICE, HOST, [0], [1])
            for stub in (first, second):
                await stub.close()

    asyncio.run(test())


def test_only_a_configuration_that_worked_moves_the_epoch(tmp_path: Path):
    async def test() -> None:
        async with block_worker(tmp_path) as worker:
            leader, stray = [GrpcBlockWorker.dial(worker.address, TOKEN) for _ in range(2)]
            await leader.configure_layouts(config(1))
            far = GrpcBlockWorker(open_channel(worker.address, TOKEN), epoch=(1 << 63) - 1)
            await far.disconnect_remote(GROUPS[1])
            too_many = (LayoutRequest(tier=Tier.HOST, num_blocks=1 << 40),)
            with pytest.raises(AyniError):
                await stray.configure_layouts(config(9, layouts=too_many))
            await leader.configure_layouts(config(2))
            await leader.execute_local_transfer(DEVICE, HOST, [0], [1])
            for stub in (leader, stray, far):
                await stub.close()

    asyncio.run(test())


def test_a_configuration_that_failed_is_undone_and_the_old_one_can_be_repeated(tmp_path: Path):
    async def test() -> None:
        async with block_worker(tmp_path) as worker:
            await worker.configure_layouts(config(0))
            before = (await worker.export_metadata())[0]
            too_many = (*HOSTS, LayoutRequest(tier=Tier.DISK, num_blocks=1 << 40))
            with pytest.raises((TooLarge, StorageFailed)):
                await worker.configure_layouts(config(0, layouts=too_many, instance_id=GROUPS[1]))
            after = (await worker.export_metadata())[0]
            assert (after.instance_id, after.owner_id) == (before.instance_id, before.owner_id)
            assert await places(worker) == [DEVICE]
            await worker.configure_layouts(config(0))
            assert await places(worker) == [DEVICE, HOST]

    asyncio.run(test())


def test_a_folder_that_can_not_be_made_is_a_failure_of_storage(tmp_path: Path):
    (tmp_path / "slabs").write_text("in the way")

    async def test() -> None:
        async with block_worker(tmp_path) as worker:
            with pytest.raises(StorageFailed, match="can't be made"):
                await worker.configure_layouts(config(1, layouts=(LayoutRequest(tier=Tier.DISK, num_blocks=4),)))

    asyncio.run(test())


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_memory_whose_maker_gave_up_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: Tier):
    made, go = threading.Event(), threading.Event()
    make = tiers.make_memory

    def slow(*arguments):
        memory = make(*arguments)
        made.set()
        assert go.wait(20)
        return memory

    async def test() -> None:
        async with block_worker(tmp_path) as worker:
            monkeypatch.setattr(configuring, "make_memory", slow)
            asked = config(1, layouts=(LayoutRequest(tier=tier, num_blocks=8),))
            before = open_files()
            giving_up = asyncio.ensure_future(worker.configure_layouts(asked))
            await asyncio.to_thread(made.wait, 20)
            giving_up.cancel()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await giving_up
            assert open_files() == before
            assert await places(worker) == [DEVICE]
            await worker.configure_layouts(asked)
            assert [place.tier for place in await places(worker)] == [Tier.DEVICE, tier]

    asyncio.run(test())


def test_a_connection_that_is_given_up_or_fails_half_way_leaves_no_link(tmp_path: Path):
    async def test() -> None:
        async with block_worker(tmp_path, "shm") as one, block_worker(tmp_path, "shm") as other:
            (good,) = await other.export_metadata()
            broken = replace(good, rank=1, engines=(replace(good.engines[0], data=b"{}", crc32=0),))
            before = open_files()
            for _ in range(5):
                with pytest.raises(AyniError):
                    await one.connect_remote(good.instance_id, [good, broken])
                assert not (await one.has_remote_metadata(good.instance_id)).connected
            assert open_files() == before

    asyncio.run(test())


def test_a_worker_that_was_started_again_replaces_its_former_self(tmp_path: Path):
    async def test() -> None:
        async with block_worker(tmp_path, "shm", "grpc") as one:
            before = open_files()
            for number in range(3):
                async with block_worker(tmp_path, "shm", "grpc") as other:
                    await other.configure_layouts(config(1, layouts=()))
                    data = np.full((16, SHAPE.block_bytes), number, np.uint8)
                    await other.write(DEVICE, as_ids(range(16)), data)
                    (metadata,) = await other.export_metadata()
                    await one.import_metadata([metadata])
                    await one.connect_remote(metadata.instance_id, [metadata])
                    source = RemoteBlocks(layout=metadata.layouts[0].handle, blocks=as_ids([1]))
                    await one.execute_remote_onboard(source, DEVICE, [2])
                    assert (await one.read(DEVICE, as_ids([2])) == number).all()
                    assert await one.disconnect_remote(metadata.instance_id)
                    assert not await one.disconnect_remote(metadata.instance_id)
            assert open_files() == before

    asyncio.run(test())


def test_bounce_blocks_must_be_in_host_memory(tmp_path: Path):
    async def test() -> None:
        async with block_worker(tmp_path) as worker:
            await worker.allocate(HOST, Geometry(config=SHAPE))
            await worker.allocate(DISK, Geometry(config=SHAPE))
            disk = (await worker.export_metadata())[0].layouts[2].handle
            options = TransferOptions(bounce=Bounce(layout=disk, blocks=as_ids([7])))
            with pytest.raises(TransferFailed, match="bounce blocks must be in host memory") as caught:
                await worker.execute_local_transfer(HOST, DISK, [0], [1], options)
            assert caught.value.reasons == {"UNSUPPORTED"}

    asyncio.run(test())
