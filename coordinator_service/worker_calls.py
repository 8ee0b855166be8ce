"""Calls to one worker over gRPC: what is sent, what an error means, and how a transfer ends.  [shell]

A transfer's time becomes the deadline of its call, plus a margin in which the answer of an agent that used all of it
arrives; so the result is there half a second after the time at the latest. When the connection breaks, the call runs
out or the caller cancels, nobody knows which bytes still land: every block fails, and the outcome is not quiesced. An
agent that runs stops by the transfer's own deadline, and at once when it is cancelled, whether it is heard or not; one
that stands still goes on copying when it wakes. So the transfer is called quiesced once the agent, asked again, has
answered and the drain has passed, or once nobody listens at its address any more. What an agent still holds then, it
refuses with BLOCK_BUSY.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpc import StatusCode, aio

from ayni import rpc
from ayni.blocks.calls import call_id
from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.messages import sent_by
from ayni.blocks.notifications import Event, EventManager
from ayni.blocks.outcome_messages import outcome_of
from ayni.blocks.transfer_messages import ANSWER_MARGIN_S
from ayni.blocks.transfers import Failure, TransferOptions, TransferOutcome, TransferResult, refused
from ayni.blocks.worker import Notification
from ayni.errors import AyniError, BadRequest, Cancelled, Deadline, Fault, PeerLost, TooLarge, Unsupported
from ayni.v1 import worker_pb2 as pb
from ayni.v1.worker_pb2_grpc import WorkerServiceStub

MAX_REQUEST_BYTES = 4 << 20
"""What a gRPC server takes; a larger request would only look like a broken connection."""

CALL_HEADER = "ayni-call"

_ASK_S = 2.0
"""Longest wait for an agent to say that it is there."""
_ASK_AGAIN_S = 0.2
_REFUSED = "Connection refused"
"""In gRPC's text where a host answers that no process listens on the port; it has no code for that."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
Request = Callable[[], Message]
"""Makes a request; what it raises is the caller's mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Transfer:
    """A transfer under way."""

    call: str
    message: Message
    blocks: Ids
    options: TransferOptions
    rank: int
    started: float
    """Moment on the event loop's clock."""

    @property
    def deadline(self) -> float:
        """Moment by which the agent has stopped."""
        return self.started + self.options.timeout_s


