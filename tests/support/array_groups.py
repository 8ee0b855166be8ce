"""Groups of array workers, in this process or behind gRPC, as the conformance suite takes them."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Literal

import numpy as np

from ayni.blocks.layouts import LayoutConfig, LocalLayout, Tier
from ayni.blocks.metadata import GroupConfig, LayoutRequest
from ayni.blocks.worker import RankWorker
from ayni.servers import TokenInterceptor, bind, make_server
from coordinator_service.leader import SpmdParallelWorkers
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.support.array_layouts import World
from tests.support.array_worker import ArrayWorker
from tests.support.attached_agent import Coordinator, attached, coordinating
from tests.support.block_groups import BlockGroup
from worker_agent.blocks.streams import Lender
from worker_agent.service import WorkerServicer

TOKEN = "a-token-of-some-length"
SHAPE = LayoutConfig(num_blocks=16, num_layers=2, outer_dim=2, page_size=4, inner_dim=16, num_heads=2)
GROUPS = ("6f1d7a52-0b7e-4a6c-9c3d-2f4e5a6b7c8d", "9a2b3c4d-5e6f-4a7b-8c9d-0e1f2a3b4c5d")
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)


@asynccontextmanager
async def served(worker: RankWorker | None, lender: Lender | None = None) -> AsyncIterator[str]:
    """Serves a worker on a free port and gives the address."""
    server = make_server(TokenInterceptor(TOKEN))
    WorkerServicer(worker, lender).add_to(server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=None)


@asynccontextmanager
async def far(worker: RankWorker, rank: int = 0) -> AsyncIterator[GrpcBlockWorker]:
    """Serves a worker and gives the stub that calls it."""
    async with served(worker) as address:
        stub = GrpcBlockWorker.dial(address, TOKEN, rank)
        try:
            yield stub
        finally:
            await stub.close()


@asynccontextmanager
async def attached_stub(worker: RankWorker, rank: int = 0) -> AsyncIterator[GrpcBlockWorker]:
    """Attaches a worker to a coordinator and gives the stub that calls it from there."""
    coordinator = Coordinator()
    async with coordinating(coordinator) as address, attached(address, WorkerServicer(worker)):
        await coordinator.until_attached(0)
        stub = GrpcBlockWorker(coordinator.attachments.channel(0), rank)
        try:
            yield stub
        finally:
            await stub.close()


@asynccontextmanager
async def array_group(num_ranks: int, where: Literal["near", "far", "attached"]) -> AsyncIterator[BlockGroup]:
    """Opens two groups of array workers that share nothing but a world; a single worker is no group."""
    async with AsyncExitStack() as stack:
        world = World()
        peer = await _open(stack, world, num_ranks, where, GROUPS[1], None)
        yield await _open(stack, world, num_ranks, where, GROUPS[0], peer)


async def _open(
    stack: AsyncExitStack,
    world: World,
    num_ranks: int,
    where: Literal["near", "far", "attached"],
    instance_id: str,
    peer: BlockGroup | None,
) -> BlockGroup:
    arrays = [ArrayWorker(world, SHAPE) for _ in range(num_ranks)]
    ranks: list[RankWorker] = list(arrays)
    for rank, array in enumerate(arrays):
        stack.push_async_callback(array.close)
        if where == "far":
            ranks[rank] = await stack.enter_async_context(far(array, rank))
        if where == "attached":
            ranks[rank] = await stack.enter_async_context(attached_stub(array, rank))
    group = SpmdParallelWorkers(ranks)
    stack.push_async_callback(group.close)
    config = GroupConfig(
        epoch=1,
        instance_id=instance_id,
        rank=0,
        world_size=num_ranks,
        layouts=tuple(LayoutRequest(tier=tier, num_blocks=SHAPE.num_blocks) for tier in TIERS[1:]),
    )
    worker = ranks[0] if num_ranks == 1 else group
    await worker.configure_layouts(config)
    return _described(worker, arrays, config, peer)


def _described(
    worker: RankWorker | SpmdParallelWorkers,
    arrays: Sequence[ArrayWorker],
    config: GroupConfig,
    peer: BlockGroup | None,
) -> BlockGroup:
    async def fill(rank: int, tier: Tier, block: int, data: bytes) -> None:
        arrays[rank].arrays[LocalLayout(tier=tier)][block] = np.frombuffer(data, np.uint8)

    async def read(rank: int, tier: Tier, block: int) -> bytes:
        return bytes(arrays[rank].arrays[LocalLayout(tier=tier)][block])

    @contextmanager
    def stalled() -> Iterator[None]:
        for array in arrays:
            array.go.clear()
        try:
            yield
        finally:
            for array in arrays:
                array.go.set()

    return BlockGroup(
        worker=worker,
        num_ranks=len(arrays),
        config=config,
        shape=SHAPE,
        tiers=TIERS,
        fill=fill,
        read=read,
        stalled=stalled,
        peer=peer,
    )
