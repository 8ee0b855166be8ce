"""A stub and the array worker behind it, and what transfers of the stub become."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from ayni.blocks.layouts import LayoutHandle, LocalLayout, Tier
from ayni.blocks.transfers import (
    TransferOptions,
    TransferOutcome,
)
from ayni.blocks.worker import Notification
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.support.array_groups import SHAPE, far
from tests.support.array_layouts import World
from tests.support.array_worker import ArrayWorker
from tests.support.block_groups import soon

DEVICE = LocalLayout(tier=Tier.DEVICE)
GROUP = "6f1d7a52-0b7e-4a6c-9c3d-2f4e5a6b7c8d"
SHORT = TransferOptions(timeout_s=0.6, drain_s=0.1)
LIMIT_S = 30.0
WIDE = LayoutHandle(owner_id=1 << 64, number=0)


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, LIMIT_S))


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[ArrayWorker, GrpcBlockWorker]]:
    """Gives a worker and the stub that calls it as rank 3."""
    worker = ArrayWorker(World(), SHAPE)
    async with far(worker, 3) as stub:
        yield worker, stub
    await worker.close()


def copy(stub: GrpcBlockWorker, options: TransferOptions = SHORT) -> Notification:
    return stub.execute_local_transfer(DEVICE, DEVICE, [0, 1], [8, 9], options)


async def failed(notification: Notification, reason: str, within_s: float) -> TransferOutcome:
    """Waits for a transfer whose blocks all fail for this reason; nobody knows whether its bytes still land."""
    result = await soon(notification.result(), "a transfer that fails", within_s)
    (outcome,) = result.outcomes
    assert (outcome.rank, outcome.num_done, outcome.refusal) == (3, 0, None)
    assert [(f.index, f.block, f.failure.reason) for f in outcome.failures] == [(0, 8, reason), (1, 9, reason)]
    assert not outcome.quiesced
    return outcome


async def refused(notification: Notification, reason: str) -> TransferOutcome:
    (outcome,) = (await soon(notification.result(), "a refusal")).outcomes
    assert outcome.refusal
    assert outcome.refusal.reason == reason
    assert outcome.rank == 3
    assert outcome.quiesced
    return outcome


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Waits for a condition that something else on this loop brings about."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 -- what brings it about tells nobody
            await asyncio.sleep(0.005)
