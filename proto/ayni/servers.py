"""A gRPC server with a service, a token check, health checking and reflection.  [shell]

server = make_server(TokenInterceptor(token, limits), limits=limits)
add_service(server, "ayni.v1.CoordinatorService", servicer, raw=frozenset({"Gradient"}))
health = add_health_and_reflection(server, ["ayni.v1.CoordinatorService"])
address = bind(server, "127.0.0.1:0")
await server.start()
"""

import inspect
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import aclosing
from functools import wraps
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ayni import rpc
from ayni.credentials import server_credentials
from ayni.doorkeeper import OPEN_SERVICES, Handler, TokenInterceptor
from ayni.endpoints import Address, Keepalive, ServerLimits, ServerTls, check_listening_in_clear, parse_address

__all__ = [
    "TokenInterceptor",
    "add_health_and_reflection",
    "add_service",
    "bind",
    "certificate_names",
    "make_server",
]

_NAME_PROPERTIES = ("x509_common_name", "peer_dns")
_GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")
_LOST_CALLERS = logging.getLogger(__name__)

_HANDLER_MAKERS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def make_server(
    *interceptors: grpc.aio.ServerInterceptor, keepalive: Keepalive | None = None, limits: ServerLimits | None = None
) -> grpc.aio.Server:
    """Returns a server with the options that all of Ayni's servers have."""
    _GRPC_LOG.addFilter(_is_no_lost_caller)
    return grpc.aio.server(interceptors=interceptors, options=rpc.server_options(keepalive or Keepalive(), limits))


def add_service(
    server: grpc.aio.Server, service_name: str, servicer: object, raw: Collection[str] = frozenset()
) -> None:
    """Serves a service whose generated module has been imported.

    Args:
        server: not started yet.
        service_name: full name, such as "ayni.v1.CoordinatorService".
        servicer: has a coroutine function or an asynchronous generator function for each method. An AyniError that
            leaves it becomes a status. A method that it lacks answers UNIMPLEMENTED.
        raw: methods whose streamed messages the servicer takes and gives as bytes; a single request or response of
            such a method stays a message.
    """
    methods = descriptor_pool.Default().FindServiceByName(service_name).methods_by_name
    if unknown := sorted(set(raw) - {name for name, method in methods.items() if _streams(method)}):
        raise ValueError(f"{service_name} has no streaming methods {', '.join(unknown)}")
    handlers = {name: _handler(servicer, method, name in raw) for name, method in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, handlers),))


async def add_health_and_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> health.aio.HealthServicer:
    """Serves health checking (all named services are serving) and reflection; returns the health servicer."""
    names = tuple(service_names)
    servicer = health.aio.HealthServicer()
    for name in ("", *names):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((*names, *sorted(OPEN_SERVICES)), server)
    return servicer


def bind(server: grpc.aio.Server, listen: str, tls: ServerTls | None = None, insecure: bool = False) -> str:
    """Makes the server listen, and returns the address with the port that it got.

    Args:
        server: not started yet.
        listen: host:port; port 0 takes a free one.
        tls: certificate and key; None or an empty one speaks in clear.
        insecure: speak in clear although others may read along.

    Raises:
        SettingsError: the address or the TLS files are wrong, or TLS is missing.
        OSError: the port is in use, or the system refuses it.
    """
    tls = tls or ServerTls()
    address = parse_address(listen)
    check_listening_in_clear(address, tls, insecure)
    credentials = server_credentials(tls) if tls.is_on else None
    try:
        port = (
            server.add_secure_port(str(address), credentials) if credentials else server.add_insecure_port(str(address))
        )
    except RuntimeError:
        port = 0
    if not port:
        raise OSError(_why_unbound(address))
    return str(Address(host=address.host, port=port))


def certificate_names(context: rpc.Context) -> tuple[str, ...]:
    """Returns the names in a caller's certificate, its common name first; none where it showed no certificate."""
    found = context.auth_context() or {}
    values = [value for key in _NAME_PROPERTIES for value in found.get(key, ())]
    return tuple(dict.fromkeys(value.decode("utf-8", "replace") for value in values))


def _streams(method: MethodDescriptor) -> bool:
    return bool(method.client_streaming or method.server_streaming)


def _handler(servicer: object, method: MethodDescriptor, raw: bool) -> Handler:
    request: Any = message_factory.GetMessageClass(method.input_type)
    response: Any = message_factory.GetMessageClass(method.output_type)
    return _HANDLER_MAKERS[method.client_streaming, method.server_streaming](
        _behaviour(servicer, method, request.FromString),
        request_deserializer=request.FromString if method.client_streaming and not raw else None,
        response_serializer=None if raw and method.server_streaming else response.SerializeToString,
    )


def _behaviour(servicer: object, method: MethodDescriptor, decode: Callable[[bytes], Any]) -> Callable[..., Any]:
    handler = getattr(servicer, method.name, None)
    if handler is None or handler.__module__.endswith("_pb2_grpc"):
        return _unimplemented(method)
    if not (inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler)):
        raise TypeError(f"{type(servicer).__name__}.{method.name} must be an async function")
    return rpc.refusing(handler if method.client_streaming else _decoding(handler, decode), method.name)


def _decoding(handler: Callable[..., Any], decode: Callable[[bytes], Any]) -> Callable[..., Any]:
    """Has a single request decoded where a damaged one becomes a refusal; gRPC would call it a bug of the server."""
    if inspect.isasyncgenfunction(handler):

        @wraps(handler)
        async def stream(data: bytes, context: rpc.Context) -> AsyncIterator[Any]:
            async with aclosing(handler(decode(data), context)) as responses:
                async for response in responses:
                    yield response

        return stream

    @wraps(handler)
    async def single(data: bytes, context: rpc.Context) -> Any:
        return await handler(decode(data), context)

    return single


def _unimplemented(method: MethodDescriptor) -> Callable[..., Awaitable[None]]:
    async def refuse(_request: object, context: rpc.Context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method.full_name} is not implemented by this server")

    return refuse


def _is_no_lost_caller(record: logging.LogRecord) -> bool:
    """Says whether an event of gRPC's is anything else than an answer whose caller has gone.

    gRPC logs that as an error, with a traceback, so that any caller could fill the log.
    """
    if not record.exc_info or type(record.exc_info[1]).__name__ != "ExecuteBatchError":
        return True
    _LOST_CALLERS.debug("a caller went away before it had all of an answer: %s", record.getMessage())
    return False


def _why_unbound(address: Address) -> str:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
        why = "gRPC could not bind it"
    except OSError as error:
        return unbound(address, error)
    return _unbound(address, why)


def unbound(address: Address, error: OSError) -> str:
    """Returns the sentence that says why nothing can listen at an address."""
    return _unbound(address, os.strerror(error.errno) if error.errno and error.errno > 0 else str(error))


def _unbound(address: Address, why: str) -> str:
    return f"can't listen on {address}: {why}; stop the other process or choose another port (port 0 takes a free one)"
