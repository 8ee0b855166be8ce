"""Assignments, gradient streams and commits of one worker over one stream.  [shell]

Each lane is served by a task of its own, as if it were a call; what lanes have to say while a message is on its way
leaves together in the next one. What a worker can make wait here is bounded: lanes at a time, and bytes that came and
were not read, over all lanes. A lane that its worker gives up, and every lane of a stream that breaks, is cancelled.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta

import grpc
from google.protobuf.message import DecodeError

from ayni.errors import AyniError, BadRequest, Deadline, TooLarge
from ayni.lane_frames import Waiting
from ayni.lane_status import FAILED, SUCCESS, refusal_status
from ayni.rpc import Context, as_refusal
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.signals import Signal

_log = logging.getLogger(__name__)

MOST_LANES = 1024
"""Open at a time on one stream."""
MOST_WAITING_BYTES = 8 << 20
"""Of messages that came and were not read yet, and likewise of those that are to leave; over all lanes of a stream."""
MOST_WAITING_MESSAGES = 4096
"""The same for one lane, in messages, which may be empty."""

Serve = Callable[["Lane"], Awaitable[None]]
"""Serves one lane to its end; a refusal is raised."""


class Lane:
    """One call."""

    def __init__(self, lanes: "Lanes", number: int) -> None:
        """Opens the lane."""
        self._lanes, self.number = lanes, number
        self._messages: deque[bytes] = deque()
        self.changed = Signal()
        """Notified when there is something to read, or nothing any more."""
        self.half_closed = False
        """Whether no more messages come."""

    @property
    def context(self) -> Context:
        """The call that carries all lanes."""
        return self._lanes.context

    def take(self) -> bytes | None:
        """Returns the next message, if it is there."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._lanes.waiting_bytes -= len(message)
        return message

    async def read(self) -> bytes | None:
        """Waits for the next message; None after the last one."""
        while (message := self.take()) is None and not self.half_closed:
            await self.changed.wait()
        return message

    async def first(self, within: timedelta) -> bytes:
        """Returns what the lane begins with, empty where it ends with nothing; there is no timer where it came along.

        Raises:
            Deadline: it did not come in time.
        """
        if (message := self.take()) is not None or self.half_closed:
            return message or b""
        seconds = within.total_seconds()
        try:
            async with asyncio.timeout(seconds):
                return await self.read() or b""
        except TimeoutError:
            sentence = f"lane {self.number} was opened, and nothing came on it within {seconds:g} s (timeouts.accept)"
            raise Deadline(sentence, waiting_for="the first message of a lane", timeout=seconds) from None

    async def write(self, message: bytes) -> None:
        """Sends a message; waits while too much of this stream is to leave."""
        await self._lanes.room()
        self._lanes.send(pb.LaneResponse(lane=self.number, messages=[message]))

    def put(self, frame: pb.LaneRequest) -> None:
        """Takes what came for it."""
        self._messages.extend(frame.messages)
        self._lanes.waiting_bytes += sum(map(len, frame.messages))
        self.half_closed = self.half_closed or frame.half_close
        self.changed.notify()

    @property
    def num_waiting(self) -> int:
        """Messages that came and were not read yet."""
        return len(self._messages)

    def drop(self) -> None:
        """Forgets what nobody reads any more."""
        while self.take() is not None:
            pass


