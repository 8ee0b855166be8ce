"""A peer that serves blocks over gRPC, and a link to it, in one process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.layouts import AxisOrder, LayoutKind, StorageKind
from ayni.errors import StorageFailed
from tests.support import block_peer
from tests.support.block_peer import TOKEN, Lender, Servicer, config, descriptor, metadata
from worker_agent.blocks.engine import Move, MoveResult, Ticket
from worker_agent.blocks.engines.grpc_engine import Dialling, GrpcEngine
from worker_agent.blocks.engines.grpc_link import GrpcLink
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Memory, Part

LIMIT = 20.0
"""Deadline of moves that are to end long before."""

FC, BLOCK_FIRST, BLOCK_SECOND = LayoutKind
NHD, HND, UNIVERSAL = AxisOrder.NHD, AxisOrder.HND, AxisOrder.UNIVERSAL


@dataclass
class Pair:
    """A peer that serves, and a link to it."""

    link: GrpcLink
    lender: Lender
    servicer: Servicer

    async def pull(self, local: Memory, remote_blocks: Any, local_blocks: Any, **options: Any) -> MoveResult:
        return await ended(self.link.pull(self.move(local, remote_blocks, local_blocks, **options)))

    async def push(self, local: Memory, remote_blocks: Any, local_blocks: Any, **options: Any) -> MoveResult:
        return await ended(self.link.push(self.move(local, remote_blocks, local_blocks, **options)))

    def move(self, local: Memory, remote_blocks: Any, local_blocks: Any, limit: float = LIMIT, **options: Any) -> Move:
        return Move(
            remote=descriptor(self.lender.memory.geometry),
            remote_blocks=as_ids(remote_blocks),
            local=local,
            local_blocks=as_ids(local_blocks),
            deadline=asyncio.get_running_loop().time() + limit,
            **options,
        )


async def ended(ticket: Ticket) -> MoveResult:
    """Returns a move's outcome once it is quiesced."""
    async with asyncio.timeout(LIMIT + 5):
        await ticket.quiesced
        return await ticket.outcome


@asynccontextmanager
async def connected(memory: Memory, servicer_class: type[Servicer] = Servicer) -> AsyncIterator[Pair]:
    lender = Lender(memory)
    servicer = servicer_class(lender)
    async with block_peer.serving(servicer) as address:
        worker, export = metadata(memory.geometry, address)
        engine = GrpcEngine(Dialling(token=TOKEN))
        link = await engine.connect(worker, export, asyncio.get_running_loop().time() + LIMIT)
        try:
            yield Pair(link, lender, servicer)
        finally:
            await link.close()
    # A call that the server's end has cancelled takes a moment to give its blocks back.
    await lender.idle()


def geometry(order: AxisOrder = NHD, kind: LayoutKind = FC, **fields: Any) -> Geometry:
    return Geometry(config=config(**fields), kind=kind, axis_order=order)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


class Apart:
    """Memory that the processor can't reach, like a disk or a device; some blocks fail."""

    storage = StorageKind.DISK

    def __init__(self, host: Memory, broken: frozenset[int] = frozenset()) -> None:
        self._host, self.geometry, self._broken = host, host.geometry, broken

    def rows(self, part: Part) -> None:
        return None

    def views(self, block: int, part: Part) -> None:
        return None

    def read(self, blocks: Ids, part: Part, out: np.ndarray) -> None:
        self._check(blocks)
        self._host.read(blocks, part, out)

    def write(self, blocks: Ids, part: Part, data: np.ndarray) -> None:
        self._check(blocks)
        self._host.write(blocks, part, data)

    def close(self) -> None:
        pass

    def _check(self, blocks: Ids) -> None:
        if broken := self._broken & set(blocks.tolist()):
            raise StorageFailed(f"block {min(broken)} is broken", place="a disk", detail="broken")


def naive(data: np.ndarray, order: AxisOrder, layers: slice, heads: slice) -> np.ndarray:
    """Returns blocks' elements as [N, layer, outer, page, head, element of uint16], sliced."""
    shapes = {NHD: (2, 2, 2, 4, -1), HND: (2, 2, 4, 2, -1), UNIVERSAL: (4, 2, 2, 2, -1)}
    places = {NHD: (0, 1, 2, 3, 4, 5), HND: (0, 1, 2, 4, 3, 5), UNIVERSAL: (0, 2, 3, 4, 1, 5)}
    elements = data.view(np.uint16).reshape(len(data), *shapes[order]).transpose(places[order])
    return elements[:, layers, :, :, heads]
