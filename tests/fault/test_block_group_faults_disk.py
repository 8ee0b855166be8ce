"""Disk tiers of a group: a disk that is full, a file that is cut short, an agent killed while it writes."""

import asyncio
import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import LocalLayout
from ayni.blocks.transfers import TransferFailed, TransferOptions
from ayni.errors import StorageFailed
from tests.support.serve_agents import ServeAgent, crew
from tests.support.served_groups import (
    DISK,
    HOST,
    BlocksRefused,
    ServedGroup,
    as_soon_as_free,
    caught,
    check_blocks,
    check_same,
    geometry_of,
    in_time,
    reasons,
    served,
)
from worker_agent.blocks.slab_header import places

NUM_BLOCKS = 2048
ALL = np.arange(NUM_BLOCKS)
IDS = ALL[ALL % 16 > 0]
"""Destinations; all others are guards."""

OLD, NEW = range(1, 3)
"""What blocks are filled with."""


def slab_of(group: ServedGroup, rank: int) -> Path:
    return group.agents[rank].folder / "root" / group.instance_id / f"rank{rank}-resource0.slab"


def on_disk(group: ServedGroup, rank: int) -> np.ndarray:
    """The blocks of a slab as the file has them now, shape [B, n]."""
    layout = group.layout(rank, DISK)
    start = places(geometry_of(layout)).allocations[0]
    shape = layout.config.num_blocks, layout.config.block_bytes
    return np.memmap(slab_of(group, rank), np.uint8, "r+", start, shape)


