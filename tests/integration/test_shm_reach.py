"""How workers of one host find one another: who may, what is refused, and that nothing is left behind."""

import asyncio
import contextlib
import gc
import json
import os
import socket
import stat
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ayni.blocks.metadata import EngineExport
from ayni.errors import BadRequest, Deadline, PeerLost, StaleEpoch, Unsupported
from ayni.shm import host, json_messages, sockets
from ayni.shm.folder import SocketFolder, default_folder
from tests.support.shm_owner import (
    GEOMETRIES,
    both_sides,
    fill,
    handle,
    link_to,
    metadata,
    move,
    owner,
    part_of,
)
from worker_agent.blocks import pools
from worker_agent.blocks.engines import shm_messages
from worker_agent.blocks.engines.shm import ShmEngine
from worker_agent.blocks.host_memory import allocate_host
from worker_agent.blocks.pools import PoolMemory


@pytest.fixture(scope="module")
def lender(tmp_path_factory):
    with owner(tmp_path_factory.mktemp("run") / "sockets", "nhd", "hnd", "second", "universal", "many") as process:
        yield process


@pytest.fixture
def folder(lender):
    return lender.socket.parent


def test_system_without_sealed_memory_offers_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "can_share", lambda: False)
    pool = PoolMemory(GEOMETRIES["nhd"])
    data = fill(pool, 7)
    pool.begin_write(np.array([1]))
    pool.end_write(np.array([1]))
    np.testing.assert_array_equal(part_of(pool, range(80)), data)

    async def scenario():
        engine = ShmEngine(tmp_path)
        engine.register(handle("nhd"), pool)
        assert engine.export() is None
        engine.deregister(handle("nhd"))
        await engine.close()

    asyncio.run(scenario())
    pool.close()


def test_engine_with_nothing_to_lend_offers_nothing_and_opens_nothing(tmp_path):
    async def scenario():
        engine = ShmEngine(tmp_path / "run")
        engine.register(handle("nhd"), allocate_host(GEOMETRIES["nhd"]))
        assert engine.export() is None
        await engine.close()
        await engine.close()

    asyncio.run(scenario())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrong", ["mode", "link", "file"])
def test_folder_that_others_could_enter_is_refused(tmp_path, caplog, wrong):
    folder = tmp_path / "run"
    if wrong == "mode":
        folder.mkdir()
        folder.chmod(0o750)
    elif wrong == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "other")
    else:
        folder.write_text("")

    async def scenario():
        engine, pool = ShmEngine(folder), PoolMemory(GEOMETRIES["nhd"])
        engine.register(handle("nhd"), pool)
        assert engine.export() is None
        await engine.close()
        pool.close()

    asyncio.run(scenario())
    assert "shared memory is not offered" in caplog.text
    assert f"needs a folder that only this user can enter, and {folder} is none" in caplog.text


def test_folder_and_socket_are_the_users_alone(lender, folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert default_folder("/run/user/5") == Path("/run/user/5/ayni")
    assert default_folder().name == f"ayni-{os.getuid()}"


def test_other_user_on_the_other_side_is_refused(monkeypatch):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert sockets.credentials(left).pid == os.getpid()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with left, right, pytest.raises(Unsupported, match=f"the other side is user {os.getuid()}, this one is user 12345"):
        sockets.credentials(left)


def changed(export: EngineExport, **values: object) -> EngineExport:
    data = json.dumps({**json.loads(export.data), **values}).encode()
    return replace(export, data=data, crc32=zlib.crc32(data))


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"host": {"boot_id": "x", "pid_namespace": 1, "uid": 0}}, Unsupported, "needs one host, process namespace"),
        ({"host": {"boot_id": "x"}}, BadRequest, "can't be read: KeyError"),
        ({"folder": "relative"}, BadRequest, "is not absolute"),
        ({"folder": "/nowhere"}, Unsupported, "No such file"),
        ({"folder": "/"}, Unsupported, "with mode 755"),
        ({"layouts": []}, Unsupported, "lends no layout"),
        ({"layouts": ["0"] * 2000}, BadRequest, "2000 layouts; at most"),
        ({"layouts": ["zz"]}, BadRequest, "can't be read"),
        ({"incarnation": "1" * 20}, BadRequest, "does not fit into 64 bits"),
        ({"incarnation": "1"}, PeerLost, "nobody answers at .*shm-0000000000000001.sock"),
    ],
)
def test_export_that_does_not_fit_is_refused(lender, folder, values, error, text):
    async def scenario():
        engine = ShmEngine(folder)
        try:
            deadline = asyncio.get_running_loop().time() + 20
            await engine.connect(lender.metadata(), changed(lender.export, **values), deadline)
        finally:
            await engine.close()

    with pytest.raises(error, match=text):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"hello", "BAD_REQUEST"),
        (b"[" * 5000, "BAD_REQUEST"),
        (b'{"incarnation": "0", "layout": "0"}', "STALE_EPOCH"),
    ],
)
def test_socket_answers_nonsense_with_a_refusal(lender, folder, request_, reason):
    place = SocketFolder(folder, make=False)
    with contextlib.closing(place), place.dial(lender.socket.name) as connection:
        connection.setblocking(True)
        connection.settimeout(20)
        sockets.send(connection, request_)
        data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4)
    assert json.loads(data)["reason"] == reason
    assert fds == []


