"""Messages and descriptors between two workers of one host, over a connected Unix socket.  [shell]

A message is a byte that says its kind, four that say its length, and its content. What is said at one time leaves in
one packet, with all its descriptors, so that the other side wakes up once. A connection carries one contribution after
the other:

    dialed by  HELLO secret of the group; LEND a region that frames name (with its descriptor); FRAME ...; END
    answers    LEND, FRAME ..., and then DONE, or REFUSED with the refusal

Frames are those of `PeerService.ReduceSlice`. What was lent is lent for one contribution.
"""

import asyncio
import enum
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from ayni.errors import AyniError, BadRequest, PeerLost, TooLarge, Unsupported
from ayni.shm.json_messages import MAX_MESSAGE_BYTES
from ayni.shm.region_messages import Lend, decode_request, encode_request
from ayni.shm.regions import Region
from ayni.shm.sockets import close_all
from worker_agent.changes import Change

_HEAD = struct.Struct("<BI")
MOST_BYTES = MAX_MESSAGE_BYTES - _HEAD.size
"""Content of a message."""
_MOST_UNSENT = 256
"""Packets that wait until the other side reads; who has more to say waits."""
MOST_LENT = 64
"""Regions that either side lends for one contribution."""
_MOST_WAITING = 256
"""Messages that were received and nobody has read; more stay in the socket."""


class Kind(enum.IntEnum):
    """What a message is."""

    HELLO = 1
    LEND = 2
    FRAME = 3
    END = 4
    DONE = 5
    REFUSED = 6


Message = tuple[int, bytes, int]
"""Kind, content, and a descriptor, which the reader closes; -1: none."""


