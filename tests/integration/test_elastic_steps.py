"""Deaths, delays and restarts inside a step, against a real coordinator process, frame by frame."""

import asyncio
import contextlib
import hashlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from ayni.errors import LeaseRevoked, RoundRestarted, RunEnded, StaleEpoch, StepVoided
from ayni.rpc import error_from
from ayni.tree import children, cover, root
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.store import open_folder
from coordinator_service.store_records import CommitRecord
from coordinator_service.stored_states import STORED_STATES
from tests.support.coordinator import RawWorker, coordinator, raw_worker, refusal
from tests.support.peer_workers import beat

NUM, SIZE = 8, 700_000
RUN: dict[str, Any] = {
    "run_id": "elastic",
    "num_steps": 2,
    "min_workers": 1,
    "start_workers": 3,
    "batch": {"samples": 16, "microbatches": NUM},
    "stragglers": {"shortest": "15s", "longest": "15s"},
    "timeouts": {"shutdown": "1s", "heartbeat_interval": "200ms", "lease": "20s", "accept": "21s"},
}
GRADIENTS = [np.random.default_rng(m).standard_normal(SIZE).astype(np.float32) for m in range(NUM)]
GARBAGE = np.full(SIZE, 1e6, np.float32)


def summed(node) -> np.ndarray:
    halves = children(node) if node.stop - node.start > 1 else None
    return GRADIENTS[node.start] if halves is None else summed(halves[0]) + summed(halves[1])


MEAN = hashlib.sha256((summed(root(NUM)) / np.float32(2 * NUM)).tobytes()).hexdigest()


def parts(lease: pb.Assignment) -> list[np.ndarray]:
    return [summed(node) for node in cover(lease.microbatch_start, lease.microbatch_stop, NUM)]


def weights(lease: pb.Assignment) -> dict[int, int]:
    return dict.fromkeys(range(lease.microbatch_start, lease.microbatch_stop), 2)


async def next_lease(worker: RawWorker) -> pb.Assignment:
    while True:
        frame = await worker.next_frame()
        if frame.HasField("assignment"):
            return frame.assignment


async def open_contribution(worker: RawWorker, lease: pb.Assignment) -> Any:
    """Begins and waits for leave to send; returns the call and what was said."""
    worker.assignment = lease
    call = worker.open_gradient()
    begin = pb.GradientBegin(round=worker.begin(weights(lease), SIZE))
    await call.write(pb.GradientRequest(begin=begin).SerializeToString())
    return call, pb.GradientResponse.FromString(await worker._read(call)).accepted


async def mean_of(worker: RawWorker, lease: pb.Assignment) -> str:
    """Contributes under a primary lease, again when told so, and returns the hash of the mean."""
    while True:
        worker.assignment = lease
        try:
            values, _ = await worker.reduce(parts(lease), weights(lease))
        except grpc.aio.AioRpcError as error:
            if isinstance(error_from(error), RoundRestarted):
                continue
            raise
        return hashlib.sha256(values.tobytes()).hexdigest()


async def contribute_extra(worker: RawWorker, lease: pb.Assignment) -> bool:
    """Contributes under an extra lease; returns whether nothing had to be sent."""
    call, accepted = await open_contribution(worker, lease)
    if not accepted.already_held:
        await worker.send(call, parts(lease), accepted.chunk_bytes)
    response = pb.GradientResponse.FromString(await worker._read(call))
    assert response.HasField("complete"), "no mean comes under an extra lease"
    return bool(accepted.already_held)


async def commit_all(worker: RawWorker, *leases: pb.Assignment) -> pb.CommitStepResponse:
    calls = []
    for lease in leases:
        worker.assignment = lease
        calls.append(worker.stub.CommitStep(worker.commit_request(weights(lease)), timeout=30))
    answers = await asyncio.gather(*calls)
    assert len({answer.SerializeToString() for answer in answers}) == 1
    return answers[0]


