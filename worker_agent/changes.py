"""Waiting for something to change, on the event loop.  [shell]"""

import asyncio


class Change:
    """Wakes all who wait, each time that it is announced. Who waits looks again whether it is what was waited for."""

    def __init__(self) -> None:
        """Starts without anybody waiting."""
        self._event = asyncio.Event()

    def announce(self) -> None:
        """Wakes everybody who waits now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        """Waits for the next announcement."""
        await self._event.wait()
