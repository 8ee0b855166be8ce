"""Events and the notification that a transfer gives back.  [shell]

An event is the one way in which a transfer ends: `trigger` with its result, or `poison` with an error, which becomes a
result too. Waiters never cancel a transfer by giving up: only `cancel` does.
"""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from ayni.blocks.transfers import TransferFailed, TransferResult


def _nothing() -> None:
    """Cancels what can't be cancelled any more."""


class TransferCompleteNotification:
    """Tells how a transfer ended; see `ayni.blocks.worker.Notification`."""

    def __init__(self, ended: asyncio.Future[TransferResult], quiesced: asyncio.Future[None], what: str = "transfer"):
        """Takes the two futures of a transfer; use `EventManager` to get one."""
        self._ended = ended
        self._quiesced = quiesced
        self._what = what
        self.on_cancel: Callable[[], None] = _nothing
        """What `cancel` calls while the transfer has not ended."""

    def __await__(self) -> Generator[Any, None, TransferResult]:
        """Waits for the end; raises TransferFailed unless every block of every rank is done."""
        result = yield from self.result().__await__()
        if not result.is_done:
            raise TransferFailed(result, self._what)
        return result

    async def result(self) -> TransferResult:
        """Waits for the end; returns the result, whatever it is."""
        return await asyncio.shield(self._ended)

    async def quiesced(self) -> None:
        """Waits until no byte of the transfer can land any more."""
        await asyncio.shield(self._quiesced)

    def cancel(self) -> None:
        """Starts no further copy."""
        if not self._ended.done():
            self.on_cancel()

    def could_yield(self) -> bool:
        """Says whether the end is still to come."""
        return not self._ended.done()


class Event:
    """The end of one transfer, from the side of whoever carries it out. Ends once; later calls change nothing."""

    def __init__(self, what: str) -> None:
        """Makes an event on the running loop; `what` names the transfer in errors."""
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[TransferResult] = loop.create_future()
        self._quiesced: asyncio.Future[None] = loop.create_future()
        self.notification = TransferCompleteNotification(self._ended, self._quiesced, what)

    def trigger(self, result: TransferResult) -> None:
        """Ends the transfer. When the result says that it is quiesced, so does this."""
        if not self._ended.done():
            self._ended.set_result(result)
        if result.quiesced:
            self.quiesce()

    def quiesce(self) -> None:
        """Says that no byte can land any more."""
        if not self._quiesced.done():
            self._quiesced.set_result(None)


class EventManager:
    """Makes events and joins notifications."""

    def new_event(self, what: str = "transfer") -> Event:
        """Returns a new event; call it on the running loop."""
        return Event(what)

    def completed(self, result: TransferResult | None = None, what: str = "transfer") -> TransferCompleteNotification:
        """Returns a notification of something that has ended already."""
        event = Event(what)
        event.trigger(result or TransferResult())
        return event.notification
