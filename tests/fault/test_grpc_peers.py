"""Peers in processes of their own that are killed, stopped and started again while blocks move through gRPC."""

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from ayni.endpoints import Keepalive
from ayni.errors import AyniError
from tests.support.block_peer import TOKEN, Program, blocks_of, config, descriptor, filled
from worker_agent.blocks.engine import Move, MoveResult, Ticket
from worker_agent.blocks.engines.grpc_engine import Dialling, GrpcEngine
from worker_agent.blocks.engines.grpc_link import GrpcLink
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Memory

NUM_BLOCKS = 2048
GEOMETRY = Geometry(config=config(num_blocks=NUM_BLOCKS, region_bytes=1 << 14))
"""128 MiB in blocks of 64 KiB: enough for a move to be caught in the middle."""

MOVED, GUARDS = np.arange(0, NUM_BLOCKS, 2), np.arange(1, NUM_BLOCKS, 2)

KEEPALIVE = Keepalive(interval=timedelta(seconds=1), timeout=timedelta(seconds=1))
NOTICED_WITHIN = 2.5
"""Seconds: interval + timeout + 0.5."""

DEAD_WITHIN = 0.2
"""Seconds within which a dead peer must be noticed."""

BUSY = 1.0
"""Seconds more for both, because the machine may have other work."""

LIMIT = 30.0


def engine() -> GrpcEngine:
    return GrpcEngine(Dialling(token=TOKEN, keepalive=KEEPALIVE))


async def connect(peer: Program) -> GrpcLink:
    return await engine().connect(peer.metadata, peer.export, asyncio.get_running_loop().time() + LIMIT)


def start(link: GrpcLink, way: str, local: Memory, limit: float = LIMIT, blocks: np.ndarray = MOVED) -> Ticket:
    deadline = asyncio.get_running_loop().time() + limit
    remote = descriptor(GEOMETRY)
    move = Move(remote=remote, remote_blocks=blocks, local=local, local_blocks=blocks, deadline=deadline)
    return link.pull(move) if way == "pull" else link.push(move)


async def ended(ticket: Ticket) -> MoveResult:
    async with asyncio.timeout(LIMIT + 5):
        await ticket.quiesced
        return await ticket.outcome


async def disturbed(link: GrpcLink, way: str, local: Memory, disturb: Callable[[], None], limit: float = LIMIT) -> Any:
    """Starts a move, disturbs it in the middle; returns its result, the seconds until then, and its ticket."""
    before = blocks_of(local, [0])
    ticket = start(link, way, local, limit)
    if way == "pull":
        while np.array_equal(blocks_of(local, [0]), before):
            assert not ticket.outcome.done(), "the move was over before it could be disturbed"
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(0.02)  # Nothing on this side shows how far a push is.
    disturb()
    assert not ticket.outcome.done(), "the move was over before it could be disturbed"
    began = time.monotonic()
    result = await asyncio.shield(ticket.outcome)
    seconds = time.monotonic() - began
    if way == "pull":
        assert await ended(ticket) is result
    return result, seconds, ticket


def check(result: MoveResult, way: str, local: Memory, expected: np.ndarray, before: np.ndarray, reason: str) -> None:
    """Nothing counts as moved without the peer's last word, and says why; nothing beside the destinations changed."""
    failed = [index for index, _ in result.failures]
    assert failed
    assert {failure.reason for _, failure in result.failures} == {reason}
    assert result.moved_bytes == 0
    assert len(failed) == len(MOVED)
    now = blocks_of(local)
    if way == "push":
        assert np.array_equal(now, before)
        return
    assert np.array_equal(now[MOVED[0]], expected[MOVED[0]]), "the move was disturbed before it began"
    assert np.array_equal(now[GUARDS], before[GUARDS])


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("way", ["pull", "push"])
def test_peer_killed_in_the_middle_of_a_move(way):
    async def test() -> None:
        local, expected = filled(GEOMETRY, seed=2), blocks_of(filled(GEOMETRY, seed=1))
        before = blocks_of(local)
        with Program(GEOMETRY) as peer:
            link = await connect(peer)
            result, seconds, ticket = await disturbed(link, way, local, peer.process.kill)
            await ended(ticket)
            check(result, way, local, expected, before, "PEER_LOST")
            assert seconds < DEAD_WITHIN + BUSY
            ticket = start(link, way, local)
            assert {f.reason for _, f in (await ended(ticket)).failures} == {"PEER_LOST"}, "and stays lost"
            await link.close()

    run(test)


