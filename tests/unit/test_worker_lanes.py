"""Lanes, as a worker uses them: a scripted stream, no socket."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
import numpy as np
import pytest
from grpc import aio

from ayni.errors import AyniError, StepVoided
from ayni.frames import CHUNK_FIELD, ChunkView, decode_frame, encode_chunk
from ayni.lane_status import FAILED, refusal_status
from ayni.tensors import TensorSpec
from ayni.v1 import coordinator_pb2 as pb
from worker_agent.exchange import Contribution, Traffic, exchange
from worker_agent.faults import TransportBroken
from worker_agent.lanes import Lanes

GRADIENT, COMMIT = pb.LANE_METHOD_GRADIENT, pb.LANE_METHOD_COMMIT_STEP


class Stream:
    """The coordinator's side."""

    def __init__(self) -> None:
        self.messages: list[pb.LanesRequest] = []
        self.arrived = asyncio.Event()
        self.cancelled = False
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0)
        self.messages.append(pb.LanesRequest.FromString(data))
        self.arrived.set()

    async def read(self) -> Any:
        item = await self._answers.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> bool:
        self.cancelled = True
        return True

    def answer(self, *frames: pb.LaneResponse) -> None:
        self._answers.put_nowait(pb.LanesResponse(frames=frames).SerializeToString())

    def fail(self, error: object) -> None:
        self._answers.put_nowait(error)


def run(story: Callable[[Lanes, Stream], Awaitable[None]]) -> Stream:
    async def bounded() -> Stream:
        async with asyncio.timeout(10):
            stream = Stream()
            lanes = Lanes(cast(Any, stream), "host:1", 4096)
            try:
                await story(lanes, stream)
            finally:
                await lanes.close()
            return stream

    return asyncio.run(bounded())


def end(lane: int, *messages: bytes) -> pb.LaneResponse:
    return pb.LaneResponse(lane=lane, messages=messages, status=pb.LaneStatus())


def test_what_is_written_at_the_same_time_leaves_in_one_message():
    async def story(lanes: Lanes, stream: Stream) -> None:
        first, second = lanes.open(GRADIENT), lanes.open(COMMIT)
        await first.write(b"begin")
        await first.write(b"chunk")
        await second.write(b"commit")
        await second.done_writing()
        await lanes.left()
        (message,) = stream.messages
        said = [(f.lane, f.method, list(f.messages), f.half_close) for f in message.frames]
        merged: dict[int, list[bytes]] = {}
        for lane, _, messages, _ in said:
            merged.setdefault(lane, []).extend(messages)
        assert merged == {1: [b"begin", b"chunk"], 2: [b"commit"]}
        assert {(lane, method) for lane, method, *_ in said if method} == {(1, GRADIENT), (2, COMMIT)}
        assert said[-1][3]

    run(story)


def test_a_lane_reads_its_own_answers_to_their_end():
    async def story(lanes: Lanes, stream: Stream) -> None:
        first, second = lanes.open(GRADIENT), lanes.open(GRADIENT)
        stream.answer(pb.LaneResponse(lane=2, messages=[b"x"]), end(1, b"y", b"z"))
        stream.answer(end(2))
        assert [await first.read(), await first.read(), await first.read()] == [b"y", b"z", aio.EOF]
        assert [await second.read(), await second.read()] == [b"x", aio.EOF]
        assert first.done()
        assert second.done()

    run(story)


def test_a_refusal_is_raised_after_what_came_before_it():
    async def story(lanes: Lanes, stream: Stream) -> None:
        lane = lanes.open(GRADIENT)
        status = refusal_status(StepVoided("given up", step=3, attempt=1, detail="why"))
        stream.answer(pb.LaneResponse(lane=1, messages=[b"accepted"], status=status))
        assert await lane.read() == b"accepted"
        with pytest.raises(StepVoided, match="given up") as caught:
            await lane.read()
        assert caught.value.metadata == {"step": "3", "attempt": "1", "detail": "why"}

    run(story)


def test_an_unknown_reason_is_a_refusal_all_the_same():
    async def story(lanes: Lanes, stream: Stream) -> None:
        lane = lanes.open(GRADIENT)
        status = pb.LaneStatus(code=9, message="no", reason="OF_A_LATER_VERSION")
        stream.answer(pb.LaneResponse(lane=1, status=status))
        with pytest.raises(AyniError) as caught:
            await lane.read()
        assert caught.value.metadata["reason"] == "OF_A_LATER_VERSION"

    run(story)


def test_a_lane_that_failed_is_broken_and_no_verdict():
    async def story(lanes: Lanes, stream: Stream) -> None:
        lane = lanes.open(COMMIT)
        stream.answer(pb.LaneResponse(lane=1, status=FAILED))
        with pytest.raises(TransportBroken, match="UNKNOWN"):
            await lane.read()
        assert lanes.is_open

    run(story)


@pytest.mark.parametrize(
    "what",
    [aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), details="gone"), aio.EOF, b"\xff"],
    ids=["broke", "ended", "nonsense"],
)
def test_all_lanes_end_with_the_stream_and_none_is_opened_after_it(what):
    async def story(lanes: Lanes, stream: Stream) -> None:
        waiting = [lanes.open(GRADIENT), lanes.open(COMMIT)]
        reads = [asyncio.create_task(lane.read()) for lane in waiting]
        stream.fail(what)
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(outcome, TransportBroken)
        assert not lanes.is_open
        late = lanes.open(GRADIENT)
        with pytest.raises(TransportBroken):
            await late.read()
        await late.write(b"to nobody")
        await lanes.left()

    run(story)


def test_a_lane_that_is_given_up_says_so_once():
    async def story(lanes: Lanes, stream: Stream) -> None:
        lane = lanes.open(GRADIENT)
        assert lane.cancel()
        assert not lane.cancel()
        await lanes.left()
        stream.answer(pb.LaneResponse(lane=1, messages=[b"too late"]))
        with pytest.raises(TransportBroken, match="given up"):
            await lane.read()

    stream = run(story)
    assert sum(frame.cancel for message in stream.messages for frame in message.frames) == 1
    assert stream.cancelled


def test_a_contribution_leaves_whole_before_it_is_accepted():
    async def story(lanes: Lanes, stream: Stream) -> None:
        values = np.arange(5, dtype=np.float32)
        out = np.empty(5, np.float32)
        spec = TensorSpec(dtype="float32", num_elements=5)
        offer = Contribution(name="flat of step 3", begin=b"\x0a\x00", spec=spec, parts=[values, None], out=out)
        exchanging = asyncio.create_task(exchange(lambda part_bytes: lanes.open(GRADIENT), offer, Traffic()))
        await stream.arrived.wait()
        (message,) = stream.messages
        begin, chunk = [said for frame in message.frames for said in frame.messages]
        assert begin == b"\x0a\x00"
        content = decode_frame(chunk)[1]
        assert isinstance(content, ChunkView)
        assert (content.part, bytes(content.data)) == (0, values.tobytes())
        assert message.frames[-1].half_close
        accepted = pb.GradientResponse(accepted=pb.RoundAccepted(chunk_bytes=4096)).SerializeToString()
        complete = pb.GradientResponse(complete=pb.RoundComplete(total_weight=2)).SerializeToString()
        stream.answer(end(1, accepted, encode_chunk(CHUNK_FIELD, 0, 0, (values * 2).tobytes()), complete))
        outcome = await exchanging
        assert outcome.total_weight == 2
        assert outcome.times.accepted > 0
        np.testing.assert_array_equal(out, values * 2)

    run(story)
