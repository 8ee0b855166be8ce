"""Groups of real block workers, in this process or called over gRPC, as the conformance suite takes them."""

import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import AxisOrder, LayoutConfig, LocalLayout, Tier
from ayni.blocks.metadata import GroupConfig, LayoutRequest
from ayni.blocks.objects import ObjectStoreConfig
from ayni.blocks.worker import RankWorker
from ayni.endpoints import ClientTls, ServerTls
from coordinator_service.leader import SpmdParallelWorkers
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.support.array_groups import GROUPS, SHAPE, TIERS, TOKEN
from tests.support.block_groups import BlockGroup
from worker_agent.blocks import local_tickets
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.worker import LocalBlockWorker
from worker_agent.blocks_config import BlocksConfig
from worker_agent.serving import ServiceConfig, serving

DEVICE, HOST, DISK = (LocalLayout(tier=tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))


def service(root: Path, *engines: str, copy_threads: int = 2) -> ServiceConfig:
    """Returns the configuration of a worker's service on a free port."""
    return ServiceConfig(
        listen="127.0.0.1:0",
        token=TOKEN,
        blocks=BlocksConfig(root=root, engines=engines or ("grpc",), copy_threads=copy_threads),
        tls=ClientTls(),
        server_tls=ServerTls(),
        insecure=False,
        model="test",
    )


@asynccontextmanager
async def block_worker(
    root: Path, *engines: str, shape: LayoutConfig = SHAPE, order: AxisOrder = AxisOrder.NHD
) -> AsyncIterator[LocalBlockWorker]:
    """A worker that serves, with a device layout."""
    async with serving(service(root, *engines)) as worker:
        await worker.allocate(DEVICE, Geometry(config=shape, axis_order=order))
        yield worker


@asynccontextmanager
async def worker_group(num_ranks: int, where: Literal["near", "far"], *engines: str) -> AsyncIterator[BlockGroup]:
    """Opens two groups of real workers that share a folder; a single worker is no group."""
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peer = await _open(stack, root, num_ranks, where, engines, None)
        yield await _open(stack, root, num_ranks, where, engines, peer)


async def _open(
    stack: AsyncExitStack,
    root: Path,
    num_ranks: int,
    where: Literal["near", "far"],
    engines: Sequence[str],
    peer: BlockGroup | None,
) -> BlockGroup:
    workers = [await stack.enter_async_context(block_worker(root, *engines)) for _ in range(num_ranks)]
    ranks: list[RankWorker] = list(workers)
    if where == "far":
        for rank, worker in enumerate(workers):
            stub = GrpcBlockWorker.dial(worker.address, TOKEN, rank)
            stack.push_async_callback(stub.close)
            ranks[rank] = stub
    group = SpmdParallelWorkers(ranks)
    stack.push_async_callback(group.close)
    config = GroupConfig(
        epoch=1,
        instance_id=GROUPS[0 if peer else 1],
        rank=0,
        world_size=num_ranks,
        layouts=tuple(LayoutRequest(tier=tier, num_blocks=SHAPE.num_blocks) for tier in TIERS[1:]),
        disk_folder="slabs" if peer else "slabs of the peer",
        object_store=ObjectStoreConfig(kind="file", bucket="objects"),
    )
    face = ranks[0] if num_ranks == 1 else group
    await face.configure_layouts(config)
    return _described(face, workers, config, peer)


def _described(
    face: RankWorker | SpmdParallelWorkers,
    workers: Sequence[LocalBlockWorker],
    config: GroupConfig,
    peer: BlockGroup | None,
) -> BlockGroup:
    async def fill(rank: int, tier: Tier, block: int, data: bytes) -> None:
        rows = np.frombuffer(data, np.uint8).reshape(1, -1)
        await workers[rank].write(LocalLayout(tier=tier), as_ids([block]), rows, 10.0)

    async def read(rank: int, tier: Tier, block: int) -> bytes:
        return (await workers[rank].read(LocalLayout(tier=tier), as_ids([block]), 10.0)).tobytes()

    @contextmanager
    def stalled() -> Iterator[None]:
        """Keeps all copying threads busy, and every copy on a thread."""
        go, inline = threading.Event(), local_tickets.INLINE_BYTES
        local_tickets.INLINE_BYTES = -1
        for worker in workers:
            for _ in range(worker.config.copy_threads):
                worker.copier.occupy(go.wait)
        try:
            yield
        finally:
            local_tickets.INLINE_BYTES = inline
            go.set()

    return BlockGroup(
        worker=face,
        num_ranks=len(workers),
        config=config,
        shape=SHAPE,
        tiers=TIERS,
        fill=fill,
        read=read,
        stalled=stalled,
        peer=peer,
    )
