"""A real coordinator process, called frame by frame."""

import asyncio
import contextlib

import grpc
import numpy as np
import pytest

from ayni import frames
from ayni.errors import (
    AyniError,
    BadChunk,
    BadRequest,
    Checksum,
    Halted,
    IdentityTaken,
    Incompatible,
    NonFinite,
    NotLeased,
    SpecMismatch,
    StaleEpoch,
    StaleStep,
    StepVoided,
    TokenRefused,
    TooLarge,
    UnknownWorker,
)
from ayni.rpc import error_from
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2
from tests.support.coordinator import (
    RUN,
    coordinator,
    make_step,
    microbatches,
    parts_of,
    raw_worker,
    raw_workers,
    refusal,
)


def test_two_workers_reduce_and_commit(tmp_path):
    gradients = microbatches(5)

    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as workers:
            assert [(*w.leased,) for w in workers] == [(0, 1), (2, 3, 4)]
            mean, complete, commit = await make_step(workers, gradients)
            g = gradients
            assert mean.tobytes() == ((((g[0] + g[1]) + (g[2] + g[3])) + g[4]) / np.float32(10)).tobytes()
            assert (complete.num_contributors, complete.total_weight, complete.global_loss) == (2, 10, 1.0)
            assert (commit.total_weight, commit.global_loss, commit.num_correct) == (10, 1.0, 10)
            assert commit.gradient_norm == pytest.approx(float(np.linalg.norm(mean.astype(np.float64))), rel=1e-9)
            assert commit.clip_factor == pytest.approx(1 / commit.gradient_norm)
            again = await workers[0].commit({m: 2 for m in workers[0].leased})
            assert again == commit, "a committed step is answered again"
            for worker in workers:
                await worker.next_frame()
                assert worker.assignment.step == 1
                assert worker.assignment.position == 10
            await make_step(workers, gradients)
            for worker in workers:
                shutdown = (await worker.next_frame()).shutdown
                assert shutdown.finished
                assert shutdown.committed_steps == 2
                await worker.leave("done")

    with coordinator(tmp_path, RUN) as process:
        asyncio.run(scenario(process.address))
        assert process.process.wait(20) == 0
        assert "step 1 committed" in process.read_log()


@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("a", "b", "c"), ("a", "b", "c", "d", "e")])
def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path, names):
    gradients = microbatches(13, size=1000)
    run = {**RUN, "min_workers": len(names), "batch": {"samples": 26, "microbatches": 13}}

    async def scenario(address):
        async with raw_workers(address, *names) as workers:
            return (await make_step(workers, gradients))[0]

    def node(start, stop):
        if stop - start == 1:
            return gradients[start]
        middle = start + (1 << ((stop - start - 1).bit_length() - 1))
        return node(start, middle) + node(middle, stop)

    with coordinator(tmp_path, run) as process:
        mean = asyncio.run(scenario(process.address))
    assert mean.tobytes() == (node(0, 13) / np.float32(26)).tobytes()


