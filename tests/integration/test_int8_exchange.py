"""int8 over a real connection: a byte out and two back for each element, and nothing wrong passes for numbers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from ayni import frames, tensors
from ayni.buckets import FLAT
from ayni.errors import AyniError, BadChunk, Incompatible, NonFinite, SpecMismatch, TooLarge
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2
from coordinator_service import wire
from tests.integration.test_client import RUN as OWN_LOOP
from tests.integration.test_client import members, on_threads, shards_of
from tests.support.agents import TOY, agent
from tests.support.coordinator import RUN, RawWorker, coordinator, parts_of, raw_worker, refusal
from worker_agent.client import WorkerClient

SIZE = 600_001
INT8: dict[str, Any] = {**RUN, "num_steps": 1, "wire_type": "int8"}


def over(values_N: np.ndarray, dtype: str) -> np.ndarray:
    return tensors.decode(bytes(tensors.encode(values_N, dtype)), dtype)


def spec(num_elements: int, **changes: Any) -> tensor_pb2.TensorSpec:
    fields = {"dtype": tensor_pb2.DTYPE_INT8, "num_elements": num_elements, "scale_block_elements": 256}
    return tensor_pb2.TensorSpec(**{**fields, **changes})


@asynccontextmanager
async def int8_workers(address: str, *names: str) -> AsyncIterator[list[RawWorker]]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(raw_worker(address, name)) for name in names]
        for worker in workers:
            await worker.join(wire_types=[tensor_pb2.DTYPE_INT8])
            worker.open_assignments()
        for worker in workers:
            await worker.next_frame()
        yield workers


def test_gradients_may_travel_in_int8(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    sent = [rng.standard_normal(SIZE).astype(np.float32) for _ in range(2)]
    types = {"wire_types": tensors.WIRE_DTYPES}
    with (
        coordinator(tmp_path, {**OWN_LOOP, "wire_type": "int8", "num_steps": 1, "gradients": "grpc"}) as server,
        members(server, "ant", "bee", **types) as clients,
    ):
        for client, shard in zip(clients, shards_of(clients), strict=True):
            assert client.wire_type == "int8"
            client.send_gradients(shard.step, sent[shard.rank], 0.0, 0, 2)

        def received(client: WorkerClient) -> np.ndarray:
            return np.asarray(client.receive_averaged().gradients)

        means = on_threads(received, clients)
        expected = over((over(sent[0], "int8") + over(sent[1], "int8")) / np.float32(2), "bfloat16")
        assert {mean.tobytes() for mean in means} == {expected.tobytes()}
        for client in clients:
            assert tensors.payload_bytes(SIZE, "int8") < client.traffic.sent_bytes < 1.02 * SIZE
            assert 2 * SIZE < client.traffic.received_bytes < 2.002 * SIZE


def test_a_client_that_does_not_speak_of_int8_is_refused(tmp_path: Path) -> None:
    """A loop of one's own has no error feedback unless it says that it knows of it."""
    with coordinator(tmp_path, {**OWN_LOOP, "wire_type": "int8"}) as server:
        with pytest.raises(Incompatible, match="wire_type differs: this coordinator has int8"), members(server, "ant"):
            pass


