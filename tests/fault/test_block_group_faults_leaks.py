"""Blocks go back and forth between groups of processes, calls fail and agents die: nothing is left behind by it."""

import asyncio
import contextlib
from collections import Counter
from functools import partial

import numpy as np
import pytest

from ayni.blocks.layouts import Axis, AxisOrder, Tier
from ayni.blocks.transfers import AxisSlice, PullPlan, PullShard, TransferOptions
from ayni.blocks.worker import Notification
from tests.support.block_groups import soon
from tests.support.serve_agents import SOON_S, ServeAgent, crew, wait_until
from tests.support.served_groups import (
    HOST,
    BlocksRefused,
    ServedGroup,
    as_soon_as_free,
    check_same,
    joined_groups,
    pull,
    reasons,
    whole_content,
)

NUM_BLOCKS = 512
FAR, NEAR = range(1, 3)
"""What blocks are filled with."""


def rows_of(group: ServedGroup) -> list[np.ndarray]:
    return [group.view(rank).copy() for rank in range(group.size)]


@pytest.mark.fact("T99", "T100")
@pytest.mark.parametrize("engine", ["grpc", "shm"])
def test_blocks_go_from_four_ranks_to_two_and_back(engine):
    async def test() -> None:
        async with joined_groups(NUM_BLOCKS, FAR, engine) as (far, near):
            await near.fill(NEAR)
            await far.connect(near, engine)
            there, back = np.arange(3, 403), np.random.default_rng(0).permutation(NUM_BLOCKS)[:400]
            assert (await pull(near, far, np.arange(400), there, SOON_S).result()).is_done
            for rank, rows in enumerate(rows_of(near)):
                expected = near.content(NEAR, rank)
                expected[there] = whole_content(far, FAR, near, rank)[:400]
                check_same(rows, expected)
            for rank in range(far.size):
                await far.write(rank, range(NUM_BLOCKS), np.zeros_like(far.view(rank)))
            waves = [(there[:150], back[:150]), (there[150:], back[150:])]
            results = await asyncio.gather(*(pull(far, near, *wave, SOON_S).result() for wave in waves))
            assert all(result.is_done for result in results)
            for rank, rows in enumerate(rows_of(far)):
                expected = np.zeros_like(rows)
                expected[back] = far.content(FAR, rank)[:400]
                check_same(rows, expected)
            # The roles are exchanged with other blocks: those that were never moved go the other way.
            rest = np.setdiff1d(np.arange(NUM_BLOCKS), there)
            free = np.setdiff1d(np.arange(NUM_BLOCKS), back)[: len(rest)]
            assert (await pull(far, near, rest, free, SOON_S).result()).is_done
            for rank, rows in enumerate(rows_of(far)):
                check_same(rows[free], whole_content(near, NEAR, far, rank)[rest])
                check_same(rows[back], far.content(FAR, rank)[:400])

    asyncio.run(test())


async def refused(near: ServedGroup, far: ServedGroup) -> None:
    """Calls that fail at every stage."""
    everything = np.arange(NUM_BLOCKS)
    unknown = await pull(near, far, everything + 1, everything, SOON_S).result()
    late = await pull(near, far, everything, everything, 0.6).result()
    given_up = pull(near, far, everything, everything, SOON_S)
    given_up.cancel()
    assert not unknown.is_done
    assert late.quiesced
    assert not (await given_up.result()).is_done
    await soon(given_up.quiesced(), "a transfer that was given up")


def start_dialling(near: ServedGroup, far: ServedGroup) -> Notification:
    """Starts a pull for which another link has to be opened: checksums go through gRPC."""
    everything = np.arange(NUM_BLOCKS)
    options = TransferOptions(timeout_s=SOON_S, checksum=True)
    return near.leader.execute_remote_onboard_for_instance(
        far.instance_id, Tier.HOST, everything, HOST, everything, options
    )


async def ended_while_dialling(near: ServedGroup, far: ServedGroup) -> None:
    """Pulls that open a link to a peer that stands still are given up, or the peer is forgotten."""
    with far.agents[0].stopped():
        note = start_dialling(near, far)
        await busy(near)
        note.cancel()
        await as_soon_as_free(partial(near.write, 0, [0], near.content(NEAR, 0)[:1]), 3)
        await soon(note.quiesced(), "a transfer that was given up")
        note = start_dialling(near, far)
        await busy(near)
        await soon(near.leader.disconnect_remote(far.instance_id), "disconnecting")
        assert note.could_yield()
    result = await soon(note.result(), "a transfer whose peer was forgotten")
    assert reasons(result.outcomes[0]) == {"PEER_LOST"}
    await soon(note.quiesced(), "a transfer whose peer was forgotten")


