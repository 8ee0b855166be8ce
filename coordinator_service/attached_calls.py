"""Calls to one agent over the stream that it has opened, and which answer belongs to which call.  [shell]

Belongs to the event loop. Answers wait here until whoever called takes them, up to a limit; then the stream is not read
any more, and with it all other calls stand still. So a caller that takes nothing for STALL_S loses its call instead.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode, aio

from ayni import rpc
from ayni.errors import BY_REASON, AyniError, Deadline, TooLarge
from ayni.v1 import coordinator_pb2 as pb

MOST_CALLS = 8
"""Calls to one agent at a time; the others wait for their turn."""
QUEUED_BYTES = 8 << 20
"""Bytes of answers to one call that wait for whoever called."""
STALL_S = 5.0
"""Longest wait for whoever called to take an answer, where too many wait already."""
MOST_REQUEST_BYTES = (4 << 20) - 1024
"""So that the frame around a request is below gRPC's own limit."""

_CODES = {code.value[0]: code for code in StatusCode}
_NO_METADATA = aio.Metadata()


class AttachedCall:
    """One call: its answers, in order, and its end."""

    def __init__(self, calls: "AttachedCalls", number: int, what: str, deadline: float, is_unary: bool) -> None:
        """Use `AttachedCalls.open`."""
        self._calls, self._number, self._what = calls, number, what
        self._deadline = deadline
        self.is_unary = is_unary
        """Whether the last reply is the answer, even where it is empty."""
        self._answers: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._changed = asyncio.Event()
        self._end: aio.AioRpcError | None = None
        self.is_over = False

    async def read(self) -> Any:
        """Returns the next answer, encoded; `aio.EOF` after the last one.

        Raises:
            aio.AioRpcError: the agent refused, the attachment ended, or the deadline has passed.
        """
        try:
            async with asyncio.timeout_at(self._deadline):
                while not self._answers and not self.is_over:
                    await self._changed.wait()
        except TimeoutError:
            self.cancel(broken(StatusCode.DEADLINE_EXCEEDED, f"{self._what} was not answered in time"))
        if self._answers and not isinstance(self._end, _Given):
            answer = self._answers.popleft()
            self._waiting_bytes -= len(answer)
            self._announce()
            return answer
        if self._end:
            raise self._end
        return aio.EOF

    def cancel(self, why: aio.AioRpcError | None = None) -> None:
        """Gives the call up; reading raises `why` from now on. Does nothing after the end."""
        if not self.is_over:
            self._calls.give_up(self._number)
            self.finish(_Given.of(why or broken(StatusCode.CANCELLED, f"{self._what} was given up by its caller")))

    def finish(self, error: aio.AioRpcError | None) -> None:
        """Notes the end; None: all is well."""
        if not self.is_over:
            self._end, self.is_over = error, True
            self._calls.forget(self._number)
            self._announce()

    async def put(self, answer: bytes) -> None:
        """Adds an answer, once few enough wait. A caller that takes nothing for too long loses the call."""
        try:
            async with asyncio.timeout(STALL_S):
                while self._waiting_bytes >= QUEUED_BYTES and not self.is_over:
                    await self._changed.wait()
        except TimeoutError:
            sentence = f"{self._what} stood still: its caller took nothing for {STALL_S:g} s"
            self.cancel(refused(Deadline(sentence, waiting_for="the caller", timeout=STALL_S)))
        if not self.is_over:
            self._answers.append(answer)
            self._waiting_bytes += len(answer)
            self._announce()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class _Given(aio.AioRpcError):
    """An end that came from this side: answers that wait are dropped."""

    @classmethod
    def of(cls, error: aio.AioRpcError) -> "_Given":
        return cls(error.code(), _NO_METADATA, error.trailing_metadata(), details=error.details())