class Lanes:
    """All lanes of one stream."""

    def __init__(self, context: Context, methods: "Mapping[pb.LaneMethod.ValueType, Serve]") -> None:
        """Serves the lanes of a call, whose messages are bytes, with what serves each method."""
        self.context = context
        self.waiting_bytes = 0
        self._methods = methods
        self._open: dict[int, tuple[Lane, asyncio.Task[None]]] = {}
        self._last = 0
        self._pending: Waiting[pb.LaneResponse] = Waiting()
        self._mail, self._left = Signal(), Signal()

    async def serve(self) -> None:
        """Serves all lanes until the worker ends the stream.

        Raises:
            BadRequest, TooLarge: the stream itself is wrong; all lanes end with it.
        """
        writing = asyncio.create_task(self._write())
        try:
            while (data := await self.context.read()) is not grpc.aio.EOF:
                for frame in _frames(data):
                    self._take(frame)
            if tasks := [task for _, task in self._open.values()]:
                await asyncio.wait(tasks)
            while self._pending and not writing.done():
                await self._left.wait()
        finally:
            tasks = [writing, *(task for _, task in self._open.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def send(self, frame: pb.LaneResponse) -> None:
        """Has a frame leave, together with others that do at this time."""
        self._pending.put(frame)
        self._mail.notify()

    async def room(self) -> None:
        """Waits until little enough is to leave."""
        while self._pending.num_bytes >= MOST_WAITING_BYTES:
            await self._left.wait()

    def _take(self, frame: pb.LaneRequest) -> None:
        if frame.method:
            self._begin(frame)
        lane, task = self._open.get(frame.lane, (None, None))
        if lane is None or task is None:
            if frame.lane > self._last:
                raise BadRequest(f"a frame came for lane {frame.lane}, which was not opened", field="lane")
            return  # It ended here while the frame was on its way.
        if frame.cancel:
            task.cancel()
            return
        lane.put(frame)
        if lane.num_waiting > MOST_WAITING_MESSAGES:
            sentence = f"more than {MOST_WAITING_MESSAGES} messages wait on lane {lane.number}; wait for its answers"
            raise TooLarge(sentence, field="messages", limit=MOST_WAITING_MESSAGES, received=lane.num_waiting)
        if self.waiting_bytes > MOST_WAITING_BYTES:
            raise TooLarge(
                f"more than {MOST_WAITING_BYTES} bytes came on lanes and can't be used yet; send large gradients "
                "on streams of their own",
                field="lanes",
                limit=MOST_WAITING_BYTES,
                received=self.waiting_bytes,
            )

    def _begin(self, frame: pb.LaneRequest) -> None:
        serve = self._methods.get(frame.method)
        if serve is None:
            raise BadRequest(f"a lane can't stand for method {frame.method}", field="method")
        if frame.lane != self._last + 1:
            raise BadRequest(f"lane {frame.lane} was opened; the next one is {self._last + 1}", field="lane")
        if len(self._open) >= MOST_LANES:
            raise TooLarge(
                f"more than {MOST_LANES} lanes are open", field="lanes", limit=MOST_LANES, received=MOST_LANES + 1
            )
        self._last += 1
        lane = Lane(self, frame.lane)
        task = asyncio.create_task(self._serve(lane, serve))
        self._open[lane.number] = lane, task
        task.add_done_callback(lambda _: self._forget(lane))

    async def _serve(self, lane: Lane, serve: Serve) -> None:
        self.send(pb.LaneResponse(lane=lane.number, status=await _outcome(serve, lane)))

    def _forget(self, lane: Lane) -> None:
        """Drops a lane that is over, even one that was given up before it had begun."""
        del self._open[lane.number]
        lane.drop()

    async def _write(self) -> None:
        """Sends what is to leave, until the worker is gone."""
        while True:
            while not self._pending:
                await self._mail.wait()
            await asyncio.sleep(0)  # Others that the same event has woken join in.
            frames = self._pending.take()
            try:
                await self.context.write(pb.LanesResponse(frames=frames).SerializeToString())
            except grpc.aio.InternalError as error:
                _log.debug("a worker that lanes go to is gone: %s", error)
                return
            finally:
                self._left.notify()


def _frames(data: bytes) -> "list[pb.LaneRequest]":
    try:
        return list(pb.LanesRequest.FromString(data).frames)
    except DecodeError:
        raise BadRequest("a message with frames of lanes can't be read", field="frames") from None


async def _outcome(serve: Serve, lane: Lane) -> pb.LaneStatus:
    """Serves a lane and returns how it ended."""
    try:
        await serve(lane)
    except (AyniError, DecodeError) as error:
        refusal = as_refusal(error)
        _log.info("refused lane %d with %s: %s", lane.number, refusal.reason, refusal)
        return refusal_status(refusal)
    except Exception:
        _log.exception("lane %d failed", lane.number)
        return FAILED
    return SUCCESS
