"""Workers that go silent, stall or read nothing: the others go on, and somebody says why."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from ayni.errors import Halted, StepVoided, UnknownWorker
from ayni.rpc import error_from
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import RawWorker, coordinator, parts_of, raw_workers

RUN: dict[str, Any] = {
    "run_id": "silent",
    "num_steps": 1,
    "min_workers": 1,
    "start_workers": 2,
    "batch": {"samples": 8, "microbatches": 4},
    "timeouts": {"heartbeat_interval": "200ms", "lease": "1s", "accept": "2s", "drain": "2s", "shutdown": "1s"},
}
GRADIENTS = [np.full(600_000, m + 1, np.float32) for m in range(4)]


async def beat(worker: RawWorker) -> None:
    while True:
        await worker.stub.Heartbeat(pb.HeartbeatRequest(worker_id=worker.worker_id), timeout=5)
        await asyncio.sleep(0.2)


def test_lease_of_a_silent_worker_ends_and_its_share_goes_to_the_others(tmp_path):
    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee):
            beating = asyncio.create_task(beat(ant))
            weights = {m: 2 for m in ant.leased}
            with pytest.raises(grpc.aio.AioRpcError) as voided:
                await ant.reduce(parts_of(ant, GRADIENTS), weights)
            await ant.next_frame()
            alone = {m: 2 for m in ant.leased}
            mean, _ = await ant.reduce(parts_of(ant, GRADIENTS), alone)
            commit = await ant.commit(alone)
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await bee.commit({m: 2 for m in bee.leased})
            beating.cancel()
            return error_from(voided.value), error_from(late.value), mean, commit, len(alone)

    with coordinator(tmp_path, RUN) as process:
        voided, late, mean, commit, share = asyncio.run(scenario(process.address))
        assert "worker bee left: its lease ended: nothing was heard of it for" in process.read_log()
    assert isinstance(voided, StepVoided)
    assert "bee" in voided.message
    assert isinstance(late, UnknownWorker)
    assert share == 4
    assert (commit.attempt, commit.total_weight) == (1, 8)
    assert set(mean) == {np.float32(10 / 8)}


def test_stream_that_says_nothing_is_ended_by_its_deadline(tmp_path):
    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, _):
            beating = asyncio.create_task(beat(ant))
            call = ant.open_gradient()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ant._read(call)
            beating.cancel()
            return error_from(caught.value)

    with coordinator(tmp_path, RUN) as process:
        error = asyncio.run(scenario(process.address))
    assert error.reason == "DEADLINE"
    assert "nothing came on a gradient stream within 2 s" in error.message


def test_step_that_takes_too_long_halts_and_names_who_was_waited_for(tmp_path):
    timeouts = {**RUN["timeouts"], "lease": "1s", "accept": "2s", "step": "3s"}

    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee):
            beating = [asyncio.create_task(beat(worker)) for worker in (ant, bee)]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ant.next_frame()
            for task in beating:
                task.cancel()
            return error_from(caught.value)

    with coordinator(tmp_path, {**RUN, "timeouts": timeouts}) as process:
        error = asyncio.run(scenario(process.address))
        assert process.process.wait(20) == 1
    assert isinstance(error, Halted)
    assert "step 0 took longer than 3 s; waited for ant, bee" in error.message


def test_fast_worker_is_slowed_down_not_buffered(tmp_path):
    """One worker is 400 MB ahead; the coordinator holds its window, not its gradient."""
    size = 100_000_000
    run = {**RUN, "timeouts": {**RUN["timeouts"], "lease": "30s", "accept": "40s"}, "window_chunks": 4}

    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee):
            values = np.ones(size, np.float32)
            weights = {m: 2 for m in ant.leased}
            ahead = asyncio.create_task(ant.reduce([values], weights))
            held = 0
            async for response in bee.stub.WatchRun(pb.WatchRunRequest(), timeout=30):
                snapshot = response.snapshot
                if snapshot.reducer_bytes and snapshot.reducer_bytes == held:
                    break
                held = snapshot.reducer_bytes
            assert not ahead.done()
            mean, _ = await bee.reduce([values], {m: 2 for m in bee.leased})
            await ahead
            end = (await bee.stub.GetRun(pb.GetRunRequest(), timeout=5)).snapshot
            return held, end, mean

    with coordinator(tmp_path, run) as process:
        held, end, mean = asyncio.run(scenario(process.address))
    assert held == 4 << 20
    assert end.reducer_peak_bytes <= 4 << 20
    assert end.reducer_bytes == 0
    assert end.received_bytes > 2 * 4 * size
    assert mean[0] == mean[-1] == np.float32(2 / 8)


async def read_to_the_end(worker: RawWorker, call: Any) -> None:
    while True:
        await worker._read(call)


def test_worker_that_reads_nothing_can_not_hold_up_the_end_of_an_attempt(tmp_path):
    """Its stream is full of means that it does not fetch when the other worker dies."""
    size = 20_000_000

    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee):
            beating = asyncio.create_task(beat(ant))
            values = np.ones(size, np.float32)
            call = ant.open_gradient()
            begin = pb.GradientBegin(round=ant.begin({m: 2 for m in ant.leased}, size))
            await call.write(pb.GradientRequest(begin=begin).SerializeToString())
            await ant._read(call)
            sending = asyncio.create_task(ant.send(call, [values], 1 << 20))
            reducing = asyncio.create_task(bee.reduce([values], {m: 2 for m in bee.leased}))
            await asyncio.wait({reducing}, timeout=0.5)
            bee.stream.cancel()
            frame = await ant.next_frame()
            with pytest.raises(grpc.aio.AioRpcError):
                await reducing
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_the_end(ant, call)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            alone = {m: 2 for m in ant.leased}
            mean, _ = await ant.reduce(parts_of(ant, [np.ones(9, np.float32)] * 4), alone)
            beating.cancel()
            return frame.assignment.attempt, error_from(caught.value), mean

    run = {**RUN, "timeouts": {**RUN["timeouts"], "lease": "5s", "accept": "6s"}}
    with coordinator(tmp_path, run) as process:
        attempt, error, mean = asyncio.run(scenario(process.address))
    assert attempt == 1
    assert isinstance(error, StepVoided)
    assert set(mean) == {np.float32(0.5)}
