"""Gradients through shared memory: the same bytes as over gRPC, and nothing that was written to too early."""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from ayni import frames
from ayni.buckets import FLAT
from ayni.errors import BadChunk, NonFinite, RoundRestarted
from ayni.frames import SharedRange
from ayni.messages import shared_memory_of
from ayni.rpc import error_from
from ayni.shm.regions import Region, Regions
from ayni.v1 import coordinator_pb2 as pb
from tests.integration.test_client import config, on_threads
from tests.support.coordinator import CoordinatorProcess, RawWorker, coordinator, raw_worker
from worker_agent.client import WorkerClient
from worker_agent.session import MicrobatchStats, Report, ShardAssignment
from worker_agent.shared_regions import SharedRegions

SIZE = 1_500_001
"""Elements: six chunks, the last one shorter."""
NUM = 4
RUN: dict[str, Any] = {
    "run_id": "shared",
    "num_steps": 1,
    "min_workers": 2,
    "batch": {"samples": NUM, "microbatches": NUM},
    "timeouts": {"shutdown": "1s", "lease": "60s", "accept": "61s", "drain": "500ms"},
}
GRADIENTS = [np.random.default_rng(m).standard_normal(SIZE).astype(np.float32) for m in range(NUM)]
PAIRS = [GRADIENTS[0] + GRADIENTS[1], GRADIENTS[2] + GRADIENTS[3]]
MEAN = ((PAIRS[0] + PAIRS[1]) / np.float32(NUM)).tobytes()


def step(client: WorkerClient) -> tuple[bytes, str]:
    """Makes one step; returns the mean's bytes and the way that gradients went."""
    lease = client.receive_shard()
    assert lease is not None
    out = np.full(SIZE, np.nan, np.float32)
    client.contribute(lease, FLAT, [part_of(client, lease)], stats_of(lease), out=out).result(60)
    client.commit(lease, Report(num_buckets=1, microbatches=stats_of(lease)))
    traffic = client.traffic
    bulk = 4 * SIZE
    if traffic.shared_bytes >= 2 * bulk and traffic.sent_bytes + traffic.received_bytes < 10_000:
        return out.tobytes(), "shm"
    assert traffic.shared_bytes == 0
    assert min(traffic.sent_bytes, traffic.received_bytes) >= bulk
    return out.tobytes(), "grpc"


