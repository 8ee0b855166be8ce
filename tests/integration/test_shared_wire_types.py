"""Every wire type through shared memory: the same bytes as over gRPC, and nothing that was written to too early."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ayni import frames, tensors, tree
from ayni.buckets import FLAT
from ayni.errors import BadChunk, NonFinite, RoundRestarted
from ayni.frames import SharedRange
from ayni.messages import dtype_enum, shared_memory_of
from ayni.shm.regions import Region, Regions
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2
from coordinator_service.store import open_folder
from tests.integration.test_client import config, on_threads
from tests.integration.test_shared_gradients import refusal
from tests.support.agents import TOY, agent
from tests.support.coordinator import CoordinatorProcess, RawWorker, coordinator, raw_worker
from worker_agent.client import WorkerClient
from worker_agent.session import MicrobatchStats, Report, ShardAssignment
from worker_agent.shared_regions import SharedRegions

SIZE = 700_001
"""Elements: two or three chunks, the last one shorter."""
NUM = 5
RUN: dict[str, Any] = {
    "run_id": "wires",
    "num_steps": 1,
    "min_workers": 2,
    "batch": {"samples": NUM, "microbatches": NUM},
    "timeouts": {"shutdown": "1s", "lease": "60s", "accept": "61s", "drain": "500ms"},
}
GRADIENTS = [np.random.default_rng(m).standard_normal(SIZE).astype(np.float32) for m in range(NUM)]
ROUNDED = [dtype for dtype in tensors.WIRE_DTYPES if dtype != "float32"]


def total(start: int, stop: int) -> np.ndarray:
    """The sum over a node of the tree."""
    if stop - start == 1:
        return GRADIENTS[start]
    half = 1 << ((stop - start - 1).bit_length() - 1)
    return total(start, start + half) + total(start + half, stop)


def step(client: WorkerClient) -> tuple[bytes, str, range]:
    """Makes one step; returns the mean's bytes, the way that gradients went, and who computed what."""
    lease = client.receive_shard()
    assert lease is not None
    out = np.full(SIZE, np.nan, np.float32)
    nodes = tree.cover(lease.microbatch_start, lease.microbatch_stop, NUM)
    parts = [total(node.start, node.stop) for node in nodes]
    client.contribute(lease, FLAT, parts, stats_of(lease), out=out).result(60)
    client.commit(lease, Report(num_buckets=1, microbatches=stats_of(lease)))
    traffic, dtype = client.traffic, client.wire_type
    mean_bytes = tensors.payload_bytes(SIZE, tensors.mean_dtype(dtype))
    bulk = len(nodes) * tensors.payload_bytes(SIZE, dtype) + mean_bytes
    if traffic.shared_bytes == bulk and traffic.sent_bytes + traffic.received_bytes < 10_000:
        return out.tobytes(), "shm", lease.microbatches
    assert traffic.shared_bytes == 0
    assert bulk < traffic.sent_bytes + traffic.received_bytes < bulk + 10_000
    return out.tobytes(), "grpc", lease.microbatches


def stats_of(lease: ShardAssignment) -> list[MicrobatchStats]:
    return [MicrobatchStats(microbatch=m, weight=1, loss_sum=1.0) for m in lease.microbatches]


def mean_of(leases: list[range], dtype: str) -> bytes:
    """The mean as the contract says it, for workers with these leases."""
    sent = {}
    for lease in leases:
        for node in tree.cover(lease.start, lease.stop, NUM):
            sent[node.start, node.stop] = tensors.decode(
                bytes(tensors.encode(total(node.start, node.stop), dtype)), dtype
            )

    def received(start: int, stop: int) -> np.ndarray:
        if (start, stop) in sent:
            return sent[start, stop]
        half = 1 << ((stop - start - 1).bit_length() - 1)
        return received(start, start + half) + received(start + half, stop)

    mean = (received(0, NUM) / np.float32(NUM)).astype(np.float32)
    mean_dtype = tensors.mean_dtype(dtype)
    return tensors.decode(bytes(tensors.encode(mean, mean_dtype)), mean_dtype).tobytes()


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(
    ("gradients", "ways"),
    [
        ({"ant": "auto", "bee": "auto"}, ["shm", "shm"]),
        ({"ant": "auto", "bee": "grpc"}, ["grpc", "shm"]),
    ],
)
def test_means_have_the_same_bytes_whichever_way_gradients_go(tmp_path: Path, dtype, gradients, ways):
    types = {"wire_types": tensors.WIRE_DTYPES}
    run = {**RUN, "wire_type": dtype}
    with coordinator(tmp_path, run) as server, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(WorkerClient.connect(config(server, name, gradients=way, **types), 0, "cpu"))
            for name, way in gradients.items()
        ]
        steps = on_threads(step, clients)
    expected = mean_of([lease for _, _, lease in steps], dtype)
    assert [mean == expected for mean, _, _ in steps] == [True, True]
    assert sorted(way for _, way, _ in steps) == ways


