"""The coordinator chooses a narrower wire type between two steps, for everybody, and remembers it."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ayni import frames, tensors
from ayni.messages import dtype_enum, dtype_name, duration, shared_memory_of
from ayni.tensors import scale_block_elements
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2
from coordinator_service.store import open_folder
from coordinator_service.store_records import CommitRecord
from tests.support.agents import TOY, agent
from tests.support.coordinator import RawWorker, coordinator, environment, raw_worker
from worker_agent.shared_regions import SharedRegions

SIZE = 300
TYPES = [dtype_enum(name) for name in tensors.WIRE_DTYPES]
RUN: dict[str, Any] = {
    "run_id": "auto",
    "num_steps": 60,
    "min_workers": 2,
    "auto_wire": True,
    "exchange_share": 0.25,
    "batch": {"samples": 4, "microbatches": 4},
    "timeouts": {"shutdown": "1s"},
}
EXCHANGE_S = {"float32": 2.0, "bfloat16": 1.0, "int8": 0.75}
"""What the workers say that it took, beside a second of computing."""


@asynccontextmanager
async def members(
    address: str, completed_steps: int = 0, sharing: Sequence[str] = (), **facts: Any
) -> AsyncIterator[list[RawWorker]]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(raw_worker(address, name)) for name in ("ant", "bee")]
        for worker in workers:
            joined = await worker.join(**{"wire_types": TYPES, "follows_wire_type": True, **facts})
            if worker.name in sharing:
                shared = await SharedRegions.connect(shared_memory_of(joined.shared_memory), joined.session, 10)
                stack.push_async_callback(shared.close)
            request = pb.ShardAssignmentRequest(worker_id=worker.worker_id, completed_steps=completed_steps)
            worker.stream = worker.stub.ShardAssignment(request)
        for worker in workers:
            await worker.next_frame()
        yield workers


async def reduce(worker: RawWorker) -> str:
    """Contributes to a step in the type that its lease says; returns the type."""
    name = dtype_name(worker.assignment.wire_type)
    call, weights = worker.open_gradient(), dict.fromkeys(worker.leased, 1)
    spec = tensor_pb2.TensorSpec(
        dtype=worker.assignment.wire_type, num_elements=SIZE, scale_block_elements=scale_block_elements(name)
    )
    begin = pb.GradientBegin(round=worker.begin(weights, SIZE, tensor=spec))
    await call.write(pb.GradientRequest(begin=begin).SerializeToString())
    await worker._read(call)
    await call.write(frames.encode_chunk(2, 0, 0, tensors.encode(np.ones(SIZE, np.float32), name)))
    await call.done_writing()
    while isinstance(frames.decode_frame(await worker._read(call))[1], frames.ChunkView):
        pass
    return name


async def make_step(workers: list[RawWorker]) -> str:
    """Makes a step and takes the next leases; returns the wire type that everybody was told."""
    (name,) = set(await asyncio.gather(*map(reduce, workers)))
    times = pb.StepTimes(compute=duration(1.0), exchange=duration(EXCHANGE_S[name]))
    commits = (worker.commit(dict.fromkeys(worker.leased, 1), times=times) for worker in workers)
    await asyncio.gather(*commits)
    return name


async def make_steps(workers: list[RawWorker], steps: int) -> list[str]:
    names = []
    for number in range(steps):
        names.append(await make_step(workers))
        if number + 1 < steps:
            await asyncio.gather(*(worker.next_frame() for worker in workers))
    return names


def ledger_of(folder: Path, run_id: str) -> list[CommitRecord]:
    with contextlib.closing(open_folder(folder / "state" / run_id, to_read=True)) as store:
        return [record for record in store.commits() if record.kind == "train"]


def test_the_wire_type_goes_down_and_a_coordinator_that_is_started_again_stays_there(tmp_path: Path):
    async def first(address: str) -> list[str]:
        async with members(address) as workers:
            names = await make_steps(workers, 42)
            run = await workers[0].stub.GetRun(pb.GetRunRequest(), timeout=20)
            assert json.loads(run.config_json)["wire_type"] == "int8"
            assert dtype_name(run.snapshot.wire_type) == "int8"
            return names

    async def second(address: str) -> list[str]:
        async with members(address, 42) as workers:
            return await make_steps(workers, 18)

    with coordinator(tmp_path, RUN) as server:
        names = asyncio.run(first(server.address))
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)
        log = server.read_log()
    assert names == [*["float32"] * 19, *["bfloat16"] * 19, *["int8"] * 4]
    assert "from step 19 on gradients travel in bfloat16, not float32: the exchange takes 67% of a step" in log
    assert "from step 38 on gradients travel in int8, not bfloat16: the exchange takes 50% of a step" in log
    with coordinator(tmp_path, RUN) as server:
        names += asyncio.run(second(server.address))
        assert "gradients travel in int8, as was chosen before" in server.read_log()
    assert names[42:] == ["int8"] * 18
    assert [record.wire_type for record in ledger_of(tmp_path, "auto")] == names


def test_a_change_that_did_not_help_is_followed_by_no_other_one_after_a_restart(tmp_path: Path, monkeypatch):
    """Killed after the change, before it was measured: the next process must know how long it took before."""

    async def first(address: str) -> list[str]:
        async with members(address) as workers:
            return await make_steps(workers, 21)

    async def second(address: str) -> list[str]:
        async with members(address, 21) as workers:
            return await make_steps(workers, 30)

    monkeypatch.setitem(EXCHANGE_S, "bfloat16", EXCHANGE_S["float32"])
    with coordinator(tmp_path, RUN) as server:
        assert asyncio.run(first(server.address)) == ["float32"] * 19 + ["bfloat16"] * 2
        server.process.kill()
        server.process.wait(20)
    with coordinator(tmp_path, RUN) as server:
        assert asyncio.run(second(server.address)) == ["bfloat16"] * 30


@pytest.mark.parametrize(
    ("run", "facts"),
    [
        ({"auto_wire": False}, {}),
        ({}, {"follows_wire_type": False}),
        ({}, {"wire_types": TYPES[:1]}),
        ({"exchange_share": 0.8}, {}),
    ],
)
def test_the_wire_type_stays_where_nobody_asked_or_somebody_could_not_follow(tmp_path: Path, run, facts):
    async def main(address: str) -> list[str]:
        async with members(address, **facts) as workers:
            return await make_steps(workers, 25)

    with coordinator(tmp_path, {**RUN, **run}) as server:
        assert asyncio.run(main(server.address)) == ["float32"] * 25


@pytest.mark.parametrize(("sharing", "last"), [(("ant", "bee"), "float32"), (("ant",), "bfloat16")])
def test_the_wire_type_stays_where_no_bytes_travel(tmp_path: Path, sharing: tuple[str, ...], last: str):
    async def main(address: str) -> str:
        async with members(address, sharing=sharing) as workers:
            return (await make_steps(workers, 25))[-1]

    with coordinator(tmp_path, RUN) as server:
        assert asyncio.run(main(server.address)) == last


def test_local_updates_are_advised_more_inner_steps_instead(tmp_path: Path):
    async def main(address: str) -> list[str]:
        async with members(address) as workers:
            return await make_steps(workers, 25)

    run = {**RUN, "local_update": {"enabled": True}}
    with coordinator(tmp_path, run) as server:
        assert asyncio.run(main(server.address)) == ["float32"] * 25
        assert "batch.microbatches of 24 or more, the inner steps of all workers together, keep it below 25%" in (
            server.read_log()
        )


@pytest.mark.timeout(180)
def test_a_replay_makes_each_step_in_its_own_wire_type(tmp_path: Path):
    """One worker sends the sum of all micro-batches in both runs, so rounding is the same."""
    run = {
        "run_id": "toy",
        "num_steps": 9,
        "wire_changes": {"3": "bfloat16", "6": "int8"},
        "task": {"name": TOY, "options": {"width": 32, "dropout": 0.25}},
        "batch": {"samples": 12, "microbatches": 6, "evaluation_samples": 4},
        "optimizer": {"learning_rate": 0.05, "update": "host"},
        "timeouts": {"shutdown": "5s"},
    }
    with coordinator(tmp_path, run) as server, agent(server.address, "ant", tmp_path) as ant:
        assert ant.end() == 0
        assert server.process.wait(30) == 0
    assert [record.wire_type for record in ledger_of(tmp_path, "toy")] == [
        *["float32"] * 3,
        *["bfloat16"] * 3,
        *["int8"] * 3,
    ]
    place = ["--run", str(tmp_path / "state" / "toy")]
    command = [sys.executable, "-m", "coordinator_service", "replay", *place, "--steps", ":", "--", "--backend", "cpu"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment(), cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["equal"], result["steps_compared"], result["final_parameters_equal"]) == (True, 9, True)
    assert result["caveats"] == [
        "wire_type is float32, then bfloat16, then int8: what workers send is rounded, and depends on who computed what"
    ]