class WorkerCalls:
    """Makes the calls to one worker."""

    def __init__(self, channel: aio.Channel, name: str) -> None:
        """Takes a channel, and what errors and logs call the worker."""
        self._channel = channel
        self._stub: Any = WorkerServiceStub(channel)
        self._name = name
        self._events = EventManager()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def close(self) -> None:
        """Gives up the transfers that are under way and closes the channel.

        Nobody is asked any more then: of a transfer that was not heard of only its time tells when it has ended.
        """
        self._is_closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._channel.close()

    async def ask(self, call: str, request: Request, read: Callable[[Any], _T], timeout_s: float) -> _T:
        """Makes a call and reads its answer.

        Args:
            call: name of the method.
            request: what to ask.
            read: makes a value of the answer.
            timeout_s: time until the deadline.

        Raises:
            AyniError: the worker refused, its answer can't be read, or the deadline has passed.
            ConnectionError: nobody decided anything.
        """
        response = await self._answer(call, request, timeout_s)
        with sent_by(self._name):
            return read(response)

    async def ask_about_keys(
        self,
        call: str,
        request: Request,
        read: Callable[[Any], _T],
        timeout_s: float,
        unanswered: Callable[[Failure], _T],
    ) -> _T:
        """Makes a call that has an answer for each key, and ends at its deadline.

        Args:
            call: name of the method.
            request: what to ask.
            read: makes a value of the answer.
            timeout_s: time until the deadline; the answer may come a little later.
            unanswered: makes the value where there is no answer, and says why.

        Raises:
            AyniError: the worker refused all of the request.
        """
        try:
            response = await self._answer(call, request, timeout_s + ANSWER_MARGIN_S)
        except Deadline as error:
            return unanswered(Failure.of(error))
        except ConnectionError as error:
            return unanswered(Failure.of(PeerLost(str(error), peer=self._name, detail=str(error))))
        try:
            with sent_by(self._name):
                return read(response)
        except AyniError as error:
            return unanswered(Failure.of(error))

    def transfer(
        self, call: str, blocks: Iterable[int], request: Callable[[Ids], Message], options: TransferOptions, rank: int
    ) -> Notification:
        """Starts a transfer; whatever stands in its way becomes its result.

        Args:
            call: name of the method.
            blocks: destination blocks; zeros for objects.
            request: makes the request, given the destination blocks.
            options: their time becomes the call's deadline.
            rank: rank of the outcome.
        """
        what, ids = f"{call} on {self._name}", as_ids(())
        try:
            ids = as_ids(blocks)
            message = _encoded(call, lambda: request(ids))
        except AyniError as error:
            return self._events.completed(_result(refused(rank, ids, error)), what)
        event, loop = self._events.new_event(what), asyncio.get_running_loop()
        transfer = _Transfer(call=call, message=message, blocks=ids, options=options, rank=rank, started=loop.time())
        task = loop.create_task(self._carry(transfer))
        event.notification.on_cancel = partial(_cancel, task)
        self._tasks.add(task)
        task.add_done_callback(partial(self._end, event, transfer))
        return event.notification

    async def _answer(self, call: str, request: Request, timeout_s: float) -> Any:
        message = _encoded(call, request)
        with self._translated(call, timeout_s):
            return await self._send(call, message, timeout_s)

    async def _carry(self, transfer: _Transfer) -> TransferOutcome:
        """Makes the call of a transfer and returns how it ended."""
        try:
            response = await self._send(transfer.call, transfer.message, transfer.options.timeout_s + ANSWER_MARGIN_S)
        except aio.AioRpcError as error:
            refusal = _refusal(error, transfer.call)
            if refusal is not None:
                return refused(transfer.rank, transfer.blocks, refusal)
            return _undone(transfer, self._lost(error, transfer))
        try:
            with sent_by(self._name):
                outcome = outcome_of(response.outcome, transfer.blocks)
        except AyniError as error:
            return _undone(transfer, error)
        return replace(outcome, rank=transfer.rank)

    def _end(self, event: Event, transfer: _Transfer, task: "asyncio.Task[TransferOutcome]") -> None:
        """Tells the result, and later, where that is not known yet, that no byte can land."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            outcome = _undone(transfer, self._given_up(transfer))
        elif error:
            _log.error("%s on %s: an error that nobody foresaw", transfer.call, self._name, exc_info=error)
            outcome = _undone(transfer, Fault(f"{transfer.call} on {self._name}: {error!r}", detail=repr(error)))
        else:
            outcome = task.result()
        event.trigger(_result(outcome))
        if not outcome.quiesced:
            self._settle(event, transfer, task.get_loop().time() if task.cancelled() else transfer.deadline)

    def _settle(self, event: Event, transfer: _Transfer, stops_at: float) -> None:
        """Has the event told, later, that no byte can land.

        Args:
            event: of the transfer.
            transfer: it has its result.
            stops_at: moment from which on an agent that runs starts no further copy.
        """
        loop = asyncio.get_running_loop()
        if self._is_closed:
            loop.call_at(transfer.deadline + transfer.options.drain_s, event.quiesce)
            return
        settling = loop.create_task(self._until_it_runs(stops_at, transfer.options.drain_s))
        self._tasks.add(settling)

        def tell(done: "asyncio.Task[None]") -> None:
            self._tasks.discard(done)
            if done.cancelled():
                loop.call_at(transfer.deadline + transfer.options.drain_s, event.quiesce)
            elif error := done.exception():
                _log.error("%s: can't say whether bytes may still land", self._name, exc_info=error)
            else:
                event.quiesce()

        settling.add_done_callback(tell)

    async def _until_it_runs(self, moment: float, drain_s: float) -> None:
        """Waits until the agent is known to run, or to be gone, after a moment, and has had its time to end copies."""
        await asyncio.sleep(max(0.0, moment - asyncio.get_running_loop().time()))
        while True:
            if await self._runs_or_is_gone():
                break
            await asyncio.sleep(_ASK_AGAIN_S)
        await asyncio.sleep(drain_s)

    async def _runs_or_is_gone(self) -> bool:
        try:
            await self._send("ExportMetadata", pb.ExportMetadataRequest(), _ASK_S)
        except aio.AioRpcError as error:
            return rpc.error_from(error) is not None or _REFUSED in str(error.details())
        return True

    def _send(self, call: str, message: Message, timeout_s: float) -> Any:
        header = ((CALL_HEADER, call_id.get()),) if call_id.get() else ()
        return getattr(self._stub, call)(message, timeout=timeout_s, metadata=header)

    @contextmanager
    def _translated(self, call: str, timeout_s: float) -> Iterator[None]:
        """Turns the errors of a call into ours; raises as `ask`."""
        try:
            yield
        except aio.AioRpcError as error:
            refusal = _refusal(error, call)
            if refusal is None and error.code() is StatusCode.DEADLINE_EXCEEDED:
                refusal = self._late(call, timeout_s)
            raise refusal or ConnectionError(f"{call} to {self._name} broke: {_told(error)}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            raise ConnectionError(f"{call} to {self._name} broke: the connection was closed here") from None

    def _lost(self, error: aio.AioRpcError, transfer: _Transfer) -> AyniError:
        if error.code() is StatusCode.DEADLINE_EXCEEDED:
            return self._late(transfer.call, transfer.options.timeout_s)
        return PeerLost(
            f"{self._name} was lost during {transfer.call}: {_told(error)}; the destination blocks hold undefined "
            "bytes, and more may land until the deadline",
            peer=self._name,
            detail=_told(error),
        )

    def _given_up(self, transfer: _Transfer) -> AyniError:
        if asyncio.get_running_loop().time() >= transfer.deadline:
            return self._late(transfer.call, transfer.options.timeout_s)
        return Cancelled(f"{transfer.call} on {self._name} was given up by its caller")

    def _late(self, call: str, timeout_s: float) -> Deadline:
        return Deadline(
            f"{self._name} did not answer {call} within {timeout_s:g} s", waiting_for=call, timeout=f"{timeout_s:g}"
        )


def _cancel(task: "asyncio.Task[TransferOutcome]") -> None:
    task.cancel()


def _encoded(call: str, request: Request) -> Message:
    """Returns a request that gRPC carries.

    Raises:
        AyniError: a value can't be sent; BAD_REQUEST or TOO_LARGE.
    """
    try:
        message = request()
    except ValueError as error:
        raise BadRequest(f"{call} can't be sent, a value is out of range: {error}", field=call) from error
    size = message.ByteSize()
    if size > MAX_REQUEST_BYTES:
        raise TooLarge(
            f"{call} would be {size} bytes long; at most {MAX_REQUEST_BYTES} are sent, so ask for fewer blocks or keys",
            field=call,
            limit=MAX_REQUEST_BYTES,
            received=size,
        )
    return message


def _refusal(error: aio.AioRpcError, call: str) -> AyniError | None:
    """Returns what the service said; None when the transport ended the call."""
    refusal = rpc.error_from(error)
    if refusal is None and error.code() is StatusCode.UNIMPLEMENTED:
        return Unsupported(error.details() or f"the worker has no {call}", field=call, detail="UNIMPLEMENTED")
    return refusal


def _told(error: aio.AioRpcError) -> str:
    return f"{error.code().name}, {error.details()}"


def _undone(transfer: _Transfer, error: AyniError) -> TransferOutcome:
    """Returns the outcome of a transfer of which nothing is known."""
    elapsed_s = asyncio.get_running_loop().time() - transfer.started
    outcome = refused(transfer.rank, transfer.blocks, error)
    # Without blocks only a refusal tells that it isn't done.
    refusal = None if outcome.failures else outcome.refusal
    return replace(outcome, refusal=refusal, quiesced=False, elapsed_s=elapsed_s)


def _result(outcome: TransferOutcome) -> TransferResult:
    return TransferResult(outcomes=(outcome,))
