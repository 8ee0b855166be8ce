"""A service with one method of each kind of call, for tests of what all services share.

Run as a program it serves on a free port until it is killed, and prints the address.
"""
# ruff: noqa: N802 -- methods are named after calls

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.wrappers_pb2 import BytesValue

from ayni.channels import open_sync_channel
from ayni.endpoints import ClientTls, ServerLimits, ServerTls
from ayni.errors import AyniError
from ayni.servers import add_health_and_reflection, add_service, bind, make_server

SERVICE = "ayni.test.Echo"
KINDS = {"One": (False, False), "Many": (False, True), "Gather": (True, False), "Chat": (True, True)}
"""Method of each kind: whether requests and responses are streams."""

LIMIT = 60.0
"""Deadline of a call that blocks."""

REPEATS = 3
"""Responses to one request of Many."""


def _describe() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="ayni/test/echo.proto", package="ayni.test", syntax="proto3")
    file.dependency.append("google/protobuf/wrappers.proto")
    service = file.service.add(name="Echo")
    for name, (client, server) in {**KINDS, "Hang": (False, False), "Absent": (False, False)}.items():
        kind = ".google.protobuf.BytesValue"
        service.method.add(
            name=name, input_type=kind, output_type=kind, client_streaming=client, server_streaming=server
        )
    descriptor_pool.Default().Add(file)


_describe()


class Echo:
    """Answers with what it was sent; lacks the method Absent."""

    def __init__(self, refusal: AyniError | None = None) -> None:
        self.refusal = refusal
        self.calls: list[str] = []
        self.seen: list[Any] = []
        self.metadata: dict[str, Any] = {}
        self.ended = asyncio.Event()

    async def One(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self._begin("One", context)
        self.seen.append(request)
        return request

    async def Many(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            for _ in range(REPEATS):
                yield request
            self._begin("Many", context)
        finally:
            self.ended.set()

    async def Gather(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        self.seen += [request async for request in requests]
        self._begin("Gather", context)
        return BytesValue(value=b"".join(getattr(request, "value", request) for request in self.seen))

    async def Chat(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async for request in requests:
            self.seen.append(request)
            yield request
        self._begin("Chat", context)

    async def Hang(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        await asyncio.Event().wait()

    def _begin(self, method: str, context: grpc.aio.ServicerContext) -> None:
        self.calls.append(method)
        self.metadata = dict(context.invocation_metadata() or ())
        if self.refusal:
            raise self.refusal


@asynccontextmanager
async def serving(
    servicer: object,
    *interceptors: grpc.aio.ServerInterceptor,
    raw: Collection[str] = (),
    tls: ServerTls | None = None,
    listen: str = "127.0.0.1:0",
    limits: ServerLimits | None = None,
) -> AsyncIterator[str]:
    """Serves on a free port and gives the address."""
    server = make_server(*interceptors, limits=limits)
    add_service(server, SERVICE, servicer, raw)
    await add_health_and_reflection(server, [SERVICE])
    address = bind(server, listen, tls)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=None)


def calls(channel: Any, raw: bool = False) -> dict[str, Callable[..., Any]]:
    """Returns what starts a call, for each method."""
    codec = (
        {}
        if raw
        else {"request_serializer": BytesValue.SerializeToString, "response_deserializer": BytesValue.FromString}
    )
    kinds = {**KINDS, "Hang": (False, False), "Absent": (False, False)}
    names = {(False, False): "unary_unary", (False, True): "unary_stream"}
    names |= {(True, False): "stream_unary", (True, True): "stream_stream"}
    return {name: getattr(channel, names[kind])(f"/{SERVICE}/{name}", **codec) for name, kind in kinds.items()}


async def outcome(channel: Any, name: str, requests: list[Any], raw: bool = False) -> list[Any]:
    """Makes one call of a grpc.aio channel and returns all its responses."""
    takes_stream, gives_stream = KINDS.get(name, (False, False))
    call = calls(channel, raw)[name](_each(requests) if takes_stream else requests[0])
    return [response async for response in call] if gives_stream else [await call]


def blocking_outcome(address: str, name: str, request: Any, token: str, tls: ClientTls | None = None) -> list[Any]:
    """Makes one call that blocks and returns all its responses."""
    takes_stream, gives_stream = KINDS[name]
    with open_sync_channel(address, token, tls) as channel:
        response = calls(channel)[name](iter([request]) if takes_stream else request, timeout=LIMIT)
        return list(response if gives_stream else [response])


async def _each(requests: list[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request


async def _main() -> None:
    async with serving(Echo()) as address:
        print(address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
