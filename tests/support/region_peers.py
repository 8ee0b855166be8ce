"""Processes that are workers with regions, or read one, and do what they are told.

They are forked from one that has loaded everything, so that each starts at once.
"""

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import numpy as np

from ayni.errors import AyniError
from ayni.shm.host import SharedMemoryOffer
from ayni.shm.regions import Region, map_region
from worker_agent.shared_regions import SharedRegions


def num_fds(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_maps(pid: int | str = "self") -> int:
    """Regions that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:ayni-region")


class Peer:
    """A process that answers, seen from the test."""

    def __init__(self, process: ForkServerProcess, connection: Connection) -> None:
        self.process, self.connection = process, connection

    def tell(self, *command: Any) -> Any:
        """Returns the answer; raises what went wrong there."""
        self.connection.send(command)
        assert self.connection.poll(30), f"no answer to {command!r}"
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask(self, *command: Any) -> Any:
        """Does the same beside a loop that has to answer the process."""
        return await asyncio.to_thread(self.tell, *command)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)


@contextlib.contextmanager
def worker_process(offer: SharedMemoryOffer | None) -> Iterator[Peer]:
    """A worker that is not connected yet."""
    with _process(_work, offer) as peer:
        yield peer


@contextlib.contextmanager
def reader_process(region: Region) -> Iterator[Peer]:
    """A process that has mapped a region and knows nothing else of it."""
    with _process(_read, DupFd(region.fd), region.id, region.size) as peer:
        yield peer


@contextlib.contextmanager
def _process(target: Any, *arguments: Any) -> Iterator[Peer]:
    context = _context()
    connection, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Peer(process, connection)
    finally:
        process.kill()
        process.join(20)
        process.close()
        connection.close()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.region_peers"])
    return context


def _read(connection: Connection, fd: Any, region_id: int, size: int) -> None:
    region = map_region(fd.detach(), region_id, size, "the test")
    # The end of the test ends the connection, and with it the process.
    with contextlib.suppress(EOFError):
        while connection.recv():
            connection.send((region.generation, region.bytes.tobytes()))


class _Worker:
    def __init__(self, offer: SharedMemoryOffer) -> None:
        self._offer = offer
        self._regions: list[Region] = []
        self._shared: SharedRegions | None = None

    @property
    def shared(self) -> SharedRegions:
        assert self._shared, "not connected"
        return self._shared

    async def connect(self, session: str) -> None:
        self._shared = await SharedRegions.connect(self._offer, session, 20)

    async def lend(self, size: int, value: int) -> int:
        """Lends a region full of one value; returns its id."""
        region = self.shared.ours.allocate(size)
        region.bytes[:] = value
        self._regions.append(region)
        await self.shared.lend(region)
        return region.id

    async def write(self, number: int, value: int) -> int:
        generation = self._regions[number].renew()
        self._regions[number].bytes[:] = value
        return generation

    async def borrow(self, region_id: int) -> tuple[int, bytes]:
        region = await self.shared.borrow(region_id)
        return region.generation, region.bytes.tobytes()

    async def sum(self, region_id: int) -> int:
        return int(np.sum((await self.shared.borrow(region_id)).bytes, dtype=np.int64))

    async def close(self) -> None:
        await self.shared.close()


async def _obey(connection: Connection, offer: SharedMemoryOffer) -> None:
    worker = _Worker(offer)
    while True:
        verb, *arguments = await asyncio.to_thread(connection.recv)
        try:
            answer = await getattr(worker, verb)(*arguments)
        except AyniError as error:
            answer = RuntimeError(f"{error.reason}: {error.message}")
        connection.send(answer)


def _work(connection: Connection, offer: SharedMemoryOffer) -> None:
    with contextlib.suppress(EOFError):
        asyncio.run(_obey(connection, offer))
