"""A group's own ranks that are killed or stand still in a call; calls that run out, are given up, or meet in one block.

Two agents pull from four. The disturbed agent is rank 1 of the group that pulls.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from ayni.blocks.layouts import Tier
from ayni.blocks.transfers import RemoteBlocks, TransferOptions, TransferOutcome
from ayni.blocks.worker import Notification
from tests.support.block_groups import soon
from tests.support.served_groups import (
    DISK,
    HOST,
    ServedGroup,
    as_soon_as_free,
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
GUARDS = np.setdiff1d(np.arange(NUM_BLOCKS), IDS)
VICTIM = 1

FAR, NEAR, OTHER = range(1, 4)
"""What blocks are filled with."""


def check_all_failed(outcome: TransferOutcome, reason: str) -> None:
    assert outcome.num_done == 0
    assert [failure.index for failure in outcome.failures] == list(range(len(IDS)))
    assert reasons(outcome) == {reason}


async def check_rank_0(near: ServedGroup, far: ServedGroup, sources: np.ndarray, outcome: TransferOutcome) -> None:
    assert outcome.is_done
    expected = whole_content(far, FAR, near, 0)[sources]
    check_blocks(near.view(0), IDS, expected, np.zeros_like(near.view(0)), outcome)


async def check_pull(near: ServedGroup, far: ServedGroup) -> None:
    """The next call works on all ranks."""
    result = await pull(near, far, IDS[::-1], IDS, 20).result()
    assert result.is_done, result
    for rank in range(near.size):
        check_same(near.view(rank)[IDS], whole_content(far, FAR, near, rank)[IDS[::-1]])


@pytest.mark.fact("T125", "T126")
def test_own_rank_killed_in_the_middle_of_a_pull_and_started_again():
    async def test() -> None:
        async with joined_groups(NUM_BLOCKS, FAR, "shm", "grpc") as (far, near):
            victim = near.agents[VICTIM]
            found = await caught(victim, near.view(VICTIM), IDS, lambda sources: pull(near, far, sources, IDS, 20))
            victim.kill()
            killed = time.monotonic()
            result = await in_time(found.note, 20)
            assert time.monotonic() - killed < 2, "a dead rank is noticed long before the deadline"
            check_all_failed(result.outcomes[VICTIM], "PEER_LOST")
            assert not result.outcomes[VICTIM].quiesced
            await check_rank_0(near, far, found.sources, result.outcomes[0])
            again = await pull(near, far, IDS, IDS, 20).result()
            assert again.outcomes[0].is_done
            check_all_failed(again.outcomes[VICTIM], "PEER_LOST")
            await asyncio.to_thread(victim.restart)
            await near.dial_again(VICTIM)
            kept = near.view(0).copy()
            await near.configure()
            check_same(near.view(0), kept)
            assert not near.view(VICTIM).any()
            await near.connect(far, "shm", "grpc")
            await check_pull(near, far)

    asyncio.run(test())


@pytest.mark.fact("T125")
@pytest.mark.parametrize("engine", ["grpc", "shm"])
def test_own_rank_that_stands_still_in_the_middle_of_a_pull(engine):
    """Its blocks are free once its copies have ended: what is written to them then stays."""

    async def test() -> None:
        async with joined_groups(NUM_BLOCKS, FAR, engine) as (far, near):
            victim, view = near.agents[VICTIM], near.view(VICTIM)
            found = await caught(victim, view, IDS, lambda sources: pull(near, far, sources, IDS, 1))
            result = await in_time(found.note, 1)
            check_all_failed(result.outcomes[VICTIM], "DEADLINE")
            assert not result.outcomes[VICTIM].quiesced
            await check_rank_0(near, far, found.sources, result.outcomes[0])
            content = near.content(OTHER, VICTIM)[IDS]
            victim.go_on()
            await as_soon_as_free(partial(near.write, VICTIM, IDS, content))
            assert (await pull(near, far, GUARDS, GUARDS, 20).result()).is_done
            await soon(found.note.quiesced(), "the transfer of the rank that stood still")
            check_same(view[IDS], content)
            await check_pull(near, far)

    asyncio.run(test())


@pytest.mark.parametrize("way", ["pull", "push", "local"])
def test_large_transfer_that_runs_out_of_time(way):
    """What was copied in time is right, the rest has failed, and the blocks are free."""

    async def test() -> None:
        async with joined_groups(NUM_BLOCKS, FAR, "grpc", halves=True, disk=way == "local") as (far, near):
            starts: dict[str, Callable[[TransferOptions], Notification]] = {
                "pull": lambda options: near.leader.execute_remote_onboard_for_instance(
                    far.instance_id, Tier.HOST, IDS[::-1], HOST, IDS, options
                ),
                "push": lambda options: near.leader.execute_remote_offload(
                    HOST, IDS[::-1], RemoteBlocks(layout=far.layout(0).handle, blocks=IDS), options
                ),
                "local": lambda options: near.leader.execute_local_transfer(HOST, DISK, IDS[::-1], IDS, options),
            }
            await near.fill(NEAR)
            source, destination, place = {
                "pull": (far.content(FAR, 0), near, HOST),
                "push": (near.content(NEAR, 0), far, HOST),
                "local": (near.content(NEAR, 0), near, DISK),
            }[way]
            if way == "local":
                await near.leader.execute_local_transfer(HOST, DISK, range(NUM_BLOCKS), range(NUM_BLOCKS))
            before = await destination.read(0, range(NUM_BLOCKS), place)
            result = await in_time(starts[way](TransferOptions(timeout_s=0.5, drain_s=0.49)), 0.5)
            outcome = result.outcomes[0]
            assert outcome.failures
            assert reasons(outcome) == {"DEADLINE"}
            done = np.delete(IDS, [failure.index for failure in outcome.failures])
            left = np.setdiff1d(IDS, done)
            await as_soon_as_free(partial(destination.write, 0, left, before[left], place))
            after = await destination.read(0, range(NUM_BLOCKS), place)
            expected = before.copy()
            expected[done] = source[IDS[::-1]][np.isin(IDS, done)]
            check_same(after, expected)
            assert (await starts[way](TransferOptions())).is_done

    asyncio.run(test())


def test_transfer_that_is_given_up_ends_on_all_ranks():
    """The agents stop at once, long before the deadline."""

    async def test() -> None:
        async with joined_groups(NUM_BLOCKS, FAR, "grpc") as (far, near):
            found = await caught(
                near.agents[VICTIM], near.view(VICTIM), IDS, lambda sources: pull(near, far, sources, IDS, 60)
            )
            found.note.cancel()
            near.agents[VICTIM].go_on()
            result = await soon(found.note.result(), "a transfer that was given up", 3)
            check_all_failed(result.outcomes[VICTIM], "CANCELLED")
            for rank in range(near.size):
                await as_soon_as_free(partial(near.write, rank, IDS, near.content(OTHER, rank)[IDS]), 3)
            for rank in range(far.size):
                # A read holds all of its blocks until it ends.
                await as_soon_as_free(partial(far.write, rank, [0, 1], far.content(FAR, rank)[:2]), 3)
            assert (await pull(near, far, GUARDS, GUARDS, 20).result()).is_done
            for rank in range(near.size):
                check_same(near.view(rank)[IDS], near.content(OTHER, rank)[IDS])
            await check_pull(near, far)

    asyncio.run(test())


@pytest.mark.parametrize("engine", ["grpc", "shm"])
def test_transfers_into_the_same_blocks_do_not_meet(engine):
    """Each is done or refused as a whole on each rank, and the blocks hold what one of them brought."""

    async def test() -> None:
        async with joined_groups(NUM_BLOCKS, FAR, engine) as (far, near):
            sources = [np.roll(IDS, shift) for shift in range(1, 7)]
            results = await asyncio.gather(*(pull(near, far, each, IDS, 20).result() for each in sources))
            for rank in range(near.size):
                outcomes = [result.outcomes[rank] for result in results]
                done = [each for each, outcome in zip(sources, outcomes, strict=True) if outcome.is_done]
                assert done
                assert len(done) < len(sources), "no two of them were under way at one time"
                for outcome in outcomes:
                    if not outcome.is_done:
                        check_all_failed(outcome, "BLOCK_BUSY")
                now, content = near.view(rank), whole_content(far, FAR, near, rank)
                assert any(np.array_equal(now[IDS], content[each]) for each in done)
                assert not now[GUARDS].any()

    asyncio.run(test())