def part_of(client: WorkerClient, lease: ShardAssignment) -> np.ndarray:
    """A worker whose name ends with "+" has its gradient in a vector that it was given for that."""
    values = PAIRS[lease.microbatch_start // 2]
    if not client._config.worker_name.endswith("+"):
        return values
    vector = client.new_vector(SIZE)
    vector[:] = values
    return vector


def stats_of(lease: ShardAssignment) -> list[MicrobatchStats]:
    return [MicrobatchStats(microbatch=m, weight=1, loss_sum=1.0) for m in lease.microbatches]


@pytest.mark.parametrize(
    ("gradients", "of_coordinator", "ways"),
    [
        ({"ant": "auto", "bee": "auto"}, "auto", ["shm", "shm"]),
        ({"ant+": "auto", "bee+": "auto"}, "auto", ["shm", "shm"]),
        ({"ant+": "auto", "bee": "grpc"}, "auto", ["grpc", "shm"]),
        ({"ant+": "auto", "bee": "auto"}, "grpc", ["grpc", "grpc"]),
    ],
)
def test_means_have_the_same_bytes_whichever_way_gradients_go(tmp_path: Path, gradients, of_coordinator, ways):
    with coordinator(tmp_path, {**RUN, "gradients": of_coordinator}) as server:
        clients = [WorkerClient.connect(config(server, n, gradients=g), 0, "cpu") for n, g in gradients.items()]
        try:
            steps = on_threads(step, clients)
        finally:
            for client in clients:
                client.close()
    assert [mean == MEAN for mean, _ in steps] == [True, True]
    assert sorted(way for _, way in steps) == ways


class SharedWorker:
    """A worker that is played frame by frame, and lends what it likes."""

    def __init__(self, raw: RawWorker, shared: SharedRegions) -> None:
        self.raw, self.shared = raw, shared

    @property
    def pair(self) -> np.ndarray:
        return PAIRS[self.raw.leased.start // 2]

    async def lend(self, values: np.ndarray) -> Region:
        region = self.shared.ours.allocate(values.nbytes)
        region.bytes[:] = values.view(np.uint8)
        await self.shared.lend(region)
        return region

    async def begin(self) -> Any:
        call = self.raw.open_gradient()
        weights = dict.fromkeys(self.raw.leased, 1)
        begin = pb.GradientBegin(round=self.raw.begin(weights, SIZE))
        await call.write(pb.GradientRequest(begin=begin).SerializeToString())
        assert pb.GradientResponse.FromString(await self.raw._read(call)).HasField("accepted")
        return call

    async def mean(self, call: Any) -> str:
        """The hash of the mean, read out of the coordinator's memory."""
        mean = np.full(SIZE, np.nan, np.float32)
        while True:
            number, chunk = frames.decode_frame(await self.raw._read(call))
            if not isinstance(chunk, frames.ChunkView):
                assert number == 3
                return hashlib.sha256(mean.tobytes()).hexdigest()
            assert chunk.shared is not None
            place, start = chunk.shared, chunk.offset_bytes // 4
            region = await self.shared.borrow(place.region)
            data = region.bytes[place.offset_bytes : place.offset_bytes + place.length_bytes].view(np.float32)
            mean[start : start + data.size] = data
            assert region.generation == place.generation


def chunk(region: Region, length: int = 4 * SIZE, offset: int = 0, generation: int | None = None) -> bytes:
    place = SharedRange(region.id, offset, length, region.generation if generation is None else generation)
    return frames.encode_shared_chunk(frames.CHUNK_FIELD, offset, 0, place)


async def refusal(worker: SharedWorker, call: Any) -> Any:
    try:
        while True:
            await worker.raw._read(call)
    except grpc.aio.AioRpcError as error:
        return error_from(error) or error


@asynccontextmanager
async def shared_workers(server: CoordinatorProcess) -> AsyncIterator[list[SharedWorker]]:
    async with raw_worker(server.address, "ant") as ant, raw_worker(server.address, "bee") as bee:
        workers = []
        for raw in (ant, bee):
            answer = await raw.join(elastic=True)
            offer = shared_memory_of(answer.shared_memory)
            workers.append(SharedWorker(raw, await SharedRegions.connect(offer, answer.session, 10, Regions())))
            raw.open_assignments()
        for raw in (ant, bee):
            assert (await raw.next_frame()).HasField("assignment")
        try:
            yield workers
        finally:
            for worker in workers:
                await worker.shared.close()
                worker.shared.ours.close()


def played(tmp_path: Path, play: Any, **run: Any) -> str:
    """Plays two workers against a coordinator; returns its log."""

    async def main(server: CoordinatorProcess) -> None:
        async with asyncio.timeout(60), shared_workers(server) as workers:
            await play(*workers)

    with coordinator(tmp_path, {**RUN, **run}) as server:
        asyncio.run(main(server))
        return server.read_log()


RIGHT = hashlib.sha256(MEAN).hexdigest()


def test_a_region_that_is_written_to_before_it_is_added_makes_everybody_begin_again(tmp_path):
    async def play(ant: SharedWorker, bee: SharedWorker) -> None:
        first, region = await ant.begin(), await ant.lend(ant.pair)
        await first.write(chunk(region))
        second, other = await bee.begin(), await bee.lend(bee.pair)
        # Ant's contribution is here whole and waits for bee's; now ant uses the memory for something else.
        region.renew()
        region.bytes[: 4 * SIZE // 2] = 1
        await second.write(chunk(other))
        assert isinstance(await refusal(ant, first), RoundRestarted)
        assert isinstance(await refusal(bee, second), RoundRestarted)
        region.bytes[:] = ant.pair.view(np.uint8)
        first, second = await ant.begin(), await bee.begin()
        await first.write(chunk(region))
        await second.write(chunk(other))
        assert [await ant.mean(first), await bee.mean(second)] == [RIGHT, RIGHT]

    played(tmp_path, play)


def test_a_region_that_was_given_up_is_not_blamed_for_what_is_written_there_since(tmp_path):
    async def play(ant: SharedWorker, bee: SharedWorker) -> None:
        first, region = await ant.begin(), await ant.lend(ant.pair)
        region.renew()
        region.bytes.view(np.float32)[:] = np.nan
        await first.write(chunk(region, generation=region.generation - 1))
        assert isinstance(await refusal(ant, first), RoundRestarted)
        region.bytes[:] = ant.pair.view(np.uint8)
        first, second = await ant.begin(), await bee.begin()
        other = await bee.lend(bee.pair)
        await first.write(chunk(region))
        await second.write(chunk(other))
        assert [await ant.mean(first), await bee.mean(second)] == [RIGHT, RIGHT]

    played(tmp_path, play)


def test_what_a_worker_has_contributed_whole_stays_after_its_death(tmp_path):
    async def play(ant: SharedWorker, bee: SharedWorker) -> None:
        first, region = await ant.begin(), await ant.lend(ant.pair)
        await first.write(chunk(region))
        await first.done_writing()
        second, other = await bee.begin(), await bee.lend(bee.pair)
        await ant.shared.close()
        ant.shared.ours.close()
        ant.raw.stream.cancel()
        await bee.raw.next_frame()  # The extra lease: by then ant is gone.
        extra = bee.raw.assignment
        assert extra.extra
        assert extra.microbatch_stop - extra.microbatch_start == NUM // 2
        await second.write(chunk(other))
        assert await bee.mean(second) == RIGHT

    played(tmp_path, play, min_workers=1, start_workers=2)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda region: chunk(region, length=4 * SIZE + 4), "shared.length_bytes"),
        (lambda region: chunk(region, length=4 * SIZE - 2), "shared.offset_bytes"),
        (lambda region: frames.encode_shared_chunk(2, 0, 0, SharedRange(region.id + 1, 0, 4, 0)), "region"),
        (lambda region: frames.encode_shared_chunk(2, 0, 1, SharedRange(region.id, 0, 4 * SIZE, 0)), "part"),
        (lambda region: chunk(region, length=400), "length"),
    ],
)
def test_a_range_that_is_wrong_is_refused_by_name(tmp_path, make, field):
    async def play(ant: SharedWorker, bee: SharedWorker) -> None:
        call, region = await ant.begin(), await ant.lend(ant.pair)
        await call.write(make(region))
        error = await refusal(ant, call)
        assert isinstance(error, BadChunk)
        assert error.metadata["field"] == field

    played(tmp_path, play)


