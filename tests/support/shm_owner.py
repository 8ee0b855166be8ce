"""Processes that lend pools through shared memory and do what they are told.

They are forked from one that has loaded everything, so that each starts at once.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

from ayni.blocks.layouts import AxisOrder, LayoutConfig, LayoutDescriptor, LayoutHandle, LayoutKind, StorageKind, Tier
from ayni.blocks.metadata import EngineExport, WorkerMetadata
from worker_agent.blocks.engine import Move
from worker_agent.blocks.engines.shm import ShmEngine
from worker_agent.blocks.engines.shm_link import ShmLink
from worker_agent.blocks.engines.shm_messages import decode_export
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import WHOLE, Memory, Part
from worker_agent.blocks.pools import PoolMemory

_SMALL = LayoutConfig(num_blocks=80, num_layers=3, outer_dim=2, page_size=4, inner_dim=64, num_heads=4)
_MANY = LayoutConfig(num_blocks=2000, num_layers=2, outer_dim=1, page_size=1, inner_dim=512)
_LARGE = LayoutConfig(num_blocks=12, num_layers=8, outer_dim=2, page_size=64, inner_dim=1024, num_heads=8)

GEOMETRIES = {
    "nhd": Geometry(config=_SMALL, axis_order=AxisOrder.NHD),
    "hnd": Geometry(config=_SMALL, axis_order=AxisOrder.HND, kind=LayoutKind.LAYER_SEPARATE_BLOCK_FIRST),
    "second": Geometry(config=_SMALL, axis_order=AxisOrder.NHD, kind=LayoutKind.LAYER_SEPARATE_BLOCK_SECOND),
    "universal": Geometry(config=_SMALL, axis_order=AxisOrder.UNIVERSAL),
    "many": Geometry(config=_MANY),
    "large": Geometry(config=_LARGE, axis_order=AxisOrder.NHD),
}
_NUMBERS = {name: number for number, name in enumerate(GEOMETRIES)}


def handle(name: str) -> LayoutHandle:
    return LayoutHandle(owner_id=0xABCD << 48, number=_NUMBERS[name])


def descriptor(name: str) -> LayoutDescriptor:
    geometry = GEOMETRIES[name]
    return LayoutDescriptor(
        handle=handle(name),
        tier=Tier.HOST,
        config=geometry.config,
        kind=geometry.kind,
        axis_order=geometry.axis_order,
        storage=StorageKind.SYSTEM,
        fingerprint=name,
    )


def metadata(names: Sequence[str], engines: Sequence[EngineExport] = ()) -> WorkerMetadata:
    return WorkerMetadata(
        instance_id="1" * 36,
        epoch=1,
        rank=0,
        owner_id=0xABCD << 48,
        incarnation=7,
        address="",
        layouts=tuple(map(descriptor, names)),
        engines=tuple(engines),
    )


def content(geometry: Geometry, seed: int) -> np.ndarray:
    """Bytes of all blocks, shape [B, block_bytes], unlike in every place."""
    shape = (geometry.config.num_blocks, geometry.config.block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def fill(memory: Memory, seed: int) -> np.ndarray:
    data = content(memory.geometry, seed)
    memory.write(np.arange(len(data)), WHOLE, data)
    return data


def source_of(name: str) -> HostMemory:
    """A copy of what an owner lends."""
    memory = allocate_host(GEOMETRIES[name])
    fill(memory, _NUMBERS[name])
    return memory


def part_of(memory: Memory, ids: Sequence[int] | np.ndarray, part: Part = WHOLE) -> np.ndarray:
    out = np.zeros((len(ids), memory.geometry.part_bytes(part.layers, part.slice, part.axis_order)), np.uint8)
    memory.read(np.asarray(ids, np.int64), part, out)
    return out


def move(name: str, remote: Any, local: Memory, ids: Any, timeout: float = 20.0, **options: Any) -> Move:
    """Remote blocks to local ones; must be called on the loop."""
    return Move(
        remote=descriptor(name),
        remote_blocks=np.asarray(remote, np.int64),
        local=local,
        local_blocks=np.asarray(ids, np.int64),
        deadline=asyncio.get_running_loop().time() + timeout,
        **options,
    )


@dataclass
class Owner:
    """The process, seen from the test."""

    process: ForkServerProcess
    connection: Connection
    names: tuple[str, ...]
    export: EngineExport
    socket: Path

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    def tell(self, command: str) -> None:
        self.connection.send(command)
        assert self.connection.poll(20), f"no answer to {command!r}"
        assert self.connection.recv() == "done"

    def metadata(self) -> WorkerMetadata:
        return metadata(self.names, [self.export])


@contextlib.contextmanager
def owner(folder: Path, *names: str) -> Iterator[Owner]:
    """Starts an owner of some layouts, filled with their own data; kills it at the end if it is still there."""
    context = _context()
    connection, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, folder, names), daemon=True)
    process.start()
    theirs.close()
    try:
        assert connection.poll(100), "the owner did not start"
        export, socket = connection.recv()
        yield Owner(process, connection, names, export, socket)
    finally:
        process.kill()
        process.join(20)
        process.close()
        connection.close()


def end_of_killed_reader(owner: Owner, folder: Path) -> int | None:
    """Returns how a process ended that was killed while it was connected."""
    process = _context().Process(target=_connect_and_die, args=(owner.metadata(), folder), daemon=True)
    process.start()
    process.join(60)
    return process.exitcode


@contextlib.asynccontextmanager
async def link_to(owner: Owner, folder: Path) -> AsyncIterator[ShmLink]:
    """A second engine, connected to an owner."""
    engine = ShmEngine(folder)
    deadline = asyncio.get_running_loop().time() + 20
    link = await engine.connect(owner.metadata(), owner.export, deadline)
    try:
        yield link
    finally:
        await link.close()
        await engine.close()


@contextlib.asynccontextmanager
async def both_sides(folder: Path, name: str = "nhd") -> AsyncIterator[tuple[PoolMemory, ShmEngine, ShmLink]]:
    """A pool, its engine and a link to it, all in this process."""
    lending, pulling, pool = ShmEngine(folder), ShmEngine(folder), PoolMemory(GEOMETRIES[name])
    fill(pool, 1)
    lending.register(handle(name), pool)
    export = lending.export()
    assert export is not None
    link = await pulling.connect(metadata([name]), export, asyncio.get_running_loop().time() + 20)
    try:
        yield pool, lending, link
    finally:
        await link.close()
        await pulling.close()
        await lending.close()
        pool.close()


async def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Waits for a condition; returns how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"waited {seconds} s in vain"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.shm_owner"])
    return context


def _connect_and_die(metadata: WorkerMetadata, folder: Path) -> None:
    async def connect() -> None:
        await ShmEngine(folder).connect(metadata, metadata.engines[0], asyncio.get_running_loop().time() + 20)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(connect())


def _obey(engine: ShmEngine, pools: dict[str, PoolMemory], command: str) -> None:
    verb, name, *numbers = command.split()
    pool, ids = pools[name], np.array(numbers, np.int64)
    match verb:
        case "begin":
            pool.begin_write(ids)
        case "end":
            pool.end_write(ids)
        case "fill":
            pool.begin_write(np.arange(pool.geometry.config.num_blocks))
            fill(pool, int(numbers[0]))
            pool.end_write(np.arange(pool.geometry.config.num_blocks))
        case "withdraw":
            engine.deregister(handle(name))
        case "lend":
            engine.register(handle(name), pool)
        case _:
            raise ValueError(command)


async def _own(connection: Connection, folder: Path, names: Sequence[str]) -> None:
    engine = ShmEngine(folder)
    pools = {name: PoolMemory(GEOMETRIES[name]) for name in names}
    for name, pool in pools.items():
        fill(pool, _NUMBERS[name])
        engine.register(handle(name), pool)
    export = engine.export()
    assert export is not None
    connection.send((export, folder / decode_export(export.data).socket_name))
    while True:
        command = await asyncio.to_thread(connection.recv)
        if command == "close":
            await engine.close()
            for pool in pools.values():
                pool.close()
        else:
            _obey(engine, pools, command)
        connection.send("done")


def _main(connection: Connection, folder: Path, names: Sequence[str]) -> None:
    # The end of the test ends the connection, and with it the process.
    with contextlib.suppress(EOFError):
        asyncio.run(_own(connection, folder, names))
