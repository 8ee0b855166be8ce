"""Lanes, as the coordinator serves them: a scripted stream, no socket."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc import aio

from ayni.errors import BadRequest, Deadline, NotLeased, TooLarge
from ayni.lane_status import refusal_of
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service import lanes
from coordinator_service.lanes import Lane, Lanes

COMMIT = pb.LANE_METHOD_COMMIT_STEP
GRADIENT = pb.LANE_METHOD_GRADIENT


class Stream:
    """The worker's side: what it sends is put in, what it gets is kept."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.messages: list[pb.LanesResponse] = []
        self.arrived = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self) -> Any:
        return await self.incoming.get()

    async def write(self, data: bytes) -> None:
        await self.gate.wait()
        self.messages.append(pb.LanesResponse.FromString(data))
        self.arrived.set()

    def send(self, *frames: pb.LaneRequest) -> None:
        self.incoming.put_nowait(pb.LanesRequest(frames=frames).SerializeToString())

    def end(self) -> None:
        self.incoming.put_nowait(aio.EOF)

    @property
    def frames(self) -> list[pb.LaneResponse]:
        return [frame for message in self.messages for frame in message.frames]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self.arrived.clear()
                await self.arrived.wait()


def opened(lane: int, method: Any = COMMIT, *messages: bytes, done: bool = True) -> pb.LaneRequest:
    return pb.LaneRequest(lane=lane, method=method, messages=messages, half_close=done)


async def echo(lane: Lane) -> None:
    """Answers each message with itself, to the end."""
    while (message := await lane.read()) is not None:
        await lane.write(message)


def serving(stream: Stream, serve: Callable[[Lane], Awaitable[None]] = echo) -> "asyncio.Task[None]":
    return asyncio.create_task(Lanes(cast(Any, stream), {COMMIT: serve, GRADIENT: serve}).serve())


