"""Both sides of shared regions in one process, and either one by hand."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np

from ayni.shm import region_messages, sockets
from ayni.shm import regions as regions_module
from ayni.shm.folder import SocketFolder
from ayni.shm.host import SharedMemoryOffer, socket_name
from ayni.shm.regions import MappedRegion
from ayni.shm.this_host import this_host
from coordinator_service.shared_regions import SharedRegions as CoordinatorRegions
from worker_agent.shared_regions import SharedRegions as WorkerRegions

LIMIT = 1 << 30


def find_worker(session: str) -> int | None:
    """Worker 7 has session "7"; only numbers are sessions."""
    return int(session) if session.isdecimal() else None


@contextlib.asynccontextmanager
async def coordinator(folder: Path, limit_bytes: int = LIMIT) -> AsyncIterator[CoordinatorRegions]:
    made = CoordinatorRegions(folder / "run", find_worker, limit_bytes)
    try:
        yield made
    finally:
        await made.close()


def offered(coordinator: CoordinatorRegions) -> SharedMemoryOffer:
    offer = coordinator.offer()
    assert offer is not None
    return offer


@contextlib.asynccontextmanager
async def worker(coordinator: CoordinatorRegions, session: str = "7") -> AsyncIterator[WorkerRegions]:
    made = await WorkerRegions.connect(offered(coordinator), session, 20)
    try:
        yield made
    finally:
        await made.close()


def bytes_of(coordinator: CoordinatorRegions, worker_id: int, region_id: int) -> np.ndarray:
    mapped = coordinator.lent(worker_id, region_id)
    assert mapped is not None
    return mapped.bytes


def held_up(monkeypatch, above: int) -> tuple[threading.Event, threading.Event]:
    """Has threads wait before they map regions above a size; returns what they wait for, and what says that they do."""
    go_on, began = threading.Event(), threading.Event()
    map_region = regions_module.map_region

    def slow(fd: int, region_id: int, size: int, peer: str) -> MappedRegion:
        if size > above:
            began.set()
            assert go_on.wait(20)
        return map_region(fd, region_id, size, peer)

    monkeypatch.setattr("ayni.shm.mapping.map_region", slow)
    return go_on, began


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@contextlib.contextmanager
def dialed(offer: SharedMemoryOffer) -> Iterator[socket.socket]:
    """A connection by hand."""
    with contextlib.closing(SocketFolder(Path(offer.folder), make=False)) as place, place.dial(offer.socket_name) as it:
        yield it


async def said(connection: socket.socket, data: bytes, fds=()) -> tuple[bytes, list[int]]:
    sockets.send(connection, data, fds)
    return await sockets.receive(connection, asyncio.get_running_loop().time() + 20)


@contextlib.asynccontextmanager
async def silent(folder: Path, answers: int) -> AsyncIterator[SharedMemoryOffer]:
    """A coordinator that answers so many requests and then none; says so much with no request when negative."""
    place = SocketFolder(folder / "run", make=True)

    async def converse(connection: socket.socket) -> None:
        for _ in range(abs(answers)):
            await sockets.receive(connection, None)
            sockets.send(connection, region_messages.encode_answer(region_messages.RegionAnswer()))
        if answers < 0:
            sockets.send(connection, b"{}")
        await sockets.receive(connection, None)
        await asyncio.Event().wait()

    server = sockets.SocketServer(place, socket_name(5), converse)
    try:
        yield SharedMemoryOffer(host=this_host(), folder=str(folder / "run"), socket_name=socket_name(5))
    finally:
        await server.close()
        place.close()
