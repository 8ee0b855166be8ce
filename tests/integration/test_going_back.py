"""After a run went back, nothing counts that was taken back: commits, evaluations, and states that workers hold."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ayni.run_config import EvaluationConfig
from ayni.step_values import Origin
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service import plan
from coordinator_service.config import RunFile
from coordinator_service.leases import Moment
from coordinator_service.recovery import Recovery
from coordinator_service.run import Run
from coordinator_service.store import open_folder
from coordinator_service.store_records import EpochRecord
from coordinator_service.stored_states import STORED_STATES
from tests.support.commits import commit
from tests.support.coordinator import RawWorker, coordinator, raw_worker

SIZE = 8
RUN: dict[str, Any] = {
    "run_id": "back",
    "num_steps": 6,
    "min_workers": 1,
    "task": {"name": "own:Task"},
    "batch": {"samples": 8, "microbatches": 4},
    "stragglers": {"shortest": "15s", "longest": "15s"},
    "timeouts": {
        **{"shutdown": "1s", "heartbeat_interval": "200ms", "lease": "20s", "accept": "21s"},
        **{"rejoin": "300ms", "comeback": "10ms"},
    },
}
BEFORE = pb.StateOrigin(epoch=1, attempt=0)


def prepare(folder: Path, steps: int, *stored: int) -> None:
    """Leaves what a coordinator leaves that has made some steps in epoch 1, and has stored some states."""
    with contextlib.closing(open_folder(folder / "state" / "back")) as store:
        store.begin_epoch(EpochRecord(number=1, worker_names=(), committed_steps=0, unix_time=1.5e9))
        for step in range(steps):
            store.commit(commit(step))
        store.set_facts({STORED_STATES: json.dumps(dict.fromkeys(stored, 1))})


def stored_in(folder: Path) -> dict[str, int]:
    with contextlib.closing(open_folder(folder / "state" / "back", to_read=True)) as store:
        whole: dict[str, int] = json.loads(store.facts()[STORED_STATES])
        return whole


@contextlib.asynccontextmanager
async def worker(
    address: str, name: str, completed_steps: int, origin: pb.StateOrigin | None
) -> AsyncIterator[RawWorker]:
    async with raw_worker(address, name) as one:
        await one.join(elastic=True)
        one.stream = one.stub.ShardAssignment(
            pb.ShardAssignmentRequest(worker_id=one.worker_id, completed_steps=completed_steps, origin=origin)
        )
        yield one


async def beat(one: RawWorker, **said: Any) -> None:
    await one.stub.Heartbeat(pb.HeartbeatRequest(worker_id=one.worker_id, **said), timeout=10)


async def until_following(one: RawWorker, name: str) -> None:
    async with asyncio.timeout(20):
        while True:
            snapshot = (await one.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot
            if any(other.worker_name == name and other.following for other in snapshot.workers):
                return


async def next_of(one: RawWorker, kind: Any) -> Any:
    while not (frame := await one.next_frame()).HasField(kind):
        pass
    return getattr(frame, kind)


async def make_step(one: RawWorker, lease: pb.Assignment) -> None:
    one.assignment = lease
    weights = dict.fromkeys(range(lease.microbatch_start, lease.microbatch_stop), 2)
    await one.reduce([np.ones(SIZE, np.float32)], weights)
    await one.stub.CommitStep(one.commit_request(weights), timeout=20)


@pytest.mark.parametrize("origin", [BEFORE, None])
def test_worker_that_wakes_with_a_state_behind_a_step_that_is_made_again_has_to_throw_it_away(tmp_path, origin):
    async def scenario(address):
        async with worker(address, "new", 0, None) as new:
            assert (await next_of(new, "offer")).completed_steps == 1
            await beat(new, completed_steps=1, origin=BEFORE)
            lease = await next_of(new, "assignment")
            assert (lease.step, lease.microbatch_stop) == (1, 4)
            async with worker(address, "old", 2, origin) as old:
                await beat(old, completed_steps=2, origin=origin)
                await make_step(new, lease)
                return await next_of(old, "assignment")

    prepare(tmp_path, 2, 1)
    with coordinator(tmp_path, RUN) as process:
        lease = asyncio.run(scenario(process.address))
    assert (lease.step, lease.discard_state, lease.microbatch_stop - lease.microbatch_start) == (2, True, 0)


def test_worker_that_comes_after_the_step_was_made_again_is_told_by_its_commit(tmp_path):
    async def scenario(address):
        async with worker(address, "new", 0, None) as new:
            await next_of(new, "offer")
            await beat(new, completed_steps=1, origin=BEFORE)
            lease = await next_of(new, "assignment")
            await make_step(new, lease)
            lease = await next_of(new, "assignment")
            async with worker(address, "old", 2, BEFORE) as old:
                await until_following(new, "old")
                await make_step(new, lease)
                return await next_of(old, "assignment")

    prepare(tmp_path, 2, 1)
    with coordinator(tmp_path, RUN) as process:
        lease = asyncio.run(scenario(process.address))
    assert (lease.step, lease.discard_state) == (3, True)


def test_run_whose_newest_stored_state_is_damaged_goes_back_to_the_one_before(tmp_path):
    async def scenario(address):
        async with worker(address, "new", 0, None) as new:
            seen = []
            for said in ({}, {"offered_state_is_damaged": True}, {"offered_state_is_damaged": True}):
                offer = await next_of(new, "offer")
                seen.append(offer.completed_steps)
                await beat(new, failed_offer_id=offer.offer_id, failed_offer_reason="a bit is wrong", **said)
            offer = await next_of(new, "offer")
            return [*seen, offer.completed_steps]

    prepare(tmp_path, 5, 2, 4)
    with coordinator(tmp_path, RUN) as process:
        offered = asyncio.run(scenario(process.address))
        log = process.read_log()
    assert offered == [4, 4, 4, 2]
    assert "the state behind step 4 is not used any more: worker new could not load the one that is stored" in log
    assert "if nobody brings it within 0.3 s, the run goes back to the one behind step 2" in log
    assert stored_in(tmp_path) == {"2": 1}


def test_run_whose_only_stored_state_is_damaged_says_so_and_tries_it_again(tmp_path):
    async def scenario(address):
        async with worker(address, "new", 0, None) as new:
            seen = []
            for _ in range(4):
                offer = await next_of(new, "offer")
                seen.append(offer.completed_steps)
                said = {"failed_offer_id": offer.offer_id, "failed_offer_reason": "a bit is wrong"}
                await beat(new, offered_state_is_damaged=True, **said)
            return seen, (await new.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot.waiting.reason

    prepare(tmp_path, 5, 4)
    with coordinator(tmp_path, RUN) as process:
        offered, reason = asyncio.run(scenario(process.address))
    assert offered == [4, 4, 4, 4]
    assert "worker new could not load the one that is stored behind step 4: a bit is wrong" in reason
    assert stored_in(tmp_path) == {"4": 1}


def test_neither_evaluations_nor_commits_nor_states_count_that_were_taken_back(tmp_path):
    file = RunFile(run_id="back", num_steps=9, evaluation=EvaluationConfig(metric="loss"))
    prepare(tmp_path, 6, 3)
    with contextlib.closing(open_folder(tmp_path / "state" / "back")) as store:
        store.commit(commit(2, kind="evaluate", loss=2.0, best=True))
        store.commit(commit(4, kind="evaluate", loss=1.0, best=True))
        run = Run(file, store)
        run.progress.evaluated_steps, run.progress.best = plan.evaluated(file, store.commits())
        assert (run.progress.evaluated_steps, run.progress.best) == (4, -1.0)
        for record in store.commits():
            moment = Moment(epoch=record.epoch, step=record.step, attempt=record.attempt)
            run.remember(moment, record.kind, record.told())
        asyncio.run(Recovery(run, store).go_back())
        assert (run.progress.evaluated_steps, run.progress.best) == (2, -2.0)
        assert (run.progress.committed_steps, run.stored_source) == (3, ("back", 3))
        assert {(moment.step, kind) for moment, kind in run._commits} == {(0, "train"), (1, "train"), (2, "train")} | {
            (2, "evaluate")
        }
        assert run.states.lineage.has(5, Origin(epoch=7, attempt=0))


def test_run_that_is_suspended_says_when_its_last_state_is_not_stored(tmp_path):
    run = {**RUN, "state": {"publish_every": 4, "store_every": 4}}

    async def scenario(process):
        async with worker(process.address, "ant", 0, None) as ant:
            await make_step(ant, await next_of(ant, "assignment"))
            await next_of(ant, "assignment")
            process.process.send_signal(signal.SIGTERM)
            await ant.leave("it is told to stop as well")
            return await asyncio.to_thread(process.process.wait, 20)

    with coordinator(tmp_path, run) as process:
        assert asyncio.run(scenario(process)) == 75
        log = process.read_log()
    assert "its state is stored first, if its workers stay" in log
    assert "suspended without the state behind step 1 being stored: none is" in log
