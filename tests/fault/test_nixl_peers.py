"""Peers in processes of their own that are killed, stopped and started again while blocks move through NIXL.

Over TCP, where the peer takes part in every transfer. Skipped where NIXL is not installed.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from tests.support import nixl_peer
from tests.support.block_peer import blocks_of, config, descriptor, filled
from tests.support.nixl_peer import Program, digest
from worker_agent.blocks.engine import Move, MoveResult, Ticket
from worker_agent.blocks.engines import nixl_descriptors
from worker_agent.blocks.engines.nixl_engine import NixlEngine
from worker_agent.blocks.engines.nixl_link import CLOSE_S, NixlLink
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Memory

pytestmark = nixl_peer.NEEDED

NUM_BLOCKS = 2048
GEOMETRY = Geometry(config=config(num_blocks=NUM_BLOCKS, region_bytes=1 << 14))
"""128 MiB in blocks of 64 KiB: enough for a move to be caught in the middle."""

MOVED, GUARDS = np.arange(0, NUM_BLOCKS, 2), np.arange(1, NUM_BLOCKS, 2)

DEAD_WITHIN = 0.2
"""Seconds within which a dead peer must be noticed."""

BUSY = 1.0
"""Seconds more, because the machine may have other work."""

LIMIT = 30.0


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nixl_peer.TCP.items():
        monkeypatch.setenv(name, value)
    for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
        monkeypatch.setenv(name, "256k")
    monkeypatch.setattr(nixl_descriptors, "REQUEST_BYTES", 8 << 20)


async def connect(engine: NixlEngine, peer: Program) -> NixlLink:
    return await engine.connect(peer.metadata, peer.export, asyncio.get_running_loop().time() + LIMIT)


def start(link: NixlLink, way: str, local: Memory, limit: float = LIMIT, blocks: np.ndarray = MOVED) -> Ticket:
    deadline = asyncio.get_running_loop().time() + limit
    remote = descriptor(GEOMETRY)
    move = Move(remote=remote, remote_blocks=blocks, local=local, local_blocks=blocks, deadline=deadline)
    return link.pull(move) if way == "pull" else link.push(move)


async def ended(ticket: Ticket) -> MoveResult:
    async with asyncio.timeout(LIMIT + 5):
        await asyncio.wait({ticket.quiesced})
        return ticket.outcome.result()


async def disturbed(
    link: NixlLink, way: str, local: Memory, peer: Program, number: int, limit: float = LIMIT
) -> Ticket:
    """Starts a move and sends its peer a signal in the middle of it."""
    before = blocks_of(local, [0])
    ticket = start(link, way, local, limit)
    if way == "pull":
        while np.array_equal(blocks_of(local, [0]), before):
            assert not ticket.outcome.done(), "the move was over before it could be disturbed"
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(0.005)  # Nothing on this side shows how far a push is.
    os.kill(peer.process.pid, number)
    assert not ticket.outcome.done(), "the move was over before it could be disturbed"
    return ticket


def check(result: MoveResult, way: str, local: Memory, expected: np.ndarray, before: np.ndarray, reason: str) -> None:
    failed = [index for index, _ in result.failures]
    assert failed
    assert {failure.reason for _, failure in result.failures} == {reason}
    assert result.moved_bytes == (len(MOVED) - len(failed)) * (1 << 16)
    now = blocks_of(local)
    assert np.array_equal(now[GUARDS], before[GUARDS])
    if way == "pull":
        done = MOVED[np.delete(np.arange(len(MOVED)), failed)]
        assert np.array_equal(now[done], expected[done])


def run(test: Callable[[NixlEngine], Coroutine[Any, Any, None]]) -> None:
    async def with_engine() -> None:
        engine = NixlEngine()
        await test(engine)
        await engine.close()

    asyncio.run(with_engine())


@pytest.mark.parametrize("way", ["pull", "push"])
def test_killed_peer_is_noticed_and_one_that_is_started_again_can_be_connected(way):
    async def test(engine: NixlEngine) -> None:
        local, expected = filled(GEOMETRY, seed=2), blocks_of(filled(GEOMETRY, seed=1))
        before = blocks_of(local)
        with Program(GEOMETRY, nixl_peer.TCP) as peer:
            link = await connect(engine, peer)
            ticket = await disturbed(link, way, local, peer, signal.SIGKILL)
            began = time.monotonic()
            result = await ended(ticket)
            assert time.monotonic() - began < DEAD_WITHIN + BUSY
            check(result, way, local, expected, before, "PEER_LOST")
            again = await ended(start(link, way, local, blocks=MOVED[:1]))
            assert [failure.reason for _, failure in again.failures] == ["PEER_LOST"], "and stays lost"
        with Program(GEOMETRY, nixl_peer.TCP, seed=5) as peer:
            new = await connect(engine, peer)
            assert not (await ended(start(new, "pull", local))).failures
            assert np.array_equal(blocks_of(local, MOVED), blocks_of(filled(GEOMETRY, seed=5), MOVED))
            await new.close()
        await link.close()

    run(test)


@pytest.mark.parametrize("way", ["pull", "push"])
def test_blocks_of_a_frozen_peer_stay_in_quarantine_until_the_requests_have_ended(way):
    async def test(engine: NixlEngine) -> None:
        local, expected = filled(GEOMETRY, seed=2), blocks_of(filled(GEOMETRY, seed=1))
        before = blocks_of(local)
        with Program(GEOMETRY, nixl_peer.TCP) as peer:
            link = await connect(engine, peer)
            ticket = await disturbed(link, way, local, peer, signal.SIGSTOP, limit=1.0)
            began = time.monotonic()
            result = await asyncio.shield(ticket.outcome)
            assert time.monotonic() - began < 1.0 + BUSY
            check(result, way, local, expected, before, "DEADLINE")
            await asyncio.sleep(0.3)
            assert not ticket.quiesced.done(), "bytes can still land"
            os.kill(peer.process.pid, signal.SIGCONT)
            await ended(ticket)
            after, theirs = blocks_of(local), peer.ask("read")
            await asyncio.sleep(0.2)
            assert np.array_equal(blocks_of(local), after), "bytes landed after the move was quiesced"
            assert peer.ask("read") == theirs
            assert not (await ended(start(link, way, local))).failures
            await link.close()

    run(test)


def test_link_to_a_frozen_peer_can_be_closed_and_nothing_lands_afterwards():
    async def test(engine: NixlEngine) -> None:
        local, expected = filled(GEOMETRY, seed=2), blocks_of(filled(GEOMETRY, seed=1))
        before = blocks_of(local)
        with Program(GEOMETRY, nixl_peer.TCP) as peer:
            link = await connect(engine, peer)
            ticket = await disturbed(link, "pull", local, peer, signal.SIGSTOP)
            began = time.monotonic()
            await link.close()
            assert time.monotonic() - began < CLOSE_S + BUSY
            assert ticket.quiesced.done()
            check(ticket.outcome.result(), "pull", local, expected, before, "PEER_LOST")
            after = blocks_of(local)
            os.kill(peer.process.pid, signal.SIGCONT)
            await asyncio.sleep(0.5)
            assert np.array_equal(blocks_of(local), after), "bytes landed after the link was closed"

    run(test)


def test_connecting_to_a_frozen_peer_ends_at_the_deadline():
    async def test(engine: NixlEngine) -> None:
        with Program(GEOMETRY, nixl_peer.TCP) as peer:
            os.kill(peer.process.pid, signal.SIGSTOP)
            began = time.monotonic()
            deadline = asyncio.get_running_loop().time() + 1.0
            with pytest.raises(Exception, match=r"did not end within|in time") as error:
                await engine.connect(peer.metadata, peer.export, deadline)
            assert getattr(error.value, "reason", "") == "DEADLINE"
            assert time.monotonic() - began < 1.0 + BUSY

    run(test)


def test_frozen_peer_on_the_same_host_is_read_all_the_same(monkeypatch):
    """The kernel copies from a stopped process."""
    monkeypatch.setenv("UCX_TLS", "all")

    async def test(engine: NixlEngine) -> None:
        local = filled(GEOMETRY, seed=2)
        with Program(GEOMETRY, nixl_peer.LOOPBACK | {"UCX_TLS": "all"}) as peer:
            link = await connect(engine, peer)
            # The peer takes part until both sides have agreed on the ways between them.
            assert not (await ended(start(link, "push", filled(GEOMETRY, seed=1)))).failures
            os.kill(peer.process.pid, signal.SIGSTOP)
            assert not (await ended(start(link, "pull", local, blocks=np.arange(NUM_BLOCKS)))).failures
            os.kill(peer.process.pid, signal.SIGCONT)
            assert peer.ask("read") == digest(local)
            await link.close()

    run(test)
