"""Face of the slices that this worker reduces for others: PeerService, one stream from first to last frame.  [shell]

The request reader is a task of its own and is never cancelled before the stream is drained: a server that ends a call
while its client is still writing loses the status on the way (grpc issue 36066). A stream that breaks ends nothing: its
lease begins again, or the coordinator says that there is another group.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ayni import frames
from ayni.endpoints import ServerLimits, ServerTls
from ayni.errors import AyniError, BadRequest, Deadline, TokenRefused
from ayni.rpc import Context, refuse_stream
from ayni.servers import TokenInterceptor, add_health_and_reflection, add_service, bind, make_server
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import peer_pb2
from worker_agent.peer_messages import slice_offer_of
from worker_agent.slice_contribution import WINDOW_CHUNKS, SliceContribution
from worker_agent.slice_offers import GROUP_HEADER
from worker_agent.slice_rounds import SliceRounds

_log = logging.getLogger(__name__)

SERVICE = peer_pb2.DESCRIPTOR.services_by_name["PeerService"]

_RAW_METHODS = frozenset({"ReduceSlice"})
_BEGIN_FIELD = 1
_BEGIN_S = 20.0
_DRAIN = timedelta(seconds=10)
_GRACE_S = 2.0


class PeerServicer:
    """Answers the calls of PeerService for one worker."""

    def __init__(self, rounds: SliceRounds) -> None:
        """Serves the rounds of this worker's slices."""
        self._rounds = rounds

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers all calls with a server that has not been started."""
        add_service(server, SERVICE.full_name, self, _RAW_METHODS)

    async def ReduceSlice(self, _: object, context: Context) -> None:
        """Reduces one slice of a bucket."""
        secret = dict(context.invocation_metadata() or ()).get(GROUP_HEADER)
        if not secret:
            raise TokenRefused(f"the call has no {GROUP_HEADER}: only members of an exchange group may contribute")
        begin = begin_of(await _first(context))
        contribution = await self._rounds.admit(slice_offer_of(begin), str(secret))
        try:
            await _exchange(context, contribution)
        finally:
            contribution.close()


@asynccontextmanager
async def listening(rounds: SliceRounds, listen: str, token: str, tls: ServerTls, insecure: bool) -> AsyncIterator[str]:
    """Serves nothing but PeerService, for a worker without a service of its own; yields the address that it got.

    Raises:
        OSError: the port is in use.
        SettingsError: the address is wrong, or TLS is missing.
    """
    limits = ServerLimits()
    server = make_server(TokenInterceptor(token, limits), limits=limits)
    PeerServicer(rounds).add_to(server)
    await add_health_and_reflection(server, [SERVICE.full_name])
    address = bind(server, listen, tls, insecure)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=_GRACE_S)


async def _first(context: Context) -> bytes:
    try:
        async with asyncio.timeout(_BEGIN_S):
            frame = await context.read()
    except TimeoutError:
        sentence = f"nothing came on a stream for a slice within {_BEGIN_S:g} s"
        raise Deadline(sentence, waiting_for="begin", timeout=_BEGIN_S) from None
    return b"" if frame is grpc.aio.EOF else frame


def begin_of(frame: bytes) -> peer_pb2.SliceBegin:
    """Returns what the first frame of a contribution says; raises BadRequest where it is another one."""
    number, content = frames.decode_frame(frame)
    if number != _BEGIN_FIELD or isinstance(content, frames.ChunkView):
        raise BadRequest("the first frame of a stream for a slice must be `begin`", field="begin")
    try:
        return peer_pb2.SliceBegin.FromString(bytes(content))
    except DecodeError:
        raise BadRequest("the `begin` frame of a stream for a slice can't be read", field="begin") from None


async def _exchange(context: Context, contribution: SliceContribution) -> None:
    """Takes the contribution and gives the mean; refuses so that the client hears of it."""
    reader = asyncio.create_task(_read(context, contribution))
    writer = asyncio.create_task(_write(context, contribution))
    try:
        ends: set[asyncio.Future[Any]] = {writer, contribution.failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if contribution.failed and not (writer.done() and writer.exception() is None):
            error = contribution.failure.result()
            await refuse_stream(context, reader, error, _DRAIN, contribution.offer.name)
        writer.result()
    finally:
        for task in (reader, writer):
            task.cancel()
        await asyncio.wait({reader, writer})
        for task in (reader, writer):
            task.cancelled() or task.exception()


async def _write(context: Context, contribution: SliceContribution) -> None:
    """Accepts, then sends the mean to its end; a client that is gone ends it."""
    live, chunk_bytes = contribution.live, contribution.chunk_bytes
    accepted = pb.RoundAccepted(chunk_bytes=chunk_bytes, window_chunks=WINDOW_CHUNKS, already_held=contribution.is_held)
    try:
        await context.write(peer_pb2.ReduceSliceResponse(accepted=accepted).SerializeToString())
        while (chunk := await contribution.next_chunk()) is not None:
            await context.write(live.frame(*chunk))
        complete = peer_pb2.ReduceSliceResponse(complete=complete_of(contribution))
        await context.write(complete.SerializeToString())
    except grpc.aio.InternalError as error:
        _log.debug("%s: the client is gone: %s", contribution.offer.name, error)


async def _read(context: Context, contribution: SliceContribution) -> None:
    """Reads to the end of the stream; after an error, to discard."""
    while (frame := await context.read()) is not grpc.aio.EOF:
        if contribution.failed:
            continue
        try:
            contribution.arrive(frame)
        except AyniError as error:
            contribution.fail(error)
            continue
        await contribution.room()


def complete_of(contribution: SliceContribution) -> pb.RoundComplete:
    """Returns the last frame's content."""
    reduction = contribution.live.round
    loss, num_correct, num_predictions = contribution.live.totals()
    return pb.RoundComplete(
        num_contributors=reduction.num_contributors,
        total_weight=reduction.total_weight,
        global_loss=loss,
        num_correct=num_correct,
        num_predictions=num_predictions,
    )
