"""One gradient stream, from its first frame to its last.  [shell]

On a call of its own the request reader is a task that is never cancelled before the stream is drained: a server that
ends a call while its client is still writing loses the status on the way (grpc issue 36066). The reader posts its
errors to the exchange, so there is one way out, `Exchange.failure`; it also ends the wait for a client that does not
read. On a lane nothing gets lost, and little is sent: all of it is read before the mean is awaited, without tasks.
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
from coordinator_service.lanes import Lane
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
        frame = await self._first(context)
        begin = _begin(b"" if frame is grpc.aio.EOF else frame, begin_class)
        seat = seat_of(begin.round.worker_id, context)
        exchange = self._open(seat, begin)
        try:
            await self._exchange(context, seat, exchange, response_class)
        finally:
            exchange.close()

    async def serve_lane(
        self, lane: Lane, seat_of: Callable[[int, Context], Seat], begin_class: Any, response_class: Any
    ) -> None:
        """Serves one stream on a lane; see `serve`."""
        begin = _begin(await lane.first(self._run.file.timeouts.accept), begin_class)
        seat = seat_of(begin.round.worker_id, lane.context)
        exchange = self._open(seat, begin)
        told = False
        try:
            told = await self._exchange_on_lane(lane, seat, exchange, response_class)
        except AyniError as error:
            told = True
            exchange.fail(error)
            self._run.note_failure(error, seat)
            raise
        finally:
            if not told:
                self._run.broke(seat, exchange)
            exchange.close()

    async def _first(self, context: Context) -> Any:
        """Waits for a stream's first frame."""
        timeout = self._run.file.timeouts.accept.total_seconds()
        try:
            async with asyncio.timeout(timeout):
                return await context.read()
        except TimeoutError:
            raise Deadline(
                f"nothing came on a gradient stream within {timeout:g} s", waiting_for="begin", timeout=timeout
            ) from None

    def _open(self, seat: Seat, begin: Any) -> Exchange:
        try:
            return self._open_round(seat, begin)
        except AyniError as error:
            self._run.note_refusal(error, seat)
            raise

    def _open_round(self, seat: Seat, begin: Any) -> Exchange:
        self._run.check_lease(seat, wire.key(begin.round))
        file, bucket = self._run.file, wire.bucket(begin)
        spec = wire.tensor(begin.round.tensor, bucket, self._run.wire_type, file.max_bucket_bytes)
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
        try:
            await context.write(self._accepted(exchange, response_class))
            while (frame := await exchange.next_frame()) is not None:
                await context.write(frame)
            await context.write(_complete(exchange, response_class))
        except grpc.aio.InternalError as error:
            _log.debug("%s: the client is gone: %s", exchange.label, error)
            return False
        return True

    def _accepted(self, exchange: Exchange, response_class: Any) -> bytes:
        file = self._run.file
        accepted = pb.RoundAccepted(
            chunk_bytes=file.chunk_bytes, window_chunks=file.window_chunks, already_held=exchange.is_held
        )
        frame: bytes = response_class(accepted=accepted).SerializeToString()
        return frame

    async def _exchange_on_lane(self, lane: Lane, seat: Seat, exchange: Exchange, response_class: Any) -> bool:
        """Takes the contribution, then sends the mean; returns whether the worker stayed to its end.

        Where all of it came at once, the worker is told that it is accepted together with the mean.

        Raises:
            AyniError: the contribution was refused or given up.
        """
        exchange.failure.add_done_callback(lambda _: lane.changed.notify())
        accepted: bytes | None = self._accepted(exchange, response_class)
        while not exchange.finished_sending:
            frame = lane.take()
            if frame is None and accepted:
                await lane.write(accepted)
                accepted = None
            if exchange.failed:
                raise exchange.failure.result()
            if frame is not None:
                await exchange.contribute(frame, is_whole=True)
                self._run.note_held()
            elif lane.half_closed:
                return False
            else:
                await lane.changed.wait()
        self._run.note_sent(seat)
        failpoints.hit("coordinator.contribution.complete")
        while (mean := await exchange.next_frame()) is not None:
            if accepted:
                await lane.write(accepted)
                accepted = None
            await lane.write(mean)
        for frame in filter(None, (accepted, _complete(exchange, response_class))):
            await lane.write(frame)
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


def _begin(frame: bytes, begin_class: Any) -> Any:
    field_number, content = frames.decode_frame(frame)
    if field_number != _BEGIN_FIELD or isinstance(content, frames.ChunkView):
        raise BadRequest("the first frame of a gradient stream must be `begin`", field="begin")
    try:
        return begin_class.FromString(bytes(content))
    except DecodeError:
        raise BadRequest("the `begin` frame of a gradient stream can't be read", field="begin") from None


def _complete(exchange: Exchange, response_class: Any) -> bytes:
    complete = wire.complete(exchange.totals(), exchange.num_contributors)
    frame: bytes = response_class(complete=complete).SerializeToString()
    return frame
