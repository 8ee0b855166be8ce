"""Blocks through NIXL and UCX, on one host and over TCP: between two engines of one process, and with another process.

Skipped where NIXL is not installed.
"""

import asyncio
import os
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import Axis, AxisOrder, LayoutHandle, LayoutKind
from ayni.blocks.metadata import EngineExport
from ayni.blocks.transfers import AxisSlice
from ayni.errors import AyniError, Unsupported
from tests.support import nixl_peer
from tests.support.block_peer import HANDLE, blocks_of, config, descriptor, filled
from tests.support.grpc_pairs import Apart
from worker_agent.blocks.engine import Move, MoveResult, Ticket
from worker_agent.blocks.engines import nixl_agent, nixl_descriptors
from worker_agent.blocks.engines.nixl_engine import NixlEngine
from worker_agent.blocks.engines.nixl_envelope import decode, encode
from worker_agent.blocks.engines.nixl_link import NixlLink
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory
from worker_agent.blocks.memory import Memory, Part

pytestmark = nixl_peer.NEEDED

LIMIT = 30.0

FC, BLOCK_FIRST, BLOCK_SECOND = LayoutKind
NHD, HND, UNIVERSAL = AxisOrder.NHD, AxisOrder.HND, AxisOrder.UNIVERSAL


@pytest.fixture(autouse=True, params=["host", "tcp"])
def _transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP the owner's agent takes part in each transfer, on one host it may have none."""
    monkeypatch.setenv("UCX_TLS", "all")
    for name, value in (nixl_peer.TCP if request.param == "tcp" else nixl_peer.LOOPBACK).items():
        monkeypatch.setenv(name, value)
    for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
        monkeypatch.setenv(name, "256k")


def geometry(order: AxisOrder = NHD, kind: LayoutKind = FC, **fields: Any) -> Geometry:
    return Geometry(config=config(**fields), kind=kind, axis_order=order)


class Pair:
    """A peer that lends memory, and a link to it."""

    def __init__(self, owner: NixlEngine, ours: NixlEngine, memory: HostMemory, link: NixlLink) -> None:
        self.owner, self.ours, self.memory, self.link = owner, ours, memory, link

    def move(self, local: Memory, remote_blocks: Any, local_blocks: Any, limit: float = LIMIT, **options: Any) -> Move:
        return Move(
            remote=descriptor(self.memory.geometry),
            remote_blocks=as_ids(remote_blocks),
            local=local,
            local_blocks=as_ids(local_blocks),
            deadline=asyncio.get_running_loop().time() + limit,
            **options,
        )

    async def pull(self, local: Memory, remote_blocks: Any, local_blocks: Any, **options: Any) -> MoveResult:
        return await ended(self.link.pull(self.move(local, remote_blocks, local_blocks, **options)))

    async def push(self, local: Memory, remote_blocks: Any, local_blocks: Any, **options: Any) -> MoveResult:
        return await ended(self.link.push(self.move(local, remote_blocks, local_blocks, **options)))


async def ended(ticket: Ticket) -> MoveResult:
    async with asyncio.timeout(LIMIT + 5):
        await ticket.quiesced
        return await ticket.outcome


async def connect(ours: NixlEngine, memory: Memory, export: EngineExport | None) -> NixlLink:
    assert export
    worker = nixl_peer.worker(memory.geometry, export)
    return await ours.connect(worker, export, asyncio.get_running_loop().time() + LIMIT)


