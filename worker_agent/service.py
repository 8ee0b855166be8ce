"""Face of the block half: WorkerService.  [shell]

The schema of the block half is fixed before its engine, so that clients in any language can be generated once. Until
the engine is there, every call is refused before any of its messages is read, with a text that says so.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from ayni.v1 import worker_pb2

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


class WorkerServicer:
    """Answers every call of WorkerService with UNIMPLEMENTED."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers all calls with a server that has not been started."""
        # A handler of two streams fits calls of every shape, and without a decoder it reads no message.
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            method.name: grpc.stream_stream_rpc_method_handler(_refusal(method.name)) for method in SERVICE.methods
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))


def _refusal(call: str) -> Callable[[Any, Any], Awaitable[NoReturn]]:
    text = (
        f"{call} is not available in this version of the worker: it trains, but does not move blocks yet. "
        "Update the worker, or ask a worker whose version does."
    )

    async def refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

    return refuse
