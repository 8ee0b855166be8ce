"""Lanes of a real coordinator: steps through them, and what ends them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from ayni.errors import BadChunk, Deadline, Duplicate, LeaseRevoked, NotLeased, StaleStep, StepVoided, UnknownWorker
from ayni.frames import CHUNK_FIELD, ChunkView, decode_frame, encode_chunk
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import RUN, RawWorker, coordinator, raw_worker, refusal
from worker_agent.lanes import Lane, Lanes

GRADIENT, COMMIT, ASSIGNMENT = (
    pb.LANE_METHOD_GRADIENT,
    pb.LANE_METHOD_COMMIT_STEP,
    pb.LANE_METHOD_SHARD_ASSIGNMENT,
)
SIZE = 1000


class LaneWorker:
    """A raw worker whose whole part in the run goes over lanes."""

    def __init__(self, raw: RawWorker, lanes: Lanes) -> None:
        self.raw, self.lanes = raw, lanes
        self.assignments: Lane = lanes.open(ASSIGNMENT)

    async def ready(self) -> None:
        await self.assignments.write(pb.ShardAssignmentRequest(worker_id=self.raw.worker_id).SerializeToString())

    async def lease(self) -> pb.ShardAssignmentResponse:
        """The next frame that is no reason to wait."""
        while True:
            async with asyncio.timeout(20):
                data = await self.assignments.read()
            assert isinstance(data, bytes), "the lane of assignments ended"
            frame = pb.ShardAssignmentResponse.FromString(data)
            if frame.HasField("assignment"):
                self.raw.assignment = frame.assignment
            if not frame.HasField("waiting"):
                return frame

    async def begin(self, size: int = SIZE, **changes: Any) -> Lane:
        lane = self.lanes.open(GRADIENT)
        round_ = self.raw.begin({m: 2 for m in self.raw.leased}, size, **changes)
        await lane.write(pb.GradientRequest(begin=pb.GradientBegin(round=round_)).SerializeToString())
        return lane

    async def contribute(self) -> Lane:
        """Sends ones for each of its micro-batches, without waiting for leave."""
        lane = await self.begin()
        values = np.full(SIZE, len(self.raw.leased), np.float32)
        await lane.write(encode_chunk(CHUNK_FIELD, 0, 0, values.tobytes()))
        await lane.done_writing()
        return lane

    async def commit(self) -> pb.CommitStepResponse:
        lane = self.lanes.open(COMMIT)
        await lane.write(self.raw.commit_request({m: 2 for m in self.raw.leased}).SerializeToString())
        async with asyncio.timeout(20):
            answer = await lane.read()
        assert isinstance(answer, bytes)
        return pb.CommitStepResponse.FromString(answer)


async def mean_of(lane: Lane) -> np.ndarray:
    mean = np.empty(SIZE, np.float32)
    kinds = []
    async with asyncio.timeout(20):
        while isinstance(data := await lane.read(), bytes):
            number, content = decode_frame(data)
            kinds.append(number)
            if isinstance(content, ChunkView):
                start = content.offset_bytes // 4
                mean[start : start + len(content.data) // 4] = np.frombuffer(content.data, np.float32)
    assert kinds == [1, 2, 3], "accepted, one chunk, complete"
    return mean


@contextlib.asynccontextmanager
async def lane_worker(address: str, name: str, **fields: Any) -> AsyncIterator[LaneWorker]:
    async with raw_worker(address, name) as raw:
        answer = await raw.join(**fields)
        assert answer.chunk_bytes == 1 << 20
        lanes = Lanes(raw.open_gradient("Lanes"), address, answer.chunk_bytes)
        try:
            yield LaneWorker(raw, lanes)
        finally:
            await lanes.close()


@pytest.fixture
def address(tmp_path):
    # Micro-batches are powers of two for each of the two, so that each lease is one part.
    run = {**RUN, "batch": {"samples": 8, "microbatches": 4}}
    with coordinator(tmp_path, run) as served:
        yield served.address


def run(story: Any) -> None:
    asyncio.run(story)


def test_two_steps_go_over_lanes_beside_calls_and_have_the_same_mean(address):
    async def story() -> None:
        async with lane_worker(address, "ant") as ant, raw_worker(address, "bee") as bee:
            await ant.ready()
            await bee.join()
            bee.open_assignments()
            for step in range(2):
                await ant.lease()
                await bee.next_frame()
                assert ant.raw.assignment.step == bee.assignment.step == step
                lane = await ant.contribute()
                part = np.full(SIZE, len(bee.leased), np.float32)
                mean, _ = await bee.reduce([part], {m: 2 for m in bee.leased})
                np.testing.assert_array_equal(mean, np.full(SIZE, 0.5, np.float32))
                assert (await mean_of(lane)).tobytes() == mean.tobytes()
                told = await asyncio.gather(ant.commit(), bee.commit({m: 2 for m in bee.leased}))
                assert told[0].total_weight == told[1].total_weight == 8
            frame = await ant.lease()
            assert frame.shutdown.finished

    run(story())


def test_a_lane_is_refused_with_the_reason_of_the_call(address):
    async def story() -> None:
        async with lane_worker(address, "ant") as ant, lane_worker(address, "bee") as bee:
            await ant.ready()
            await bee.ready()
            await ant.lease()
            await bee.lease()
            stolen = await ant.begin(lease_id=bee.raw.assignment.lease_id)
            with pytest.raises(NotLeased):
                await stolen.read()
            assert ant.lanes.is_open
            lane = await ant.contribute()
            await bee.contribute()
            await mean_of(lane)

    run(story())


def test_a_lane_that_says_nothing_is_ended_and_the_step_goes_on(tmp_path):
    async def story(address: str) -> None:
        async with lane_worker(address, "ant") as ant:
            await ant.ready()
            await ant.lease()
            silent = [ant.lanes.open(method) for method in (COMMIT, ASSIGNMENT, GRADIENT)]
            ends = asyncio.gather(*(lane.read() for lane in silent), return_exceptions=True)
            async with asyncio.timeout(20):
                while not ends.done():
                    await ant.raw.stub.Heartbeat(pb.HeartbeatRequest(worker_id=ant.raw.worker_id))
                    await asyncio.wait([ends], timeout=0.2)
            assert all(isinstance(end, Deadline) for end in await ends)
            await mean_of(await ant.contribute())
            await ant.commit()

    times = {**RUN["timeouts"], "heartbeat_interval": "100ms", "lease": "1s", "accept": "1100ms"}
    quick = {**RUN, "min_workers": 1, "timeouts": times}
    with coordinator(tmp_path, quick) as served:
        run(story(served.address))


def test_a_gradient_of_several_chunks_needs_a_stream_of_its_own(tmp_path):
    async def story(address: str) -> None:
        async with lane_worker(address, "ant") as ant, lane_worker(address, "bee") as bee:
            await ant.ready()
            await bee.ready()
            await ant.lease()
            await bee.lease()
            lane = await ant.begin(300_000)
            await lane.write(encode_chunk(CHUNK_FIELD, 0, 0, bytes(1 << 20)))
            with pytest.raises(BadChunk, match="stream of its own"):
                await lane.read()

    with coordinator(tmp_path, {**RUN, "batch": {"samples": 8, "microbatches": 4}}) as served:
        run(story(served.address))


def test_a_worker_that_waits_for_leave_gets_it(address):
    async def story() -> None:
        async with lane_worker(address, "ant") as ant, lane_worker(address, "bee") as bee:
            await ant.ready()
            await bee.ready()
            await ant.lease()
            await bee.lease()
            lane = await ant.begin()
            async with asyncio.timeout(20):
                frame = await lane.read()
            assert isinstance(frame, bytes)
            assert pb.GradientResponse.FromString(frame).accepted.chunk_bytes == 1 << 20

    run(story())


def test_the_membership_ends_with_its_lanes(address):
    async def story() -> None:
        async with lane_worker(address, "bee", elastic=True) as bee:
            async with lane_worker(address, "ant", elastic=True) as ant:
                await ant.ready()
                await bee.ready()
                await ant.lease()
                await bee.lease()
                await ant.contribute()
            # A contribution that is whole stays: what ends is the other's own lease.
            frame = await bee.lease()
            assert frame.WhichOneof("frame") == "assignment"
            assert frame.assignment.extra

    run(story())


def test_strangers_and_seconds_are_refused(address):
    async def story() -> None:
        async with raw_worker(address, "ant") as stranger:
            stranger.channel.headers["ayni-session"] = "made-up"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stranger.open_gradient("Lanes").read()
            assert isinstance(refusal(caught), UnknownWorker)
        async with lane_worker(address, "bee") as bee:
            await bee.ready()
            await bee.lanes.left()
            await bee.assignments.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await bee.raw.open_gradient("Lanes").read()
            assert isinstance(refusal(caught), Duplicate)

    run(story())


def test_a_lane_that_waits_for_others_ends_when_its_step_does(address):
    async def story() -> None:
        async with lane_worker(address, "ant") as ant, lane_worker(address, "bee") as bee:
            await ant.ready()
            await bee.ready()
            await ant.lease()
            await bee.lease()
            lane = await ant.contribute()
            await bee.raw.leave("it has other plans")
            async with asyncio.timeout(20):
                # StaleStep where the other worker's leaving, on a connection of its own, was quicker.
                with pytest.raises((StepVoided, LeaseRevoked, StaleStep)):
                    await lane.read()

    run(story())
