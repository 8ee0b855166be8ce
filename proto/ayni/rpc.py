"""What every client and server of Ayni does with gRPC: refusals as statuses, options, the allocator.  [shell]

A refusal is an `AyniError`. On its way out it becomes a status with an ErrorInfo detail, on its way in the same class
again; a status without that detail means that the transport broke. gRPC drops metadata above 8 KiB, and what a caller
sent may be part of a refusal, so a status is trimmed to fit.

A server that ends a call while the client is still writing usually loses its status on the way. Where data may be
under way, a handler refuses with `refuse_stream`.
"""

import asyncio
import ctypes
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from datetime import timedelta
from functools import wraps
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from ayni import errors
from ayni.endpoints import Keepalive, ServerLimits
from ayni.errors import AyniError, BadRequest

logger = logging.getLogger(__name__)

DOMAIN = "ayni"
"""Who gives the reasons of errors.proto, as ErrorInfo says it."""

REASON_KEY = "ayni-reason"
"""Trailing metadata with the reason alone, for languages in which reading ErrorInfo takes more than a line."""

MESSAGE_BYTES = 1024
METADATA_BYTES = 1536
METADATA_VALUES = 16

DRAIN_LIMIT = timedelta(seconds=10)
"""Time for which a refused client is still listened to."""

Context = grpc.aio.ServicerContext[Any, Any]
Options = tuple[tuple[str, int | str], ...]
Source = AsyncIterator[Any] | Callable[[], Awaitable[Any]] | asyncio.Future[Any]

_DETAILS_KEY = "grpc-status-details-bin"
_LEAST_PING_INTERVAL_MS = 500
_PING_STRIKES = 2
_MALLOPT = ((-3, 32 << 20), (-1, 256 << 20), (-2, 64 << 20))
"""M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD; any one alone is worse than none."""

_BY_CODE: dict[int, type[AyniError]] = {
    grpc.StatusCode[cls.code].value[0]: cls for cls in AyniError.__subclasses__() if cls.reason == AyniError.reason
}


class _Status(grpc.Status):
    def __init__(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str | bytes], ...]
    ) -> None:
        self.code = code
        self.details = details
        self.trailing_metadata = trailing_metadata


def status_of(error: AyniError) -> grpc.Status:
    """Returns the status that tells a client of a refusal; trimmed so that gRPC carries it whole."""
    code = grpc.StatusCode[error.code]
    message = trimmed_message(error)
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(info_of(error))
    trailing = ((_DETAILS_KEY, status.SerializeToString()), (REASON_KEY, error.reason))
    return _Status(code, message, trailing)


def info_of(error: AyniError) -> error_details_pb2.ErrorInfo:
    """Returns what a status says of a refusal beside its sentence, trimmed."""
    return error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_trimmed_metadata(error.metadata))


def trimmed_message(error: AyniError) -> str:
    """Returns a refusal's sentence, cut where it is too long for a status."""
    return _trimmed(error.message, MESSAGE_BYTES)


def error_from(error: grpc.RpcError) -> AyniError | None:
    """Returns the refusal that a failed call carries; None when the transport, not a service, ended the call.

    A reason that this version doesn't know becomes the class of its status code, with the word in metadata["reason"].
    """
    status = _rich_status(error)
    info = error_details_pb2.ErrorInfo()
    if not any(detail.Unpack(info) and info.domain == DOMAIN for detail in status.details):
        return None
    cls = errors.BY_REASON.get(info.reason)
    refusal = (cls or _BY_CODE.get(status.code, AyniError))(status.message)
    refusal.metadata = dict(info.metadata) | ({} if cls else {"reason": info.reason})
    return refusal


async def abort(context: Context, error: AyniError, method: str = "") -> NoReturn:
    """Ends a call with a refusal, and logs it. For calls whose client isn't writing any more."""
    logger.info("refused %s from %s with %s: %s", method or "a call", peer_of(context), error.reason, error)
    await context.abort_with_status(status_of(error))


async def refuse_stream(
    context: Context, source: Source, error: AyniError, limit: timedelta = DRAIN_LIMIT, method: str = ""
) -> NoReturn:
    """Ends a call with a refusal that arrives whole although the client may still be writing.

    Args:
        context: the call.
        source: what is read and discarded until it ends: the handler's request iterator, `context.read`, or the task
            that reads it already. A task that was cancelled before is of no use.
        error: the refusal.
        limit: how long to go on; then the call ends all the same.
        method: name of the call, for the log.
    """
    await discard(source, limit)
    await abort(context, error, method)


