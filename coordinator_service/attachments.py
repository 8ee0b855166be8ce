"""Agents that nobody can dial, reached over the streams that they have opened to the coordinator.  [shell]

`serve` is the body of CoordinatorService.Attach; `channel` and `open` are for those who call an agent.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial

from grpc import StatusCode

from ayni.blocks.transfers import DEFAULT_TIMEOUT_S
from ayni.errors import BadRequest, Deadline
from ayni.rpc import Context
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.attached_calls import AttachedCall, AttachedCalls, broken
from coordinator_service.attached_channel import AttachedChannel
from coordinator_service.epochs import Seat

_log = logging.getLogger(__name__)

_HELLO_S = 15.0
"""Longest wait for the first frame."""


class Attachments:
    """All agents that are attached. Belongs to the event loop."""

    def __init__(self) -> None:
        """Starts with none."""
        self._attached: dict[int, AttachedCalls] = {}

    def is_attached(self, worker_id: int) -> bool:
        """Says whether a worker can be called over a stream of its own."""
        return worker_id in self._attached

    def channel(self, worker_id: int) -> AttachedChannel:
        """Returns what calls an attached worker; its calls fail while the worker is not attached."""
        return AttachedChannel(partial(self.open, worker_id))

    async def serve(
        self,
        requests: AsyncIterator[pb.AttachRequest],
        context: Context,
        seat_of: Callable[[int, Context], Seat],
    ) -> AsyncGenerator[pb.AttachResponse]:
        """Carries calls to an agent until it ends the stream, or opens another one.

        Args:
            requests: the agent's frames.
            context: the call.
            seat_of: finds the caller's seat.

        Raises:
            AyniError: the caller is no member, or its first frame is not a hello.
        """
        hello = await _hello(requests)
        member = seat_of(hello.worker_id, context).member
        calls = AttachedCalls(member.name)
        before = self._attached.get(member.worker_id)
        self._attached[member.worker_id] = calls
        if before:
            before.end()
        _log.info("worker %s is attached: calls to it travel over its own stream", member.name)
        reading = asyncio.create_task(calls.take_all(requests))
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async for frame in calls.frames():
                yield frame
        finally:
            reading.cancel()
            calls.end()
            if self._attached.get(member.worker_id) is calls:
                del self._attached[member.worker_id]
                _log.info("worker %s is not attached any more", member.name)

    async def open(
        self, worker_id: int, method: str, request: bytes, timeout_s: float | None, *, is_unary: bool
    ) -> AttachedCall:
        """Starts a call of an agent; raises as `AttachedCalls.open`, and UNAVAILABLE where it is not attached."""
        calls = self._attached.get(worker_id)
        if calls is None:
            raise broken(StatusCode.UNAVAILABLE, f"worker {worker_id} is not attached")
        seconds = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        return await calls.open(method, request, seconds, is_unary=is_unary)


async def _hello(requests: AsyncIterator[pb.AttachRequest]) -> pb.AttachHello:
    try:
        async with asyncio.timeout(_HELLO_S):
            frame = await anext(requests, None)
    except TimeoutError:
        raise Deadline(
            f"nothing came through the attachment within {_HELLO_S:g} s", waiting_for="hello", timeout=_HELLO_S
        ) from None
    if frame is None or not frame.HasField("hello"):
        raise BadRequest("the first frame of an attachment must be its hello", field="hello")
    return frame.hello