def run(story: Callable[[Stream], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await story(Stream())

    asyncio.run(bounded())


def test_each_lane_is_answered_and_ends_with_a_status():
    async def story(stream: Stream) -> None:
        serve = serving(stream)
        stream.send(opened(1, COMMIT, b"a", b"b"), opened(2, GRADIENT, b"c"))
        stream.end()
        await serve
        told = {frame.lane: (list(frame.messages), frame.status.code) for frame in stream.frames}
        assert told == {1: ([b"a", b"b"], 0), 2: ([b"c"], 0)}
        assert all(frame.HasField("status") for frame in stream.frames)

    run(story)


def test_a_lane_on_which_nothing_comes_ends_by_name_and_alone():
    async def patient(lane: Lane) -> None:
        await lane.write(await lane.first(timedelta(seconds=0.05)))

    async def story(stream: Stream) -> None:
        serve = serving(stream, patient)
        stream.send(opened(1, COMMIT, done=False), opened(2, COMMIT, b"a", done=False), opened(3, GRADIENT))
        await stream.until(lambda: {f.lane for f in stream.frames if f.HasField("status")} == {1, 2, 3})
        ends = {frame.lane: frame.status for frame in stream.frames if frame.HasField("status")}
        refused = refusal_of(ends[1])
        assert isinstance(refused, Deadline)
        assert "lane 1 was opened, and nothing came on it within 0.05 s" in str(refused)
        assert refused.metadata["waiting_for"] == "the first message of a lane"
        assert [bytes(m) for frame in stream.frames for m in frame.messages if frame.lane == 2] == [b"a"]
        assert ends[2].code == ends[3].code == 0
        stream.send(opened(4, COMMIT, b"b"), pb.LaneRequest(lane=1, messages=[b"late"]))
        stream.end()
        await serve
        assert stream.frames[-1].lane == 4

    run(story)


def test_no_timer_is_set_where_the_first_message_came_along(monkeypatch):
    async def patient(lane: Lane) -> None:
        await lane.write(await lane.first(timedelta(seconds=5)))

    async def story(stream: Stream) -> None:
        def refuse(_: float) -> Any:
            raise AssertionError("a timer was set")

        monkeypatch.setattr(lanes, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": refuse}))
        serve = serving(stream, patient)
        stream.send(opened(1, COMMIT, b"a"), opened(2, GRADIENT), opened(3, COMMIT, b"c", done=False))
        stream.end()
        await serve
        assert {frame.lane: frame.status.code for frame in stream.frames} == {1: 0, 2: 0, 3: 0}

    run(story)


def test_what_lanes_say_at_the_same_time_leaves_in_one_message():
    async def story(stream: Stream) -> None:
        serve = serving(stream)
        stream.send(*(opened(lane, COMMIT, b"x") for lane in range(1, 9)))
        stream.end()
        await serve
        assert len(stream.messages) == 1
        assert [frame.lane for frame in stream.frames] == list(range(1, 9))

    run(story)


def test_a_refusal_ends_its_lane_only():
    async def refuse(lane: Lane) -> None:
        if await lane.read() == b"bad":
            raise NotLeased("that is not yours", lease="3", contributed=4)

    async def story(stream: Stream) -> None:
        serve = serving(stream, refuse)
        stream.send(opened(1, COMMIT, b"bad"), opened(2, COMMIT, b"good"))
        stream.end()
        await serve
        told = {frame.lane: refusal_of(frame.status) for frame in stream.frames}
        error = told[1]
        assert isinstance(error, NotLeased)
        assert (error.message, error.metadata) == ("that is not yours", {"lease": "3", "contributed": "4"})
        assert told[2] is None

    run(story)


def test_a_bug_ends_its_lane_without_a_verdict(caplog):
    async def fail(lane: Lane) -> None:
        raise KeyError("a bug")

    async def story(stream: Stream) -> None:
        serve = serving(stream, fail)
        stream.send(opened(1))
        stream.end()
        await serve
        (frame,) = stream.frames
        assert frame.status.code
        assert refusal_of(frame.status) is None
        assert "a bug" not in frame.status.message

    run(story)
    assert "lane 1 failed" in caplog.text


def test_a_lane_that_is_given_up_is_cancelled_and_says_nothing_more():
    begun, cancelled = asyncio.Event(), []

    async def wait(lane: Lane) -> None:
        begun.set()
        try:
            await lane.read()
        except asyncio.CancelledError:
            cancelled.append(lane.number)
            raise

    async def story(stream: Stream) -> None:
        serve = serving(stream, wait)
        stream.send(opened(1, done=False))
        await begun.wait()
        stream.send(pb.LaneRequest(lane=1, cancel=True), opened(2))
        stream.send(pb.LaneRequest(lane=1, messages=[b"too late"]))
        stream.end()
        await serve
        assert [frame.lane for frame in stream.frames] == [2]

    run(story)
    assert cancelled == [1]


def test_a_lane_that_is_given_up_before_it_has_begun_leaves_nothing():
    async def story(stream: Stream) -> None:
        served = Lanes(cast(Any, stream), {COMMIT: echo})
        serve = asyncio.create_task(served.serve())
        stream.send(opened(1, COMMIT, b"x"), pb.LaneRequest(lane=1, cancel=True))
        stream.end()
        await serve
        assert stream.frames == []
        assert served.waiting_bytes == 0

    run(story)


def test_lanes_of_a_stream_that_breaks_are_cancelled():
    ended = []
    begun: asyncio.Queue[int] = asyncio.Queue()

    async def wait(lane: Lane) -> None:
        begun.put_nowait(lane.number)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(lane.number)

    async def story(stream: Stream) -> None:
        serve = serving(stream, wait)
        stream.send(opened(1), opened(2))
        await begun.get()
        await begun.get()
        serve.cancel()
        await asyncio.wait({serve})

    run(story)
    assert sorted(ended) == [1, 2]


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([opened(2)], "lane"),
        ([opened(1), opened(1)], "lane"),
        ([pb.LaneRequest(lane=1, messages=[b"x"])], "lane"),
        ([opened(1, 77)], "method"),
    ],
    ids=["not-the-next", "twice", "never-opened", "no-such-method"],
)
def test_frames_that_make_no_sense_end_the_stream(frames, field):
    async def story(stream: Stream) -> None:
        serve = serving(stream)
        stream.send(*frames)
        with pytest.raises(BadRequest) as caught:
            await serve
        assert caught.value.metadata["field"] == field

    run(story)


def test_bytes_that_are_no_message_end_the_stream():
    async def story(stream: Stream) -> None:
        serve = serving(stream)
        stream.incoming.put_nowait(b"\xff\xff")
        with pytest.raises(BadRequest, match="can't be read"):
            await serve

    run(story)


def test_what_waits_to_be_read_is_bounded(monkeypatch):
    monkeypatch.setattr(lanes, "MOST_WAITING_BYTES", 1000)

    async def ignore(lane: Lane) -> None:
        await asyncio.Event().wait()

    async def story(stream: Stream) -> None:
        serve = serving(stream, ignore)
        stream.send(opened(1, COMMIT, bytes(600)), opened(2, COMMIT, bytes(401)))
        with pytest.raises(TooLarge) as caught:
            await serve
        assert caught.value.metadata["received"] == "1001"

    run(story)


def test_empty_messages_are_bounded_too():
    async def ignore(lane: Lane) -> None:
        await asyncio.Event().wait()

    async def story(stream: Stream) -> None:
        serve = serving(stream, ignore)
        stream.send(opened(1, COMMIT, *[b""] * 4097))
        with pytest.raises(TooLarge, match="more than 4096 messages"):
            await serve

    run(story)


def test_lanes_at_a_time_are_bounded(monkeypatch):
    monkeypatch.setattr(lanes, "MOST_LANES", 2)

    async def ignore(lane: Lane) -> None:
        await asyncio.Event().wait()

    async def story(stream: Stream) -> None:
        serve = serving(stream, ignore)
        stream.send(opened(1), opened(2), opened(3))
        with pytest.raises(TooLarge, match="more than 2 lanes"):
            await serve

    run(story)


def test_a_lane_waits_while_its_worker_takes_nothing(monkeypatch):
    monkeypatch.setattr(lanes, "MOST_WAITING_BYTES", 1000)
    written = []

    async def flood(lane: Lane) -> None:
        for number in range(10):
            await lane.write(bytes(300))
            written.append(number)

    async def story(stream: Stream) -> None:
        stream.gate.clear()
        serve = serving(stream, flood)
        stream.send(opened(1))
        stream.end()
        for _ in range(50):
            await asyncio.sleep(0)
        assert 3 <= len(written) < 10
        stream.gate.set()
        await serve
        assert sum(len(message) for frame in stream.frames for message in frame.messages) == 3000

    run(story)
