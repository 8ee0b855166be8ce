"""One request at a time over the socket of the coordinator's shared memory, and word of its end.  [shell]"""

import asyncio
import socket
from collections.abc import Sequence

from ayni.errors import AyniError, Deadline, PeerLost
from ayni.shm.region_messages import Request, decode_answer, encode_request
from ayni.shm.sockets import close_all, receive, send

COORDINATOR = "the coordinator"

_Answer = tuple[bytes, list[int]]


class RegionCalls:
    """One connection. It is over once the coordinator ends it, or a request was given up: its answer may still come.

    Attributes:
        connection: belongs to this; is closed when it is over.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Listens to a connection, on the running loop."""
        self.connection = connection
        self._end = ""
        """Why it is over; empty: it is not."""
        self._turn = asyncio.Lock()
        self._awaited: asyncio.Future[_Answer] | None = None
        self._listening = asyncio.create_task(self._listen())
        # Here, because a task that is cancelled before it began closes nothing itself.
        self._listening.add_done_callback(lambda _: connection.close())

    @property
    def is_open(self) -> bool:
        """Whether the coordinator can be asked."""
        return not self._end

    def check_open(self) -> None:
        """Refuses to ask where it is over; raises PeerLost."""
        if self._end:
            raise self._lost()

    async def ask(self, request: Request, seconds: float, fds: Sequence[int] = ()) -> None:
        """Has a request fulfilled; descriptors stay the caller's.

        Raises:
            PeerLost: the coordinator is gone.
            Deadline: no answer came for so many seconds after the request was sent.
            AyniError: what the coordinator said.
        """
        data, received = await self._exchange(request, seconds, fds)
        close_all(received)
        decode_answer(data)

    async def ask_for_one(self, request: Request, seconds: float) -> tuple[int, int]:
        """Returns a region's size and its descriptor, which the caller closes; raises what `ask` does."""
        data, received = await self._exchange(request, seconds)
        try:
            size = decode_answer(data).size
            if not size or len(received) != 1:
                raise _odd(f"it lent {size} bytes with {len(received)} descriptors")
        except BaseException:
            close_all(received)
            raise
        return size, received[0]

    async def close(self) -> None:
        """Ends it; who waits for an answer is told. A second call does nothing."""
        self._finish("it was closed by this worker")
        await asyncio.wait([self._listening])

    async def _exchange(self, request: Request, seconds: float, fds: Sequence[int] = ()) -> _Answer:
        async with self._turn:
            self.check_open()
            awaited: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
            self._awaited = awaited
            try:
                send(self.connection, encode_request(request), fds)
                async with asyncio.timeout(seconds):
                    return await awaited
            except BaseException as error:
                detail = error.metadata.get("detail") if isinstance(error, AyniError) else None
                self._finish(detail or "a request was given up before its answer came")
                _discard(awaited)
                if isinstance(error, TimeoutError):
                    what = "an answer about shared memory from the coordinator"
                    raise Deadline(f"waited {seconds} s for {what}", waiting_for=what, timeout=seconds) from None
                raise
            finally:
                self._awaited = None

    async def _listen(self) -> None:
        try:
            while True:
                data, fds = await receive(self.connection, None)
                if not data or self._awaited is None or self._awaited.done():
                    close_all(fds)
                    raise _odd("it said something that nobody asked for" if data else "it closed the connection")
                self._awaited.set_result((data, fds))
        except AyniError as error:
            self._finish(error.metadata.get("detail", error.message))

    def _finish(self, detail: str) -> None:
        self._end = self._end or detail
        self._listening.cancel()
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(self._lost())

    def _lost(self) -> PeerLost:
        message = f"the connection to {COORDINATOR} for shared memory is over: {self._end}; gradients travel over gRPC"
        return PeerLost(message, peer=COORDINATOR, detail=self._end)


def _discard(awaited: "asyncio.Future[_Answer]") -> None:
    """Closes what an answer brought that came at the moment when it was given up."""
    if awaited.done() and not awaited.cancelled() and awaited.exception() is None:
        close_all(awaited.result()[1])


def _odd(detail: str) -> PeerLost:
    return PeerLost(f"the coordinator's shared memory can't be used: {detail}", peer=COORDINATOR, detail=detail)