def chunks_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bytes of all chunks of a part, one after the other."""
    step = (1 << 20) // tensors.position_bytes(dtype)
    chunks = [bytes(tensors.encode(values[at : at + step], dtype)) for at in range(0, values.size, step)]
    return np.frombuffer(b"".join(chunks), np.uint8)


class SharedWorker:
    """A worker that is played frame by frame, and lends what it likes."""

    def __init__(self, raw: RawWorker, shared: SharedRegions, dtype: str) -> None:
        self.raw, self.shared, self.dtype = raw, shared, dtype

    @property
    def data(self) -> np.ndarray:
        """The bytes of its only part."""
        return chunks_of(total(self.raw.leased.start, self.raw.leased.stop), self.dtype)

    async def lend(self, data: np.ndarray) -> Region:
        region = self.shared.ours.allocate(data.nbytes)
        region.bytes[:] = data
        await self.shared.lend(region)
        return region

    async def begin(self) -> Any:
        call = self.raw.open_gradient()
        tensor = tensor_pb2.TensorSpec(
            dtype=dtype_enum(self.dtype),
            num_elements=SIZE,
            scale_block_elements=tensors.scale_block_elements(self.dtype),
        )
        begin = pb.GradientBegin(round=self.raw.begin(dict.fromkeys(self.raw.leased, 1), SIZE, tensor=tensor))
        await call.write(pb.GradientRequest(begin=begin).SerializeToString())
        assert pb.GradientResponse.FromString(await self.raw._read(call)).HasField("accepted")
        return call

    async def mean(self, call: Any) -> bytes:
        """The mean, read out of the coordinator's memory."""
        dtype, mean = tensors.mean_dtype(self.dtype), np.full(SIZE, np.nan, np.float32)
        while True:
            number, chunk = frames.decode_frame(await self.raw._read(call))
            if not isinstance(chunk, frames.ChunkView):
                assert number == 3
                return mean.tobytes()
            assert chunk.shared is not None
            place, start = chunk.shared, chunk.offset_bytes // tensors.itemsize(dtype)
            region = await self.shared.borrow(place.region)
            values = tensors.decode(region.bytes[place.offset_bytes :][: place.length_bytes], dtype)
            mean[start : start + values.size] = values
            assert region.generation == place.generation


def chunk(region: Region, length: int | None = None, offset: int = 0) -> bytes:
    place = SharedRange(region.id, offset, region.size - offset if length is None else length, region.generation)
    return frames.encode_shared_chunk(frames.CHUNK_FIELD, 0, 0, place)


@asynccontextmanager
async def shared_workers(server: CoordinatorProcess, dtype: str) -> AsyncIterator[list[SharedWorker]]:
    async with raw_worker(server.address, "ant") as ant, raw_worker(server.address, "bee") as bee:
        workers = []
        for raw in (ant, bee):
            answer = await raw.join(elastic=True, wire_types=[dtype_enum(dtype)])
            offer = shared_memory_of(answer.shared_memory)
            shared = await SharedRegions.connect(offer, answer.session, 10, Regions())
            workers.append(SharedWorker(raw, shared, dtype))
            raw.open_assignments()
        for raw in (ant, bee):
            assert (await raw.next_frame()).HasField("assignment")
        try:
            yield workers
        finally:
            for worker in workers:
                await worker.shared.close()
                worker.shared.ours.close()


