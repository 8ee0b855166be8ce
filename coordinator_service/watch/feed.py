"""One stream of views for all who look at the page.  [shell]

A view is made for all of them together, and only while somebody looks. Nobody has a queue: each takes the newest one
when it has written the last, so that a slow reader skips some; one that takes nothing for too long is dropped.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from coordinator_service.signals import Signal

_log = logging.getLogger(__name__)

MOST_READERS = 32
_SHORTEST_S = 0.5
"""Between two views."""
_LONGEST_S = 1.0
"""After the shortest time, if nothing happens."""


class Feed:
    """Makes views and hands them out."""

    def __init__(self, make: Callable[[], bytes], next_change: Callable[[float, float], Awaitable[None]]) -> None:
        """Starts without readers.

        Args:
            make: returns the view of now, encoded.
            next_change: waits for a first time, then for something new, at most for a second one.
        """
        self._make = make
        self._next_change = next_change
        self._changed = Signal()
        self._newest, self._number = b"", 0
        self._making: asyncio.Task[None] | None = None
        self.num_readers = 0

    @property
    def is_full(self) -> bool:
        """Whether it takes no more readers."""
        return self.num_readers >= MOST_READERS

    async def views(self) -> AsyncGenerator[bytes]:
        """Yields the newest view, again and again, for ever."""
        self.num_readers += 1
        self._making = self._making or asyncio.create_task(self._keep_making())
        seen = 0
        try:
            yield self._make()
            while True:
                while seen == self._number:
                    await self._changed.wait()
                seen = self._number
                yield self._newest
        finally:
            self.num_readers -= 1
            if not self.num_readers:
                await self.close()

    async def close(self) -> None:
        """Makes no more views."""
        making, self._making = self._making, None
        if making:
            making.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await making

    async def _keep_making(self) -> None:
        while True:
            await self._next_change(_SHORTEST_S, _LONGEST_S)
            try:
                self._newest = self._make()
            except Exception:  # Training goes on, and so do those who look.
                _log.exception("the dashboard's view can't be made")
                continue
            self._number += 1
            self._changed.notify()
