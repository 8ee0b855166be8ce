"""Owners of shared memory that are killed, stopped or end in the middle of a pull; disks that are full."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from ayni.blocks.layouts import LayoutConfig
from ayni.errors import Deadline, PeerLost, StorageFailed
from tests.support.coordinator import environment
from tests.support.shm_owner import (
    GEOMETRIES,
    end_of_killed_reader,
    fill,
    link_to,
    move,
    owner,
    part_of,
    source_of,
    wait_until,
)
from worker_agent.blocks import paths
from worker_agent.blocks.engines.shm import ShmEngine
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.local_copy import copy
from worker_agent.blocks.memory import WHOLE
from worker_agent.blocks.slab import SlabMemory
from worker_agent.blocks.slab_header import SlabHeader, places

NUM_BLOCKS = GEOMETRIES["large"].config.num_blocks
IDS = list(range(1, NUM_BLOCKS - 1))
"""All but a guard on either side."""


@pytest.fixture
def steps(monkeypatch):
    """Makes the third copy of a pull wait: `reached` is set when it is about to begin; it does after `goes_on`."""

    class Steps:
        reached = threading.Event()
        goes_on = threading.Event()
        done = 0

    real = paths.Straight.copy

    def copy(self, source_blocks, destination_blocks):
        Steps.done += 1
        if Steps.done == 3:
            Steps.reached.set()
            assert Steps.goes_on.wait(30)
        real(self, source_blocks, destination_blocks)

    monkeypatch.setattr(paths.Straight, "copy", copy)
    return Steps


def check_blocks(local: HostMemory, failed: set[int], before: np.ndarray) -> None:
    """Every block that did not fail is right; guards are unchanged."""
    source = part_of(source_of("large"), range(NUM_BLOCKS))
    after = part_of(local, range(NUM_BLOCKS))
    for index, block in enumerate(IDS):
        if index not in failed:
            np.testing.assert_array_equal(after[block], source[block])
    for guard in (0, NUM_BLOCKS - 1):
        np.testing.assert_array_equal(after[guard], before[guard])


async def interrupted_pull(process, folder: Path, steps, interrupt) -> tuple[set[int], set[str]]:
    """Pulls all blocks; `interrupt` is called in the middle. Returns what failed, and why."""
    local = allocate_host(GEOMETRIES["large"])
    before = fill(local, 50)
    async with link_to(process, folder) as link:
        ticket = link.pull(move("large", IDS, local, IDS))
        assert await asyncio.to_thread(steps.reached.wait, 30)
        await interrupt()
        steps.goes_on.set()
        async with asyncio.timeout(20):
            result = await ticket.outcome
            await ticket.quiesced
    failed = {index for index, _ in result.failures}
    assert result.moved_bytes == (len(IDS) - len(failed)) * local.geometry.config.block_bytes
    check_blocks(local, failed, before)
    return failed, {failure.reason for _, failure in result.failures}


def test_owner_killed_in_the_middle_of_a_pull(tmp_path, steps):
    """What was copied before counts; nothing that was read after the kill does. The socket goes at once."""
    folder = tmp_path / "run"

    async def scenario(process):
        async def kill():
            os.kill(process.pid, signal.SIGKILL)
            assert await wait_until(lambda: not process.socket.exists(), 5) < 0.5

        return await interrupted_pull(process, folder, steps, kill)

    with owner(folder, "large") as process:
        failed, reasons = asyncio.run(scenario(process))
    assert reasons == {"PEER_LOST"}
    assert 0 < len(failed) < len(IDS)
    assert list(folder.iterdir()) == []


def test_owner_that_ends_in_order_in_the_middle_of_a_pull(tmp_path, steps):
    folder = tmp_path / "run"

    async def scenario(process):
        return await interrupted_pull(process, folder, steps, lambda: asyncio.to_thread(process.tell, "close"))

    with owner(folder, "large") as process:
        failed, reasons = asyncio.run(scenario(process))
    assert reasons == {"STALE_EPOCH"}
    assert 0 < len(failed) < len(IDS)
    assert list(folder.iterdir()) == []


def test_owner_that_is_stopped_is_still_read_but_can_not_be_connected(tmp_path, steps):
    folder = tmp_path / "run"

    async def scenario(process):
        async def stop():
            os.kill(process.pid, signal.SIGSTOP)

        failed, _ = await interrupted_pull(process, folder, steps, stop)
        engine = ShmEngine(folder)
        with pytest.raises(Deadline):
            await engine.connect(process.metadata(), process.export, asyncio.get_running_loop().time() + 0.2)
        os.kill(process.pid, signal.SIGCONT)
        link = await engine.connect(process.metadata(), process.export, asyncio.get_running_loop().time() + 20)
        await link.close()
        await engine.close()
        return failed

    with owner(folder, "large") as process:
        assert asyncio.run(scenario(process)) == set()


def test_killed_owner_is_refused_swept_and_replaced(tmp_path):
    """Nobody was connected when it was killed: who tries to connect, or starts, cleans up."""
    folder = tmp_path / "run"
    local = allocate_host(GEOMETRIES["nhd"])

    async def scenario(dead, alive):
        engine = ShmEngine(folder)
        deadline = asyncio.get_running_loop().time() + 20
        with pytest.raises(PeerLost, match="nobody answers at"):
            await engine.connect(dead.metadata(), dead.export, deadline)
        await engine.close()
        async with link_to(alive, folder) as link:
            return await link.pull(move("nhd", [1], local, [1])).outcome

    with owner(folder, "nhd") as dead:
        dead.process.kill()
        dead.process.join(20)
        assert dead.socket.exists()
        with owner(folder, "nhd") as alive:
            assert list(folder.iterdir()) == [alive.socket]
            assert asyncio.run(scenario(dead, alive)).failures == ()
    np.testing.assert_array_equal(part_of(local, [1]), part_of(source_of("nhd"), [1]))


def test_reader_that_is_killed_harms_neither_the_owner_nor_other_readers(tmp_path):
    folder = tmp_path / "run"
    local = allocate_host(GEOMETRIES["nhd"])

    async def scenario(process):
        async with link_to(process, folder) as link:
            return await link.pull(move("nhd", [1], local, [1])).outcome

    with owner(folder, "nhd") as process:
        assert end_of_killed_reader(process, folder) == -signal.SIGKILL
        assert asyncio.run(scenario(process)).failures == ()


def test_death_is_noticed_while_nothing_is_pulled(tmp_path, caplog):
    folder = tmp_path / "run"
    caplog.set_level("INFO")

    async def scenario(process):
        async with link_to(process, folder) as link:
            os.kill(process.pid, signal.SIGKILL)
            took = await wait_until(lambda: not process.socket.exists(), 5)
            result = await link.pull(move("nhd", [1], allocate_host(GEOMETRIES["nhd"]), [1])).outcome
            return took, result

    with owner(folder, "nhd") as process:
        took, result = asyncio.run(scenario(process))
    assert took < 0.5
    assert [failure.reason for _, failure in result.failures] == ["PEER_LOST"]
    assert "the process of rank 0 of 1" in caplog.text


@contextlib.contextmanager
def tiny_disk(folder: Path):
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk; the limit on file sizes is tested all the same")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


DISK = Geometry(config=LayoutConfig(num_blocks=64, num_layers=1, outer_dim=1, page_size=1, inner_dim=16384))


def slab(path: Path, geometry: Geometry = DISK) -> SlabMemory:
    return SlabMemory(path, geometry, SlabHeader.of(geometry, "f", "i", 0))


def test_disk_without_room_is_told_when_the_slab_is_made(tmp_path):
    with tiny_disk(tmp_path / "disk"):
        with pytest.raises(StorageFailed) as caught:
            slab(tmp_path / "disk" / "a.slab")
        assert list((tmp_path / "disk").iterdir()) == []
        (tmp_path / "disk" / "b").write_bytes(b"x" * 100_000)
    assert int(caught.value.metadata["wanted"]) == places(DISK).end
    assert 0 < int(caught.value.metadata["free"]) <= 1 << 20
    assert f"it needs {places(DISK).end} bytes" in caught.value.message


LIMITED = textwrap.dedent(
    """
    import resource
    from pathlib import Path
    from ayni.errors import StorageFailed
    from tests.fault.test_shm_faults import slab
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        slab(Path({path!r}))
    except StorageFailed as error:
        print(error.message)
    """
)


def test_file_that_may_not_grow_is_told_when_the_slab_is_made_and_leaves_nothing(tmp_path):
    """There is room, but setting it aside fails."""
    code = LIMITED.format(path=str(tmp_path / "a.slab"))
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), timeout=100, check=True, capture_output=True, text=True
    )
    assert f"it needs {places(DISK).end} bytes" in ended.stdout
    assert "File too large" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_pull_into_a_file_that_may_not_be_written_fails_the_rest_and_says_why(tmp_path):
    """The limit ends in the middle of the blocks: those before are right, the others failed, the next pull works."""
    name = "large"
    geometry = GEOMETRIES[name]
    folder = tmp_path / "run"
    memory = slab(tmp_path / "a.slab", geometry)
    old = fill(memory, 51)
    allocation = places(geometry).allocations[0]
    limit = allocation + 7 * geometry.config.block_bytes + 12345
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def scenario(process):
        async with link_to(process, folder) as link:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                result = await link.pull(move(name, IDS, memory, IDS)).outcome
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            return result, await link.pull(move(name, IDS, allocate_host(geometry), IDS)).outcome

    with owner(folder, name) as process:
        result, again = asyncio.run(scenario(process))
    failed = {index for index, _ in result.failures}
    assert {failure.reason for _, failure in result.failures} == {"STORAGE_FAILED"}
    assert all("no room is left" in failure.message for _, failure in result.failures)
    assert again.failures == ()
    assert set(range(7, len(IDS))) <= failed
    source = part_of(source_of(name), range(NUM_BLOCKS))
    for index, block in enumerate(IDS):
        if index not in failed:
            np.testing.assert_array_equal(part_of(memory, [block])[0], source[block])
    np.testing.assert_array_equal(part_of(memory, [0, NUM_BLOCKS - 1]), old[[0, NUM_BLOCKS - 1]])
    memory.close()


def test_slab_that_is_cut_short_fails_the_blocks_that_are_gone_alone(tmp_path):
    memory = slab(tmp_path / "a.slab")
    old = fill(memory, 52)
    os.truncate(tmp_path / "a.slab", places(DISK).allocations[0] + 40 * DISK.config.block_bytes + 1)
    target = allocate_host(DISK)
    source = paths.Selection(memory=memory, blocks=np.arange(64))
    failures = copy(source, paths.Selection(memory=target, blocks=np.arange(64)))
    assert [index for index, _ in failures] == list(range(40, 64))
    assert {error.reason for _, error in failures} == {"STORAGE_FAILED"}
    np.testing.assert_array_equal(part_of(target, range(40)), old[:40])
    memory.write(np.arange(64), WHOLE, old)
    np.testing.assert_array_equal(part_of(memory, range(64)), old)
    memory.close()