def test_a_contribution_goes_one_way_or_the_other(tmp_path):
    async def play(ant: SharedWorker, bee: SharedWorker) -> None:
        call, region = await ant.begin(), await ant.lend(ant.pair)
        await call.write(chunk(region, length=1 << 20))
        await call.write(frames.encode_chunk(2, 1 << 20, 0, ant.pair[1 << 18 : 1 << 19].tobytes()))
        error = await refusal(ant, call)
        assert isinstance(error, BadChunk)
        assert "shared memory" in error.message

    played(tmp_path, play)


def test_a_value_in_shared_memory_that_is_not_finite_is_found_and_named(tmp_path):
    async def play(ant: SharedWorker, bee: SharedWorker) -> None:
        values = ant.pair.copy()
        values[SIZE - 1] = np.inf
        call, region = await ant.begin(), await ant.lend(values)
        await call.write(chunk(region))
        await call.done_writing()
        error = await refusal(ant, call)
        assert isinstance(error, NonFinite)
        assert (error.metadata["worker"], error.metadata["element"]) == ("ant", str(SIZE - 1))

    played(tmp_path, play)


def test_nothing_is_left_of_workers_that_came_and_went(tmp_path):
    with coordinator(tmp_path, {**RUN, "num_steps": 100}) as server:
        for _ in range(4):
            clients = [WorkerClient.connect(config(server, name), 0, "cpu") for name in ("ant", "bee")]
            on_threads(step, clients)
            for client in clients:
                client.close()
            # Two descriptors of the mean's one region, which goes on to be used.
            wait_until(lambda: shared_files(server) == 2)


def shared_files(server: CoordinatorProcess) -> int:
    """Descriptors of shared memory that the coordinator has open."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    links = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(folder / name))
    return sum(link.startswith("/memfd:ayni-region") for link in links)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