async def discard(source: Source, limit: timedelta) -> None:
    """Reads to the end of a stream, for a limited time; see `refuse_stream`."""
    reader = source if isinstance(source, asyncio.Future) else asyncio.ensure_future(_discarded(source))
    try:
        await asyncio.wait({reader}, timeout=limit.total_seconds())
    finally:
        reader.cancel()
        reader.add_done_callback(lambda done: done.cancelled() or done.exception())


def refusing(handler: Callable[..., Any], method: str = "") -> Callable[..., Any]:
    """Wraps a grpc.aio handler so that an AyniError that leaves it becomes a status, logged once.

    A message of a stream that can't be decoded is refused likewise, wherever the handler reads it.
    """
    if inspect.isasyncgenfunction(handler):

        @wraps(handler)
        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async with aclosing(handler(request, context)) as responses:
                    async for response in responses:
                        yield response
            except (AyniError, DecodeError) as error:
                await abort(context, as_refusal(error), method)

        return stream

    @wraps(handler)
    async def single(request: Any, context: Context) -> Any:
        try:
            return await handler(request, context)
        except (AyniError, DecodeError) as error:
            await abort(context, as_refusal(error), method)

    return single


def peer_of(context: Context) -> str:
    """Returns where a call comes from, such as "127.0.0.1:50412"."""
    return unquote(context.peer()).removeprefix("ipv4:").removeprefix("ipv6:")


def client_options(keepalive: Keepalive, loopback: bool) -> Options:
    """Returns the options of every channel. The limit on received messages stays at gRPC's 4 MiB."""
    return (
        *_keepalive_options(keepalive),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A new channel dials at once, whatever pauses another one to the same address is in.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0 if loopback else 1),
    )


def server_options(keepalive: Keepalive, limits: ServerLimits | None = None) -> Options:
    """Returns the options of every server. A port that is in use is an error; clients may ping.

    The limit on received messages stays at gRPC's 4 MiB.
    """
    limits = limits or ServerLimits()
    return (
        *_keepalive_options(keepalive),
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", _PING_STRIKES),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.max_concurrent_streams", limits.connection_calls),
        ("grpc.server.max_pending_requests", limits.waiting_calls),
        ("grpc.server.max_pending_requests_hard_limit", 2 * limits.waiting_calls),
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", 2 * limits.metadata_bytes),
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.handshake)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.idle)),
    )


def tune_allocator() -> bool:
    """Makes glibc keep freed memory, which doubles gRPC's rate; returns whether it was done.

    Call once, at the start of the process, before threads are started. Another C library is left alone.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt, _glibc = library.mallopt, library.gnu_get_libc_version
    except (AttributeError, OSError, TypeError):
        return False
    return all([mallopt(setting, size) == 1 for setting, size in _MALLOPT])


def _keepalive_options(keepalive: Keepalive) -> Options:
    timeout_ms = _milliseconds(keepalive.timeout)
    return (
        ("grpc.keepalive_time_ms", _milliseconds(keepalive.interval)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def _milliseconds(time: timedelta) -> int:
    return round(time.total_seconds() * 1000)


def as_refusal(error: AyniError | DecodeError) -> AyniError:
    """Returns the refusal that tells a caller of an error of its own."""
    if isinstance(error, AyniError):
        return error
    return BadRequest(f"a message can't be read, since it is damaged or of another schema: {error}", field="request")


async def _discarded(source: AsyncIterator[Any] | Callable[[], Awaitable[Any]]) -> None:
    if callable(source):
        while await source() is not grpc.aio.EOF:
            pass
        return
    async for _ in source:
        pass


def _rich_status(error: grpc.RpcError) -> status_pb2.Status:
    trailing: Iterable[tuple[str, Any]] = getattr(error, "trailing_metadata", tuple)() or ()
    content = next((value for key, value in trailing if key == _DETAILS_KEY), b"")
    try:
        return status_pb2.Status.FromString(content)
    except DecodeError:
        return status_pb2.Status()


def _trimmed(text: str, limit: int) -> str:
    encoded = text.encode("utf-8", "replace")
    return encoded.decode() if len(encoded) <= limit else encoded[: limit - 3].decode("utf-8", "ignore") + "..."


def _trimmed_metadata(metadata: dict[str, str]) -> dict[str, str]:
    share = METADATA_BYTES // max(1, min(len(metadata), METADATA_VALUES))
    return {key: _trimmed(value, share) for key, value in list(metadata.items())[:METADATA_VALUES]}