class _Packet:
    """Messages that leave together."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.fds: list[int] = []

    def takes(self, num_bytes: int) -> bool:
        return len(self.data) + num_bytes <= MAX_MESSAGE_BYTES and len(self.fds) < MOST_LENT


class HostStream:
    """One connection. Belongs to the event loop."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """Reads from a socket that does not block, which is this stream's from now on; `peer` names the other side."""
        self._connection, self._peer = connection, peer
        self._loop = asyncio.get_running_loop()
        self._came: deque[Message] = deque()
        self._end = ""
        self._change = Change()
        self._lent: set[int] = set()
        self._offered: dict[int, tuple[Lend, int]] = {}
        """What the other side lends, and its descriptor."""
        self._is_reading = self._is_flushing = False
        self._unsent: deque[_Packet] = deque()
        self.on_end: Callable[[], object] = lambda: None
        """Called when the connection is over."""
        self._go_on()

    @property
    def is_open(self) -> bool:
        """Whether the other side is there, as far as is known."""
        return not self._end

    @property
    def is_quiet(self) -> bool:
        """Whether it is open and nothing waits to be read."""
        return self.is_open and not self._came

    async def receive(self) -> tuple[int, bytes]:
        """Returns kind and content of the next message that lends nothing.

        Raises:
            PeerLost: none comes any more.
            BadRequest: the other side lends something that can't be read.
            TooLarge: it lends too much at a time.
        """
        while True:
            while not self._came:
                if self._end:
                    raise self._lost()
                await self._change.wait()
            kind, content, fd = self._came.popleft()
            if not self._is_reading and not self._end:
                self._go_on()
            if kind != Kind.LEND:
                return kind, content
            self._take(content, fd)

    def take_offered(self, region_id: int) -> tuple[Lend, int]:
        """Returns what the other side has lent, and its descriptor, which is the caller's then.

        Raises:
            BadRequest: it lends no such region.
        """
        found = self._offered.pop(region_id, None)
        if found is None:
            raise BadRequest(f"{self._peer} names a region {region_id:x} that it does not lend", field="region")
        return found

    def forget_lent(self) -> None:
        """Ends all loans, on both sides: another contribution follows."""
        self._lent.clear()
        close_all([fd for _, fd in self._offered.values()])
        self._offered.clear()

    async def send(self, kind: Kind, content: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Has a message leave, soon; waits while the other side reads nothing.

        Descriptors are copied before this waits for anything: the caller may close its own at once.

        Raises:
            PeerLost: the other side is gone.
            Unsupported: this process has too many descriptors, or one is none any more.
        """
        assert len(content) <= MOST_BYTES, f"a message of {len(content)} bytes"
        copies = self._copies(fds)
        try:
            while len(self._unsent) >= _MOST_UNSENT and not self._end:
                await self._change.wait()
            if self._end:
                raise self._lost()
        except BaseException:
            close_all(copies)
            raise
        if not self._unsent or not self._unsent[-1].takes(_HEAD.size + len(content)):
            self._unsent.append(_Packet())
        packet = self._unsent[-1]
        packet.data += _HEAD.pack(kind, len(content)) + content
        packet.fds += copies
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    async def lend(self, region: Region) -> None:
        """Lets the other side have a region of this process, once."""
        if region.id in self._lent:
            return
        self._lent.add(region.id)
        try:
            await self.send(Kind.LEND, encode_request(Lend(region=region.id, size=region.size)), [region.fd])
        except BaseException:
            self._lent.discard(region.id)
            raise

    def close(self, why: str = "it was closed by this worker") -> None:
        """Ends the connection; who waits is told. A second call drops what came before the other side's end."""
        if self._end:
            self._drop_came()
            return
        self._end = why
        if self._is_reading:
            self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        for packet in self._unsent:
            close_all(packet.fds)
        self._unsent.clear()
        self._drop_came()
        self._change.announce()
        self.on_end()

    def _drop_came(self) -> None:
        """Closes descriptors that came and nobody took: each of them keeps a region's memory."""
        close_all([fd for _, _, fd in self._came if fd >= 0])
        self._came.clear()
        self.forget_lent()

    def _copies(self, fds: Sequence[int]) -> list[int]:
        """Returns copies of descriptors: a number may be another file's by the time it is sent."""
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))
        except OSError as error:
            close_all(copies)
            detail = error.strerror or str(error)
            sentence = f"memory can't be lent to {self._peer}: {detail}"
            raise Unsupported(sentence, field="gradients", detail=detail) from error
        return copies

    def _take(self, content: bytes, fd: int) -> None:
        """Takes what the other side lends."""
        try:
            lend = decode_request(content)
            if not isinstance(lend, Lend) or lend.region in self._offered:
                raise BadRequest(f"{self._peer} lends something that is no region", field="ask")
            if len(self._offered) >= MOST_LENT:
                raise TooLarge(
                    f"{self._peer} lends {MOST_LENT + 1} regions for one contribution; {MOST_LENT} are taken",
                    field="regions",
                    limit=MOST_LENT,
                    received=MOST_LENT + 1,
                )
        except AyniError:
            close_all([fd])
            raise
        self._offered[lend.region] = (lend, fd)

    def _go_on(self) -> None:
        self._is_reading = True
        self._loop.add_reader(self._connection, self._read)

    def _read(self) -> None:
        """Takes what there is."""
        while len(self._came) < _MOST_WAITING:
            try:
                data, fds, flags, _ = socket.recv_fds(
                    self._connection, MAX_MESSAGE_BYTES, MOST_LENT, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except OSError as error:
                self._finish(error.strerror or str(error))
                return
            if not data or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                close_all(fds)
                self._finish("a packet was cut off" if data else "the other side closed it")
                return
            messages = _messages(data, fds)
            if messages is None:
                close_all(fds)
                self._finish("a packet can't be read")
                return
            self._came += messages
        else:
            self._is_reading = False
            self._loop.remove_reader(self._connection)
        self._change.announce()

    def _flush(self) -> None:
        """Sends what waits, as far as the socket takes it."""
        was_full = len(self._unsent) >= _MOST_UNSENT
        while self._unsent and not self._end:
            try:
                socket.send_fds(self._connection, [self._unsent[0].data], self._unsent[0].fds)
            except BlockingIOError:
                self._loop.add_writer(self._connection, self._flush)
                break
            except OSError as error:
                self._finish(error.strerror or str(error))
                return
            close_all(self._unsent.popleft().fds)
        if not self._unsent and not self._end:
            self._is_flushing = False
            self._loop.remove_writer(self._connection)
        if was_full:
            self._change.announce()

    def _finish(self, why: str) -> None:
        """Ends it, but lets what came before be read."""
        waiting, self._came = self._came, deque()
        self.close(why)
        self._came = waiting
        self._change.announce()

    def _lost(self) -> PeerLost:
        return PeerLost(
            f"the connection to {self._peer} for shared memory is over: {self._end}", peer=self._peer, detail=self._end
        )


def _messages(data: bytes, fds: Sequence[int]) -> list[Message] | None:
    """Returns the messages of a packet; None where it is none."""
    messages, position, unused = list[Message](), 0, list(fds)
    while position < len(data):
        start = position + _HEAD.size
        if start > len(data):
            return None
        kind, length = _HEAD.unpack_from(data, position)
        position = start + length
        if position > len(data) or (kind == Kind.LEND and not unused):
            return None
        messages.append((kind, data[start:position], unused.pop(0) if kind == Kind.LEND else -1))
    return None if unused else messages
