"""A worker reduced to ReadBlocks and WriteBlocks, in this process or as a program.

Run as a program it prints its address and serves until it is killed. Its blocks hold `filled(seed)`.
"""
# ruff: noqa: N802 -- methods are named after calls

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder, LayoutConfig, LayoutDescriptor, LayoutHandle, LayoutKind, StorageKind, Tier
from ayni.blocks.metadata import EngineExport, WorkerMetadata
from ayni.endpoints import ServerTls
from ayni.errors import BlockBusy, StaleEpoch, UnknownBlock, UnknownLayout
from ayni.rpc import tune_allocator
from ayni.servers import TokenInterceptor, add_service, bind, make_server
from worker_agent.blocks import streams
from worker_agent.blocks.engines.grpc_engine import Dialling, GrpcEngine
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import WHOLE, Memory

ROOT = Path(__file__).parents[2]
TOKEN = "a token for tests only"
HANDLE = LayoutHandle(owner_id=7, number=3)
INSTANCE = "0b5a3c8e-1111-4222-8333-444455556666"


def config(num_blocks: int = 8, region_bytes: int = 32, num_layers: int = 2, outer_dim: int = 2) -> LayoutConfig:
    """Returns a shape with 4 heads of 2 elements of 2 bytes where regions are 32 bytes: 2 tokens."""
    page_size = 2
    inner_dim = region_bytes // page_size // 2
    return LayoutConfig(
        num_blocks=num_blocks,
        num_layers=num_layers,
        outer_dim=outer_dim,
        page_size=page_size,
        inner_dim=inner_dim,
        num_heads=4,
    )


def filled(geometry: Geometry, seed: int = 1) -> HostMemory:
    """Returns memory with random bytes, the same for the same seed."""
    memory = allocate_host(geometry)
    for number, buffer in enumerate(memory.buffers):
        buffer[:] = np.random.default_rng([seed, number]).integers(0, 256, buffer.size, np.uint8)
    return memory


def blocks_of(memory: Memory, ids: Any = None) -> np.ndarray:
    """Returns the bytes of blocks, shape [N, bytes of a block], copied."""
    ids = np.arange(memory.geometry.config.num_blocks) if ids is None else np.asarray(ids)
    out = np.empty((len(ids), memory.geometry.config.block_bytes), np.uint8)
    if len(ids):
        memory.read(ids, WHOLE, out)
    return out


class Lender:
    """Lends one layout."""

    def __init__(self, memory: Memory, incarnation: int = 1) -> None:
        self.memory, self.incarnation = memory, incarnation
        self.lent: list[tuple[list[int], bool]] = []
        self.notified: list[int] = []
        self.busy: set[int] = set()
        self._returned = asyncio.Event()

    @contextmanager
    def lend(self, handle: LayoutHandle, incarnation: int, ids: Ids, write: bool) -> Iterator[Memory]:
        if incarnation != self.incarnation:
            raise StaleEpoch("another incarnation", epoch=incarnation, current_epoch=self.incarnation)
        if handle != HANDLE:
            raise UnknownLayout("no such layout", layout=handle)
        num_blocks = self.memory.geometry.config.num_blocks
        if len(ids) and ids.max() >= num_blocks:
            raise UnknownBlock("no such block", block=ids.max(), num_blocks=num_blocks)
        if self.busy & set(ids.tolist()):
            raise BlockBusy("the block is being written", layout=handle, block=min(self.busy))
        held = (ids.tolist(), write)
        self.lent.append(held)
        if write:
            self.busy |= set(ids.tolist())
        try:
            yield self.memory
        finally:
            self.lent.remove(held)
            self._returned.set()
            if write:
                self.busy -= set(ids.tolist())

    async def idle(self) -> None:
        """Waits until nothing is lent; a call that was cancelled takes a moment to end."""
        async with asyncio.timeout(5):
            while self.lent:
                self._returned.clear()
                await self._returned.wait()

    def notify(self, number: int) -> None:
        self.notified.append(number)


class Servicer:
    """The two calls."""

    def __init__(self, lender: Lender) -> None:
        self.lender = lender

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        async with aclosing(streams.read_blocks(request, self.lender)) as frames:
            async for frame in frames:
                yield frame

    async def WriteBlocks(self, requests: Any, context: Any) -> Any:
        return await streams.write_blocks(requests, context, self.lender)


@asynccontextmanager
async def serving(servicer: Servicer, address: str = "127.0.0.1:0", tls: ServerTls | None = None) -> AsyncIterator[str]:
    """Serves in this process; yields the address."""
    server = make_server(TokenInterceptor(TOKEN))
    add_service(server, "ayni.v1.WorkerService", servicer, raw={"ReadBlocks", "WriteBlocks"})
    bound = bind(server, address, tls)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=None)


def descriptor(geometry: Geometry) -> LayoutDescriptor:
    """Describes the lender's layout."""
    return LayoutDescriptor(
        handle=HANDLE,
        tier=Tier.HOST,
        config=geometry.config,
        kind=geometry.kind,
        axis_order=geometry.axis_order,
        storage=StorageKind.SYSTEM,
        fingerprint="f" * 64,
    )


def metadata(
    geometry: Geometry, address: str, incarnation: int = 1, is_tls: bool = False
) -> tuple[WorkerMetadata, EngineExport]:
    """Returns what a worker with this layout at this address exports."""
    engine = GrpcEngine(Dialling(token=TOKEN))
    engine.serve_at(address, is_tls)
    export = engine.export()
    assert export
    worker = WorkerMetadata(
        instance_id=INSTANCE,
        epoch=1,
        rank=0,
        owner_id=HANDLE.owner_id,
        incarnation=incarnation,
        address=address,
        layouts=(descriptor(geometry),),
        engines=(export,),
    )
    return worker, export


class Program:
    """The peer as a process."""

    def __init__(self, geometry: Geometry, incarnation: int = 1, address: str = "127.0.0.1:0", seed: int = 1) -> None:
        settings = {
            "config": dataclasses.asdict(geometry.config),
            "kind": geometry.kind.value,
            "order": geometry.axis_order.value,
            "incarnation": incarnation,
            "address": address,
            "seed": seed,
        }
        command = [sys.executable, "-m", "tests.support.block_peer", json.dumps(settings)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        assert self.process.stdout
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the peer did not start"
        self.metadata, self.export = metadata(geometry, self.address, incarnation)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


async def _main() -> None:
    tune_allocator()
    settings = json.loads(sys.argv[1])
    geometry = Geometry(
        config=LayoutConfig(**settings["config"]),
        kind=LayoutKind(settings["kind"]),
        axis_order=AxisOrder(settings["order"]),
    )
    servicer = Servicer(Lender(filled(geometry, settings["seed"]), settings["incarnation"]))
    async with serving(servicer, settings["address"]) as address:
        print(address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
