"""Gradient streams that are there and send nothing: who ends them, and that nobody waits for them for ever."""

import asyncio
from typing import Any

import grpc
import pytest

from ayni.errors import Deadline, LeaseRevoked, StepVoided
from ayni.rpc import error_from
from ayni.v1 import coordinator_pb2 as pb
from tests.integration.test_elastic_steps import (
    MEAN,
    RUN,
    commit_all,
    contribute_extra,
    elastic_workers,
    mean_of,
    next_lease,
    open_contribution,
)
from tests.support.coordinator import coordinator, raw_worker

IMPATIENT: dict[str, Any] = {
    **RUN,
    "num_steps": 1,
    "start_workers": 2,
    "stragglers": {"shortest": "300ms", "longest": "1s"},
    "timeouts": {**RUN["timeouts"], "drain": "1s"},
}


def test_a_stream_that_begins_and_sends_nothing_is_ended_once_its_worker_is_late(tmp_path):
    """Its worker lives, by its heartbeats; the straggler deadline ends the lease, and with it the stream."""

    async def scenario(address):
        async with elastic_workers(address, "ant", "bee") as (ant, bee):
            leases = [await next_lease(ant), await next_lease(bee)]
            idle, _ = await open_contribution(bee, leases[1])
            mean = asyncio.create_task(mean_of(ant, leases[0]))
            extra = await next_lease(ant)
            await contribute_extra(ant, extra)
            assert await mean == MEAN
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await bee._read(idle)
            commit = await commit_all(ant, leases[0], extra)
            return error_from(caught.value), commit, (extra.microbatch_start, extra.microbatch_stop), leases[1]

    with coordinator(tmp_path, IMPATIENT) as process:
        error, commit, taken, lease = asyncio.run(asyncio.wait_for(scenario(process.address), 60))
        assert "the step goes on without worker bee: it stood still" in process.read_log()
    assert isinstance(error, LeaseRevoked)
    assert taken == (lease.microbatch_start, lease.microbatch_stop)
    assert commit.total_weight == 16


def test_an_idle_stream_of_a_worker_that_nobody_can_replace_ends_with_the_attempt(tmp_path):
    run = {**IMPATIENT, "timeouts": {**IMPATIENT["timeouts"], "lease": "1s", "accept": "2s"}}

    async def scenario(address):
        async with elastic_workers(address, "ant", "bee") as (ant, bee):
            lease = await next_lease(ant)
            idle, _ = await open_contribution(ant, lease)
            bee.stream.cancel()
            await ant.leave()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ant._read(idle)
            return error_from(caught.value)

    with coordinator(tmp_path, run) as process:
        error = asyncio.run(asyncio.wait_for(scenario(process.address), 60))
    assert isinstance(error, LeaseRevoked | StepVoided)


def test_many_streams_that_never_begin_are_all_ended(tmp_path):
    """They have the token and no session: a deadline is all that ends them."""
    run = {**RUN, "timeouts": {"heartbeat_interval": "100ms", "lease": "500ms", "accept": "1s", "shutdown": "1s"}}

    async def scenario(address):
        async with raw_worker(address, "idle") as idle:
            calls = [idle.open_gradient(method) for method in ("Gradient", "BlockGradient") * 100]
            codes = []
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await idle._read(call)
                codes.append(type(error_from(caught.value)))
            answer = await idle.stub.GetRun(pb.GetRunRequest(), timeout=20)
            assert not answer.snapshot.workers
            return codes

    with coordinator(tmp_path, run) as process:
        assert set(asyncio.run(asyncio.wait_for(scenario(process.address), 60))) == {Deadline}
