"""A gRPC server with a service, a token check, health checking and reflection.  [shell]

server = make_server(TokenInterceptor(token))
add_service(server, "ayni.v1.CoordinatorService", servicer, raw=frozenset({"Gradient"}))
health = add_health_and_reflection(server, ["ayni.v1.CoordinatorService"])
address = bind(server, "127.0.0.1:0")
await server.start()
"""

import hmac
import inspect
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from datetime import timedelta
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ayni import rpc
from ayni.credentials import server_credentials
from ayni.endpoints import Address, Keepalive, ServerTls, check_listening_in_clear, parse_address
from ayni.errors import TokenRefused

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

OPEN_SERVICES = frozenset({health.SERVICE_NAME, reflection.SERVICE_NAME})
"""Services that are answered without a token."""

_STRANGER_DRAIN_LIMIT = timedelta(seconds=2)

_HANDLER_MAKERS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def make_server(*interceptors: grpc.aio.ServerInterceptor, keepalive: Keepalive | None = None) -> grpc.aio.Server:
    """Returns a server with the options that all of Ayni's servers have."""
    return grpc.aio.server(interceptors=interceptors, options=rpc.server_options(keepalive or Keepalive()))


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


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without the join token; no handler sees it and no request is decoded.

    Health and reflection are open. A stream of requests is discarded for a short time, so that its sender gets to see
    the refusal.
    """

    def __init__(self, token: str) -> None:
        """Keeps the value that callers must send."""
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Passes a call on, or has it refused."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if method.split("/")[1] in OPEN_SERVICES or self._is_right(handler_call_details):
            return handler
        # On the wire all four kinds of call look the same; a handler of streams is started before a request is read.
        return grpc.stream_stream_rpc_method_handler(_refusal_of(method, bool(handler and handler.request_streaming)))

    def _is_right(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        return len(given) == 1 and hmac.compare_digest(str(given[0]).encode(), self._expected)


def _refusal_of(method: str, streams_requests: bool) -> Callable[..., Awaitable[None]]:
    async def refuse(_requests: object, context: rpc.Context) -> None:
        error = TokenRefused("the join token is missing or wrong: give the coordinator's token with --token-file")
        if streams_requests:
            await rpc.refuse_stream(context, context.read, error, _STRANGER_DRAIN_LIMIT, method)
        await rpc.abort(context, error, method)

    return refuse


def _streams(method: MethodDescriptor) -> bool:
    return bool(method.client_streaming or method.server_streaming)


def _handler(servicer: object, method: MethodDescriptor, raw: bool) -> Handler:
    request: Any = message_factory.GetMessageClass(method.input_type)
    response: Any = message_factory.GetMessageClass(method.output_type)
    return _HANDLER_MAKERS[method.client_streaming, method.server_streaming](
        _behaviour(servicer, method),
        request_deserializer=None if raw and method.client_streaming else request.FromString,
        response_serializer=None if raw and method.server_streaming else response.SerializeToString,
    )


def _behaviour(servicer: object, method: MethodDescriptor) -> Callable[..., Any]:
    handler = getattr(servicer, method.name, None)
    if handler is None or handler.__module__.endswith("_pb2_grpc"):
        return _unimplemented(method)
    if not (inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler)):
        raise TypeError(f"{type(servicer).__name__}.{method.name} must be an async function")
    return rpc.refusing(handler, method.name)


def _unimplemented(method: MethodDescriptor) -> Callable[..., Awaitable[None]]:
    async def refuse(_request: object, context: rpc.Context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method.full_name} is not implemented by this server")

    return refuse


def _why_unbound(address: Address) -> str:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
        why = "gRPC could not bind it"
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return f"can't listen on {address}: {why}; stop the other process or choose another port (port 0 takes a free one)"
