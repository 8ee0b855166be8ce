"""Waking those who wait for a change.  [shell]"""

import asyncio


class Signal:
    """Wakes every waiter at each `notify`. Waiters check their condition again; nothing is remembered."""

    def __init__(self) -> None:
        """Starts without waiters."""
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all that wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Waits for the next `notify`. The caller owns the deadline."""
        await self._event.wait()
