"""Every call of WorkerService is refused with a text for people, whatever its shape."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from ayni.v1 import worker_pb2, worker_pb2_grpc
from worker_agent.service import SERVICE, WorkerServicer

DEADLINE = 10.0
"""Seconds for one call."""


async def one(request: object) -> AsyncIterator[object]:
    yield request


async def call_once(name: str) -> grpc.aio.AioRpcError:
    """Starts a server, makes one call through the generated stub and returns its refusal."""
    method = SERVICE.methods_by_name[name]
    request = GetMessageClass(method.input_type)()
    server = grpc.aio.server()
    WorkerServicer().add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub_call = getattr(worker_pb2_grpc.WorkerServiceStub(channel), name)
            call = stub_call(one(request) if method.client_streaming else request, timeout=DEADLINE)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await (call.read() if method.server_streaming else call)
            return refusal.value
    finally:
        await server.stop(grace=None)


@pytest.mark.parametrize("name", [method.name for method in SERVICE.methods])
def test_call_is_refused_with_a_text_that_names_it(name):
    refusal = asyncio.run(call_once(name))
    assert refusal.code() is grpc.StatusCode.UNIMPLEMENTED
    assert str(refusal.details()).startswith(f"{name} is not available in this version of the worker: ")


def test_service_has_the_calls_of_both_planes():
    streams = {method.name for method in SERVICE.methods if method.client_streaming or method.server_streaming}
    assert streams == {"ReadBlocks", "WriteBlocks"}
    assert worker_pb2.DESCRIPTOR.package == "ayni.v1"