class AttachedCalls:
    """All calls over one attachment."""

    def __init__(self, worker_name: str) -> None:
        """Starts with none; `worker_name` is named in errors."""
        self._name = worker_name
        self._outgoing: asyncio.Queue[pb.AttachResponse | None] = asyncio.Queue()
        self._open: dict[int, AttachedCall] = {}
        self._turns = asyncio.Semaphore(MOST_CALLS)
        self._last = 0
        self._ended: aio.AioRpcError | None = None

    async def open(self, method: str, request: bytes, timeout_s: float, *, is_unary: bool) -> AttachedCall:
        """Starts a call, once it is its turn. Whoever opens it cancels it in the end.

        Raises:
            aio.AioRpcError: the attachment has ended, or the deadline has passed.
            TooLarge: the request does not fit into one frame.
        """
        if len(request) > MOST_REQUEST_BYTES:
            raise TooLarge(
                f"{method} to worker {self._name} would be {len(request)} bytes long; at most {MOST_REQUEST_BYTES} go "
                "through an attachment",
                field=method,
                limit=MOST_REQUEST_BYTES,
                received=len(request),
            )
        what = f"{method} to worker {self._name}"
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._turns.acquire()
        except TimeoutError:
            raise broken(StatusCode.DEADLINE_EXCEEDED, f"{what} had to wait for others for too long") from None
        if self._ended:
            self._turns.release()
            raise self._ended
        self._last += 1
        self._open[self._last] = call = AttachedCall(self, self._last, what, deadline, is_unary)
        self._outgoing.put_nowait(_call_frame(self._last, method, request, deadline))
        return call

    async def frames(self) -> AsyncGenerator[pb.AttachResponse]:
        """Yields what goes to the agent, until the attachment ends."""
        while (frame := await self._outgoing.get()) is not None:
            yield frame

    async def take_all(self, requests: AsyncIterator[pb.AttachRequest]) -> None:
        """Takes the agent's answers until it ends the stream."""
        try:
            async for frame in requests:
                call = self._open.get(frame.reply.call_id)
                if call:
                    await _take(call, frame.reply)
        finally:
            self.end()

    def end(self) -> None:
        """Fails all calls: nobody can answer them any more."""
        self._ended = self._ended or broken(StatusCode.UNAVAILABLE, f"worker {self._name} is not attached any more")
        for call in list(self._open.values()):
            call.finish(self._ended)
        self._outgoing.put_nowait(None)

    def give_up(self, number: int) -> None:
        """Tells the agent to end a call."""
        self._outgoing.put_nowait(pb.AttachResponse(cancel=pb.AttachCancel(call_id=number)))

    def forget(self, number: int) -> None:
        """Lets the next call have its turn."""
        if self._open.pop(number, None):
            self._turns.release()


def broken(code: StatusCode, details: str) -> aio.AioRpcError:
    """Returns the error of a call that nobody decided about."""
    return aio.AioRpcError(code, _NO_METADATA, _NO_METADATA, details=details)


def refused(error: AyniError) -> aio.AioRpcError:
    """Returns the error of a call that was refused; see `rpc.error_from`."""
    status = rpc.status_of(error)
    trailing = aio.Metadata(*(status.trailing_metadata or ()))
    return aio.AioRpcError(status.code, _NO_METADATA, trailing, details=status.details)


def _call_frame(number: int, method: str, request: bytes, deadline: float) -> pb.AttachResponse:
    timeout = Duration()
    timeout.FromNanoseconds(int(max(0.0, deadline - asyncio.get_running_loop().time()) * 1e9))
    call = pb.AttachCall(call_id=number, method=method, request=request, timeout=timeout)
    return pb.AttachResponse(call=call)


async def _take(call: AttachedCall, reply: pb.AttachReply) -> None:
    if reply.response or (call.is_unary and reply.last and not reply.status_code):
        await call.put(reply.response)
    if reply.last:
        call.finish(_error_of(reply))


def _error_of(reply: pb.AttachReply) -> aio.AioRpcError | None:
    """Returns how the agent ended a call; None when all is well."""
    code = _CODES.get(reply.status_code, StatusCode.UNKNOWN)
    if code is StatusCode.OK:
        return None
    if reply.reason:
        error = BY_REASON.get(reply.reason, AyniError)(reply.status_message)
        return refused(error)
    return broken(code, reply.status_message)
