"""Sockets and memory of a host that are used up, empty or silent: gradients travel, and nothing else changes."""

import asyncio
import fcntl
import gc
import mmap
import os
import resource
import struct
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ayni.errors import PeerLost
from ayni.shm.folder import SocketFolder
from ayni.shm.host import socket_name
from ayni.shm.memory import _F_SEAL_FUTURE_WRITE
from ayni.shm.regions import map_region
from ayni.shm.sources import Source
from tests.support.near_nodes import SECRET, brought, near_nodes, reduce_all, star, terms
from worker_agent import host_service
from worker_agent.host_streams import Kind
from worker_agent.slice_work import cut

SHARES = [range(2), range(2, 5), range(5, 8)]
SIZE = 3 * 65536 + 17


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "ayni"


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Leaves this process no descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_is_out_of_descriptors_is_told_that_nobody_was_reached(tmp_path: Path):
    tmp_path.chmod(0o700)
    with closing(SocketFolder(tmp_path, make=False)) as folder:
        listener = folder.listen(socket_name(1))
        with closing(listener):
            with no_descriptors(), pytest.raises(PeerLost, match="Too many open files"):
                folder.dial(socket_name(1))
            folder.dial(socket_name(1)).close()


def test_an_owner_whose_memory_can_not_be_mapped_is_reached_over_grpc(monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        async with near_nodes(3) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number, 8))

            async def no_map(*_: object) -> Any:
                raise PeerLost("no descriptor is left", peer="", detail="")

            near = made[0].exchange._near
            assert near
            monkeypatch.setattr(near.regions, "map", no_map)
            offers = [(one, brought(one, SHARES[one.number], SIZE, 8)) for one in made]
            await reduce_all(offers)
            mean, _, _ = star(SIZE, SHARES)
            assert all(what.offer.out.tobytes() == mean for _, what in offers)
            assert not any(one.lost for one in made)

    run(scenario())


def test_memory_with_holes_is_not_mapped():
    """Reading a hole would have the reader pay for a page."""
    size = 64 << 20
    fd = os.memfd_create("holes", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096 + size)
        with mmap.mmap(fd, 4096) as header:
            header[8:24] = b"AYNIRGN1" + struct.pack("<Q", size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE)
        with pytest.raises(PeerLost, match=f"4096 bytes of {4096 + size}"):
            map_region(fd, 1, size, "a worker")
        assert os.fstat(fd).st_blocks * 512 == 4096
    finally:
        os.close(fd)


def test_who_is_refused_and_goes_on_saying_nothing_loses_its_connection_and_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_service, "_DRAIN_S", 0.1)

    async def scenario() -> None:
        problems = list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        async with near_nodes(1) as made:
            made[0].exchange.regroup(terms(made, 0, 8))
            offer = made[0].offer
            assert offer
            with closing(SocketFolder(Path(offer.folder), make=False)) as folder:
                stranger = folder.dial(offer.socket_name)
            with closing(stranger):
                for kind, content in ((Kind.HELLO, SECRET.encode()), (Kind.FRAME, b"bad")):
                    stranger.send(struct.pack("<BI", kind, len(content)) + content)
                assert await asyncio.get_running_loop().sock_recv(stranger, 100) == b""
            await asyncio.sleep(0)
            gc.collect()
        assert problems == []

    run(scenario())


def test_a_folder_whose_name_is_no_text_shares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(os.environ, "XDG_RUNTIME_DIR", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))

    async def scenario() -> None:
        async with near_nodes(1) as made:
            assert made[0].offer is None

    run(scenario())


def test_what_comes_of_a_contribution_whose_slice_began_anew_meanwhile_is_passed_over():
    """Mapping a region takes time, in which others can have a slice start again."""

    async def scenario() -> None:
        problems = list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        async with near_nodes(2) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number, 3))
            late = brought(made[1], range(1, 3), SIZE, 3)
            work = cut(late, terms(made, 1, 3))[0]
            contribution, part = made[0].rounds.begin(work.offer), work.contribution.parts[0]
            assert part is not None
            contribution.live.start_again("another one was lost")
            data = part.view(np.uint8)
            contribution.lend(0, 0, Source(region=None, generation=0, data=data, dtype="float32"))
            await asyncio.sleep(0)
            contribution.close()
            early = brought(made[0], range(1), SIZE, 3)
            await reduce_all([(made[0], early), (made[1], late)])
            mean, _, _ = star(SIZE, [range(1), range(1, 3)])
            assert early.offer.out.tobytes() == late.offer.out.tobytes() == mean
            gc.collect()
        assert problems == []

    run(scenario())
