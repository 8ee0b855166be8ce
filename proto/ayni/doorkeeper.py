"""Who is let in to a server: callers with the join token, and no more calls at a time than the limits say.  [shell]

Strangers are refused before a message of theirs is read. What they can cost is bounded: the streams that are read on
for a moment so that their senders see the refusal, the calls of services that need no token, and the lines of the log.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from ayni import rpc
from ayni.endpoints import ServerLimits
from ayni.errors import TokenRefused

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

OPEN_SERVICES = frozenset({health.SERVICE_NAME, reflection.SERVICE_NAME})
"""Services that are answered without a token."""

_DRAIN_LIMIT = timedelta(seconds=2)
_LOG_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without the join token; no handler sees it and no request is decoded.

    Health and reflection are open. A stream of requests is discarded for a short time, so that its sender gets to see
    the refusal. Calls above a limit end with RESOURCE_EXHAUSTED, which is no verdict: the caller may try again.
    """

    def __init__(self, token: str, limits: ServerLimits | None = None) -> None:
        """Keeps the value that callers must send, and how many of them are served."""
        limits = limits or ServerLimits()
        self._expected = f"Bearer {token}".encode()
        self._calls = _Places(limits.calls)
        self._strangers = _Places(limits.strangers)
        self._strange_log = _StrangeLog()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Passes a call on, or has it refused."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if method.split("/")[1] in OPEN_SERVICES:
            # Single health checks are not counted: nobody may make a healthy server look dead by holding the places.
            is_single = handler is not None and not handler.response_streaming
            return handler if is_single or self._strangers.take() else _BUSY
        if self._is_right(handler_call_details):
            return handler if self._calls.take() else _BUSY
        reads_on = bool(handler and handler.request_streaming) and self._strangers.take()
        # On the wire all four kinds of call look the same; a handler of streams is started before a request is read.
        return grpc.stream_stream_rpc_method_handler(self._refusal_of(method, reads_on))

    def _is_right(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        return len(given) == 1 and hmac.compare_digest(str(given[0]).encode("utf-8", "replace"), self._expected)

    def _refusal_of(self, method: str, reads_on: bool) -> Callable[..., Awaitable[None]]:
        async def refuse(_requests: object, context: rpc.Context) -> None:
            self._strange_log.note(method, rpc.peer_of(context))
            error = TokenRefused("the join token is missing or wrong: give the coordinator's token with --token-file")
            if reads_on:
                await rpc.discard(context.read, _DRAIN_LIMIT)
            await context.abort_with_status(rpc.status_of(error))

        return refuse


class _Places:
    """Counts calls from their beginning to their end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    def take(self) -> bool:
        """Takes a place for the call that this task serves, as long as the task lasts; says whether there was one."""
        if self._taken >= self._limit:
            return False
        self._taken += 1
        task = asyncio.current_task()
        assert task
        task.add_done_callback(self._give_back)
        return True

    def _give_back(self, _task: "asyncio.Task[Any]") -> None:
        self._taken -= 1


class _StrangeLog:
    """Logs callers without the token, one line a second at most: they must not be able to fill the disk."""

    def __init__(self) -> None:
        self._unsaid = 0
        self._silent_until = 0.0

    def note(self, method: str, peer: str) -> None:
        self._unsaid += 1
        if (now := time.monotonic()) < self._silent_until:
            return
        more = f" ({self._unsaid} calls since the last line)" if self._unsaid > 1 else ""
        _log.info("refused %s from %s with %s: the join token is missing or wrong%s", method, peer, _REASON, more)
        self._unsaid, self._silent_until = 0, now + _LOG_PAUSE_S


async def _refuse_busy(_requests: object, context: rpc.Context) -> NoReturn:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the server has as many calls as its limits allow; wait")


_REASON = TokenRefused.reason
_BUSY: Handler = grpc.stream_stream_rpc_method_handler(_refuse_busy)
