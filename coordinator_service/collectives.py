"""CollectiveServicer: passes messages on between the processes of one program.  [shell]

Each process has one stream. What comes from it goes to the outboxes of those that it is for, as it came; a sender waits
while an outbox is full. The end of a stream without a goodbye ends the group for all.
"""

import asyncio
import logging
from collections import deque

import grpc

from ayni import PROTOCOL_VERSION
from ayni.errors import AyniError, BadRequest, Deadline, Incompatible, TooLarge
from ayni.rpc import Context, peer_of
from ayni.v1 import collective_pb2 as pb
from coordinator_service.collective_groups import Group, Groups
from coordinator_service.signals import Signal

SERVICE = pb.DESCRIPTOR.services_by_name["CollectiveService"].full_name
RAW_METHODS = frozenset({"Exchange"})

MOST_DATA_BYTES = 1 << 20
"""Bytes of a message's part."""
_OUTBOX_BYTES = 16 << 20
"""Bytes that wait for one process before those who send to it wait."""
_LAST_FRAMES_S = 1.0
"""How long a process that is refused may take to read what was for it."""
_TEXT_BYTES = {"group": 128, "key": 128, "about": 256, "process_name": 128}

_log = logging.getLogger(__name__)


class _Seat:
    """One process of a group."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.is_over = False
        """Whether nothing more is sent to it."""
        self.refusal: AyniError | None = None
        """What its stream ends with."""
        self._outbox: deque[bytes] = deque()
        self._bytes = 0
        self._mail, self._left = Signal(), Signal()

    async def room(self) -> None:
        """Waits until little enough waits for it."""
        while self._bytes >= _OUTBOX_BYTES and not self.is_over:
            await self._left.wait()

    def put(self, frame: pb.ExchangeResponse | bytes) -> None:
        """Has a frame sent."""
        data = frame if isinstance(frame, bytes) else frame.SerializeToString()
        if not self.is_over:
            self._outbox.append(data)
            self._bytes += len(data)
            self._mail.notify()

    def end(self) -> None:
        """Has the stream end after what waits."""
        self.is_over = True
        self._mail.notify()
        self._left.notify()

    async def write(self, context: Context) -> None:
        """Sends frames until `end`, and what waits then."""
        while self._outbox or not self.is_over:
            if not self._outbox:
                await self._mail.wait()
                continue
            data = self._outbox.popleft()
            await context.write(data)
            self._bytes -= len(data)
            self._left.notify()


class CollectiveServicer:
    """Answers the calls of CollectiveService."""

    def __init__(self, most_processes: int, hello_s: float, whole_s: float) -> None:
        """Serves groups.

        Args:
            most_processes: of one group.
            hello_s: longest wait for a stream's first frame.
            whole_s: longest wait for all processes of a group, from its first one on.
        """
        self._groups = Groups(most_processes)
        self._seats: dict[Group, dict[int, _Seat]] = {}
        self._hello_s, self._whole_s = hello_s, whole_s
        self._expiries: dict[Group, asyncio.TimerHandle] = {}

    async def Exchange(self, _: object, context: Context) -> None:
        """Serves one process until it leaves, or its group is lost."""
        hello = await self._hello(context)
        name = hello.process_name or peer_of(context)
        rank = hello.rank if hello.HasField("rank") else None
        group, place = self._groups.enter(hello.group, hello.world_size, rank, name)
        seat = _Seat(place, name)
        seats = self._seats.setdefault(group, {})
        seats[place] = seat
        self._note_entry(group)
        writing = asyncio.create_task(seat.write(context))
        reading = asyncio.create_task(self._read(context, group, seat))
        detail = "its stream broke"
        has_left, was_over = False, None
        try:
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            was_over = seat.is_over
            if seat.refusal:
                raise seat.refusal
            has_left = reading.done() and reading.result()
            if has_left:
                seat.end()
                await writing
        except (BadRequest, TooLarge) as error:
            detail = error.message
            seat.end()
            # A write that is cancelled on its way would take the refusal's place as the end of the stream.
            await asyncio.wait({writing}, timeout=_LAST_FRAMES_S)
            raise
        finally:
            for task in (writing, reading):
                task.cancel()
            self._vacate(group, seat, has_left, detail, seat.is_over if was_over is None else was_over)

    async def _hello(self, context: Context) -> pb.CollectiveHello:
        try:
            async with asyncio.timeout(self._hello_s):
                data = await context.read()
        except TimeoutError:
            sentence = f"no first frame came within {self._hello_s:g} s"
            raise Deadline(sentence, waiting_for="hello", timeout=self._hello_s) from None
        frame = pb.ExchangeRequest() if data is grpc.aio.EOF else pb.ExchangeRequest.FromString(data)
        hello = frame.hello
        if not frame.HasField("hello") or not hello.group or not hello.world_size:
            raise BadRequest("the first frame must be a hello with the group's name and world_size", field="hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise Incompatible(
                f"the coordinator speaks protocol {PROTOCOL_VERSION} and this process {hello.protocol_version}",
                field="protocol_version",
                coordinator=PROTOCOL_VERSION,
                worker=hello.protocol_version,
            )
        _check_length("group", len(hello.group.encode()))
        _check_length("process_name", len(hello.process_name.encode()))
        for field in ("group", "process_name"):
            if not getattr(hello, field).isprintable():
                raise BadRequest(f"{field} {getattr(hello, field)!r} has characters that can't be printed", field=field)
        return hello

    async def _read(self, context: Context, group: Group, seat: _Seat) -> bool:
        """Passes on what a process sends; returns whether it left in order."""
        while (data := await context.read()) is not grpc.aio.EOF:
            frame = pb.ExchangeRequest.FromString(data)
            if frame.HasField("bye"):
                return True
            if not frame.HasField("send"):
                raise BadRequest("after the hello only `send` and `bye` may come", field="frame")
            await self._pass_on(group, seat, frame.send)
        return False

    async def _pass_on(self, group: Group, seat: _Seat, send: pb.CollectiveSend) -> None:
        receivers = list(send.to)
        self._check(group, seat, send, receivers)
        send.ClearField("to")
        delivery = pb.CollectiveDelivery(sender=seat.rank, send=send)
        data = pb.ExchangeResponse(delivery=delivery).SerializeToString()
        for receiver in receivers:
            other = self._seats[group].get(receiver)
            if other is not None:
                await other.room()
                other.put(data)

    def _check(self, group: Group, seat: _Seat, send: pb.CollectiveSend, receivers: list[int]) -> None:
        if not group.was_whole:
            raise BadRequest("nothing may be sent before the welcome", field="send")
        wrong = [rank for rank in receivers if rank >= group.world_size or rank == seat.rank]
        if not receivers or wrong or len(set(receivers)) < len(receivers):
            raise BadRequest(f"a message can't go from rank {seat.rank} to ranks {receivers}", field="to")
        if not send.key:
            raise BadRequest("a message needs a key", field="key")
        _check_length("key", len(send.key))
        _check_length("about", len(send.about.encode()))
        if len(send.data) > MOST_DATA_BYTES:
            sentence = f"a part of a message has {len(send.data)} bytes; it may have {MOST_DATA_BYTES}"
            raise TooLarge(sentence, field="data", limit=MOST_DATA_BYTES, received=len(send.data))
        if send.offset_bytes + len(send.data) > send.total_bytes:
            raise BadRequest(f"a part reaches beyond its message of {send.total_bytes} bytes", field="offset_bytes")

    def _note_entry(self, group: Group) -> None:
        if not group.was_whole:
            if group not in self._expiries:
                self._expiries[group] = asyncio.get_running_loop().call_later(self._whole_s, self._expire, group)
            _log.info("group %s waits for %d more of %d processes (%s)", group.name, len(group.missing),
                      group.world_size, group.missing_ranks)  # fmt: skip
            return
        self._stop_expiry(group)
        _log.info("group %s is whole: %s", group.name, ", ".join(group.names))
        for rank, seat in self._seats[group].items():
            seat.put(pb.ExchangeResponse(welcome=pb.CollectiveWelcome(rank=rank, process_names=group.names)))

    def _expire(self, group: Group) -> None:
        """Refuses the processes of a group whose others did not come."""
        _log.warning("%s", group.not_whole(self._whole_s))
        self._groups.forget(group)
        for seat in self._seats[group].values():
            seat.refusal = group.not_whole(self._whole_s)
            seat.end()

    def _stop_expiry(self, group: Group) -> None:
        if expiry := self._expiries.pop(group, None):
            expiry.cancel()

    def _vacate(self, group: Group, seat: _Seat, has_left: bool, detail: str, was_over: bool) -> None:
        seats = self._seats[group]
        del seats[seat.rank]
        seat.end()
        if has_left:
            frame = pb.ExchangeResponse(left=pb.CollectiveLeft(rank=seat.rank))
        else:
            lost = pb.CollectiveLost(rank=seat.rank, detail=f"{seat.name}: {detail}"[:256])
            frame = pb.ExchangeResponse(lost=lost)
        if group.was_whole and (has_left or not was_over):
            _log.info("rank %d (%s) of group %s %s", seat.rank, seat.name, group.name,
                      "has left" if has_left else f"is lost: {detail}")  # fmt: skip
            for other in list(seats.values()):
                other.put(frame)
                if not has_left:
                    other.end()
        self._groups.leave(group, seat.rank)
        if not seats:
            self._stop_expiry(group)
            del self._seats[group]


def _check_length(name: str, length: int) -> None:
    if length > _TEXT_BYTES[name]:
        sentence = f"{name} has {length} bytes; it may have {_TEXT_BYTES[name]}"
        raise TooLarge(sentence, field=name, limit=_TEXT_BYTES[name], received=length)