def played(tmp_path: Path, dtype: str, play: Any) -> None:
    """Plays two workers, with two micro-batches each, against a coordinator."""

    async def main(server: CoordinatorProcess) -> None:
        async with asyncio.timeout(60), shared_workers(server, dtype) as workers:
            await play(*workers)

    run = {**RUN, "wire_type": dtype, "batch": {"samples": 4, "microbatches": 4}}
    with coordinator(tmp_path, run) as server:
        asyncio.run(main(server))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_region_that_is_written_to_before_it_is_added_makes_everybody_begin_again(tmp_path: Path, dtype):
    async def play(ant: SharedWorker, bee: SharedWorker) -> None:
        first, region = await ant.begin(), await ant.lend(ant.data)
        await first.write(chunk(region))
        second, other = await bee.begin(), await bee.lend(bee.data)
        # Ant's contribution is here whole and waits for bee's; now ant uses the memory for something else.
        region.renew()
        region.bytes[: region.size // 2] = 1
        await second.write(chunk(other))
        assert isinstance(await refusal(ant, first), RoundRestarted)  # type: ignore[arg-type]
        assert isinstance(await refusal(bee, second), RoundRestarted)  # type: ignore[arg-type]
        region.bytes[:] = ant.data
        first, second = await ant.begin(), await bee.begin()
        await first.write(chunk(region))
        await second.write(chunk(other))
        means = [await ant.mean(first), await bee.mean(second)]
        assert len(set(means)) == 1
        assert np.abs(np.frombuffer(means[0], np.float32) - total(0, 4) / 4).max() < 0.05

    played(tmp_path, dtype, play)


@pytest.mark.parametrize(
    ("dtype", "make", "field"),
    [
        ("bfloat16", lambda region: chunk(region, length=2 * SIZE - 1), "shared.offset_bytes"),
        ("bfloat16", lambda region: chunk(region, offset=2), "shared.offset_bytes"),
        ("bfloat16", lambda region: chunk(region, length=2 * SIZE - 2), "length"),
        ("int8", lambda region: chunk(region, length=region.size - 1), "length"),
        ("int8", lambda region: chunk(region, length=4 * 1024), "length"),
        ("int8", lambda region: chunk(region, length=region.size + 1), "shared.length_bytes"),
    ],
)
def test_a_range_that_is_wrong_is_refused_by_name(tmp_path: Path, dtype, make, field):
    async def play(ant: SharedWorker, bee: SharedWorker) -> None:
        call, region = await ant.begin(), await ant.lend(ant.data)
        await call.write(make(region))
        error = await refusal(ant, call)  # type: ignore[arg-type]
        assert isinstance(error, BadChunk)
        assert error.metadata["field"] == field

    played(tmp_path, dtype, play)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_a_value_in_shared_memory_that_is_not_finite_is_found_and_named(tmp_path: Path, dtype):
    async def play(ant: SharedWorker, bee: SharedWorker) -> None:
        values = total(ant.raw.leased.start, ant.raw.leased.stop).copy()
        values[SIZE - 1] = np.inf
        call, region = await ant.begin(), await ant.lend(chunks_of(values, dtype))
        await call.write(chunk(region))
        await call.done_writing()
        error = await refusal(ant, call)  # type: ignore[arg-type]
        assert isinstance(error, NonFinite)
        assert (error.metadata["worker"], error.metadata["element"]) == ("ant", str(SIZE - 1))

    played(tmp_path, dtype, play)


def trained(folder: Path, gradients: str) -> list[tuple[str, str, str]]:
    """Trains with two agents, a third of the steps in each wire type; returns what the ledger says of each step."""
    run = {
        "run_id": "toy",
        "num_steps": 9,
        "min_workers": 2,
        "gradients": gradients,
        "wire_changes": {"3": "bfloat16", "6": "int8"},
        "task": {"name": TOY, "options": {"dropout": 0.25, "width": 200, "buckets": 2}},
        # One micro-batch for each worker, so that both runs give the same work to the same rank.
        "batch": {"samples": 10, "microbatches": 0, "evaluation_samples": 4},
        "optimizer": {"update": "host"},
        "stragglers": {"shortest": "50s"},
        "timeouts": {"shutdown": "10s"},
    }
    with coordinator(folder, run) as server, agent(server.address, "ant", folder) as ant:
        # Who computes what follows from who came first, and with int8 what is kept back does.
        server.wait_for_log("worker ant joined")
        with agent(server.address, "bee", folder) as bee:
            assert (ant.end(), bee.end()) == (0, 0)
        assert server.process.wait(20) == 0
    for worker in (ant, bee):
        assert ("gradients go through memory" in worker.read_log()) == (gradients == "auto")
        assert [path.name for path in (worker.folder / "checkpoints" / "residuals").iterdir()] == ["9.safetensors"]
    store = open_folder(folder / "state" / "toy", to_read=True)
    with contextlib.closing(store):
        steps = [(c.wire_type, c.gradient_hash, c.parameters_sha256) for c in store.commits() if c.kind == "train"]
        return [*steps, ("", "", store.facts()["final_parameters_sha256"])]


def test_two_agents_end_with_the_same_parameters_whichever_way_gradients_go(tmp_path: Path):
    shared, sent = trained(tmp_path / "auto", "auto"), trained(tmp_path / "grpc", "grpc")
    assert [wire for wire, _, _ in shared] == [*["float32"] * 3, *["bfloat16"] * 3, *["int8"] * 3, ""]
    assert shared == sent
    assert all(parameters for _, _, parameters in shared)
