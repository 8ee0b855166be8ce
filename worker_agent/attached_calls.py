"""Answers calls that came through an attachment with the code that answers those of the own server.  [shell]"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, cast

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from ayni import rpc
from ayni.errors import AyniError, BadRequest, TooLarge
from ayni.v1 import coordinator_pb2 as pb
from worker_agent.service import SERVICE, WorkerServicer

_log = logging.getLogger(__name__)

MOST_REPLY_BYTES = (4 << 20) - 1024
"""So that the frame around a reply is below gRPC's own limit."""

_ABORT_S = 0.5
"""How long after a handler was stopped from within the reason may still come."""

_METHODS = {method.name: method for method in SERVICE.methods if not method.client_streaming}

Send = Callable[[pb.AttachReply], Awaitable[None]]
"""Sends a part of an answer; lasts as long as the coordinator takes nothing."""


class Aborted(grpc.RpcError):
    """A handler ended its call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple[Any, ...] = ()) -> None:
        """Takes the status."""
        super().__init__(details)
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        """Returns the status code."""
        return self._code

    def details(self) -> str:
        """Returns the sentence for people."""
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Returns what says why."""
        return self._trailing


class CallContext:
    """What a handler sees of its call; see grpc.aio.ServicerContext, of which it has what the handlers use."""

    def __init__(self, deadline: float | None) -> None:
        """Takes the moment by which the call must have ended; None for no limit."""
        self._deadline = deadline
        self.aborted: asyncio.Future[Aborted] = asyncio.get_running_loop().create_future()
        """How another task than the handler's own ended the call."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns nothing: metadata does not travel through an attachment."""
        return ()

    def peer(self) -> str:
        """Says who calls."""
        return "the coordinator"

    def time_remaining(self) -> float | None:
        """Returns the seconds that are left; None for no limit."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """Ends the call with a status."""
        self._abort(Aborted(code, details, tuple(trailing_metadata)))

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """Ends the call with a status."""
        self._abort(Aborted(status.code, status.details, tuple(status.trailing_metadata or ())))

    def _abort(self, why: Aborted) -> NoReturn:
        if not self.aborted.done():
            self.aborted.set_result(why)
        raise why


class AttachedCall:
    """One call."""

    def __init__(self, servicer: WorkerServicer, call: pb.AttachCall, send: Send) -> None:
        """Starts to carry it out, on a task of its own."""
        self._servicer, self._call, self._send = servicer, call, send
        self._is_given_up = False
        self.task = asyncio.create_task(self._answer())

    def give_up(self) -> None:
        """Ends the call; nothing more is sent of its answer."""
        self._is_given_up = True
        self.task.cancel()

    async def _answer(self) -> None:
        call = self._call
        timeout = call.timeout.ToTimedelta().total_seconds() if call.HasField("timeout") else None
        context = CallContext(None if timeout is None else asyncio.get_running_loop().time() + timeout)
        try:
            async with asyncio.timeout(timeout):
                await _carry_out(self._servicer, call, context, self._send)
        except TimeoutError:
            await self._send(_last(call, grpc.StatusCode.DEADLINE_EXCEEDED, f"{call.method} did not end in time"))
        except Aborted as why:
            await self._send(_ending(call, why))
        except AyniError as error:
            _log.info("refused %s with %s: %s", call.method, error.reason, error)
            await self._send(refusal(call, error))
        except asyncio.CancelledError:
            await self._explain(context)
        except Exception as error:
            _log.exception("%s failed", call.method)
            await self._send(_last(call, grpc.StatusCode.UNKNOWN, f"{call.method} failed: {error!r}"))

    async def _explain(self, context: CallContext) -> None:
        """Answers a stream that cancelled itself, because its reader took nothing, and says why from another task."""
        if not self._is_given_up:
            await asyncio.wait({context.aborted}, timeout=_ABORT_S)
        if not context.aborted.done():
            raise asyncio.CancelledError
        await self._send(_ending(self._call, context.aborted.result()))


async def _carry_out(servicer: WorkerServicer, call: pb.AttachCall, context: CallContext, send: Send) -> None:
    method = _METHODS.get(call.method)
    if method is None:
        raise Aborted(grpc.StatusCode.UNIMPLEMENTED, f"{call.method[:64]} can't be called through an attachment")
    request: Any = message_factory.GetMessageClass(method.input_type)()
    try:
        request.ParseFromString(call.request)
    except DecodeError:
        raise BadRequest(f"the request of {call.method} can't be read", field="request") from None
    handler = getattr(servicer, call.method)
    seen = cast(rpc.Context, context)
    if not method.server_streaming:
        response = (await handler(request, seen)).SerializeToString()
        await send(pb.AttachReply(call_id=call.call_id, response=_checked(call, response), last=True))
        return
    async with aclosing(handler(request, seen)) as frames:
        async for frame in frames:
            await send(pb.AttachReply(call_id=call.call_id, response=_checked(call, frame)))
    await send(pb.AttachReply(call_id=call.call_id, last=True))


def _checked(call: pb.AttachCall, response: bytes) -> bytes:
    if len(response) > MOST_REPLY_BYTES:
        raise TooLarge(
            f"the answer to {call.method} has {len(response)} bytes; at most {MOST_REPLY_BYTES} go through an "
            "attachment",
            field=call.method,
            limit=MOST_REPLY_BYTES,
            received=len(response),
        )
    return response


def _ending(call: pb.AttachCall, why: Aborted) -> pb.AttachReply:
    if error := rpc.error_from(why):
        return refusal(call, error)
    return _last(call, why.code(), why.details())


def refusal(call: pb.AttachCall, error: AyniError) -> pb.AttachReply:
    """Returns the reply that refuses a call."""
    status = rpc.status_of(error)
    reply = _last(call, status.code, status.details)
    reply.reason = error.reason
    return reply


def _last(call: pb.AttachCall, code: grpc.StatusCode, message: str) -> pb.AttachReply:
    number: int = code.value[0]
    return pb.AttachReply(call_id=call.call_id, last=True, status_code=number, status_message=message)
