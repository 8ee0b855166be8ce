"""Assignments, gradient streams and commits over one stream to the coordinator.  [shell]

A lane looks like a call of its own to whoever uses it. What lanes have to say while a message is on its way leaves
together in the next one. When the stream breaks, all lanes end as broken calls do, and calls of their own are made from
then on. Belongs to the event loop.
"""

import asyncio
from collections import deque

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from ayni.lane_frames import Waiting
from ayni.lane_status import code_name, refusal_of
from ayni.v1 import coordinator_pb2 as pb
from worker_agent.changes import Change
from worker_agent.faults import TransportBroken

Stream = aio.StreamStreamCall[bytes, bytes]
"""A call whose frames are encoded messages on both sides."""

_MOST_LANES = 1000
"""At a time, less than a coordinator takes; for more, calls of their own are made."""


class Lane:
    """One call; the part of `aio.StreamStreamCall` that is used of it."""

    def __init__(self, lanes: "Lanes", number: int) -> None:
        """Use `Lanes.open`."""
        self._lanes, self._number = lanes, number
        self._messages: deque[bytes] = deque()
        self._end: Exception | None = None
        self._is_over = False
        self._change = Change()

    @property
    def accepted(self) -> pb.RoundAccepted:
        """What the coordinator says to every contribution, known before it is asked."""
        return pb.RoundAccepted(chunk_bytes=self._lanes.chunk_bytes)

    async def read(self) -> object:
        """Returns the next message; `aio.EOF` after the last one.

        Raises:
            AyniError: the coordinator refused.
            TransportBroken: the stream with all lanes broke, or the lane did.
        """
        while not self._messages:
            if self._end:
                raise self._end
            if self._is_over:
                return aio.EOF
            await self._change.wait()
        return self._messages.popleft()

    async def write(self, message: bytes) -> None:
        """Has a message leave, soon; nothing happens where the lane is over, as its reader learns."""
        if not self._is_over:
            self._lanes.send(pb.LaneRequest(lane=self._number, messages=[message]))

    async def done_writing(self) -> None:
        """Says that no more messages come."""
        if not self._is_over:
            self._lanes.send(pb.LaneRequest(lane=self._number, half_close=True))

    async def left(self) -> None:
        """Waits until everything that was written has left this process's hands."""
        await self._lanes.left()

    def done(self) -> bool:
        """Returns whether the lane is over."""
        return self._is_over

    def cancel(self) -> bool:
        """Gives the call up; nothing happens where it is over."""
        if self._is_over:
            return False
        self._lanes.send(pb.LaneRequest(lane=self._number, cancel=True))
        self.finish(TransportBroken("the call was given up", "CANCELLED"))
        return True

    def take(self, frame: pb.LaneResponse) -> None:
        """Takes what came for it."""
        self._messages.extend(frame.messages)
        if frame.HasField("status"):
            self.finish(_end_of(frame.status, self._lanes.address))
        self._change.announce()

    def finish(self, error: Exception | None) -> None:
        """Notes the end; None: all is well."""
        if not self._is_over:
            self._end, self._is_over = error, True
            self._lanes.forget(self._number)
            self._change.announce()


class Lanes:
    """All lanes of one membership."""

    def __init__(self, call: Stream, address: str, chunk_bytes: int) -> None:
        """Uses a fresh call to the coordinator at an address, which wants chunks of that length."""
        self.address = address
        self.chunk_bytes = chunk_bytes
        self._call = call
        self._open: dict[int, Lane] = {}
        self._last = 0
        self._pending: Waiting[pb.LaneRequest] = Waiting()
        self._is_writing = False
        self._mail, self._left = Change(), Change()
        self._broken: TransportBroken | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @property
    def is_open(self) -> bool:
        """Whether lanes can be opened."""
        return self._broken is None and len(self._open) < _MOST_LANES

    def open(self, method: "pb.LaneMethod.ValueType") -> Lane:
        """Opens a lane; with lanes that have broken it is broken from the start."""
        self._last += 1
        lane = self._open[self._last] = Lane(self, self._last)
        if self._broken:
            lane.finish(self._broken)
        else:
            self.send(pb.LaneRequest(lane=self._last, method=method))
        return lane

    def send(self, frame: pb.LaneRequest) -> None:
        """Has a frame leave, together with others that do at this time."""
        self._pending.put(frame)
        self._mail.announce()

    async def left(self) -> None:
        """Waits until everything that was sent so far has left."""
        while (self._pending or self._is_writing) and not self._broken:
            await self._left.wait()

    def forget(self, number: int) -> None:
        """Drops a lane that is over."""
        self._open.pop(number, None)

    async def close(self) -> None:
        """Ends all lanes."""
        self._break(TransportBroken("the worker has left", "CANCELLED"))
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while isinstance(data := await self._call.read(), bytes):
                for frame in pb.LanesResponse.FromString(data).frames:
                    if lane := self._open.get(frame.lane):
                        lane.take(frame)
            self._break(TransportBroken(f"the coordinator at {self.address} ended the stream of lanes"))
        except (grpc.RpcError, DecodeError) as error:
            self._break(_broken(error, self.address))

    async def _write(self) -> None:
        while True:
            while not self._pending:
                await self._mail.wait()
            await asyncio.sleep(0)  # Others that the same event has woken join in.
            frames, self._is_writing = self._pending.take(), True
            try:
                await self._call.write(pb.LanesRequest(frames=frames).SerializeToString())
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # The reader learns why.
            finally:
                self._is_writing = False
                self._left.announce()

    def _break(self, error: TransportBroken) -> None:
        self._broken = self._broken or error
        for lane in list(self._open.values()):
            lane.finish(TransportBroken(str(error), error.code))
        self._left.announce()


def _end_of(status: pb.LaneStatus, address: str) -> Exception | None:
    if not status.code:
        return None
    sentence = f"a lane to the coordinator at {address} broke: {code_name(status)}, {status.message}"
    return refusal_of(status) or TransportBroken(sentence, code_name(status))


def _broken(error: Exception, address: str) -> TransportBroken:
    code, details = ("", str(error))
    if isinstance(error, aio.AioRpcError):
        code, details = error.code().name, error.details() or ""
    return TransportBroken(f"the stream of lanes to the coordinator at {address} broke: {code}, {details}", code)
