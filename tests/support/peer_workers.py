"""Workers that say that they reduce among themselves, and only say it: no byte travels between them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import numpy as np

from ayni.buckets import FLAT, Bucket
from ayni.messages import group_of, slice_message
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import RawWorker, raw_worker
from tests.support.peer_groups import slices_of

NUM = 8
RUN: dict[str, Any] = {
    "run_id": "peers",
    "num_steps": 2,
    "min_workers": 1,
    "start_workers": 3,
    "topology": "sharded",
    "batch": {"samples": 16, "microbatches": NUM},
    "stragglers": {"shortest": "15s", "longest": "15s"},
    "timeouts": {"shutdown": "1s", "heartbeat_interval": "200ms", "lease": "20s", "accept": "21s"},
}
MEANS = {
    FLAT: np.random.default_rng(1).standard_normal(3 * 65536 + 17).astype(np.float32),
    Bucket("block", 0): np.random.default_rng(2).standard_normal(100).astype(np.float32),
}
"""What everybody agrees that the means are."""


@contextlib.asynccontextmanager
async def peer_workers(address: str, *names: str, **fields: object) -> AsyncIterator[list[RawWorker]]:
    """Elastic workers that have joined and opened their streams; `fields` are those of Join."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(raw_worker(address, name)) for name in names]
        for worker in workers:
            said: dict[str, Any] = {
                "topologies": ["sharded"],
                "peer_address": f"127.0.0.1:{7000 + workers.index(worker)}",
            }
            await worker.join(**{"elastic": True, **said, **fields})
        beating = asyncio.create_task(beat(workers))
        for worker in workers:
            worker.open_assignments()
        try:
            yield workers
        finally:
            beating.cancel()


async def beat(workers: list[RawWorker]) -> None:
    """Heartbeats of all, until it is cancelled."""
    while True:
        for worker in workers:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await worker.stub.Heartbeat(pb.HeartbeatRequest(worker_id=worker.worker_id), timeout=5)
        await asyncio.sleep(0.2)


async def heard(worker: RawWorker, kind: str) -> Any:
    """The next frame, which must be of a kind."""
    frame = await worker.next_frame()
    assert frame.WhichOneof("frame") == kind, frame
    return getattr(frame, kind)


async def leases_of(workers: Iterable[RawWorker]) -> list[pb.Assignment]:
    """The next assignment of each."""
    return [await heard(worker, "assignment") for worker in workers]


async def say(worker: RawWorker, group: pb.ExchangeGroup, **fields: object) -> None:
    """A heartbeat about a group."""
    said: dict[str, Any] = {"worker_id": worker.worker_id, "generation": group.generation, **fields}
    await worker.stub.Heartbeat(pb.HeartbeatRequest(**said), timeout=10)


def weights(lease: pb.Assignment) -> dict[int, int]:
    return dict.fromkeys(range(lease.microbatch_start, lease.microbatch_stop), 2)


async def commit(
    worker: RawWorker, group: pb.ExchangeGroup, *leases: pb.Assignment, **changes: object
) -> pb.CommitStepResponse:
    """Commits all leases at once under a group; returns the one answer."""
    calls = []
    for lease in leases:
        worker.assignment = lease
        slices = () if lease.extra else slices_of(group_of(group), worker.worker_id, MEANS)
        said: dict[str, Any] = {"generation": group.generation, "slices": [slice_message(one) for one in slices]}
        request = worker.commit_request(weights(lease), num_buckets=len(MEANS), **{**said, **changes})
        calls.append(worker.stub.CommitStep(request, timeout=30))
    answers = await asyncio.gather(*calls)
    assert len({answer.SerializeToString() for answer in answers}) == 1
    return answers[0]


def owners(group: pb.ExchangeGroup) -> list[str]:
    return [member.worker_name for member in group.members if member.is_owner]


def names(group: pb.ExchangeGroup) -> list[str]:
    return [member.worker_name for member in group.members]
