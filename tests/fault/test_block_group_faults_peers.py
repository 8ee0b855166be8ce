"""Ranks of a remote group that are killed, stopped and started again while a group pulls from them.

Two agents pull from four: rank 0 from ranks 0 and 1, rank 1 from ranks 2 and 3. The disturbed agent is rank 3.
"""

import asyncio
import time
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from ayni.blocks.layouts import AxisOrder
from ayni.blocks.transfers import TransferOutcome
from ayni.errors import AyniError
from tests.support.block_groups import soon
from tests.support.serve_agents import CONNECT_S
from tests.support.served_groups import (
    BlocksRefused,
    ServedGroup,
    caught,
    check_blocks,
    check_same,
    in_time,
    joined_groups,
    pull,
    reasons,
    whole_content,
)

NUM_BLOCKS = 4096
IDS = np.array([block for block in range(NUM_BLOCKS) if block % 16])
"""Destinations; all others are guards."""
FEW = IDS[:64]
VICTIM = 3

FAR, AGAIN, OTHER = range(1, 4)
"""What blocks are filled with."""


def groups(engine: str) -> AbstractAsyncContextManager[tuple[ServedGroup, ServedGroup]]:
    """The group that is pulled from and the one that pulls; their ranks have blocks in different axis orders."""
    return joined_groups(NUM_BLOCKS, FAR, engine, order=AxisOrder.HND)


def check_failed(outcome: TransferOutcome, reason: str) -> None:
    assert outcome.failures
    assert reasons(outcome) == {reason}


async def works(near: ServedGroup, far: ServedGroup, label: int) -> None:
    """A pull of some blocks by all ranks."""
    result = await pull(near, far, FEW[::-1], FEW, 20).result()
    assert result.is_done, result
    for rank in range(near.size):
        expected = whole_content(far, label, near, rank)
        check_same(near.view(rank)[FEW], expected[FEW[::-1]])


@pytest.mark.fact("T126")
@pytest.mark.parametrize("engine", ["grpc", "shm"])
def test_peer_killed_in_the_middle_of_a_pull_and_started_again(engine):
    async def test() -> None:
        async with groups(engine) as (far, near):
            puller, victim = near.agents[1], far.agents[VICTIM]
            views = [near.view(rank) for rank in range(2)]
            untouched = views[0].copy()
            expected = [whole_content(far, FAR, near, rank) for rank in range(2)]
            found = await caught(puller, views[1], IDS, lambda sources: pull(near, far, sources, IDS, 20))
            victim.kill()
            killed = time.monotonic()
            puller.go_on()
            result = await in_time(found.note, 20)
            assert time.monotonic() - killed < 2, "a dead peer is noticed long before the deadline"
            assert result.quiesced
            assert result.outcomes[0].is_done
            check_failed(result.outcomes[1], "PEER_LOST")
            # A stream that ends without its last frame counts for nothing; memory is checked block by block.
            assert bool(result.outcomes[1].num_done) == (engine == "shm")
            for rank, before in enumerate((untouched, found.before)):
                check_blocks(views[rank], IDS, expected[rank][found.sources], before, result.outcomes[rank])
            await others_go_on(near, far)
            await started_again(near, far, engine)

    asyncio.run(test())


async def others_go_on(near: ServedGroup, far: ServedGroup) -> None:
    """The rank that needs the dead peer fails at once, the other one works."""
    began = time.monotonic()
    result = await pull(near, far, FEW, FEW, 20).result()
    assert time.monotonic() - began < 2
    assert result.outcomes[0].is_done
    check_failed(result.outcomes[1], "PEER_LOST")
    assert result.outcomes[1].num_done == 0


async def started_again(near: ServedGroup, far: ServedGroup, engine: str) -> None:
    """The peer comes back at the same address; nobody else is started again."""
    old = far.metadata
    assert not (await near.leader.has_remote_metadata(far.instance_id)).connected
    await asyncio.to_thread(far.agents[VICTIM].restart)
    await far.dial_again(VICTIM)
    assert not await far.configure()
    await far.fill(AGAIN)
    assert old[VICTIM].incarnation != far.metadata[VICTIM].incarnation
    assert old[VICTIM].address == far.metadata[VICTIM].address
    assert old[0] == far.metadata[0]
    for ranks in (["rank 1"], ["rank 0", "rank 1"]):
        # The first time only the rank that found it gone asks the peer; after that nobody is connected.
        with pytest.raises(AyniError) as refused:
            await soon(near.leader.connect_remote(far.instance_id, old, [engine]), "connecting")
        assert refused.value.reason == {"grpc": "STALE_EPOCH", "shm": "PEER_LOST"}[engine]
        assert all(f"{rank}: " in refused.value.message for rank in ranks)
        assert not (await near.leader.has_remote_metadata(far.instance_id)).connected
    await near.connect(far, engine)
    await works(near, far, AGAIN)


def test_peer_that_stands_still_in_the_middle_of_a_pull():
    """The pull ends at its deadline. What it left is free then, and nothing of it comes later."""

    async def test() -> None:
        async with groups("grpc") as (far, near):
            victim, view = far.agents[VICTIM], near.view(1)
            expected = [whole_content(far, FAR, near, rank) for rank in range(2)]
            untouched = near.view(0).copy()
            found = await caught(near.agents[1], view, IDS, lambda sources: pull(near, far, sources, IDS, 1.5))
            victim.stop()
            near.agents[1].go_on()
            with pytest.raises(BlocksRefused, match="BLOCK_BUSY"):
                await near.write(1, FEW, near.content(OTHER, 1)[FEW])
            result = await in_time(found.note, 1.5)
            assert result.quiesced
            assert result.outcomes[0].is_done
            check_failed(result.outcomes[1], "DEADLINE")
            for rank, before in enumerate((untouched, found.before)):
                check_blocks(near.view(rank), IDS, expected[rank][found.sources], before, result.outcomes[rank])
            await nothing_lands_later(near, far, IDS[[f.index for f in result.outcomes[1].failures]])
            await works(near, far, FAR)

    asyncio.run(test())


async def nothing_lands_later(near: ServedGroup, far: ServedGroup, blocks: np.ndarray) -> None:
    """Gives blocks of rank 1 new content; it is still there after the peer went on and did something else."""
    content = near.content(OTHER, 1)[blocks]
    await near.write(1, blocks, content)
    far.agents[VICTIM].go_on()
    await far.write(VICTIM, [0], far.content(FAR, VICTIM)[:1])
    guards = np.setdiff1d(np.arange(NUM_BLOCKS), IDS)
    assert (await pull(near, far, guards, guards, 20).result()).is_done
    check_same(near.view(1)[blocks], content)


def test_peer_that_stands_still_is_read_through_shared_memory_but_not_connected():
    async def test() -> None:
        async with groups("shm") as (far, near):
            with far.agents[VICTIM].stopped():
                await works(near, far, FAR)
                await near.leader.disconnect_remote(far.instance_id)
                began = time.monotonic()
                with pytest.raises(AyniError, match=r"rank 0: Deadline: .*rank 1: Deadline: ") as late:
                    await near.leader.connect_remote(far.instance_id, far.metadata)
                assert late.value.reason == "DEADLINE"
                assert time.monotonic() - began < CONNECT_S + 2
            await near.connect(far, "shm")
            await works(near, far, FAR)

    asyncio.run(test())
