"""Agents of the block bench: real processes that serve blocks, and a worker in this process that uses them."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder, LayoutKind, LocalLayout, Tier
from ayni.blocks.metadata import WorkerMetadata
from ayni.endpoints import ClientTls
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.bench.processes import Program
from tests.support.coordinator import TOKEN
from worker_agent.block_engines import make_engines
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.worker import LocalBlockWorker
from worker_agent.blocks_config import BlocksConfig
from worker_agent.layouts_file import LayoutEntry

HOST = LocalLayout(tier=Tier.HOST)
KIB, MIB = 1 << 10, 1 << 20

_CHECK_BYTES = 16 << 20
"""Less than what the allocator gives back to the system."""

_SHAPES = {
    4 * KIB: {"num_layers": 2, "inner_dim": 32, "num_heads": 4},
    64 * KIB: {"num_layers": 2, "inner_dim": 512, "num_heads": 4},
    MIB: {"num_layers": 16, "inner_dim": 1024, "num_heads": 8},
}
"""Of blocks with so many bytes: 16 tokens, keys and values apart, 2 bytes an element."""


def entry(num_blocks: int, block_bytes: int, tier: str = "host", resource_id: int = 0) -> LayoutEntry:
    """A fully contiguous layout as an agent's file has it."""
    shape = _SHAPES[block_bytes]
    made = LayoutEntry(num_blocks=num_blocks, tier=tier, resource_id=resource_id, **shape)  # type: ignore[arg-type]
    assert made.geometry().config.block_bytes == block_bytes
    return made


def geometry(
    num_blocks: int,
    block_bytes: int,
    kind: LayoutKind = LayoutKind.FULLY_CONTIGUOUS,
    order: AxisOrder = AxisOrder.NHD,
) -> Geometry:
    return Geometry(config=entry(num_blocks, block_bytes).geometry().config, kind=kind, axis_order=order)


def pattern(num_blocks: int, block_bytes: int, seed: int = 1) -> Bytes:
    """Bytes of blocks, shape [N, block bytes], no block like another."""
    values = np.random.default_rng(seed).integers(1, 1 << 63, num_blocks * block_bytes // 8, np.int64)
    return values.view(np.uint8).reshape(num_blocks, block_bytes)


def shuffled(num_blocks: int, seed: int) -> Ids:
    """All ids of blocks in an order of no order."""
    return np.random.default_rng(seed).permutation(num_blocks).astype(np.int64)


def agent(
    folder: Path, layouts: Sequence[LayoutEntry], engines: Sequence[str] = ("grpc",), *flags: str, name: str = "agent"
) -> Program:
    """Starts an agent that serves blocks; its word is its address."""
    place = folder / name
    place.mkdir(parents=True)
    rows = [{key: getattr(one, key) for key in LayoutEntry.__dataclass_fields__} for one in layouts]
    (place / "layouts.yaml").write_text(yaml.safe_dump({"layouts": rows}))
    options = {"layouts": place / "layouts.yaml", "blocks-root": place, "blocks-engines": ",".join(engines)}
    command = ["-m", "worker_agent", "serve", "--log-level", "warning", *flags]
    return Program.start(name, [*command, *(f"--{key}={value}" for key, value in options.items())], folder)


@contextlib.asynccontextmanager
async def local_worker(
    folder: Path, engines: Sequence[str] = ("grpc",), tls: ClientTls | None = None
) -> AsyncIterator[LocalBlockWorker]:
    """A worker in this process, without a service of its own."""
    config = BlocksConfig(root=folder / "here", engines=tuple(engines), disk_sync="never")
    made = make_engines(config, TOKEN, tls or ClientTls(), insecure=False)
    worker = LocalBlockWorker(engines=made, config=config)
    try:
        yield worker
    finally:
        await worker.close()


async def connect(worker: LocalBlockWorker, address: str, tls: ClientTls | None = None) -> WorkerMetadata:
    """Connects with an agent; returns what it says of itself."""
    stub = GrpcBlockWorker.dial(address, TOKEN, tls=tls)
    try:
        (metadata,) = await stub.export_metadata()
    finally:
        await stub.close()
    await worker.connect_remote(metadata.instance_id, [metadata])
    return metadata


async def check(worker: LocalBlockWorker, place: LocalLayout, blocks: Ids, data: Bytes, rows: Ids) -> None:
    """Makes sure that each block holds its row of `data`."""
    step = max(1, _CHECK_BYTES // data.shape[1])
    for start in range(0, len(blocks), step):
        some = slice(start, start + step)
        got = await worker.read(place, blocks[some])
        assert np.array_equal(got, data[rows[some]]), "a block holds other bytes than it was given"


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """Environment variables of this process and of those that it starts meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
