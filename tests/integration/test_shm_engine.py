"""Peers of one host read one another's pools in place: every block is right or failed, and nothing else is touched."""

import asyncio
import threading

import numpy as np
import pytest

from ayni.blocks.layouts import Axis, AxisOrder
from ayni.blocks.transfers import AxisSlice
from ayni.errors import PeerLost, UnknownLayout, Unsupported
from tests.support.shm_owner import (
    GEOMETRIES,
    both_sides,
    content,
    descriptor,
    fill,
    handle,
    link_to,
    move,
    owner,
    part_of,
    source_of,
)
from worker_agent.blocks import paths
from worker_agent.blocks.engines import shm_pull
from worker_agent.blocks.engines.shm import ShmEngine
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import WHOLE, Part
from worker_agent.blocks.paths import Selection, path_between
from worker_agent.blocks.slab import SlabMemory
from worker_agent.blocks.slab_header import SlabHeader

HEADS = AxisSlice(axis=Axis.HEAD_COUNT, start=1, stop=3)
CASES = {
    "same": ("nhd", "nhd", WHOLE, WHOLE),
    "to layers": ("nhd", "second", WHOLE, WHOLE),
    "from layers": ("second", "nhd", WHOLE, WHOLE),
    "to heads first": ("nhd", "hnd", WHOLE, WHOLE),
    "from universal": ("universal", "second", WHOLE, WHOLE),
    "layers": ("nhd", "hnd", Part(layers=(1, 3)), Part(layers=(1, 3))),
    "heads": ("universal", "nhd", Part(slice=HEADS), Part(slice=HEADS)),
}


def expect(name: str, remote, part: Part, local: HostMemory, ids, local_part: Part, before: np.ndarray) -> None:
    """Compares local memory with a copy between two layouts in this process, which has tests of its own."""
    wanted = allocate_host(local.geometry)
    wanted.write(np.arange(len(before)), WHOLE, before)
    source = Selection(memory=source_of(name), blocks=np.asarray(remote), part=part)
    path_between(source, Selection(memory=wanted, blocks=np.asarray(ids), part=local_part)).copy(
        np.asarray(remote), np.asarray(ids)
    )
    everything = np.arange(len(before))
    np.testing.assert_array_equal(part_of(local, everything), part_of(wanted, everything))


@pytest.fixture(scope="module")
def lender(tmp_path_factory):
    with owner(tmp_path_factory.mktemp("run") / "sockets", "nhd", "hnd", "second", "universal", "many") as process:
        yield process


@pytest.fixture
def folder(lender):
    return lender.socket.parent


@pytest.mark.parametrize("case", CASES)
def test_pull_between_any_two_layouts(lender, folder, case):
    remote_name, local_name, remote_part, local_part = CASES[case]
    local = allocate_host(GEOMETRIES[local_name])
    before = fill(local, 99)
    remote, ids = [7, 8, 9, 3, 0, 79], [10, 11, 12, 40, 2, 5]

    async def scenario():
        async with link_to(lender, folder) as link:
            ticket = link.pull(move(remote_name, remote, local, ids, remote_part=remote_part, local_part=local_part))
            result = await ticket.outcome
            await ticket.quiesced
            return result

    result = asyncio.run(scenario())
    part_bytes = local.geometry.part_bytes(local_part.layers, local_part.slice, local_part.axis_order)
    assert (result.failures, result.moved_bytes) == ((), 6 * part_bytes)
    expect(remote_name, remote, remote_part, local, ids, local_part, before)


@pytest.mark.parametrize("num_blocks", [0, 1, 63, 64, 65, 1023, 1025])
def test_every_batch_size(lender, folder, num_blocks):
    local = allocate_host(GEOMETRIES["many"])
    before = fill(local, 98)
    chooser = np.random.default_rng(num_blocks)
    remote, ids = chooser.permutation(2000)[:num_blocks], chooser.permutation(2000)[:num_blocks]

    async def scenario():
        async with link_to(lender, folder) as link:
            return await link.pull(move("many", remote, local, ids)).outcome

    result = asyncio.run(scenario())
    before[ids] = part_of(source_of("many"), remote)
    assert (result.failures, result.moved_bytes) == ((), before[ids].nbytes)
    np.testing.assert_array_equal(part_of(local, np.arange(2000)), before)


def test_many_pulls_at_once_over_one_link(lender, folder):
    locals_ = [allocate_host(GEOMETRIES["many"]) for _ in range(8)]

    async def scenario():
        async with link_to(lender, folder) as link:
            tickets = [link.pull(move("many", range(2000), local, range(2000))) for local in locals_]
            return [await ticket.outcome for ticket in tickets]

    assert all(result.failures == () for result in asyncio.run(scenario()))
    for local in locals_:
        np.testing.assert_array_equal(part_of(local, range(2000)), part_of(source_of("many"), range(2000)))