async def _reduce(worker: RawWorker, vectors: list[np.ndarray], chunk_bytes: int) -> np.ndarray:
    """Contributes whole parts frame by frame, and returns the mean."""
    call = worker.open_gradient()
    weights = dict.fromkeys(worker.leased, 2)
    begin = pb.GradientBegin(round=worker.begin(weights, SIZE, tensor=spec(SIZE)))
    await call.write(pb.GradientRequest(begin=begin).SerializeToString())
    accepted = pb.GradientResponse.FromString(await worker._read(call)).accepted
    assert accepted.chunk_bytes == chunk_bytes

    async def send() -> None:
        for start in range(0, SIZE, chunk_bytes // 4):
            for part, values_N in enumerate(parts_of(worker, vectors)):
                payload = tensors.encode(values_N[start : start + chunk_bytes // 4], "int8")
                await call.write(frames.encode_chunk(frames.CHUNK_FIELD, 4 * start, part, payload))
        await call.done_writing()

    writer, mean = asyncio.create_task(send()), np.empty(SIZE, np.float32)
    while True:
        _, content = frames.decode_frame(await worker._read(call))
        if not isinstance(content, frames.ChunkView):
            await writer
            await worker.commit(weights)
            return mean
        start, length = content.offset_bytes // 2, len(content.data) // 2
        tensors.decode_into(content.data, "bfloat16", mean[start : start + length])


def test_parts_are_summed_along_the_tree_whatever_the_length_of_chunks(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    vectors = [rng.standard_normal(SIZE).astype(np.float32) for _ in range(5)]

    async def means(address: str, chunk_bytes: int) -> set[bytes]:
        async with int8_workers(address, "ant", "bee") as workers:
            found = await asyncio.gather(*(_reduce(worker, vectors, chunk_bytes) for worker in workers))
            return {mean.tobytes() for mean in found}

    together = set[bytes]()
    for chunk_bytes in (1 << 16, 1 << 20):
        run = {**INT8, "chunk_bytes": chunk_bytes}
        with coordinator(tmp_path / str(chunk_bytes), run) as server:
            together |= asyncio.run(means(server.address, chunk_bytes))
    assert len(together) == 1
    mean = np.frombuffer(together.pop(), np.float32)
    assert np.abs(mean - np.sum(vectors, axis=0) / 10).max() < 0.05


@pytest.mark.parametrize(
    ("wire_type", "changes", "words"),
    [
        ("int8", {"scale_block_elements": 0}, "scale_block_elements is 0; this run takes 256"),
        ("int8", {"scale_block_elements": 128}, "scale_block_elements is 128; this run takes 256"),
        ("int8", {"dtype": tensor_pb2.DTYPE_FLOAT32}, "dtype is float32; this run takes int8"),
        ("float32", {"dtype": tensor_pb2.DTYPE_FLOAT32}, "scale_block_elements is 256; this run takes 0"),
    ],
)
def test_a_tensor_that_is_cut_into_other_blocks_is_refused(wire_type: str, changes: Any, words: str) -> None:
    with pytest.raises(SpecMismatch, match=words):
        wire.tensor(spec(9, **changes), FLAT, wire_type, 1 << 20)


def test_a_bucket_is_as_long_as_its_sums() -> None:
    """What the coordinator holds is float32, whatever travels."""
    assert wire.tensor(spec(256), FLAT, "int8", 1024).num_elements == 256
    with pytest.raises(TooLarge, match="flat has 257 elements; 1 to 256 are taken"):
        wire.tensor(spec(257), FLAT, "int8", 1024)


def test_a_chunk_of_another_length_is_refused(tmp_path: Path) -> None:
    error = _refused(tmp_path, 9, bytes(tensors.encode(np.ones(300, np.float32), "int8")))
    assert isinstance(error, BadChunk)
    assert "worker ant sends a chunk with length 300; expected 9" in error.message


def test_a_value_that_is_not_finite_halts_the_run_by_name(tmp_path: Path) -> None:
    values = np.ones(900, np.float32)
    values[700] = np.nan
    error = _refused(tmp_path, 900, bytes(tensors.encode(values, "int8")))
    assert isinstance(error, NonFinite)
    assert "worker ant contributes nan at element 700" in error.message


def _refused(folder: Path, num_elements: int, payload: bytes) -> AyniError:
    """What the coordinator says to the only chunk of a bucket."""

    async def contribute(worker: RawWorker) -> None:
        call = worker.open_gradient()
        weights = dict.fromkeys(worker.leased, 1)
        begin = pb.GradientBegin(round=worker.begin(weights, num_elements, tensor=spec(num_elements)))
        await call.write(pb.GradientRequest(begin=begin).SerializeToString())
        await worker._read(call)
        await call.write(frames.encode_chunk(frames.CHUNK_FIELD, 0, 0, payload))
        await call.done_writing()
        await worker._read(call)

    async def caught(address: str) -> AyniError:
        async with int8_workers(address, "ant", "bee") as workers:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await contribute(workers[0])
            return refusal(refused)

    with coordinator(folder, INT8) as server:
        return asyncio.run(caught(server.address))


def test_two_agents_train_over_int8_and_both_keep_what_rounding_holds_back(tmp_path: Path) -> None:
    run = {
        "run_id": "toy",
        "num_steps": 4,
        "min_workers": 2,
        "wire_type": "int8",
        "task": {"name": TOY, "options": {"dropout": 0.25}},
        "batch": {"samples": 10, "microbatches": 5, "evaluation_samples": 4},
        "timeouts": {"shutdown": "10s"},
    }
    with (
        coordinator(tmp_path, run) as server,
        agent(server.address, "ant", tmp_path) as ant,
        agent(server.address, "bee", tmp_path) as bee,
    ):
        assert (ant.end(), bee.end()) == (0, 0)
    assert [line["loss"] for line in ant.metrics()] == [line["loss"] for line in bee.metrics()]
    assert "differ" not in server.read_log()
    for worker in (ant, bee):
        assert [path.name for path in (worker.folder / "checkpoints" / "residuals").iterdir()] == ["4.safetensors"]
