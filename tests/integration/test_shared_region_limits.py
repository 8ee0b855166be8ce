"""Who may share regions with the coordinator, how much, and what is said to everybody else."""

import asyncio
import contextlib
import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ayni.errors import BadRequest, Deadline, PeerLost, TooLarge, UnknownWorker, Unsupported
from ayni.shm import region_messages, sockets
from ayni.shm.folder import SocketFolder
from ayni.shm.host import socket_name
from ayni.shm.memory import share
from ayni.shm.region_messages import Borrow, Hello, Lend, Withdraw
from ayni.shm.regions import Regions
from coordinator_service import lent_regions
from coordinator_service import shared_regions as coordinator_module
from coordinator_service.shared_regions import MAX_WORKERS
from tests.support.region_peers import num_fds
from tests.support.region_sides import (
    LIMIT,
    coordinator,
    dialed,
    offered,
    said,
    silent,
    until,
    worker,
)
from worker_agent import shared_regions as worker_module
from worker_agent.shared_regions import SharedRegions as WorkerRegions


@pytest.fixture(autouse=True)
def _nothing_left_by_others():
    """Descriptors are counted: those of other tests must not go meanwhile."""
    gc.collect()


def test_limits_hold_for_bytes_of_all_and_regions_of_each(tmp_path, monkeypatch):
    monkeypatch.setattr(lent_regions, "MAX_REGIONS", 3)

    async def scenario():
        async with coordinator(tmp_path, limit_bytes=1000) as lead, worker(lead) as ant, worker(lead, "8") as bee:
            large = ant.ours.allocate(700)
            await ant.lend(large)
            too_much = bee.ours.allocate(301)
            with pytest.raises(TooLarge, match="would lend 1001 bytes, and may lend 1000") as caught:
                await bee.lend(too_much)
            assert caught.value.metadata == {"field": "size", "limit": "1000", "received": "1001"}
            assert lead.lent(8, too_much.id) is None
            for _ in range(2):
                await ant.lend(ant.ours.allocate(100))
            with pytest.raises(TooLarge, match="may lend 3 regions at a time"):
                await ant.lend(ant.ours.allocate(1))
            await bee.lend(bee.ours.allocate(100))
            lead.drop(7)
            await bee.lend(too_much)
            assert lead.lent(8, too_much.id) is not None

    asyncio.run(scenario())


def test_memory_that_is_no_region_is_refused_and_the_next_one_taken(tmp_path):
    async def scenario():
        # As much as one region: what was refused must not count.
        async with coordinator(tmp_path, limit_bytes=5000) as lead:
            offer = offered(lead)
            with dialed(offer) as connection:
                await said(connection, region_messages.encode_request(Hello(session="7")))
                before = num_fds()
                regions, plain = Regions(), share("test", 8192)
                region = regions.allocate(4096)
                good = region_messages.encode_request(Lend(region=region.id, size=4096))
                for data, fds, error in (
                    (region_messages.encode_request(Lend(region=1, size=4096)), [plain.fd], PeerLost),
                    (region_messages.encode_request(Lend(region=1, size=4097)), [region.fd], PeerLost),
                    (region_messages.encode_request(Lend(region=1, size=LIMIT + 1)), [region.fd], TooLarge),
                    (good, [], BadRequest),
                    (good, [region.fd, region.fd], BadRequest),
                    (region_messages.encode_request(Withdraw(region=1)), [], BadRequest),
                    (region_messages.encode_request(Withdraw(region=1)), [region.fd], BadRequest),
                    (region_messages.encode_request(Borrow(region=1)), [region.fd], BadRequest),
                    (region_messages.encode_request(Hello(session="7")), [region.fd], BadRequest),
                    (b"nonsense", [region.fd, plain.fd], BadRequest),
                ):
                    answer, received = await said(connection, data, fds)
                    assert received == []
                    with pytest.raises(error):
                        region_messages.decode_answer(answer)
                answer, _ = await said(connection, good, [region.fd])
                assert region_messages.decode_answer(answer).size == 0
                answer, _ = await said(connection, good, [region.fd])
                with pytest.raises(BadRequest, match="is lent already"):
                    region_messages.decode_answer(answer)
                assert lead.lent(7, region.id) is not None
                # The plain memory's mapping and descriptor, the region's two, and the coordinator's mapping.
                assert num_fds() == before + 5
                os.close(plain.fd)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("session", "error", "text"),
    [
        ("stranger", UnknownWorker, "no live worker has this session; join first"),
        ("\u00e9", BadRequest, "ASCII"),
        ("9" * 300, BadRequest, "1 to 256"),
    ],
)
def test_stranger_is_refused(tmp_path, session, error, text):
    async def scenario():
        async with coordinator(tmp_path) as lead:
            offer, fds = offered(lead), num_fds()
            with pytest.raises(error, match=text):
                await WorkerRegions.connect(offer, session, 20)
            await until(lambda: num_fds() == fds)
            assert not lead.has_workers

    asyncio.run(scenario())