def test_large_pull_is_shared_among_threads(lender, folder, monkeypatch):
    monkeypatch.setattr(shm_pull, "_SHARE_BYTES", 1 << 16)
    monkeypatch.setattr(shm_pull, "_STEP_BYTES", 1 << 14)
    local, threads = allocate_host(GEOMETRIES["many"]), set()
    real = paths.Straight.copy

    def copy(self, source_blocks, destination_blocks):
        threads.add(threading.get_ident())
        real(self, source_blocks, destination_blocks)

    monkeypatch.setattr(paths.Straight, "copy", copy)

    async def scenario():
        async with link_to(lender, folder) as link:
            return await link.pull(move("many", range(2000), local, range(2000))).outcome

    assert asyncio.run(scenario()).failures == ()
    assert len(threads) == shm_pull.NUM_THREADS
    np.testing.assert_array_equal(part_of(local, range(2000)), part_of(source_of("many"), range(2000)))


def test_pull_into_a_slab(lender, folder, tmp_path):
    geometry = GEOMETRIES["nhd"]
    slab = SlabMemory(tmp_path / "a.slab", geometry, SlabHeader.of(geometry, "f", "i", 0))

    async def scenario():
        async with link_to(lender, folder) as link:
            return await link.pull(move("nhd", [1, 2, 3], slab, [30, 20, 10])).outcome

    assert asyncio.run(scenario()).failures == ()
    np.testing.assert_array_equal(part_of(slab, [30, 20, 10]), part_of(source_of("nhd"), [1, 2, 3]))
    slab.close()


def test_blocks_that_are_being_written_fail_alone(lender, folder):
    local = allocate_host(GEOMETRIES["nhd"])

    async def scenario():
        async with link_to(lender, folder) as link:
            lender.tell("begin nhd 4 6")
            busy = await link.pull(move("nhd", [3, 4, 5, 6], local, [0, 1, 2, 3])).outcome
            lender.tell("end nhd 4 6")
            free = await link.pull(move("nhd", [3, 4, 5, 6], local, [0, 1, 2, 3])).outcome
            return busy, free

    busy, free = asyncio.run(scenario())
    assert [(index, failure.reason) for index, failure in busy.failures] == [(1, "BLOCK_BUSY"), (3, "BLOCK_BUSY")]
    assert dict(busy.failures[0][1].metadata) == {"block": "4", "layout": str(handle("nhd"))}
    assert busy.moved_bytes == 2 * GEOMETRIES["nhd"].config.block_bytes
    assert free.failures == ()
    np.testing.assert_array_equal(part_of(local, [0, 1, 2, 3]), part_of(source_of("nhd"), [3, 4, 5, 6]))


@pytest.fixture
def gated(monkeypatch):
    """Makes copies wait: `entered` is set when one begins; it ends after `gate` was set."""

    class Gate:
        entered, gate = threading.Event(), threading.Event()

    real = paths.Straight.copy

    def copy(self, source_blocks, destination_blocks):
        Gate.entered.set()
        assert Gate.gate.wait(20)
        real(self, source_blocks, destination_blocks)

    monkeypatch.setattr(paths.Straight, "copy", copy)
    return Gate


def test_block_that_is_written_during_the_copy_fails_alone(tmp_path, gated):
    local = allocate_host(GEOMETRIES["nhd"])

    async def scenario():
        async with both_sides(tmp_path / "run") as (pool, _, link):
            ticket = link.pull(move("nhd", [1, 2, 3], local, [1, 2, 3]))
            await asyncio.to_thread(gated.entered.wait, 20)
            pool.begin_write(np.array([2]))
            pool.end_write(np.array([2]))
            gated.gate.set()
            return await ticket.outcome

    result = asyncio.run(scenario())
    assert [(index, failure.reason) for index, failure in result.failures] == [(1, "BLOCK_BUSY")]
    np.testing.assert_array_equal(part_of(local, [1, 3]), content(GEOMETRIES["nhd"], 1)[[1, 3]])


def test_pool_that_is_withdrawn_during_the_copy_fails_all_of_it(tmp_path, gated):
    local = allocate_host(GEOMETRIES["nhd"])

    async def scenario():
        async with both_sides(tmp_path / "run") as (_, lending, link):
            ticket = link.pull(move("nhd", [1, 2], local, [1, 2]))
            await asyncio.to_thread(gated.entered.wait, 20)
            lending.deregister(handle("nhd"))
            gated.gate.set()
            return await ticket.outcome

    result = asyncio.run(scenario())
    assert [failure.reason for _, failure in result.failures] == ["STALE_EPOCH"] * 2


def test_lending_the_same_pool_twice_changes_nothing(tmp_path):
    local = allocate_host(GEOMETRIES["nhd"])

    async def scenario():
        async with both_sides(tmp_path / "run") as (pool, lending, link):
            lending.register(handle("nhd"), pool)
            return await link.pull(move("nhd", [1], local, [1])).outcome

    assert asyncio.run(scenario()).failures == ()


