"""Asks all ranks of a group at once and waits for all of them, within a deadline.  [shell]

No rank is skipped because another one refused, and no answer is dropped: what a rank raises becomes its answer. A
transfer is told as ended after the last rank ended. A rank that has not a short grace after the deadline is cancelled
and counts as late; the group's notification then says that bytes may still land until the rank says otherwise.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ayni.blocks.calls import call_id
from ayni.blocks.notifications import Event, EventManager
from ayni.blocks.transfers import TransferOptions, TransferOutcome, TransferResult, describe
from ayni.blocks.worker import Notification
from ayni.errors import AyniError, Cancelled, Deadline
from coordinator_service.aggregation import Asked, joined_error, outcome_of, refusal_of, undone

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

GRACE_S = 0.75
"""Longest wait beyond a deadline, for ranks that answer at the deadline: more than a stub's margin, less than 1 s."""
CANCEL_S = 0.2
"""Longest wait for what was cancelled."""


@contextmanager
def group_call() -> Iterator[str]:
    """Names the call under way, unless whoever calls named it already; all ranks log the same name."""
    token = call_id.set(call_id.get() or secrets.token_hex(8))
    try:
        yield call_id.get()
    finally:
        call_id.reset(token)


async def ask_all(
    what: str, calls: Sequence[Callable[[], Awaitable[Answer]]], timeout_s: float
) -> list[Answer | Exception]:
    """Calls all ranks at once; returns each one's answer, or the error it ended with, by rank.

    Ranks have `timeout_s`. One that has not answered a grace later, or whose caller gave up, is cancelled.
    """
    tasks: list[asyncio.Task[Answer]] = [asyncio.create_task(_call(call)) for call in calls]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s + GRACE_S)
    finally:
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=CANCEL_S)
    return [_answer(what, rank, task, late, timeout_s) for rank, task in enumerate(tasks)]


async def ask_every(what: str, calls: Sequence[Callable[[], Awaitable[Answer]]], timeout_s: float) -> list[Answer]:
    """Asks all ranks; raises an error that names every rank that failed, once all have answered."""
    with group_call():
        answers = await ask_all(what, calls, timeout_s)
    if errors := {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Exception)}:
        raise joined_error(what, errors)
    return [answer for answer in answers if not isinstance(answer, Exception)]


async def ask_for_keys(
    what: str, calls: Sequence[Callable[[], Awaitable[Answer]]], timeout_s: float
) -> list[Answer | AyniError]:
    """Asks all ranks; what one of them raises is its answer."""
    with group_call():
        answers = await ask_all(what, calls, timeout_s)
    return [
        refusal_of(answer, f"rank {rank}") if isinstance(answer, Exception) else answer
        for rank, answer in enumerate(answers)
    ]


@dataclass(kw_only=True, slots=True)
class RankCall:
    """One rank's part of a transfer."""

    asked: Asked
    start: Callable[[], Notification]
    notification: Notification | None = field(default=None, init=False)
    outcome: TransferOutcome | None = field(default=None, init=False)
    is_quiet: bool = field(default=False, init=False)
    """No byte of the rank can land any more."""

    @property
    def who(self) -> str:
        """Names the rank."""
        return f"rank {self.asked.rank}"

    def begin(self) -> None:
        """Starts; what can't be started has its outcome at once."""
        try:
            self.notification = self.start()
        except Exception as error:
            self.outcome = undone(self.asked, _told(error, self.who), is_refusal=True)

    async def end(self) -> None:
        """Waits for the outcome."""
        assert self.notification is not None
        try:
            self.outcome = outcome_of(self.asked, await self.notification.result())
        except Exception as error:
            self.outcome = undone(self.asked, _told(error, self.who), quiesced=False)

    async def drain(self) -> None:
        """Waits until no byte of the rank can land any more."""
        assert self.notification is not None
        try:
            await self.notification.quiesced()
        except Exception as error:
            _log.error("%s: can't say whether bytes may still land", self.who, exc_info=error)
            return
        self.is_quiet = True
        if self.outcome:
            self.outcome = replace(self.outcome, quiesced=True)

    def cancel(self) -> None:
        """Starts no further copy on this rank."""
        if self.notification is not None:
            self.notification.cancel()


