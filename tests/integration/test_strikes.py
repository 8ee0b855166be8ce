"""Micro-batches that are not finite count against a worker's name: over its memberships, and over the coordinator's."""

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ayni.errors import Quarantined
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import CoordinatorProcess, RawWorker, coordinator, raw_worker, refusal

RUN: dict[str, Any] = {
    "run_id": "strikes",
    "num_steps": 20,
    "min_workers": 1,
    "batch": {"samples": 4, "microbatches": 2},
    "non_finite": "quarantine",
    "quarantine_after": 3,
    "timeouts": {"shutdown": "1s", "comeback": "100ms"},
}


@contextlib.contextmanager
def served(folder: Path, **changes: Any) -> Iterator[CoordinatorProcess]:
    with coordinator(folder, {**RUN, **changes}) as process:
        yield process


async def spoilt_step(worker: RawWorker) -> pb.CommitStepResponse:
    """Commits a step whose first micro-batch was left out."""
    stats = [pb.MicrobatchStats(microbatch=m, loss_sum=0.0, non_finite=m == 0) for m in worker.leased]
    request = worker.commit_request({}, num_buckets=0, microbatches=stats)
    return await worker.stub.CommitStep(request, timeout=20)


async def one_membership(address: str, steps: int) -> int:
    """Joins as ant, spoils some steps and leaves; returns the strikes that status shows."""
    async with raw_worker(address, "ant") as ant:
        await ant.join()
        ant.open_assignments()
        for _ in range(steps):
            await ant.next_frame()
            await spoilt_step(ant)
        await ant.next_frame()
        snapshot = (await ant.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot
        await ant.leave()
        return snapshot.workers[0].strikes


async def refused_join(address: str) -> Quarantined:
    async with raw_worker(address, "ant") as ant:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ant.join()
    error = refusal(caught)
    assert isinstance(error, Quarantined)
    return error


def test_strikes_outlast_memberships_and_coordinators(tmp_path):
    async def last_membership(address: str) -> tuple[pb.CommitStepResponse, Quarantined]:
        async with raw_worker(address, "ant") as ant:
            await ant.join()
            ant.open_assignments()
            await ant.next_frame()
            committed = await spoilt_step(ant)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ant.next_frame()
            error = refusal(caught)
            assert isinstance(error, Quarantined)
            return committed, error

    with served(tmp_path) as process:
        assert asyncio.run(one_membership(process.address, 1)) == 1
        assert asyncio.run(one_membership(process.address, 1)) == 2
    with served(tmp_path) as process:
        committed, error = asyncio.run(last_membership(process.address))
        assert (committed.step, error.metadata["strikes"]) == (2, "3")
        assert asyncio.run(refused_join(process.address)).metadata["strikes"] == "3"
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "strikes" / "run.sqlite3")) as database, database:
        assert database.execute("DELETE FROM facts WHERE name = 'shut_out/ant'").rowcount == 1
    with served(tmp_path) as process:
        # As where the coordinator died before it could note it: the commits say it too.
        assert asyncio.run(refused_join(process.address)).metadata["strikes"] == "3"


def test_commits_of_before_count_only_where_the_policy_says_so(tmp_path):
    with served(tmp_path, non_finite="skip") as process:
        assert asyncio.run(one_membership(process.address, 4)) == 4
    with served(tmp_path, quarantine_after=6) as process:
        assert asyncio.run(one_membership(process.address, 1)) == 5
    with served(tmp_path, quarantine_after=5) as process:
        assert asyncio.run(refused_join(process.address)).metadata["strikes"] == "5"
