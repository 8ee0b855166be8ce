"""Lets the coordinator call this worker although nobody can dial it: over a stream that the worker opens.  [shell]

The stream has a connection of its own, so that blocks and gradients do not wait for one another. Calls are answered by
the code that answers those of the worker's own server, a few at a time. An answer is made no faster than the
coordinator takes it. The stream lasts as long as the membership; one that breaks is opened again.

Belongs to the event loop.
"""

import asyncio
import logging
import random
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from ayni import rpc
from ayni.channels import open_channel
from ayni.endpoints import ClientTls, parse_address
from ayni.errors import AyniError, TooLarge
from ayni.logs import ChangeLogger
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from worker_agent.attached_calls import AttachedCall, refusal
from worker_agent.backoff import delays
from worker_agent.messages import Membership
from worker_agent.service import WorkerServicer

_log = logging.getLogger(__name__)

MOST_CALLS = 16
"""Calls that are answered at the same time. The coordinator makes half as many; some that it gave up may be ending."""

_LASTED_S = 10.0
"""How long a stream must have lasted, so that the next try is made soon."""
_LONGEST_PAUSE_S = 1.0

Stream = aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachConfig:
    """How the coordinator is reached."""

    coordinator: str
    """Address, host:port."""
    token: str = field(repr=False)
    """The run's join token."""
    tls: ClientTls
    insecure: bool


def is_needed(attach: str, listen: str, coordinator: str) -> bool:
    """Says whether a worker attaches.

    Args:
        attach: "always", "never" or "auto": where it listens on loopback and the coordinator is elsewhere.
        listen: where its own service listens.
        coordinator: address of the coordinator.
    """
    if attach != "auto":
        return attach == "always"
    return parse_address(listen).is_loopback and not parse_address(coordinator).is_loopback


class Attachment:
    """Keeps the stream of one membership after another."""

    def __init__(self, config: AttachConfig, servicer: WorkerServicer) -> None:
        """Takes where the coordinator is, and what answers calls."""
        self._config = config
        self._servicer = servicer
        self._changes = ChangeLogger(_log)
        self._keeping: asyncio.Task[None] | None = None

    def follow(self, membership: Membership) -> None:
        """Attaches as this member from now on, and as no other."""
        before, self._keeping = self._keeping, asyncio.create_task(self._keep(membership))
        if before:
            before.cancel()

    async def close(self) -> None:
        """Ends the stream, and all calls."""
        keeping, self._keeping = self._keeping, None
        if keeping:
            keeping.cancel()
            await asyncio.wait({keeping})

    async def _keep(self, membership: Membership) -> None:
        """Opens the stream again and again, until the membership is over."""
        loop, config = asyncio.get_running_loop(), self._config
        pauses = delays(random.random, longest=_LONGEST_PAUSE_S)
        channel = open_channel(config.coordinator, config.token, config.tls, config.insecure)
        channel.headers["ayni-session"] = membership.session
        try:
            while True:
                began = loop.time()
                stream = CoordinatorServiceStub(channel).Attach()
                if refusal := await self._live(stream, membership):
                    self._changes.log_if_changed("attachment", f"this worker can't be attached: {refusal}")
                    return
                if loop.time() - began > _LASTED_S:
                    pauses = delays(random.random, longest=_LONGEST_PAUSE_S)
                await asyncio.sleep(next(pauses))
        finally:
            await channel.close()

    async def _live(self, stream: Stream, membership: Membership) -> AyniError | None:
        """Serves one stream to its end; returns why another one would not help."""
        calls = _Calls(stream, self._servicer)
        try:
            await stream.write(pb.AttachRequest(hello=pb.AttachHello(worker_id=membership.worker_id)))
            await calls.serve()
            self._changes.log_if_changed("attachment", "the coordinator ended the attachment")
        except aio.AioRpcError as error:
            if refusal := rpc.error_from(error):
                return refusal
            self._changes.log_if_changed("attachment", f"the attachment broke: {error.code().name}, {error.details()}")
        except asyncio.InvalidStateError as error:
            self._changes.log_if_changed("attachment", f"the attachment broke: {error}")
        finally:
            await calls.close()
            stream.cancel()
        return None


class _Calls:
    """Everything that goes on over one stream."""

    def __init__(self, stream: Stream, servicer: WorkerServicer) -> None:
        self._stream, self._servicer = stream, servicer
        self._outgoing: asyncio.Queue[pb.AttachRequest] = asyncio.Queue(1)
        self._calls: dict[int, AttachedCall] = {}

    async def serve(self) -> None:
        """Answers calls until the stream ends.

        Raises:
            aio.AioRpcError: it broke, or the coordinator refused.
        """
        # A cancelled write would cancel the stream, so nobody but this task writes.
        writing = asyncio.create_task(self._write_all())
        reading = asyncio.create_task(self._read_all())
        try:
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            for done in (reading, writing):
                if done.done():
                    done.result()
        finally:
            writing.cancel()
            reading.cancel()
            await asyncio.wait({writing, reading})
            for ended in (writing, reading):
                ended.cancelled() or ended.exception()

    async def close(self) -> None:
        """Gives up all calls."""
        calls = list(self._calls.values())
        for call in calls:
            call.give_up()
        if calls:
            await asyncio.wait({call.task for call in calls})

    async def _read_all(self) -> None:
        while True:
            frame: Any = await self._stream.read()
            if frame is aio.EOF:
                await _raise_status(self._stream)
                return
            if frame.HasField("call"):
                await self._start(frame.call)
            elif call := self._calls.get(frame.cancel.call_id):
                call.give_up()

    async def _write_all(self) -> None:
        while True:
            await self._stream.write(await self._outgoing.get())

    async def _start(self, asked: pb.AttachCall) -> None:
        if len(self._calls) >= MOST_CALLS:
            sentence = f"{MOST_CALLS} calls are under way already; this worker answers no more at a time"
            error = TooLarge(sentence, field="calls", limit=MOST_CALLS, received=MOST_CALLS + 1)
            await self._send(refusal(asked, error))
            return
        call = AttachedCall(self._servicer, asked, self._send)
        self._calls[asked.call_id] = call
        call.task.add_done_callback(lambda done: self._ended(asked.call_id, done))

    def _ended(self, number: int, task: "asyncio.Task[None]") -> None:
        self._calls.pop(number, None)
        if not task.cancelled() and (error := task.exception()):
            _log.error("a call through the attachment broke", exc_info=error)

    async def _send(self, reply: pb.AttachReply) -> None:
        await self._outgoing.put(pb.AttachRequest(reply=reply))


async def _raise_status(stream: Stream) -> None:
    """Raises how a stream ended, unless it ended well."""
    code = await stream.code()
    if code.value[0]:
        trailing = await stream.trailing_metadata()
        raise aio.AioRpcError(code, await stream.initial_metadata(), trailing, details=await stream.details())
