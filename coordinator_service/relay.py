"""Reads of blocks that the coordinator passes on to agents that nobody can dial.  [shell]

A worker that reads blocks of such an agent calls the agent's own ReadBlocks at the coordinator's address, and says in
the call's metadata whom it means. Frames are passed on as they are: the coordinator does not look into them.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import grpc
from grpc import aio

from ayni.errors import BadRequest, UnknownPeer, UnknownWorker
from ayni.rpc import Context, refusing
from coordinator_service.attachments import Attachments

SERVICE = "ayni.v1.WorkerService"
METHOD = "ReadBlocks"

RELAY_HEADER = "ayni-relay"
SESSION_HEADER = "ayni-session"


def add_relay(server: aio.Server, attachments: Attachments, has_session: Callable[[str], bool]) -> None:
    """Serves ReadBlocks of attached agents.

    Args:
        server: not started yet.
        attachments: the agents.
        has_session: says whether a live member has this session; nobody else may read.
    """

    async def read_blocks(request: bytes, context: Context) -> AsyncGenerator[bytes]:
        headers = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        worker_id = _target(headers, attachments, has_session)
        call = None
        try:
            call = await attachments.open(worker_id, METHOD, request, context.time_remaining(), is_unary=False)
            while (frame := await call.read()) is not aio.EOF:
                yield frame
        except aio.AioRpcError as error:
            trailing: Any = tuple(error.trailing_metadata() or ())
            await context.abort(error.code(), error.details() or "", trailing)
        finally:
            if call:
                call.cancel()

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(refusing(read_blocks, METHOD))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))


def _target(headers: Mapping[str, str], attachments: Attachments, has_session: Callable[[str], bool]) -> int:
    """Returns the number of the agent that is meant."""
    if not has_session(headers.get(SESSION_HEADER, "")):
        raise UnknownWorker("only members of the run may read other workers' blocks here; join first", worker_id="")
    target = headers.get(RELAY_HEADER, "")
    if not target.isdecimal() or len(target) > 10:
        raise BadRequest(
            f"this is the coordinator, which has no blocks: name the worker that is meant in {RELAY_HEADER}",
            field=RELAY_HEADER,
        )
    if not attachments.is_attached(int(target)):
        raise UnknownPeer(
            f"worker {target} is not attached to the coordinator, so its blocks can't be read through it",
            instance_id="",
            rank=target,
        )
    return int(target)