@pytest.mark.parametrize(
    ("fields", "error", "both_sides"),
    [
        ({"protocol_version": 99}, Incompatible, ("1", "99")),
        ({"run_id": "other"}, Incompatible, ("raw", "other")),
        ({"wire_types": [tensor_pb2.DTYPE_INT8]}, Incompatible, ("float32", "int8")),
        ({"worker_name": ""}, BadRequest, ("worker_name",)),
        ({"worker_name": "x" * 200}, TooLarge, ("200", "128")),
        ({"join_nonce": ""}, BadRequest, ("join_nonce",)),
        ({"backend": "tpu"}, BadRequest, ("tpu", "cuda")),
    ],
)
def test_join_refusals_say_both_sides(shared, fields, error, both_sides):
    async def scenario():
        async with raw_worker(shared.address, "ant") as worker:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker.join(**fields)
            return refusal(caught)

    refused = asyncio.run(scenario())
    assert type(refused) is error
    assert all(text in refused.message for text in both_sides)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A coordinator for refusals that leave no trace."""
    with coordinator(tmp_path_factory.mktemp("shared"), {**RUN, "min_workers": 9}) as process:
        yield process


def test_other_model_or_data_is_refused_with_both_fingerprints(shared):
    async def scenario():
        async with raw_worker(shared.address, "f1") as one, raw_worker(shared.address, "f2") as two:
            await one.join(task_fingerprint="t1", task_summary="MiniLM, 3 parameters", dataset_fingerprint="d1")
            caught = []
            for other in ({"task_fingerprint": "t2"}, {"dataset_fingerprint": "d2"}):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await two.join(**other)
                caught.append(refusal(error))
            await one.leave()
            return caught

    task, data = asyncio.run(scenario())
    assert (task.metadata["coordinator"], task.metadata["worker"]) == ("t1", "t2")
    assert "MiniLM, 3 parameters" in task.message
    assert (data.metadata["coordinator"], data.metadata["worker"]) == ("d1", "d2")


def test_name_of_a_live_worker_is_refused(shared):
    async def scenario():
        async with raw_worker(shared.address, "twin") as one, raw_worker(shared.address, "twin") as two:
            await one.join()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await two.join(join_nonce="another")
            await one.leave()
            return refusal(caught)

    assert isinstance(asyncio.run(scenario()), IdentityTaken)


def test_wrong_token_and_foreign_session_are_refused(shared):
    async def scenario():
        async with raw_worker(shared.address, "x", token="not-the-right-token") as stranger:
            with pytest.raises(grpc.aio.AioRpcError) as no_token:
                await stranger.stub.GetRun(pb.GetRunRequest(), timeout=10)
        async with raw_worker(shared.address, "y") as one, raw_worker(shared.address, "z") as two:
            await one.join()
            await two.join()
            with pytest.raises(grpc.aio.AioRpcError) as foreign:
                await two.stub.Heartbeat(pb.HeartbeatRequest(worker_id=one.worker_id), timeout=10)
            await one.leave()
            await two.leave()
            return refusal(no_token), refusal(foreign)

    no_token, foreign = asyncio.run(scenario())
    assert isinstance(no_token, TokenRefused)
    assert isinstance(foreign, UnknownWorker)


BAD_BEGINS = [
    ({"epoch": 7}, StaleEpoch, "epoch 7"),
    ({"step": 9}, StaleStep, "step 9"),
    ({"attempt": 3}, StaleStep, "attempt 3"),
    ({"lease_id": 999}, NotLeased, "lease 999"),
    ({"worker_id": 1}, UnknownWorker, "worker 1"),
    ({"microbatches": []}, NotLeased, "micro-batches []"),
]


@pytest.mark.parametrize(("changes", "error", "sentence"), BAD_BEGINS)
def test_contribution_under_another_lease_is_refused_and_the_run_goes_on(tmp_path, changes, error, sentence):
    gradients = microbatches(5, size=100)

    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as workers:
            ant = workers[0]
            weights = {m: 2 for m in ant.leased}
            begin = pb.GradientBegin(round=ant.begin(weights, 100, **changes))
            refused = await refused_with(ant, begin, [])
            await make_step(workers, gradients)
            return refused

    with coordinator(tmp_path, RUN) as process:
        refused = asyncio.run(scenario(process.address))
    assert type(refused) is error
    assert sentence in refused.message


async def refused_with(worker, begin, payload) -> AyniError:
    """Sends a begin frame and raw frames; returns the refusal."""
    call = worker.open_gradient("BlockGradient" if isinstance(begin, pb.BlockGradientBegin) else "Gradient")
    request = pb.BlockGradientRequest if isinstance(begin, pb.BlockGradientBegin) else pb.GradientRequest
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _send_all(worker, call, [request(begin=begin).SerializeToString(), *payload])
    return refusal(caught)


async def _send_all(worker, call, frames_out) -> None:
    await call.write(frames_out[0])
    await worker._read(call)
    for frame in frames_out[1:]:
        await call.write(frame)
    await call.done_writing()
    while True:
        await worker._read(call)


FLOAT32 = tensor_pb2.DTYPE_FLOAT32
SPECS = [
    (tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_BFLOAT16, num_elements=9), SpecMismatch, "bfloat16"),
    (tensor_pb2.TensorSpec(num_elements=9), SpecMismatch, "unspecified"),
    (tensor_pb2.TensorSpec(dtype=FLOAT32, num_elements=9, component_sizes=[1] * 8), SpecMismatch, "nine"),
    (tensor_pb2.TensorSpec(dtype=FLOAT32, num_elements=9, component_sizes=[2] * 9), SpecMismatch, "18"),
    (tensor_pb2.TensorSpec(dtype=FLOAT32, num_elements=2**60, component_sizes=[]), SpecMismatch, "nine"),
]


@pytest.mark.parametrize(("spec", "error", "sentence"), SPECS)
def test_impossible_tensor_halts_the_run_before_anything_is_mixed(tmp_path, spec, error, sentence):
    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee):
            round_ = ant.begin({m: 2 for m in ant.leased}, 9)
            round_.tensor.CopyFrom(spec)
            refused = await refused_with(ant, pb.BlockGradientBegin(round=round_, num_blocks=1), [])
            with pytest.raises(grpc.aio.AioRpcError) as halted:
                await bee.next_frame()
            return refused, halted

    with coordinator(tmp_path, RUN) as process:
        refused, halted = asyncio.run(scenario(process.address))
        assert process.process.wait(40) == 1
    assert type(refused) is error
    assert sentence in refused.message
    assert isinstance(error_from(halted.value), Halted)


def chunk(offset, values, part=0):
    return frames.encode_chunk(2, offset, part, np.asarray(values, np.float32).tobytes())


BAD_CHUNKS = [
    ([chunk(4, [1.0] * 9)], BadChunk, "offset"),
    ([chunk(0, [1.0] * 8)], BadChunk, "length 8"),
    ([chunk(0, [1.0] * 9, part=5)], BadChunk, "part 5"),
    ([chunk(2, [1.0] * 9)], BadChunk, "inside an element"),
    ([chunk(0, [1.0] * 4 + [float("nan")] + [1.0] * 4)], NonFinite, "worker ant contributes nan at element 4"),
    ([chunk(0, [float("inf")] * 9)], NonFinite, "element 0"),
    ([b"\xff\xff"], BadRequest, "cut short"),
    ([frames.encode_chunk(2, 0, 0, bytes(36), crc32=1)], Checksum, "do not match their CRC-32"),
]


@pytest.mark.parametrize(("payload", "error", "sentence"), BAD_CHUNKS)
def test_bad_chunk_is_refused_by_name(tmp_path, payload, error, sentence):
    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, _):
            begin = pb.GradientBegin(round=ant.begin({m: 2 for m in ant.leased}, 9))
            return await refused_with(ant, begin, payload)

    with coordinator(tmp_path, RUN) as process:
        refused = asyncio.run(scenario(process.address))
        process.wait_for_log("the run was halted: ")
        halted = next(line for line in process.read_log().splitlines() if "the run was halted" in line)
    assert type(refused) is error
    assert sentence in refused.message
    assert "worker ant" in halted


def test_refusal_arrives_whole_while_the_client_still_writes(tmp_path):
    """Fifty chunks are under way when the first one is refused."""

    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, _):
            size = 50 << 18
            values = np.zeros(size, np.float32)
            values[7] = np.nan
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ant.reduce([values, values], {m: 2 for m in ant.leased})
            return refusal(caught)

    with coordinator(tmp_path, RUN) as process:
        refused = asyncio.run(scenario(process.address))
    assert isinstance(refused, NonFinite)
    assert (refused.metadata["worker"], refused.metadata["element"]) == ("ant", "7")


def test_death_of_a_worker_voids_the_attempt_and_its_share_is_leased_again(tmp_path):
    gradients = microbatches(5)

    async def scenario(address):
        async with contextlib.AsyncExitStack() as stack:
            ant, bee, cat = [await stack.enter_async_context(raw_worker(address, n)) for n in ("ant", "bee", "cat")]
            for worker in (ant, bee, cat):
                await worker.join()
                worker.open_assignments()
            for worker in (ant, bee, cat):
                await worker.next_frame()
            waiting = asyncio.create_task(ant.reduce(parts_of(ant, gradients), {m: 2 for m in ant.leased}))
            await asyncio.wait({waiting}, timeout=0.1)
            cat.stream.cancel()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await waiting
            for worker in (ant, bee):
                await worker.next_frame()
                assert (worker.assignment.step, worker.assignment.attempt) == (0, 1)
                assert worker.assignment.world_size == 2
            return (refusal(caught), *(await make_step([ant, bee], gradients)))

    with coordinator(tmp_path, {**RUN, "start_workers": 3}) as process:
        voided, mean, _, commit = asyncio.run(scenario(process.address))
        assert "worker cat left: its assignment stream broke" in process.read_log()
    g = gradients
    assert isinstance(voided, StepVoided)
    assert "cat" in voided.message
    assert commit.attempt == 1
    assert mean.tobytes() == ((((g[0] + g[1]) + (g[2] + g[3])) + g[4]) / np.float32(10)).tobytes()


def test_run_pauses_below_min_workers_and_says_so(tmp_path):
    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee):
            bee.stream.cancel()
            frame = await ant.next_frame(waiting=True)
            snapshot = (await ant.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot
            return frame.waiting.reason, snapshot

    with coordinator(tmp_path, RUN) as process:
        reason, snapshot = asyncio.run(scenario(process.address))
    assert reason == snapshot.waiting.reason == "waiting for 1 more worker (1 of 2)"
    assert snapshot.state == pb.RUN_STATE_WAITING


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\0b", "   ", "a\nb"])
def test_names_that_can_not_be_printed_are_refused(shared, name):
    async def scenario():
        async with raw_worker(shared.address, name) as worker:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker.join()
            return refusal(caught)

    assert isinstance(asyncio.run(scenario()), BadRequest)