@contextlib.contextmanager
def no_file_larger_than(limit: int, agent: ServeAgent) -> Iterator[None]:
    """An agent's files can't be written beyond a place, as on a disk that is full."""
    before = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def full_disk(folder: Path, agent: ServeAgent) -> Iterator[None]:
    """A folder on a disk of 1 MiB; where none can be mounted, files of the agent can't be larger."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.getuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    else:
        with no_file_larger_than(1 << 20, agent):
            yield


async def copy(group: ServedGroup, source: LocalLayout, destination: LocalLayout, ids: Ids) -> None:
    assert (await group.leader.execute_local_transfer(source, destination, ids, ids)).is_done


def test_disk_without_room_is_named_and_a_smaller_layout_fits():
    async def test() -> None:
        shared = crew()
        agents = shared.halves()
        async with served(shared, agents, host_blocks=16) as group:
            folder = agents[1].folder / "root" / "full"
            with full_disk(folder, agents[1]):
                asked = group.with_disk(NUM_BLOCKS)
                with pytest.raises(StorageFailed) as refused:
                    await group.configure(epoch=shared.next_epoch(), layouts=asked, disk_folder="full")
                assert "failed on 1 of the group's ranks: rank 1: " in refused.value.message
                assert "there is no room for the slab file" in refused.value.message
                assert list(folder.iterdir()) == []
                asked = group.with_disk(16)
                await group.configure(epoch=shared.next_epoch(), layouts=asked, disk_folder="full/smaller")
                await group.fill(OLD)
                await copy(group, HOST, DISK, ALL[:16])
                for rank in range(2):
                    check_same(await group.read(rank, ALL[:16], DISK), group.content(OLD, rank))
                await group.configure(epoch=shared.next_epoch(), layouts=(), disk_folder="")

    asyncio.run(test())


@pytest.mark.fact("T121")
def test_slab_that_is_cut_short_fails_what_is_gone_on_its_rank_after_all_ranks_have_ended():
    async def test() -> None:
        shared = crew()
        async with served(shared, shared.quarters()[:3], host_blocks=NUM_BLOCKS, disk_blocks=NUM_BLOCKS) as group:
            await group.fill(OLD)
            await copy(group, HOST, DISK, ALL)
            await group.fill(NEW)
            layout = geometry_of(group.layout(1, DISK))
            os.truncate(slab_of(group, 1), places(layout).allocations[0] + 1000 * layout.config.block_bytes + 1)
            with group.agents[2].stopped():
                note = group.leader.execute_local_transfer(DISK, HOST, IDS, IDS, TransferOptions(timeout_s=20))
                await as_soon_as_free(lambda: arrived(group, 1))
                assert note.could_yield(), "it does not end before the last rank has"
            result = await in_time(note, 20)
            assert [outcome.is_done for outcome in result.outcomes] == [True, False, True]
            failed = result.outcomes[1]
            assert reasons(failed) == {"STORAGE_FAILED"}
            assert [failure.block for failure in failed.failures] == IDS[IDS >= 1000].tolist()
            count = f"rank 1: {len(failed.failures)} of {len(IDS)} blocks, first block {failed.failures[0].block}: "
            assert f"{count}STORAGE_FAILED: " in str(TransferFailed(result))
            for rank, outcome in enumerate(result.outcomes):
                expected, before = group.content(OLD, rank)[IDS], group.content(NEW, rank)
                check_blocks(group.view(rank), IDS, expected, before, outcome)
            await group.fill(NEW)
            await copy(group, HOST, DISK, ALL)
            for rank in range(3):
                check_same(await group.read(rank, ALL, DISK), group.content(NEW, rank))

    asyncio.run(test())


async def arrived(group: ServedGroup, rank: int) -> None:
    """Returns once the first block is what the disk held and nobody writes it; raises while somebody does."""
    async with asyncio.timeout(20):
        while not np.array_equal((await group.read(rank, IDS[:1]))[0], group.content(OLD, rank)[IDS[0]]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.fact("T122")
def test_one_rank_whose_disk_is_full_and_one_that_is_killed_while_it_writes():
    """Both causes are told. The killed one is started again: what it tore is refused, all else is there."""

    async def test() -> None:
        shared = crew()
        async with served(shared, shared.halves(), host_blocks=NUM_BLOCKS, disk_blocks=NUM_BLOCKS) as group:
            await group.fill(OLD)
            await copy(group, HOST, DISK, ALL)
            await group.fill(NEW)
            full, victim = group.agents
            layout = geometry_of(group.layout(0, DISK))
            limit = places(layout).allocations[0] + 1500 * layout.config.block_bytes + 12345
            with no_file_larger_than(limit, full):
                found = await caught(
                    victim, on_disk(group, 1), IDS, lambda _: group.leader.execute_local_transfer(HOST, DISK, IDS, IDS)
                )
                victim.kill()
                result = await in_time(found.note, 60)
            text = str(TransferFailed(result))
            assert "no room is left" in text
            assert "was lost during ExecuteLocalTransfer" in text
            assert [reasons(outcome) for outcome in result.outcomes] == [{"STORAGE_FAILED"}, {"PEER_LOST"}]
            old = group.content(OLD, 0)
            check_blocks(np.array(on_disk(group, 0)), IDS, group.content(NEW, 0)[IDS], old, result.outcomes[0])
            assert 0 < np.setdiff1d(IDS, [f.block for f in result.outcomes[0].failures]).max() < 1500
            await started_again(group)

    asyncio.run(test())


async def started_again(group: ServedGroup) -> None:
    """The slab of rank 1 is recovered, but for blocks that were being written and one that is damaged now."""
    damaged = 16
    on_disk(group, 1)[damaged, 5000] ^= 1
    await asyncio.to_thread(group.agents[1].restart)
    await group.dial_again(1)
    await group.configure()
    await group.fill(OLD)
    result = await group.leader.execute_local_transfer(DISK, HOST, ALL, ALL).result()
    torn = [failure.block for failure in result.outcomes[1].failures]
    assert damaged in torn
    assert reasons(result.outcomes[1]) == {"CHECKSUM"}
    good = np.setdiff1d(ALL, torn)
    old, new, now = group.content(OLD, 1)[good], group.content(NEW, 1)[good], group.view(1)[good]
    is_old, is_new = (now == old).all(axis=1), (now == new).all(axis=1)
    assert (is_old | is_new).all()
    assert is_old[good % 16 == 0].all()
    with pytest.raises(BlocksRefused) as refused:
        await group.read(1, [*good[:8], damaged, *good[8:16]], DISK)
    assert refused.value.failures == {8: "CHECKSUM"}, "a peer that reads them loses the damaged one alone"
    await group.fill(NEW)
    await copy(group, HOST, DISK, ALL)
    check_same(await group.read(1, ALL, DISK), group.content(NEW, 1))