@pytest.mark.parametrize("way", ["pull", "push"])
def test_frozen_peer_is_noticed_by_keepalive(way):
    async def test() -> None:
        local, expected = filled(GEOMETRY, seed=2), blocks_of(filled(GEOMETRY, seed=1))
        before = blocks_of(local)
        with Program(GEOMETRY) as peer:
            link = await connect(peer)
            freeze = lambda: os.kill(peer.process.pid, signal.SIGSTOP)  # noqa: E731
            result, seconds, ticket = await disturbed(link, way, local, freeze)
            check(result, way, local, expected, before, "PEER_LOST")
            assert seconds < NOTICED_WITHIN + BUSY
            after = blocks_of(local)
            await check_wakes(peer, ticket, way)
            await moves_again(link, way, local)
            assert np.array_equal(blocks_of(local)[GUARDS], after[GUARDS])
            await link.close()

    run(test)


async def check_wakes(peer: Program, ticket: Ticket, way: str) -> None:
    """Wakes a frozen peer; until then nobody knows whether what it was sent will land."""
    if way == "push":
        await asyncio.wait({ticket.quiesced}, timeout=3.0)
        assert not ticket.quiesced.done()
    os.kill(peer.process.pid, signal.SIGCONT)
    await ended(ticket)


async def moves_again(link: GrpcLink, way: str, local: Memory) -> None:
    """Moves a block as soon as the connection is there again."""
    async with asyncio.timeout(LIMIT):
        # Nobody tells when gRPC connects again.
        while (await ended(start(link, way, local, blocks=MOVED[-1:]))).failures:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("way", ["pull", "push"])
def test_deadline_comes_before_a_frozen_peer_is_noticed(way):
    async def test() -> None:
        local, expected = filled(GEOMETRY, seed=2), blocks_of(filled(GEOMETRY, seed=1))
        before = blocks_of(local)
        with Program(GEOMETRY) as peer:
            link = await connect(peer)
            result, seconds, ticket = await disturbed(
                link, way, local, lambda: os.kill(peer.process.pid, signal.SIGSTOP), limit=1.0
            )
            check(result, way, local, expected, before, "DEADLINE")
            assert seconds < 1.0 + BUSY
            after = blocks_of(local)
            await check_wakes(peer, ticket, way)
            await moves_again(link, "push", local)
            assert np.array_equal(blocks_of(local), after), "bytes landed after the move was quiesced"
            await link.close()

    run(test)


def test_peer_that_was_started_again_is_another_one():
    async def test() -> None:
        local = filled(GEOMETRY, seed=2)
        with Program(GEOMETRY, incarnation=1) as peer:
            link = await connect(peer)
            address = peer.address
        with Program(GEOMETRY, incarnation=2, address=address, seed=5) as again:
            assert again.address == address
            before = blocks_of(local)
            async with asyncio.timeout(LIMIT):
                while "PEER_LOST" in (reasons := await reasons_of(link, local)):  # noqa: ASYNC110 -- as above
                    await asyncio.sleep(0.05)
            assert reasons == {"STALE_EPOCH"}
            assert np.array_equal(blocks_of(local), before)
            new = await connect(again)
            assert not (await ended(start(new, "pull", local))).failures
            assert np.array_equal(blocks_of(local, MOVED), blocks_of(filled(GEOMETRY, seed=5), MOVED))
            await link.close()
            await new.close()
            old = dataclasses.replace(again.metadata, incarnation=1)
            with pytest.raises(AyniError) as error:
                await engine().connect(old, again.export, asyncio.get_running_loop().time() + LIMIT)
            assert error.value.reason == "STALE_EPOCH"

    run(test)


async def reasons_of(link: GrpcLink, local: Memory) -> set[str]:
    return {failure.reason for _, failure in (await ended(start(link, "pull", local))).failures}


def test_connecting_to_a_frozen_peer_ends_at_the_deadline():
    async def test() -> None:
        with Program(GEOMETRY) as peer:
            os.kill(peer.process.pid, signal.SIGSTOP)
            loop = asyncio.get_running_loop()
            began = loop.time()
            with pytest.raises(AyniError) as error:
                await engine().connect(peer.metadata, peer.export, began + 1.0)
            assert error.value.reason == "DEADLINE"
            assert loop.time() - began < 1.0 + BUSY

    run(test)
