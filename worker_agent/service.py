"""Face of the block half: WorkerService. Decode, one call, encode.  [shell]

A worker that moves no blocks refuses every call before any of its messages is read, with a text that says so.

Epochs are fenced here: whatever the caller asks for, an epoch below the newest that was seen is refused.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from ayni.blocks import group_messages, metadata_messages, outcome_messages, transfer_messages
from ayni.blocks.messages import epoch_of, error_of, field, sent_by
from ayni.blocks.transfer_messages import time_left
from ayni.blocks.worker import Notification, RankWorker
from ayni.errors import StaleEpoch
from ayni.rpc import Context, peer_of
from ayni.servers import add_service
from ayni.v1 import worker_pb2 as pb
from worker_agent.blocks import streams
from worker_agent.blocks.streams import Lender

_log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["WorkerService"]
RAW_METHODS = frozenset({"ReadBlocks", "WriteBlocks"})
"""Methods whose streamed messages come and go as bytes; see `worker_agent.blocks.frames`."""

CALL_HEADER = "ayni-call"

_T = TypeVar("_T")


class WorkerServicer:
    """Answers the calls of WorkerService for one worker."""

    def __init__(self, worker: RankWorker | None = None, lender: Lender | None = None) -> None:
        """Serves a worker, and to peers what a lender lends. Without a worker every call is refused."""
        self._worker = worker
        self._lender = lender
        self._newest_epoch = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers all calls with a server that has not been started."""
        if self._worker is not None:
            add_service(server, SERVICE.full_name, self, RAW_METHODS)
            return
        # A handler of two streams fits calls of every shape, and without a decoder it reads no message.
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            method.name: grpc.stream_stream_rpc_method_handler(_refusal(method.name)) for method in SERVICE.methods
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))

    async def ConfigureLayouts(
        self, request: pb.ConfigureLayoutsRequest, context: Context
    ) -> pb.ConfigureLayoutsResponse:
        """Creates layouts and names the worker's place in its group."""
        config = self._read(request, context, group_messages.config_of)
        configured = await self._blocks.configure_layouts(config)
        self._newest_epoch = max(self._newest_epoch, config.epoch)
        return group_messages.configured_message(configured)

    async def ExportMetadata(self, request: pb.ExportMetadataRequest, context: Context) -> pb.ExportMetadataResponse:
        """Says how to reach the worker's layouts."""
        self._read(request, context, _nothing)
        (metadata,) = await self._blocks.export_metadata()
        return pb.ExportMetadataResponse(metadata=metadata_messages.metadata_message(metadata))

    async def ImportMetadata(self, request: pb.ImportMetadataRequest, context: Context) -> pb.ImportMetadataResponse:
        """Makes a remote worker's layouts usable."""
        metadata = self._read(request, context, lambda asked: field(asked, "metadata", metadata_messages.metadata_of))
        (imported,) = await self._blocks.import_metadata((metadata,))
        return group_messages.imported_message(imported)

    async def ConnectRemote(self, request: pb.ConnectRemoteRequest, context: Context) -> pb.ConnectRemoteResponse:
        """Connects with ranks of a remote group."""
        asked = self._read(request, context, group_messages.connect_of)
        layouts = await self._blocks.connect_remote(asked.instance_id, asked.metadata, asked.engines)
        return group_messages.connected_message(layouts)

    async def DisconnectRemote(
        self, request: pb.DisconnectRemoteRequest, context: Context
    ) -> pb.DisconnectRemoteResponse:
        """Forgets a remote group."""
        instance_id = self._read(request, context, group_messages.group_of)
        return pb.DisconnectRemoteResponse(was_connected=await self._blocks.disconnect_remote(instance_id))

    async def HasRemoteMetadata(
        self, request: pb.HasRemoteMetadataRequest, context: Context
    ) -> pb.HasRemoteMetadataResponse:
        """Says whether a remote group is connected."""
        instance_id = self._read(request, context, group_messages.group_of)
        return metadata_messages.remote_state_message(await self._blocks.has_remote_metadata(instance_id))

    async def ExecuteLocalTransfer(
        self, request: pb.ExecuteLocalTransferRequest, context: Context
    ) -> pb.ExecuteLocalTransferResponse:
        """Copies blocks between two of the worker's layouts."""
        asked = self._read_transfer(request, context, transfer_messages.local_transfer_of)
        started = self._blocks.execute_local_transfer(
            asked.source, asked.destination, asked.source_blocks, asked.destination_blocks, asked.options
        )
        return pb.ExecuteLocalTransferResponse(outcome=await _ended(started))

    async def ExecuteRemoteOnboard(
        self, request: pb.ExecuteRemoteOnboardRequest, context: Context
    ) -> pb.ExecuteRemoteOnboardResponse:
        """Pulls blocks of an imported layout, or stored objects."""
        asked = self._read_transfer(request, context, transfer_messages.onboard_of)
        started = self._blocks.execute_remote_onboard(
            asked.source, asked.destination, asked.destination_blocks, asked.options
        )
        return pb.ExecuteRemoteOnboardResponse(outcome=await _ended(started))

    async def ExecuteRemoteOffload(
        self, request: pb.ExecuteRemoteOffloadRequest, context: Context
    ) -> pb.ExecuteRemoteOffloadResponse:
        """Pushes blocks into an imported layout, or into stored objects."""
        asked = self._read_transfer(request, context, transfer_messages.offload_of)
        started = self._blocks.execute_remote_offload(
            asked.source, asked.source_blocks, asked.destination, asked.options
        )
        return pb.ExecuteRemoteOffloadResponse(outcome=await _ended(started))

    async def ExecuteRemoteOnboardForInstance(
        self, request: pb.ExecuteRemoteOnboardForInstanceRequest, context: Context
    ) -> pb.ExecuteRemoteOnboardForInstanceResponse:
        """Pulls blocks of a connected group."""
        asked = self._read_transfer(request, context, transfer_messages.pull_of)
        started = self._blocks.execute_remote_pull(asked.plan, asked.options)
        return pb.ExecuteRemoteOnboardForInstanceResponse(outcome=await _ended(started))

    async def HasBlocks(self, request: pb.HasBlocksRequest, context: Context) -> pb.HasBlocksResponse:
        """Says which keys are stored."""
        asked, timeout_s = self._read(request, context, outcome_messages.has_of), _time_left(context)
        report = await self._blocks.has_blocks(asked.layout, asked.keys, timeout_s)
        return outcome_messages.presences_message(report)

    async def PutBlocks(self, request: pb.PutBlocksRequest, context: Context) -> pb.PutBlocksResponse:
        """Stores blocks as objects."""
        asked, timeout_s = self._read(request, context, outcome_messages.put_of), _time_left(context)
        report = await self._blocks.put_blocks(
            asked.source, asked.source_blocks, asked.keys, asked.lock_validity_s, timeout_s
        )
        return outcome_messages.put_outcomes_message(report)

    async def GetBlocks(self, request: pb.GetBlocksRequest, context: Context) -> pb.GetBlocksResponse:
        """Loads objects into blocks."""
        asked, timeout_s = self._read(request, context, outcome_messages.get_of), _time_left(context)
        report = await self._blocks.get_blocks(asked.keys, asked.destination, asked.destination_blocks, timeout_s)
        return outcome_messages.get_outcomes_message(report)

    async def RemoveBlocks(self, request: pb.RemoveBlocksRequest, context: Context) -> pb.RemoveBlocksResponse:
        """Removes stored objects."""
        asked, timeout_s = self._read(request, context, outcome_messages.remove_of), _time_left(context)
        report = await self._blocks.remove_blocks(asked.layout, asked.keys, timeout_s)
        return outcome_messages.remove_outcomes_message(report)

    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Context) -> AsyncIterator[bytes]:
        """Streams blocks to a peer."""
        lender = self._lender or await _refuse(context, "ReadBlocks")
        async with aclosing(streams.read_blocks(request, lender, context)) as frames:
            async for frame in frames:
                yield frame

    async def WriteBlocks(self, requests: AsyncIterator[bytes], context: Context) -> pb.WriteBlocksResponse:
        """Receives blocks from a peer."""
        lender = self._lender or await _refuse(context, "WriteBlocks")
        return await streams.write_blocks(requests, context, lender)

    @property
    def _blocks(self) -> RankWorker:
        assert self._worker is not None, "without a worker no method is registered"
        return self._worker

    def _read(self, request: Any, context: Context, read: Callable[[Any], _T]) -> _T:
        """Returns what a call asks for, and fences its epoch."""
        call = type(request).__name__.removesuffix("Request")
        group_call = dict(context.invocation_metadata() or ()).get(CALL_HEADER)
        if group_call:
            _log.debug("%s from %s belongs to group call %s", call, peer_of(context), group_call)
        with sent_by(peer_of(context)):
            asked = read(request)
            epoch = epoch_of(getattr(request, "epoch", 0))
        self._fence(epoch)
        return asked

    def _read_transfer(self, request: Any, context: Context, read: Callable[[Any, float], _T]) -> _T:
        timeout_s = _time_left(context)
        return self._read(request, context, lambda message: read(message, timeout_s))

    def _fence(self, epoch: int) -> None:
        if 0 < epoch < self._newest_epoch:
            raise StaleEpoch(
                f"epoch {epoch} is over: this worker was configured in epoch {self._newest_epoch}; configure it again "
                f"in an epoch above {self._newest_epoch}",
                epoch=epoch,
                current_epoch=self._newest_epoch,
            )


async def _ended(notification: Notification) -> pb.TransferOutcome:
    """Waits for a transfer and returns how it ended; a call that is given up gives the transfer up.

    Raises:
        AyniError: the transfer was refused.
    """
    try:
        result = await notification.result()
    except asyncio.CancelledError:
        notification.cancel()
        raise
    (outcome,) = result.outcomes
    if outcome.refusal:
        raise error_of(outcome.refusal)
    return outcome_messages.outcome_message(outcome)


def _nothing(_request: object) -> None:
    """Reads a request that says nothing but its epoch."""


def _time_left(context: Context) -> float:
    return time_left(context.time_remaining())


def _refusal(call: str) -> Callable[[Any, Any], Awaitable[NoReturn]]:
    async def refuse(_requests: object, context: Context) -> NoReturn:
        await _refuse(context, call)

    return refuse


async def _refuse(context: Context, call: str) -> NoReturn:
    text = f"{call} is not available: this worker moves no blocks. Ask a worker that was started with layouts."
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
