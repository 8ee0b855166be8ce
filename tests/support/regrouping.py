"""What tests of exchange groups ask of a real coordinator."""

import asyncio
import contextlib
from collections.abc import Sequence

import grpc
import numpy as np

from ayni.rpc import error_from
from ayni.tree import cover
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.store import open_folder
from coordinator_service.store_records import CommitRecord
from tests.support.coordinator import RawWorker
from tests.support.peer_workers import (
    heard,
    leases_of,
    weights,
)


def ledger(folder) -> list[CommitRecord]:
    with contextlib.closing(open_folder(folder / "state" / "peers", to_read=True)) as store:
        return store.commits()


async def snapshot_of(worker: RawWorker) -> pb.RunSnapshot:
    return (await worker.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot


def reason_of(answer: object) -> str:
    assert isinstance(answer, grpc.aio.AioRpcError), answer
    error = error_from(answer)
    return error.reason if error else str(answer)


async def somebody_has_committed(watcher: RawWorker) -> None:
    async for response in watcher.stub.WatchRun(pb.WatchRunRequest(), timeout=20):
        if any(worker.committed for worker in response.snapshot.workers):
            return


async def regrouped(workers: Sequence[RawWorker]) -> tuple[list[pb.Regroup], list[pb.Assignment]]:
    """What each is told when one has died: the group, then an extra lease."""
    groups = [await heard(worker, "regroup") for worker in workers]
    return groups, await leases_of(workers)


async def star(*workers: RawWorker, **changes: object) -> list[pb.CommitStepResponse]:
    """Makes a step through the coordinator, with one flat bucket of ones."""

    async def one(worker):
        lease = worker.assignment
        nodes = cover(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches)
        await worker.reduce([np.ones(70_000, np.float32)] * len(nodes), weights(lease))
        return await worker.commit(weights(lease), **changes)

    return await asyncio.gather(*(one(worker) for worker in workers))