class FanOut:
    """Runs transfers on all ranks."""

    def __init__(self, events: EventManager) -> None:
        """Starts with none under way."""
        self._events = events
        self._running: dict[asyncio.Task[None], Sequence[RankCall]] = {}

    def refuse(self, what: str, asked: Sequence[Asked], error: AyniError) -> Notification:
        """Returns the notification of a transfer that no rank was asked for."""
        outcomes = tuple(undone(one, error, is_refusal=True) for one in asked)
        return self._events.completed(TransferResult(outcomes=outcomes), what)

    def start(self, what: str, calls: Sequence[RankCall], options: TransferOptions) -> Notification:
        """Starts a transfer on all ranks; the notification tells when all have ended, and how."""
        deadline = asyncio.get_running_loop().time() + options.timeout_s
        for call in calls:
            call.begin()
        if all(call.outcome for call in calls):
            return self._events.completed(_result(what, calls), what)
        event = self._events.new_event(what)
        task = asyncio.get_running_loop().create_task(_Transfer(what, calls, event, deadline, options).live())
        event.notification.on_cancel = lambda: _cancel(calls)
        self._running[task] = calls
        task.add_done_callback(self._running.pop)
        return event.notification

    async def close(self) -> None:
        """Gives up what is under way: ranks are cancelled, and waited for a little."""
        running = dict(self._running)
        for calls in running.values():
            _cancel(calls)
        if running:
            await asyncio.wait(running, timeout=GRACE_S)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _Transfer:
    """One transfer of the group."""

    def __init__(
        self, what: str, calls: Sequence[RankCall], event: Event, deadline: float, options: TransferOptions
    ) -> None:
        self._what = what
        self._calls = calls
        self._event = event
        self._deadline = deadline
        self._options = options

    async def live(self) -> None:
        """Ends the event, whatever happens."""
        error: AyniError = self._late()
        try:
            await self._end_all()
        except asyncio.CancelledError:
            error = Cancelled("the group was closed before the transfer had ended")
            _cancel(self._calls)
            raise
        finally:
            self._tell(error)
        await self._quiesce()

    async def _end_all(self) -> None:
        """Waits for all ranks, cancels those that are late, and waits a while for bytes that may still land."""
        open_ = [call for call in self._calls if call.outcome is None]
        await _within(self._remaining(), [call.end() for call in open_])
        _cancel([call for call in open_ if call.outcome is None])
        drain_s = min(self._options.drain_s, self._remaining())
        await _within(drain_s, [call.drain() for call in _unquiesced(open_)])

    def _tell(self, error: AyniError) -> None:
        for call in self._calls:
            call.outcome = call.outcome or undone(call.asked, error, quiesced=call.is_quiet)
        self._event.trigger(_result(self._what, self._calls))

    async def _quiesce(self) -> None:
        """Says that no byte can land once every rank has said so."""
        await asyncio.gather(*(call.drain() for call in _unquiesced(self._calls)))
        if not _unquiesced(self._calls):
            self._event.quiesce()

    def _late(self) -> Deadline:
        timeout_s = self._options.timeout_s
        return Deadline(
            f"the rank had not answered {timeout_s:g} s after the {self._what} began; its destination blocks stay busy "
            "until it does",
            waiting_for=self._what,
            timeout=f"{timeout_s:g}",
        )

    def _remaining(self) -> float:
        return max(0.0, self._deadline + GRACE_S - asyncio.get_running_loop().time())


async def _within(timeout_s: float, waits: Sequence[Awaitable[None]]) -> None:
    """Waits for all, or until the time is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
    finally:
        for task in tasks:
            task.cancel()


def _unquiesced(calls: Sequence[RankCall]) -> list[RankCall]:
    return [call for call in calls if call.notification and not (call.outcome and call.outcome.quiesced)]


def _result(what: str, calls: Sequence[RankCall]) -> TransferResult:
    result = TransferResult(outcomes=tuple(call.outcome for call in calls if call.outcome))
    if not result.is_done:
        _log.warning("group call %s: %s", call_id.get(), describe(result, what))
    return result


def _cancel(calls: Sequence[RankCall]) -> None:
    for call in calls:
        call.cancel()


async def _call(call: Callable[[], Awaitable[Answer]]) -> Answer:
    return await call()


def _answer(
    what: str, rank: int, task: asyncio.Task[Answer], late: Sequence[asyncio.Task[Answer]], timeout_s: float
) -> Answer | Exception:
    if task in late:
        message = f"rank {rank} had not answered after {timeout_s:g} s: {what}"
        return Deadline(message, waiting_for=what, timeout=f"{timeout_s:g}")
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        return task.result()
    return error if isinstance(error, ConnectionError) else _told(error, f"rank {rank}")


def _told(error: BaseException, who: str) -> AyniError:
    """Returns an error as a refusal, and logs where one came from that nobody foresaw."""
    if not isinstance(error, AyniError | ConnectionError | TimeoutError):
        _log.error("%s: an error that nobody foresaw", who, exc_info=error)
    return refusal_of(error, who)
