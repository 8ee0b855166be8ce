"""What can't be counted, replaced or ended: a real coordinator process refuses it and says why."""

import asyncio

import grpc
import numpy as np
import pytest

from ayni.errors import Halted, RunStarted, UnknownWorker, WeightMismatch
from ayni.rpc import error_from
from ayni.tree import cover
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import RUN, coordinator, make_step, microbatches, raw_worker, raw_workers, refusal


def test_sums_beyond_float32_are_refused_by_bucket_not_committed(tmp_path):
    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as workers:
            huge = np.full(9, 3e38, np.float32)
            parts = [[huge] * len(cover(w.leased.start, w.leased.stop, 5)) for w in workers]
            return await asyncio.gather(
                *(w.reduce(own, {m: 2 for m in w.leased}) for w, own in zip(workers, parts, strict=True)),
                return_exceptions=True,
            )

    with coordinator(tmp_path, RUN) as process:
        answers = asyncio.run(scenario(process.address))
        assert process.process.wait(20) == 1
        assert "step 0, flat: the workers' gradients, each finite, add up to inf at element 0" in process.read_log()
        assert "committed" not in process.read_log()
    assert all(isinstance(answer, grpc.aio.AioRpcError) for answer in answers)


def test_losses_beyond_float64_halt_the_run(tmp_path):
    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as workers:
            requests = [w.commit_request({m: 2 for m in w.leased}, 0) for w in workers]
            for request in requests:
                for stats in request.microbatches:
                    stats.loss_sum = 1.5e308
            calls = [w.stub.CommitStep(r, timeout=20) for w, r in zip(workers, requests, strict=True)]
            return await asyncio.gather(*calls, return_exceptions=True)

    with coordinator(tmp_path, RUN) as process:
        answers = asyncio.run(scenario(process.address))
        assert process.process.wait(20) == 1
    assert all(isinstance(error_from(answer), Halted) for answer in answers)


@pytest.mark.parametrize("field", ["weight", "num_correct", "num_predictions"])
@pytest.mark.parametrize("value", [-1, 2**62])
def test_impossible_counts_are_refused(tmp_path, field, value):
    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, _):
            request = ant.commit_request({m: 2 for m in ant.leased}, 0)
            setattr(request.microbatches[0], field, value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ant.stub.CommitStep(request, timeout=20)
            return refusal(caught)

    with coordinator(tmp_path, RUN) as process:
        error = asyncio.run(scenario(process.address))
    assert isinstance(error, WeightMismatch)
    assert str(value) in error.message


def test_wrong_session_can_not_end_anothers_membership(tmp_path):
    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee), raw_worker(address, "thief") as thief:
            thief.worker_id = ant.worker_id
            thief.open_assignments()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await thief.next_frame()
            await make_step([ant, bee], microbatches(5, size=10))
            return refusal(caught)

    with coordinator(tmp_path, RUN) as process:
        assert isinstance(asyncio.run(scenario(process.address)), UnknownWorker)


def test_worker_that_left_before_the_first_step_binds_nobody(tmp_path):
    async def scenario(address):
        async with raw_worker(address, "wrong") as wrong, raw_worker(address, "right") as right:
            await wrong.join(task_fingerprint="t1", num_evaluation_samples=5)
            await wrong.leave()
            await right.join(task_fingerprint="t2", num_evaluation_samples=7)

    with coordinator(tmp_path, RUN) as process:
        asyncio.run(scenario(process.address))


def test_run_with_a_task_pauses_when_too_few_workers_are_left_and_says_how_to_join(tmp_path):
    run = {**RUN, "task": {"name": "some.module:Class"}}

    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee):
            await make_step([ant, bee], microbatches(5, size=10))
            await ant.next_frame()
            bee.stream.cancel()
            told = await ant.next_frame(waiting=True)
            snapshot = (await ant.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot
            async with raw_worker(address, "cat") as cat:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await cat.join()
            return told.waiting.reason, snapshot, refusal(caught)

    with coordinator(tmp_path, run) as process:
        reason, snapshot, refused = asyncio.run(scenario(process.address))
    sentence = "paused after step 0: waiting for 1 more worker (1 of 2); join with: python -m worker_agent"
    assert sentence in reason
    assert snapshot.state == pb.RUN_STATE_PAUSED
    assert sentence in snapshot.waiting.reason
    assert isinstance(refused, RunStarted)
    assert "join as an elastic worker" in refused.message


def test_step_that_is_given_up_again_and_again_halts(tmp_path):
    run = {**RUN, "max_attempts": 3, "min_workers": 1, "start_workers": 2}

    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (_, bee):
            for attempt in range(3):
                call = bee.open_gradient()
                begin = pb.GradientBegin(round=bee.begin({m: 2 for m in bee.leased}, 9))
                await call.write(pb.GradientRequest(begin=begin).SerializeToString())
                await bee._read(call)
                await call.done_writing()
                if attempt < 2:
                    await bee.next_frame()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await bee.next_frame()
            return refusal(caught)

    with coordinator(tmp_path, run) as process:
        error = asyncio.run(scenario(process.address))
    assert isinstance(error, Halted)
    assert "given up 3 times" in error.message
    assert "the stream of worker bee for step 0, flat broke" in error.message


def test_stream_that_breaks_as_soon_as_it_is_accepted_voids_the_attempt(tmp_path):
    """The worker stays a member, so nothing but its broken stream tells that its contribution will never come."""

    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee):
            for _ in range(5):
                call = bee.open_gradient()
                begin = pb.GradientBegin(round=bee.begin({m: 2 for m in bee.leased}, 10))
                await call.write(pb.GradientRequest(begin=begin).SerializeToString())
                await bee._read(call)
                call.cancel()
                await bee.next_frame()
                await ant.next_frame()
            assert ant.assignment.attempt == 5
            await make_step([ant, bee], microbatches(5, size=10))

    with coordinator(tmp_path, RUN) as process:
        asyncio.run(scenario(process.address))
        assert "Traceback" not in process.read_log()