def test_first_message_has_to_say_who_it_is(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as lead:
            with dialed(offered(lead)) as connection:
                answer, _ = await said(connection, region_messages.encode_request(Borrow(region=1)))
                with pytest.raises(BadRequest, match="has to say which session"):
                    region_messages.decode_answer(answer)
                assert await sockets.receive(connection, asyncio.get_running_loop().time() + 20) == (b"", [])

    asyncio.run(scenario())


def test_who_says_nothing_is_turned_away_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_module, "_HELLO_SECONDS", 0.05)

    async def scenario():
        async with coordinator(tmp_path) as lead:
            with dialed(offered(lead)) as connection:
                assert await sockets.receive(connection, asyncio.get_running_loop().time() + 20) == (b"", [])
            async with worker(lead) as ant:
                await asyncio.sleep(0.1)
                await ant.lend(ant.ours.allocate(1))

    asyncio.run(scenario())


@pytest.mark.parametrize("change", [{"boot_id": "x"}, {"pid_namespace": 1}, {"uid": 12345}])
def test_coordinator_of_another_host_namespace_or_user_is_not_dialed(tmp_path, change):
    async def scenario():
        async with coordinator(tmp_path) as lead:
            offer = offered(lead)
            with pytest.raises(Unsupported, match="needs one host, process namespace and user: the coordinator is"):
                await WorkerRegions.connect(replace(offer, host=replace(offer.host, **change)), "7", 20)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"folder": "/nowhere"}, Unsupported, "No such file"),
        ({"folder": "/"}, Unsupported, "with mode 755"),
        ({"folder": "relative"}, BadRequest, "not absolute"),
        ({"socket_name": "../x.sock"}, BadRequest, "no name of a socket"),
        ({"socket_name": socket_name(1)}, PeerLost, "nobody answers at .*shm-0000000000000001.sock"),
    ],
)
def test_offer_that_leads_nowhere_is_refused(tmp_path, values, error, text):
    async def scenario():
        async with coordinator(tmp_path) as lead:
            with pytest.raises(error, match=text):
                await WorkerRegions.connect(replace(offered(lead), **values), "7", 20)

    asyncio.run(scenario())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_who_reaches_the_socket_gets_no_answer(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as lead:
            offer = offered(lead)
            place = SocketFolder(Path(offer.folder), make=False)
            os.chmod(offer.folder, 0o711)
            os.chmod(Path(offer.folder, offer.socket_name), 0o777)
            os.seteuid(65534)
            try:
                connection = place.dial(offer.socket_name)
            finally:
                os.seteuid(0)
            place.close()
            with connection, contextlib.suppress(PeerLost):
                assert await said(connection, region_messages.encode_request(Hello(session="7"))) == (b"", [])
            assert not lead.has_workers

    asyncio.run(scenario())


def test_coordinator_that_does_not_answer_runs_into_the_deadline(tmp_path, monkeypatch):
    async def scenario():
        async with silent(tmp_path, answers=0) as offer:
            fds = num_fds()
            with pytest.raises(Deadline, match=r"waited 0\.05 s for an answer about shared memory"):
                await WorkerRegions.connect(offer, "7", 0.05)
            await until(lambda: num_fds() <= fds + 1)
        monkeypatch.setattr(worker_module, "_REQUEST_SECONDS", 0.05)
        async with silent(tmp_path, answers=1) as offer:
            ant = await WorkerRegions.connect(offer, "7", 20)
            first, second = ant.ours.allocate(10), ant.ours.allocate(10)
            outcomes = await asyncio.gather(ant.lend(first), ant.lend(second), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [Deadline, PeerLost]
            assert not ant.is_open
            await ant.close()
            await ant.close()

    asyncio.run(scenario())


def test_coordinator_that_speaks_unasked_or_lends_no_memory_is_not_believed(tmp_path):
    async def scenario():
        async with silent(tmp_path, answers=-1) as offer:
            ant = await WorkerRegions.connect(offer, "7", 20)
            await until(lambda: not ant.is_open)
            with pytest.raises(PeerLost, match="said something that nobody asked for"):
                await ant.borrow(1)
            await ant.close()
        async with silent(tmp_path, answers=2) as offer:
            ant = await WorkerRegions.connect(offer, "7", 20)
            with pytest.raises(PeerLost, match="it lent 0 bytes with 0 descriptors"):
                await ant.borrow(1)
            await ant.close()

    asyncio.run(scenario())


def test_300_workers_connect_at_once_and_256_are_taken(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as lead:
            offer, fds = offered(lead), num_fds()
            connecting = [WorkerRegions.connect(offer, str(number), 60) for number in range(300)]
            outcomes = await asyncio.gather(*connecting, return_exceptions=True)
            taken = [outcome for outcome in outcomes if isinstance(outcome, WorkerRegions)]
            refused = [outcome for outcome in outcomes if not isinstance(outcome, WorkerRegions)]
            assert len(taken) == MAX_WORKERS == 256
            # Those beyond the strangers that may wait are turned away without a word.
            assert {type(outcome) for outcome in refused} <= {TooLarge, PeerLost}
            with pytest.raises(TooLarge, match="256 workers of this host are connected already"):
                await WorkerRegions.connect(offer, "999", 20)
            await asyncio.gather(*(each.lend(each.ours.allocate(10)) for each in taken))
            for each in taken[:10]:
                await each.close()
            await until(lambda: sum(map(lead.is_connected, range(300))) == 246)
            async with worker(lead, "999") as late:
                await late.lend(late.ours.allocate(10))
                late.ours.close()
            for each in taken:
                await each.close()
                each.ours.close()
            await until(lambda: not lead.has_workers)
            taken.clear()
            outcomes.clear()
            del each, late
            gc.collect()
            assert num_fds() == fds

    asyncio.run(scenario())


def test_offer_is_made_once_and_none_after_the_end(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as lead:
            assert not (tmp_path / "run").exists()
            assert lead.offer() == lead.offer()
            assert offered(lead).folder == str(tmp_path / "run")
            await lead.close()
            assert lead.offer() is None

    asyncio.run(scenario())


@pytest.mark.parametrize("wrong", ["system", "folder"])
def test_where_memory_can_not_be_shared_nothing_is_offered_and_it_is_said_once(tmp_path, monkeypatch, caplog, wrong):
    if wrong == "system":
        monkeypatch.setattr(coordinator_module, "can_share", lambda: False)
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run").chmod(0o755)

    async def scenario():
        async with coordinator(tmp_path) as lead:
            assert [lead.offer() for _ in range(3)] == [None] * 3
            assert not lead.is_connected(1)
            assert lead.lent(1, 2) is None

    asyncio.run(scenario())
    assert len(caplog.records) == 1
    assert {"system": "can't share memory", "folder": "only this user can enter"}[wrong] in caplog.text
