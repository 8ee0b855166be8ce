"""One gradient stream, from its first frame to its last.  [shell]

The request reader is a task of its own and is never cancelled before the stream is drained: a server that ends a call
while its client is still writing loses the status on the way (grpc issue 36066). The reader posts its errors to the
exchange, so there is one way out, `Exchange.failure`; it also ends the wait for a
client that does not read.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ayni import failpoints, frames
from ayni.errors import AyniError, BadRequest, Deadline
from ayni.rpc import Context, refuse_stream
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service import wire
from coordinator_service.epochs import Seat
from coordinator_service.live import Offer
from coordinator_service.rounds import Exchange
from coordinator_service.run import Run

_log = logging.getLogger(__name__)

_BEGIN_FIELD = 1


class Contributions:
    """Serves gradient streams for one run."""

    def __init__(self, run: Run) -> None:
        """Serves a run."""
        self._run = run

    async def serve(
        self, context: Context, seat_of: Callable[[int, Context], Seat], begin_class: Any, response_class: Any
    ) -> None:
        """Serves one stream: begin, accepted, chunks both ways, complete.

        Args:
            context: the call; messages are bytes.
            seat_of: finds the caller's seat.
            begin_class: message of the first frame.
            response_class: message of the frames that are no chunks.
        """
        begin = await self._begin(context, begin_class)
        seat = seat_of(begin.round.worker_id, context)
        try:
            exchange = self._open(seat, begin)
        except AyniError as error:
            self._run.note_refusal(error, seat)
            raise
        try:
            await self._exchange(context, seat, exchange, response_class)
        finally:
            exchange.close()

    async def _begin(self, context: Context, begin_class: Any) -> Any:
        timeout = self._run.file.timeouts.accept.total_seconds()
        try:
            async with asyncio.timeout(timeout):
                frame = await context.read()
        except TimeoutError:
            raise Deadline(
                f"nothing came on a gradient stream within {timeout:g} s", waiting_for="begin", timeout=timeout
            ) from None
        field_number, content = frames.decode_frame(b"" if frame is grpc.aio.EOF else frame)
        if field_number != _BEGIN_FIELD or isinstance(content, frames.ChunkView):
            raise BadRequest("the first frame of a gradient stream must be `begin`", field="begin")
        try:
            return begin_class.FromString(bytes(content))
        except DecodeError:
            raise BadRequest("the `begin` frame of a gradient stream can't be read", field="begin") from None

    def _open(self, seat: Seat, begin: Any) -> Exchange:
        self._run.check_lease(seat, wire.key(begin.round))
        file, bucket = self._run.file, wire.bucket(begin)
        spec = wire.tensor(begin.round.tensor, bucket, file.wire_type, file.max_bucket_bytes)
        offer = Offer(
            bucket=bucket,
            spec=spec,
            stats=wire.stats(begin.round.microbatches),
            num_buckets=wire.num_buckets(begin.round),
        )
        return self._run.begin(seat, wire.key(begin.round), offer)

    async def _exchange(self, context: Context, seat: Seat, exchange: Exchange, response_class: Any) -> None:
        reader = asyncio.create_task(self._read(context, seat, exchange))
        writer = asyncio.create_task(self._write(context, exchange, response_class))
        told = False
        try:
            ends: set[asyncio.Future[Any]] = {writer, exchange.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if exchange.failed:
                told = True
                await self._refuse(context, seat, exchange, reader)
            told = writer.result()
        finally:
            for task in (reader, writer):
                task.cancel()
            if not told:
                self._run.broke(seat, exchange)

    async def _write(self, context: Context, exchange: Exchange, response_class: Any) -> bool:
        """Accepts, then sends the mean to its end; returns whether the client took it all.

        Waits for a client that does not read; the contribution's failure ends that.
        """
        file = self._run.file
        accepted = pb.RoundAccepted(
            chunk_bytes=file.chunk_bytes, window_chunks=file.window_chunks, already_held=exchange.is_held
        )
        try:
            await context.write(response_class(accepted=accepted).SerializeToString())
            while (frame := await exchange.next_frame()) is not None:
                await context.write(frame)
            complete = wire.complete(exchange.totals(), exchange.num_contributors)
            await context.write(response_class(complete=complete).SerializeToString())
        except grpc.aio.InternalError as error:
            _log.debug("%s: the client is gone: %s", exchange.label, error)
            return False
        return True

    async def _refuse(self, context: Context, seat: Seat, exchange: Exchange, reader: "asyncio.Task[None]") -> None:
        error = exchange.failure.result()
        self._run.note_failure(error, seat)
        await refuse_stream(context, reader, error, self._run.file.timeouts.drain, exchange.label)

    async def _read(self, context: Context, seat: Seat, exchange: Exchange) -> None:
        """Reads to the end of the stream; after an error, to discard."""
        failed = False
        while (frame := await context.read()) is not grpc.aio.EOF:
            if failed or exchange.failed:
                continue
            try:
                await exchange.contribute(frame)
            except AyniError as error:
                failed = True
                exchange.fail(error)
                continue
            self._run.note_held()
            if exchange.finished_sending:
                self._run.note_sent(seat)
                failpoints.hit("coordinator.contribution.complete")
            await exchange.room()
        if not exchange.finished_sending and not exchange.failed:
            self._run.broke(seat, exchange)