async def busy(near: ServedGroup) -> None:
    """Waits until a transfer has taken the blocks of rank 0."""
    async with asyncio.timeout(SOON_S):
        with contextlib.suppress(BlocksRefused):
            while True:
                await near.read(0, [0])


def held(agent: ServeAgent) -> tuple[list[str], int]:
    """What an agent holds: descriptors, and mappings of shared memory."""
    return agent.open_files(), agent.num_mappings()


def test_nothing_is_left_behind_by_calls_that_fail():
    async def test() -> None:
        async with joined_groups(NUM_BLOCKS, FAR) as (far, near):
            agents = [*near.agents, *far.agents]
            await near.leader.disconnect_remote(far.instance_id)
            before: dict[str, tuple[list[str], int]] = {}
            for round_ in range(4):
                await near.connect(far)
                await refused(near, far)
                await ended_while_dialling(near, far)
                if round_ == 0:  # gRPC opens a few descriptors for good when it is first used.
                    before = {agent.name: held(agent) for agent in agents}
            for agent in agents:
                _wait_until_it_holds(agent, before[agent.name])
            await near.connect(far)
            assert (await pull(near, far, np.arange(64), np.arange(64), SOON_S).result()).is_done
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(test())


def _wait_until_it_holds(agent: ServeAgent, before: tuple[list[str], int]) -> None:
    try:
        wait_until(partial(_holds, agent, before), f"{agent.name} to hold what it held")
    except AssertionError as error:
        files, num_mappings = held(agent)
        more = Counter(files) - Counter(before[0])
        raise AssertionError(f"{error}: {dict(more)} more, {num_mappings} mappings, not {before[1]}") from None


def _holds(agent: ServeAgent, before: tuple[list[str], int]) -> bool:
    """Says whether an agent holds no more than before, when something may still have been on its way out."""
    files, num_mappings = held(agent)
    return Counter(files) <= Counter(before[0]) and num_mappings <= before[1]


def test_sockets_of_killed_agents_are_gone_once_another_one_starts():
    async def test() -> None:
        shared = crew()
        async with joined_groups(NUM_BLOCKS, FAR) as (far, near):
            assert len(shared.sockets) == far.size + near.size
            dead = near.agents[1]
            dead.kill()
            await asyncio.to_thread(dead.restart)
            await near.dial_again(1)
            await near.configure()
            assert len(shared.sockets) == far.size + near.size
            await near.connect(far)
            assert (await pull(near, far, np.arange(64), np.arange(64), SOON_S).result()).is_done

    asyncio.run(test())


def test_part_of_a_pull_that_can_not_be_asked_for_ends_the_other_parts():
    """One peer was asked already when it turns out that the other one can not be; nothing of the first lands later."""

    async def test() -> None:
        async with joined_groups(NUM_BLOCKS, FAR, "grpc") as (far, near):
            everything = np.arange(NUM_BLOCKS)
            with far.agents[0].stopped():
                options = TransferOptions(source_axis_order=AxisOrder.HND)
                note = near.ranks[0].execute_remote_pull(plan_of(far, everything), options)
                result = await soon(note.result(), "a pull that is refused")
                content = near.content(FAR, 0)
                await as_soon_as_free(partial(near.write, 0, everything, content))
            assert reasons(result.outcomes[0]) == {"UNSUPPORTED"}
            assert (await pull(near, far, np.array([0]), np.array([0]), SOON_S).result()).is_done
            check_same(near.view(0)[1:], content[1:])

    asyncio.run(test())


def plan_of(far: ServedGroup, blocks: np.ndarray) -> PullPlan:
    """All of rank 0's blocks, and a slice of rank 1's: that can't be asked for in another axis order."""
    first, second = (AxisSlice(axis=Axis.HEAD_COUNT, start=start, stop=start + 2) for start in (0, 2))
    return PullPlan(
        instance_id=far.instance_id,
        remote_tier=Tier.HOST,
        source_blocks=blocks,
        destination=HOST,
        destination_blocks=blocks,
        shards=(
            PullShard(remote_rank=0, destination_slice=first),
            PullShard(remote_rank=1, source_slice=first, destination_slice=second),
        ),
    )
