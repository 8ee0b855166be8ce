"""Workers and the coordinator lend one another regions, and nothing is left when one of them ends."""

import asyncio
import gc
import threading

import numpy as np
import pytest

from ayni.errors import PeerLost
from ayni.shm import region_messages
from ayni.shm.regions import Regions
from coordinator_service import shared_regions as coordinator_module
from coordinator_service.shared_regions import SharedRegions as CoordinatorRegions
from tests.support.region_peers import Peer, num_fds, num_maps, worker_process
from tests.support.region_sides import bytes_of, coordinator, held_up, offered, until, worker
from worker_agent.shared_regions import SharedRegions as WorkerRegions


@pytest.fixture(autouse=True)
def _nothing_left_by_others():
    """Descriptors are counted: those of other tests must not go meanwhile."""
    gc.collect()


def test_each_side_reads_what_the_other_lends(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as lead, worker(lead) as ant:
            vector = ant.ours.vector(1000)
            found = ant.ours.find(vector)
            assert found is not None
            region = found[0]
            vector[:] = 1.5
            assert lead.lent(7, region.id) is None
            await ant.lend(region)
            mapped = lead.lent(7, region.id)
            assert mapped is not None
            assert mapped.bytes.view(np.float32).sum() == 1500
            region.renew()
            vector[:] = 2
            assert (mapped.generation, mapped.bytes.view(np.float32).sum()) == (1, 2000)
            assert lead.lent(8, region.id) is None

            mean = lead.ours.allocate(64)
            mean.bytes[:] = 9
            mean.renew()
            borrowed = await ant.borrow(mean.id)
            assert (borrowed.id, borrowed.generation, borrowed.bytes.tobytes()) == (mean.id, 1, b"\t" * 64)
            with pytest.raises(ValueError, match="read-only"):
                borrowed.bytes[0] = 1
            assert await ant.borrow(mean.id) is borrowed
            ant.forget(mean.id)
            assert await ant.borrow(mean.id) is not borrowed

    asyncio.run(scenario())


def test_worker_in_another_process_lends_borrows_and_writes_anew(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as lead:
            with worker_process(offered(lead)) as ant:
                await ant.ask("connect", "3")
                region_id = await ant.ask("lend", 5000, 6)
                mapped = lead.lent(3, region_id)
                assert mapped is not None
                assert (mapped.generation, mapped.bytes.tobytes()) == (0, b"\6" * 5000)
                assert await ant.ask("write", 0, 7) == 1
                assert (mapped.generation, mapped.bytes.tobytes()) == (1, b"\7" * 5000)
                mean = lead.ours.allocate(300)
                mean.bytes[:] = 5
                assert await ant.ask("borrow", mean.id) == (0, b"\5" * 300)
                mean.renew()
                mean.bytes[:] = 6
                assert await ant.ask("borrow", mean.id) == (1, b"\6" * 300)
                await ant.ask("close")
                await until(lambda: not lead.is_connected(3))
                assert lead.lent(3, region_id) is None

    asyncio.run(scenario())


def test_killed_worker_leaves_nothing_and_others_go_on(tmp_path):
    async def scenario(lead: CoordinatorRegions, ant: Peer, bee: Peer):
        await bee.ask("connect", "2")
        kept = await bee.ask("lend", 100, 2)
        fds, maps = num_fds(), num_maps()
        await ant.ask("connect", "1")
        ids = [await ant.ask("lend", 1 << 20, value) for value in range(5)]
        assert lead.has_workers
        assert (num_fds(), num_maps()) == (fds + 6, maps + 5)
        view = bytes_of(lead, 1, ids[4])[1000:]
        ant.kill()
        await until(lambda: not lead.is_connected(1))
        assert [lead.lent(1, each) for each in ids] == [None] * 5
        # What is still being added stays readable, and goes with the last who reads it.
        assert view.sum() == 4 * ((1 << 20) - 1000)
        await until(lambda: num_maps() == maps + 1)
        del view
        await until(lambda: (num_fds(), num_maps()) == (fds, maps))
        assert bytes_of(lead, 2, kept).sum() == 200
        assert await bee.ask("lend", 100, 3)

    async def both():
        async with coordinator(tmp_path) as lead:
            with worker_process(offered(lead)) as ant, worker_process(offered(lead)) as bee:
                await scenario(lead, ant, bee)
        assert list((tmp_path / "run").iterdir()) == []

    asyncio.run(both())


def test_worker_learns_of_the_end_of_the_coordinator(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as lead, worker(lead) as ant:
            mine, theirs = ant.ours.allocate(10), lead.ours.allocate(10)
            await ant.lend(mine)
            borrowed = await ant.borrow(theirs.id)
            theirs.bytes[:] = 3
            assert ant.is_open
            await lead.close()
            await until(lambda: not ant.is_open)
            for asking in (ant.lend(mine), ant.borrow(theirs.id), ant.lend(ant.ours.allocate(5)), ant.borrow(1)):
                with pytest.raises(PeerLost, match="is over: it closed the connection; gradients travel over gRPC"):
                    await asking
            await ant.withdraw(mine)
            assert borrowed.bytes.sum() == 30

    asyncio.run(scenario())


def test_worker_that_waits_for_an_answer_learns_of_the_end(tmp_path, monkeypatch):
    """The coordinator's thread is held up while it maps."""
    go_on, began = threading.Event(), threading.Event()

    def slow(*_):
        began.set()
        assert go_on.wait(20)
        raise PeerLost("too late", peer="", detail="")

    monkeypatch.setattr("ayni.shm.mapping.map_region", slow)

    async def scenario():
        async with coordinator(tmp_path) as lead, worker(lead) as ant:
            fds = num_fds()
            regions = [ant.ours.allocate(10) for _ in range(2)]
            lending = [asyncio.create_task(ant.lend(region)) for region in regions]
            await until(began.is_set)
            lead.drop(7)
            for outcome in await asyncio.gather(*lending, return_exceptions=True):
                assert isinstance(outcome, PeerLost)
            assert not ant.is_open
            go_on.set()
            # Two for each region; the connection's two ends are closed, and so is what was being mapped.
            await until(lambda: num_fds() == fds + 4 - 2)
            assert not lead.is_connected(7)

    asyncio.run(scenario())


def test_drop_ends_the_connection_and_what_was_lent(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as lead, worker(lead) as ant, worker(lead, "8") as bee:
            region, other = ant.ours.allocate(10), bee.ours.allocate(10)
            await ant.lend(region)
            await bee.lend(other)
            lead.drop(7)
            lead.drop(7)
            lead.drop(99)
            assert not lead.is_connected(7)
            assert lead.lent(7, region.id) is None
            await until(lambda: not ant.is_open)
            assert lead.lent(8, other.id) is not None
            lead.drop(8)
            assert not lead.has_workers

    asyncio.run(scenario())


def test_worker_that_connects_again_takes_its_own_place(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as lead, worker(lead) as before:
            old = before.ours.allocate(10)
            await before.lend(old)
            async with worker(lead) as after:
                new = after.ours.allocate(10)
                await after.lend(new)
                await until(lambda: not before.is_open)
                await before.close()
                assert lead.is_connected(7)
                assert lead.lent(7, old.id) is None
                assert lead.lent(7, new.id) is not None

    asyncio.run(scenario())


def test_region_is_asked_for_once_also_by_many_at_a_time(tmp_path, monkeypatch):
    requests: list[bytes] = []
    decode = region_messages.decode_request

    def counted(data: bytes) -> region_messages.Request:
        requests.append(data)
        return decode(data)

    monkeypatch.setattr(coordinator_module, "decode_request", counted)

    async def scenario():
        async with coordinator(tmp_path) as lead, worker(lead) as ant:
            region, mean = ant.ours.allocate(1000), lead.ours.allocate(10)
            requests.clear()
            await asyncio.gather(*(ant.lend(region) for _ in range(5)), *(ant.borrow(mean.id) for _ in range(5)))
            await ant.lend(region)
            assert len(requests) == 2

    asyncio.run(scenario())


def test_who_gives_up_waiting_stops_nothing(tmp_path, monkeypatch):
    go_on, began = held_up(monkeypatch, above=0)

    async def scenario():
        async with coordinator(tmp_path) as lead, worker(lead) as ant:
            region = ant.ours.allocate(1000)
            waiting = asyncio.create_task(ant.lend(region))
            await until(began.is_set)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            go_on.set()
            await ant.lend(region)
            assert ant.is_open
            assert lead.lent(7, region.id) is not None

    asyncio.run(scenario())


def test_withdrawn_region_is_forgotten_and_can_be_lent_again(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, limit_bytes=1000) as lead, worker(lead) as ant:
            maps = num_maps()
            region = ant.ours.allocate(600)
            await ant.withdraw(region)
            for _ in range(3):
                await ant.lend(region)
                assert lead.lent(7, region.id) is not None
                await ant.withdraw(region)
                assert lead.lent(7, region.id) is None
            ant.ours.free(region)
            del region
            # The thread that mapped it may hold it for a moment longer.
            await until(lambda: num_maps() == maps)

    asyncio.run(scenario())


def test_coming_and_going_leaves_no_descriptor_and_no_map(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as lead:
            mean = lead.ours.allocate(1000)
            async with worker(lead):
                pass
            await until(lambda: not lead.has_workers)
            fds, maps = num_fds(), num_maps()
            for _ in range(20):
                async with worker(lead) as ant:
                    for _ in range(3):
                        await ant.lend(ant.ours.allocate(1000))
                    await ant.borrow(mean.id)
                    ant.ours.close()
            del ant
            await until(lambda: gc.collect() >= 0 and (num_fds(), num_maps()) == (fds, maps))
        assert list((tmp_path / "run").iterdir()) == []

    fds, maps = num_fds(), num_maps()
    asyncio.run(scenario())
    gc.collect()
    assert (num_fds(), num_maps()) == (fds, maps)


def test_regions_of_a_worker_outlive_its_connection(tmp_path):
    async def scenario():
        ours = Regions()
        vector = ours.vector(10)
        vector[:] = 4
        found = ours.find(vector)
        assert found is not None
        async with coordinator(tmp_path) as lead:
            for session in ("1", "2"):
                ant = await WorkerRegions.connect(offered(lead), session, 20, ours)
                await ant.lend(found[0])
                mapped = lead.lent(int(session), found[0].id)
                assert mapped is not None
                assert mapped.bytes.view(np.float32).sum() == 40
                await ant.close()
        assert ours.find(vector) == found
        ours.close()

    asyncio.run(scenario())


def test_large_region_does_not_hold_up_the_loop(tmp_path, monkeypatch):
    """While a region is being mapped the loop answers other workers."""
    go_on, began = held_up(monkeypatch, above=1000)

    async def scenario():
        async with coordinator(tmp_path) as lead, worker(lead) as ant, worker(lead, "8") as bee:
            large, small = ant.ours.allocate(2000), bee.ours.allocate(100)
            lending = asyncio.create_task(ant.lend(large))
            await until(began.is_set)
            await bee.lend(small)
            assert lead.lent(7, large.id) is None
            go_on.set()
            await lending
            assert lead.lent(7, large.id) is not None

    asyncio.run(scenario())