@asynccontextmanager
async def connected(memory: HostMemory, on_notify: Callable[[int], None] | None = None) -> AsyncIterator[Pair]:
    owner, ours = NixlEngine(), NixlEngine()
    owner.on_notify = on_notify
    owner.register(HANDLE, memory)
    pair = Pair(owner, ours, memory, await connect(ours, memory, owner.export()))
    try:
        yield pair
    finally:
        await pair.link.close()
        await ours.close()
        await owner.close()
        async with asyncio.timeout(LIMIT):
            # A thread that has been told to end does not say when it has.
            while any(thread.name.startswith("nixl") for thread in threading.enumerate()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("kinds", [(FC, FC), (BLOCK_SECOND, BLOCK_FIRST)])
def test_batches_of_any_size_arrive_and_nothing_else_changes(kinds, monkeypatch):
    """Both ways, permuted on both sides, with several requests; blocks around the destinations are compared."""
    monkeypatch.setattr(nixl_descriptors, "MOST_DESCRIPTORS", 64 if kinds == (FC, FC) else 500)

    async def test() -> None:
        remote = filled(geometry(kind=kinds[0], num_blocks=1100, region_bytes=1024), seed=1)
        local = filled(geometry(kind=kinds[1], num_blocks=1100, region_bytes=1024), seed=2)
        async with connected(remote) as pair:
            for num_blocks in (0, 1, 63, 64, 65, 1023, 1025):
                remote_ids, local_ids = (np.random.permutation(1100)[:num_blocks] for _ in range(2))
                expected = blocks_of(local)
                expected[local_ids] = blocks_of(remote, remote_ids)
                result = await pair.pull(local, remote_ids, local_ids)
                assert result == MoveResult(moved_bytes=num_blocks * 4096)
                assert np.array_equal(blocks_of(local), expected)

                expected = blocks_of(remote)
                expected[remote_ids] = blocks_of(local, np.sort(local_ids))
                result = await pair.push(local, remote_ids, np.sort(local_ids))
                assert result == MoveResult(moved_bytes=num_blocks * 4096)
                assert np.array_equal(blocks_of(remote), expected)

    run(test)


def test_large_blocks_move_too():
    async def test() -> None:
        remote, local = (filled(geometry(num_blocks=3, region_bytes=7 << 17), seed=seed) for seed in (1, 2))
        before = blocks_of(local)
        async with connected(remote) as pair:
            assert not (await pair.pull(local, [2, 0], [1, 2])).failures
        assert np.array_equal(blocks_of(local), np.stack([before[0], *blocks_of(remote, [2, 0])]))

    run(test)


def naive(data: np.ndarray, order: AxisOrder) -> np.ndarray:
    """Returns blocks' elements as [N, layer, outer, page, head, element of uint16]."""
    shapes = {NHD: (2, 2, 2, 4, -1), HND: (2, 2, 4, 2, -1), UNIVERSAL: (4, 2, 2, 2, -1)}
    places = {NHD: (0, 1, 2, 3, 4, 5), HND: (0, 1, 2, 4, 3, 5), UNIVERSAL: (0, 2, 3, 4, 1, 5)}
    return data.view(np.uint16).reshape(len(data), *shapes[order]).transpose(places[order])


HEADS = AxisSlice(axis=Axis.HEAD_COUNT, start=1, stop=3)
PARTS = {
    "whole": (Part(), slice(None), slice(None)),
    "layer": (Part(layers=(1, 2)), slice(1, 2), slice(None)),
    "heads": (Part(slice=HEADS), slice(None), slice(1, 3)),
    "both": (Part(layers=(0, 1), slice=HEADS), slice(0, 1), slice(1, 3)),
}


@pytest.mark.parametrize("local_kind", [FC, BLOCK_SECOND])
@pytest.mark.parametrize("orders", [(NHD, NHD), (NHD, HND), (HND, HND), (UNIVERSAL, NHD)])
def test_parts_and_axis_orders(orders, local_kind):
    async def test() -> None:
        remote = filled(geometry(orders[0]), seed=1)
        async with connected(remote) as pair:
            for way in ("pull", "push"):
                for what, layers, heads in PARTS.values():
                    local = filled(geometry(orders[1], local_kind), seed=2)
                    is_pull = way == "pull"
                    before = naive(blocks_of(local if is_pull else remote), orders[is_pull]).copy()
                    move = pair.pull if is_pull else pair.push
                    result = await move(local, [5, 1], [0, 7], remote_part=what, local_part=what)
                    assert not result.failures
                    assert result.moved_bytes == 2 * remote.geometry.part_bytes(what.layers, what.slice, None)
                    theirs, ours = naive(blocks_of(remote), orders[0]), naive(blocks_of(local), orders[1])
                    assert np.array_equal(theirs[[5, 1], layers][..., heads, :], ours[[0, 7], layers][..., heads, :])
                    after = (ours if is_pull else theirs).copy()
                    for block in (0, 7) if is_pull else (5, 1):
                        after[block, layers, :, :, heads] = before[block, layers, :, :, heads]
                    assert np.array_equal(after, before), "nothing outside the part changed"

    run(test)


def test_local_memory_without_addresses_goes_through_a_buffer_and_failures_are_named(monkeypatch):
    monkeypatch.setattr("worker_agent.blocks.engines.nixl_batches.BUFFER_BYTES", 3 * 128)

    async def test() -> None:
        remote, host = filled(geometry(), seed=1), filled(geometry(), seed=2)
        local, ids = Apart(host, frozenset({2, 5})), [1, 2, 3, 5, 0, 7, 6]
        async with connected(remote) as pair:
            result = await pair.pull(local, ids, ids)
            assert [(index, failure.message) for index, failure in result.failures] == [
                (1, "block 2 is broken"),
                (3, "block 5 is broken"),
            ]
            assert result.moved_bytes == 5 * 128
            assert np.array_equal(blocks_of(host, [1, 3, 0, 7, 6]), blocks_of(remote, [1, 3, 0, 7, 6]))
            before, host.buffers[0][:] = blocks_of(remote), blocks_of(filled(geometry(), seed=9)).reshape(-1)
            result = await pair.push(local, ids, ids)
            assert [index for index, _ in result.failures] == [1, 3]
            assert np.array_equal(blocks_of(remote, [1, 3, 0, 7, 6]), blocks_of(host, [1, 3, 0, 7, 6]))
            assert np.array_equal(blocks_of(remote, [2, 5, 4]), before[[2, 5, 4]])

    run(test)


def test_notification_comes_after_all_of_a_push():
    async def test() -> None:
        heard, told = list[int](), asyncio.Event()
        remote, local = filled(geometry(), seed=1), filled(geometry(), seed=2)

        def hear(number: int) -> None:
            assert np.array_equal(blocks_of(remote, [5, 6]), blocks_of(local, [0, 1]))
            heard.append(number)
            told.set()

        async with connected(remote, hear) as pair:
            assert not (await pair.push(local, [5, 6], [0, 1], write_notification=2**64 - 1)).failures
            async with asyncio.timeout(LIMIT):
                await told.wait()
            assert heard == [2**64 - 1]

    run(test)


def test_what_can_not_be_done_is_refused():
    async def test() -> None:
        local = filled(geometry(), seed=2)
        async with connected(filled(geometry(), seed=1)) as pair:
            with pytest.raises(Unsupported, match="hears no notifications"):
                pair.link.push(pair.move(local, [0], [0], write_notification=1))
            with pytest.raises(Unsupported, match="nobody sees them"):
                pair.link.pull(pair.move(local, [0], [0], checksum=True))
            other = replace(descriptor(pair.memory.geometry), handle=LayoutHandle(owner_id=7, number=9))
            assert not pair.link.reaches(other)
            with pytest.raises(Unsupported, match="does not lend its host layout"):
                pair.link.pull(replace(pair.move(local, [0], [0]), remote=other))
            assert pair.link.reaches(descriptor(pair.memory.geometry))

    run(test)


def test_request_that_nixl_refuses_fails_its_blocks_and_no_others():
    """A block beyond the lent memory; whoever moves blocks has checked ids before."""

    async def test() -> None:
        local = filled(geometry(num_blocks=99), seed=2)
        async with connected(filled(geometry(), seed=1)) as pair:
            result = await pair.pull(local, [0, 90], [0, 1])
            assert [index for index, _ in result.failures] == [0, 1]
            assert {failure.reason for _, failure in result.failures} <= {"FAULT", "PEER_LOST"}
            assert not (await pair.pull(local, [0, 7], [0, 1])).failures, "the link goes on working"

    run(test)


def test_cancelled_move_is_quiesced_when_its_requests_have_ended(monkeypatch):
    monkeypatch.setattr(nixl_descriptors, "MOST_DESCRIPTORS", 8)

    async def test() -> None:
        size: dict[str, Any] = {"num_blocks": 512, "region_bytes": 1 << 14}
        remote, local = filled(geometry(**size), seed=1), filled(geometry(**size), seed=2)
        async with connected(remote) as pair:
            before = blocks_of(local, [0])
            ticket = pair.link.pull(pair.move(local, range(512), range(512)))
            while np.array_equal(blocks_of(local, [0]), before):
                assert not ticket.outcome.done(), "the move was over before it could be disturbed"
                await asyncio.sleep(0)
            ticket.cancel()
            result = await ended(ticket)
            failed = [index for index, _ in result.failures]
            assert {failure.reason for _, failure in result.failures} <= {"CANCELLED"}
            done = np.delete(np.arange(512), failed)
            assert np.array_equal(blocks_of(local, done), blocks_of(remote, done))
            after = blocks_of(local)
            await asyncio.sleep(0.05)
            assert np.array_equal(blocks_of(local), after), "bytes landed after the move was quiesced"

    run(test)


def test_memory_that_is_lent_no_more_is_out_of_reach_and_what_is_exported_next_works():
    async def test() -> None:
        remote, local = filled(geometry(), seed=1), filled(geometry(), seed=2)
        async with connected(remote) as pair:
            first = pair.owner.export()
            pair.ours.register(LayoutHandle(owner_id=1, number=0), local)
            assert not (await pair.pull(local, [0], [0])).failures
            pair.owner.deregister(HANDLE)
            assert pair.owner.export() is None
            if os.environ["UCX_TLS"] == "tcp":  # On one host the kernel reads as long as there is memory.
                before = blocks_of(local)
                result = await pair.pull(local, [1], [1])
                assert [failure.reason for _, failure in result.failures] == ["PEER_LOST"]
                assert np.array_equal(blocks_of(local), before)

            other = filled(geometry(), seed=5)
            pair.owner.register(HANDLE, other)
            second = pair.owner.export()
            assert first
            assert second
            assert decode(first.data, "").agent != decode(second.data, "").agent
            link = await connect(pair.ours, other, second)
            pair.link, old = link, pair.link
            assert not (await pair.pull(local, [1], [1])).failures
            assert np.array_equal(blocks_of(local, [1]), blocks_of(other, [1]))
            await old.close()
            pair.ours.deregister(LayoutHandle(owner_id=1, number=0))
            assert not (await pair.pull(local, [2], [2])).failures, "local memory is registered anew when it is used"

    run(test)


def test_damaged_export_never_reaches_nixl_and_the_good_one_still_works():
    async def test() -> None:
        remote, local = filled(geometry(), seed=1), filled(geometry(), seed=2)
        async with connected(remote) as pair:
            export = pair.owner.export()
            assert export
            for place in range(0, len(export.data), 41):
                data = bytearray(export.data)
                data[place] ^= 4
                with pytest.raises(AyniError):
                    await connect(pair.ours, remote, replace(export, data=bytes(data), crc32=zlib.crc32(data)))
            envelope = decode(export.data, "")
            for lie in (
                replace(envelope, metadata=envelope.metadata[:-40]),
                replace(envelope, metadata=b"x" * 300),
                replace(envelope, agent="another"),
                replace(envelope, layouts=()),
                replace(envelope, layouts=((HANDLE, replace(envelope.layouts[0][1], allocations=())),)),
                replace(envelope, layouts=((HANDLE, replace(envelope.layouts[0][1], allocations=((4096, 9),))),)),
            ):
                with pytest.raises(AyniError) as error:
                    await connect(pair.ours, remote, replace(export, data=encode(lie)))
                assert error.value.reason in ("UNSUPPORTED", "INCOMPATIBLE_LAYOUT", "FAULT", "PEER_LOST")
            link = await connect(pair.ours, remote, export)
            pair.link, old = link, pair.link
            assert not (await pair.pull(local, [1], [1])).failures
            await old.close()

    run(test)


def test_closing_a_link_ends_what_is_in_flight():
    async def test() -> None:
        size: dict[str, Any] = {"num_blocks": 512, "region_bytes": 1 << 14}
        remote, local = filled(geometry(**size), seed=1), filled(geometry(**size), seed=2)
        async with connected(remote) as pair:
            ticket = pair.link.pull(pair.move(local, range(512), range(512)))
            await pair.link.close()
            assert ticket.quiesced.done()
            assert {failure.reason for _, failure in ticket.outcome.result().failures} == {"PEER_LOST"}
            result = await pair.pull(local, [0], [0])
            assert [failure.reason for _, failure in result.failures] == ["PEER_LOST"]
            pair.link = await connect(pair.ours, remote, pair.owner.export())
            assert not (await pair.pull(local, [0], [0])).failures

    run(test)


def test_nothing_is_exported_while_nothing_is_lent():
    async def test() -> None:
        engine = NixlEngine()
        assert engine.export() is None
        engine.register(HANDLE, Apart(filled(geometry())))
        assert engine.export() is None
        await engine.close()

    run(test)


def test_missing_library_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setattr(nixl_agent, "_LIBRARIES", ("no_such_nixl",))
    monkeypatch.setattr(nixl_agent, "_EITHER", "no_such_nixl_either")
    with pytest.raises(Unsupported, match="needs the extra nixl-cu12 or nixl-cu13"):
        nixl_agent.load_library()