@contextlib.asynccontextmanager
async def elastic_workers(address: str, *names: str) -> AsyncIterator[list[RawWorker]]:
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(raw_worker(address, name)) for name in names]
        for worker in workers:
            worker.num_buckets = 1
            await worker.join(elastic=True)
        beating = asyncio.create_task(beat(workers))
        for worker in workers:
            worker.open_assignments()
        try:
            yield workers
        finally:
            beating.cancel()


def ledger(folder: Path) -> list[CommitRecord]:
    with contextlib.closing(open_folder(folder / "state" / "elastic", to_read=True)) as store:
        return store.commits()


def test_death_before_sending_costs_neither_step_nor_sample(tmp_path):
    async def scenario(address):
        async with elastic_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = [await next_lease(w) for w in (ant, bee, cat)]
            means = [asyncio.create_task(mean_of(w, lease)) for w, lease in zip((ant, bee), leases, strict=False)]
            cat.stream.cancel()
            extras = [await next_lease(ant), await next_lease(bee)]
            await asyncio.gather(contribute_extra(ant, extras[0]), contribute_extra(bee, extras[1]))
            got = await asyncio.gather(*means)
            commits = await asyncio.gather(commit_all(ant, leases[0], extras[0]), commit_all(bee, leases[1], extras[1]))
            snapshot = (await ant.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot
            return leases[2], extras, got, commits, snapshot

    with coordinator(tmp_path, RUN) as process:
        lost, extras, means, commits, snapshot = asyncio.run(scenario(process.address))
    assert all(extra.extra and extra.attempt == 0 for extra in extras)
    covered = [m for extra in extras for m in range(extra.microbatch_start, extra.microbatch_stop)]
    assert sorted(covered) == list(range(lost.microbatch_start, lost.microbatch_stop))
    assert set(means) == {MEAN}
    assert {(commit.attempt, commit.total_weight) for commit in commits} == {(0, 2 * NUM)}
    assert snapshot.extra_leases == len(extras)


def test_half_of_a_dead_workers_bytes_leave_no_trace(tmp_path):
    async def scenario(address):
        async with elastic_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = [await next_lease(w) for w in (ant, bee, cat)]
            means = [asyncio.create_task(mean_of(w, lease)) for w, lease in zip((ant, bee), leases, strict=False)]
            call, accepted = await open_contribution(cat, leases[2])
            wrong = [GARBAGE[: accepted.chunk_bytes // 4]] * len(parts(leases[2]))
            await cat.send(call, wrong, accepted.chunk_bytes)
            async for response in ant.stub.WatchRun(pb.WatchRunRequest(), timeout=20):
                if response.snapshot.sent_bytes > accepted.chunk_bytes:
                    break  # The garbage has been summed and sent out.
            cat.stream.cancel()
            extras = [await next_lease(ant), await next_lease(bee)]
            await asyncio.gather(contribute_extra(ant, extras[0]), contribute_extra(bee, extras[1]))
            got = await asyncio.gather(*means)
            await asyncio.gather(commit_all(ant, leases[0], extras[0]), commit_all(bee, leases[1], extras[1]))
            return got

    with coordinator(tmp_path, RUN) as process:
        assert set(asyncio.run(scenario(process.address))) == {MEAN}


def test_work_of_a_worker_that_dies_after_its_last_byte_counts(tmp_path):
    async def scenario(address):
        async with elastic_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = [await next_lease(w) for w in (ant, bee, cat)]
            call, accepted = await open_contribution(cat, leases[2])
            await cat.send(call, parts(leases[2]), accepted.chunk_bytes)
            async for response in ant.stub.WatchRun(pb.WatchRunRequest(), timeout=20):
                if response.snapshot.received_bytes > 4 * SIZE * len(parts(leases[2])):
                    break
            cat.stream.cancel()
            got = await asyncio.gather(mean_of(ant, leases[0]), mean_of(bee, leases[1]))
            await asyncio.gather(commit_all(ant, leases[0]), commit_all(bee, leases[1]))
            return got, (await ant.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot

    with coordinator(tmp_path, RUN) as process:
        means, snapshot = asyncio.run(scenario(process.address))
    assert set(means) == {MEAN}
    assert snapshot.extra_leases == 0


def test_late_worker_is_left_behind_and_refused_by_name(tmp_path):
    run = {**RUN, "stragglers": {"shortest": "300ms", "longest": "1s"}}

    async def scenario(address):
        async with elastic_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = [await next_lease(w) for w in (ant, bee, cat)]
            means = [asyncio.create_task(mean_of(w, lease)) for w, lease in zip((ant, bee), leases, strict=False)]
            extras = [await next_lease(ant), await next_lease(bee)]
            await asyncio.gather(contribute_extra(ant, extras[0]), contribute_extra(bee, extras[1]))
            got = await asyncio.gather(*means)
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await open_contribution(cat, leases[2])
            revoked = (await cat.next_frame()).revoked
            await asyncio.gather(commit_all(ant, leases[0], extras[0]), commit_all(bee, leases[1], extras[1]))
            following = await next_lease(cat)
            snapshot = (await ant.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot
            return got, refusal(late), revoked, leases[2], following, snapshot

    with coordinator(tmp_path, run) as process:
        means, late, revoked, lease, following, snapshot = asyncio.run(scenario(process.address))
        assert "worker cat is late with micro-batches" in process.read_log()
        assert "worker cat was left behind at step 0" in process.read_log()
    assert set(means) == {MEAN}
    assert isinstance(late, LeaseRevoked)
    assert "lease 3 of worker cat" in late.message
    assert revoked.lease_id == lease.lease_id
    assert (following.step, following.microbatch_start) == (1, following.microbatch_stop)
    assert [w.following for w in snapshot.workers] == [False, False, True]


def test_worker_that_stands_still_in_the_middle_of_sending_is_left_behind_and_nobody_else(tmp_path):
    """The others wait for the mean meanwhile: they send nothing either, but it is not their turn."""
    run = {**RUN, "stragglers": {"shortest": "300ms", "longest": "1s"}, "num_steps": 1}

    async def scenario(address):
        async with elastic_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = [await next_lease(w) for w in (ant, bee, cat)]
            means = [asyncio.create_task(mean_of(w, lease)) for w, lease in zip((ant, bee), leases, strict=False)]
            call, accepted = await open_contribution(cat, leases[2])
            wrong = [GARBAGE[: accepted.chunk_bytes // 4]] * len(parts(leases[2]))
            await cat.send(call, wrong, accepted.chunk_bytes)
            extras = [await next_lease(ant), await next_lease(bee)]
            await asyncio.gather(contribute_extra(ant, extras[0]), contribute_extra(bee, extras[1]))
            got = await asyncio.gather(*means)
            commits = await asyncio.gather(commit_all(ant, leases[0], extras[0]), commit_all(bee, leases[1], extras[1]))
            return got, commits

    with coordinator(tmp_path, run) as process:
        means, commits = asyncio.run(scenario(process.address))
        left = [line for line in process.read_log().splitlines() if "the step goes on without worker" in line]
    assert set(means) == {MEAN}
    assert {commit.total_weight for commit in commits} == {2 * NUM}
    assert ["worker cat" in line for line in left] == [True]


def test_commit_that_was_written_before_a_crash_is_told_again_afterwards(tmp_path):
    """Killed between the disk and the answer: the workers ask again, and nobody makes the step a second time."""
    run = {**RUN, "start_workers": 2, "num_steps": 1}

    async def before(address):
        async with elastic_workers(address, "ant", "bee") as workers:
            leases = [await next_lease(w) for w in workers]
            await asyncio.gather(*(mean_of(w, lease) for w, lease in zip(workers, leases, strict=True)))
            asking = [commit_all(w, lease) for w, lease in zip(workers, leases, strict=True)]
            broken = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(error, grpc.aio.AioRpcError) for error in broken)
            return leases

    async def after(address, leases):
        async with elastic_workers(address, "ant", "bee") as workers:
            answers = [await commit_all(w, lease) for w, lease in zip(workers, leases, strict=True)]
            ends = [(await w.next_frame()).shutdown for w in workers]
            for worker in workers:
                await worker.leave("done")
            return answers, ends

    with coordinator(tmp_path, run, failpoints="coordinator.commit.stored=kill") as process:
        leases = asyncio.run(before(process.address))
        assert process.process.wait(20) == -signal.SIGKILL
    written = ledger(tmp_path)
    assert [(record.kind, record.step, record.attempt) for record in written] == [("train", 0, 0)]
    with coordinator(tmp_path, run) as process:
        answers, ends = asyncio.run(after(process.address, leases))
        assert process.process.wait(20) == 0
    assert {(a.step, a.total_weight) for a in answers} == {(0, 2 * NUM)}
    assert all(end.finished for end in ends)
    assert ledger(tmp_path) == written


def test_crash_before_the_commit_makes_the_step_again_in_a_new_epoch(tmp_path):
    run = {**RUN, "start_workers": 2, "num_steps": 1}

    async def once(address, stale):
        async with elastic_workers(address, "ant", "bee") as workers:
            leases = [await next_lease(w) for w in workers]
            refused = None
            if stale:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await commit_all(workers[0], stale[0])
                refused = refusal(caught)
            means = await asyncio.gather(*(mean_of(w, lease) for w, lease in zip(workers, leases, strict=True)))
            asking = [commit_all(w, lease) for w, lease in zip(workers, leases, strict=True)]
            answers = await asyncio.gather(*asking, return_exceptions=True)
            return leases, means, answers, refused

    with coordinator(tmp_path, run, failpoints="coordinator.commit.ready=kill") as process:
        first, _, broken, _ = asyncio.run(once(process.address, None))
        process.process.wait(20)
    assert all(isinstance(error, grpc.aio.AioRpcError) for error in broken)
    assert ledger(tmp_path) == []
    with coordinator(tmp_path, run) as process:
        second, means, answers, refused = asyncio.run(once(process.address, first))
    assert isinstance(refused, StaleEpoch), "what was leased before the crash is worth nothing"
    assert second[0].epoch > first[0].epoch
    assert set(means) == {MEAN}
    assert {answer.total_weight for answer in answers} == {2 * NUM}
    assert [(record.kind, record.step) for record in ledger(tmp_path)] == [("train", 0)]


def test_who_comes_while_a_step_is_open_follows_once_it_is_committed(tmp_path):
    """Its parameters had as many updates as the run when it came, and one less a moment later."""
    run = {**RUN, "start_workers": 1, "task": {"name": "own:Task"}}

    async def scenario(address):
        async with elastic_workers(address, "ant") as (ant,):
            lease = await next_lease(ant)
            async with elastic_workers(address, "bee") as (bee,):
                async for response in ant.stub.WatchRun(pb.WatchRunRequest(), timeout=20):
                    if len(response.snapshot.workers) == 2:
                        break
                await mean_of(ant, lease)
                await commit_all(ant, lease)
                late = await next_lease(bee)
                snapshot = (await ant.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot
                return late, {w.worker_name: w.following for w in snapshot.workers}

    with coordinator(tmp_path, run) as process:
        late, following = asyncio.run(scenario(process.address))
    assert (late.step, late.microbatch_start) == (1, late.microbatch_stop), "it can't compute step 1"
    assert following == {"ant": False, "bee": True}


def test_broken_stream_of_one_worker_loses_the_work_of_a_dead_one_and_it_is_leased_again(tmp_path):
    async def scenario(address):
        async with elastic_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = [await next_lease(w) for w in (ant, bee, cat)]
            call, accepted = await open_contribution(cat, leases[2])
            await cat.send(call, parts(leases[2]), accepted.chunk_bytes)
            async for response in ant.stub.WatchRun(pb.WatchRunRequest(), timeout=20):
                if response.snapshot.received_bytes > 4 * SIZE * len(parts(leases[2])):
                    break
            cat.stream.cancel()
            broken, accepted = await open_contribution(ant, leases[0])
            await ant.send(
                broken, [part[: accepted.chunk_bytes // 4] for part in parts(leases[0])], accepted.chunk_bytes
            )
            means = [asyncio.create_task(mean_of(w, lease)) for w, lease in zip((ant, bee), leases, strict=False)]
            extras = [await next_lease(ant), await next_lease(bee)]
            await asyncio.gather(contribute_extra(ant, extras[0]), contribute_extra(bee, extras[1]))
            return await asyncio.gather(*means)

    with coordinator(tmp_path, RUN) as process:
        assert set(asyncio.run(scenario(process.address))) == {MEAN}


def test_worker_whose_parameters_differ_is_told_to_throw_them_away_and_the_step_is_made_again(tmp_path):
    async def scenario(address):
        async with elastic_workers(address, "ant", "bee", "cat") as workers:
            leases = [await next_lease(w) for w in workers]
            await asyncio.gather(*(mean_of(w, lease) for w, lease in zip(workers, leases, strict=True)))
            asking = []
            for worker, lease, sha256 in zip(workers, leases, ("aa", "bb", "aa"), strict=True):
                worker.assignment = lease
                request = worker.commit_request(weights(lease), parameters_sha256=sha256)
                asking.append(worker.stub.CommitStep(request, timeout=30))
            answers = await asyncio.gather(*asking, return_exceptions=True)
            again = [await next_lease(w) for w in workers]
            return answers, again, (await workers[0].stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot

    with coordinator(tmp_path, RUN) as process:
        answers, again, snapshot = asyncio.run(scenario(process.address))
        assert "the parameters of bee are not those of the other 2 workers" in process.read_log()
    assert all(isinstance(error_from(answer), StepVoided) for answer in answers)
    assert [(lease.step, lease.attempt, lease.discard_state) for lease in again] == [
        (0, 1, False),
        (0, 1, True),
        (0, 1, False),
    ]
    assert again[1].microbatch_start == again[1].microbatch_stop
    assert snapshot.divergences == 1


def test_run_whose_newest_state_is_stored_goes_on_from_there_at_once_and_says_so_once(tmp_path):
    run = {**RUN, "start_workers": 1, "task": {"name": "own:Task"}}

    async def one_step(address):
        async with elastic_workers(address, "ant") as (ant,):
            lease = await next_lease(ant)
            await mean_of(ant, lease)
            await commit_all(ant, lease)

    async def come_fresh(address):
        async with elastic_workers(address, "bee") as (bee,):
            while not (frame := await bee.next_frame(waiting=True)).HasField("offer"):
                pass
            return frame.offer

    with coordinator(tmp_path, run) as process:
        asyncio.run(one_step(process.address))
    with contextlib.closing(open_folder(tmp_path / "state" / "elastic")) as store:
        store.set_facts({STORED_STATES: '{"1": 1}'})
    with coordinator(tmp_path, run) as process:
        offer = asyncio.run(come_fresh(process.address))
        assert process.read_log().count("the run goes on from the stored state behind step 1") == 1
        assert "goes back" not in process.read_log()
    assert (offer.completed_steps, offer.stored.run_id) == (1, "elastic")


def test_finished_run_refuses_who_comes_too_late(tmp_path):
    run = {**RUN, "start_workers": 1, "num_steps": 1, "timeouts": {**RUN["timeouts"], "shutdown": "5s"}}

    async def scenario(address):
        async with elastic_workers(address, "ant") as (ant,):
            lease = await next_lease(ant)
            await mean_of(ant, lease)
            await commit_all(ant, lease)
            assert (await ant.next_frame()).shutdown.finished
            async with raw_worker(address, "bee") as bee:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await bee.join(elastic=True)
            await ant.leave("done")
            return refusal(caught)

    with coordinator(tmp_path, run) as process:
        refused = asyncio.run(scenario(process.address))
        assert process.process.wait(20) == 0
    assert isinstance(refused, RunEnded)