def test_pool_that_was_lent_again_has_to_be_connected_again(lender, folder):
    local = allocate_host(GEOMETRIES["hnd"])

    async def scenario():
        async with link_to(lender, folder) as old:
            lender.tell("withdraw hnd")
            withdrawn = await old.pull(move("hnd", [1], local, [1])).outcome
            with pytest.raises(UnknownLayout, match="is not lent any more"):
                async with link_to(lender, folder):
                    pass
            lender.tell("lend hnd")
            stale = await old.pull(move("hnd", [1], local, [1])).outcome
            other = await old.pull(move("nhd", [1], local, [1])).outcome
            async with link_to(lender, folder) as new:
                return withdrawn, stale, other, await new.pull(move("hnd", [1], local, [1])).outcome

    withdrawn, stale, other, again = asyncio.run(scenario())
    assert [failure.reason for _, failure in withdrawn.failures + stale.failures] == ["STALE_EPOCH"] * 2
    assert other.failures == again.failures == ()


def test_cancel_ends_what_is_left_and_quiesces(tmp_path, gated):
    geometry = GEOMETRIES["large"]
    local = allocate_host(geometry)
    before = fill(local, 97)

    async def scenario():
        async with both_sides(tmp_path / "run", "large") as (_, _, link):
            ticket = link.pull(move("large", range(12), local, range(12)))
            await asyncio.to_thread(gated.entered.wait, 20)
            ticket.cancel()
            gated.gate.set()
            result = await ticket.outcome
            await ticket.quiesced
            return result

    result = asyncio.run(scenario())
    failed = {index for index, _ in result.failures}
    assert {failure.reason for _, failure in result.failures} == {"CANCELLED"}
    assert 0 < len(failed) < 12
    for index in range(12):
        wanted = before if index in failed else content(geometry, 1)
        np.testing.assert_array_equal(part_of(local, [index])[0], wanted[index])


def test_deadline_tells_the_outcome_before_the_copy_in_hand_has_ended(tmp_path, gated):
    local = allocate_host(GEOMETRIES["nhd"])

    async def scenario():
        async with both_sides(tmp_path / "run") as (_, _, link):
            ticket = link.pull(move("nhd", [1, 2], local, [1, 2], timeout=0.1))
            waiting = [link.pull(move("nhd", [3], local, [3], timeout=0.1)) for _ in range(3)]
            async with asyncio.timeout(5):
                result = await ticket.outcome
                others = [await other.outcome for other in waiting]
                # No thread was free for the last two: they never began.
                await waiting[1].quiesced
                await waiting[2].quiesced
            assert not ticket.quiesced.done()
            gated.gate.set()
            await ticket.quiesced
            return [result, *others]

    results = asyncio.run(scenario())
    assert {failure.reason for result in results for _, failure in result.failures} == {"DEADLINE"}
    assert [len(result.failures) for result in results] == [2, 1, 1, 1]
    assert all(result.moved_bytes == 0 for result in results)


def test_close_fails_what_is_in_flight_and_waits_until_no_byte_can_land(tmp_path, gated):
    local = allocate_host(GEOMETRIES["large"])
    fill(local, 96)

    async def scenario():
        async with both_sides(tmp_path / "run", "large") as (_, _, link):
            ticket = link.pull(move("large", range(12), local, range(12)))
            await asyncio.to_thread(gated.entered.wait, 20)
            closing = asyncio.create_task(link.close())
            await asyncio.sleep(0)
            assert not closing.done()
            gated.gate.set()
            await closing
            assert ticket.quiesced.done()
            after = part_of(local, range(12))
            with pytest.raises(PeerLost, match=r"the link to rank 0 of 1+ is closed"):
                link.pull(move("large", [1], local, [1]))
            await link.close()
            return await ticket.outcome, after

    result, after = asyncio.run(scenario())
    assert {failure.reason for _, failure in result.failures} == {"PEER_LOST"}
    np.testing.assert_array_equal(part_of(local, range(12)), after)


def test_what_it_can_not_do_is_refused(lender, folder):
    local = allocate_host(GEOMETRIES["nhd"])

    async def scenario():
        async with link_to(lender, folder) as link:
            with pytest.raises(Unsupported, match="can be read only; let the peer pull"):
                link.push(move("nhd", [1], local, [1]))
            with pytest.raises(Unsupported, match="nothing is sent"):
                link.pull(move("nhd", [1], local, [1], checksum=True))
            with pytest.raises(Unsupported, match="does not lend its host layout as shared memory; use another"):
                link.pull(move("large", [1], local, [1]))
            assert [link.reaches(descriptor(name)) for name in ("nhd", "large")] == [True, False]

    asyncio.run(scenario())
    assert (ShmEngine.capabilities.can_pull, ShmEngine.capabilities.can_push) == (True, False)


def test_axis_order_that_is_not_known_moves_whole_blocks(lender, folder):
    geometry = GEOMETRIES["many"]
    assert geometry.axis_order is AxisOrder.UNKNOWN
    local = allocate_host(geometry)

    async def scenario():
        async with link_to(lender, folder) as link:
            return await link.pull(move("many", range(2000), local, range(1999, -1, -1))).outcome

    assert asyncio.run(scenario()).failures == ()
    np.testing.assert_array_equal(part_of(local, range(2000)), part_of(source_of("many"), range(1999, -1, -1)))