def test_answer_that_can_not_be_read_or_refuses_is_an_error():
    with pytest.raises(BadRequest):
        shm_messages.decode_answer(b'{"epoch": 1, "start": -5}')
    with pytest.raises(StaleEpoch, match="gone"):
        shm_messages.decode_answer(json_messages.encode_refusal(StaleEpoch("gone", epoch=1, current_epoch=2)))


def test_connecting_and_closing_leaves_nothing(lender, folder):
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("ayni-block")

    gc.collect()
    others = mappings()

    async def scenario():
        async with link_to(lender, folder):
            assert mappings() == others + 10
        before = len(os.listdir("/proc/self/fd"))
        tickets = []
        for _ in range(5):
            async with link_to(lender, folder) as link:
                tickets.append(link.pull(move("nhd", [1], allocate_host(GEOMETRIES["nhd"]), [1])))
                await tickets[-1].outcome
        assert len(os.listdir("/proc/self/fd")) == before
        assert mappings() == others

    asyncio.run(scenario())
    assert list(folder.iterdir()) == [lender.socket]


def test_starting_engine_sweeps_what_kills_left_behind_and_nothing_else(tmp_path):
    folder = tmp_path / ("long" * 40) / "run"
    place = SocketFolder(folder, make=True)
    dead, live = host.socket_name(1), host.socket_name(2)
    place.listen(dead).close()
    listener = place.listen(live)
    old, young = host.socket_name(3) + ".new", host.socket_name(4) + ".new"
    for name in (old, young, "notes.sock", "shm-x.sock"):
        (folder / name).write_text("")
    os.utime(folder / old, (1, 1))

    async def scenario():
        engine, pool = ShmEngine(folder), PoolMemory(GEOMETRIES["nhd"])
        engine.register(handle("nhd"), pool)
        export = engine.export()
        assert export is not None
        assert engine.export() == export
        mine = shm_messages.decode_export(export.data).socket_name
        assert {path.name for path in folder.iterdir()} == {live, young, "notes.sock", "shm-x.sock", mine}
        await engine.close()
        pool.close()

    asyncio.run(scenario())
    assert {path.name for path in folder.iterdir()} == {live, young, "notes.sock", "shm-x.sock"}
    listener.close()
    place.close()


def test_peer_that_says_nothing_runs_into_the_deadline(tmp_path):
    """A socket that listens, but nobody accepts."""
    place = SocketFolder(tmp_path / "run", make=True)
    listener = place.listen(host.socket_name(9))

    async def scenario():
        async with both_sides(tmp_path / "run") as (_, lending, _):
            export = lending.export()
            assert export is not None
            silent = changed(export, incarnation="9")
            with pytest.raises(Deadline):
                await lending.connect(metadata(["nhd"]), silent, asyncio.get_running_loop().time() + 0.1)

    asyncio.run(scenario())
    listener.close()
    place.close()


@contextlib.contextmanager
def another_user():
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_can_not_reach_the_socket(lender, folder):
    with another_user(), pytest.raises(Unsupported, match=r"Permission denied|belongs to user 0"):
        SocketFolder(folder, make=False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_who_reaches_the_socket_gets_no_answer(tmp_path):
    folder = tmp_path / "run"

    async def scenario():
        async with both_sides(folder) as (_, lending, _):
            place = SocketFolder(folder, make=False)
            (socket_path,) = folder.iterdir()
            folder.chmod(0o711)
            socket_path.chmod(0o777)
            with another_user():
                connection = place.dial(socket_path.name)
            place.close()
            export = lending.export()
            assert export is not None
            incarnation = shm_messages.decode_export(export.data).incarnation
            request = shm_messages.PoolRequest(incarnation=incarnation, layout=handle("nhd"))
            with connection, contextlib.suppress(PeerLost):
                sockets.send(connection, shm_messages.encode_request(request))
                assert await sockets.receive(connection, asyncio.get_running_loop().time() + 20) == (b"", [])

    asyncio.run(scenario())


def test_many_peers_wait_for_their_turn_and_one_that_leaves_harms_nobody(lender, folder):
    local = allocate_host(GEOMETRIES["nhd"])

    async def scenario():
        place = SocketFolder(folder, make=False)
        idle = [place.dial(lender.socket.name) for _ in range(20)]
        try:
            async with link_to(lender, folder) as link:
                for connection in idle:
                    connection.close()
                return await link.pull(move("nhd", [1], local, [1])).outcome
        finally:
            place.close()

    assert asyncio.run(scenario()).failures == ()


def test_engine_ends_while_peers_are_connected(tmp_path):
    async def scenario():
        async with both_sides(tmp_path / "run") as (_, lending, link):
            place = SocketFolder(tmp_path / "run", make=False)
            name = next(path.name for path in (tmp_path / "run").iterdir())
            with place.dial(name):
                await lending.close()
            place.close()
            assert list((tmp_path / "run").iterdir()) == []
            result = await link.pull(move("nhd", [1], allocate_host(GEOMETRIES["nhd"]), [1])).outcome
            assert [failure.reason for _, failure in result.failures] == ["STALE_EPOCH"]

    asyncio.run(scenario())
