"""Things that take long to make and have to be closed: made on a thread, and never left without an owner.  [shell]"""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar


class Closable(Protocol):
    """What holds memory, files or connections."""

    def close(self) -> None:
        """Gives them back."""


T = TypeVar("T", bound=Closable)


async def made(make: Callable[..., T], *arguments: object) -> T:
    """Returns what `make` returns, called on a thread.

    Who gives up waiting waits for the thread all the same; what it made is closed then.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make, *arguments))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])
        if not making.cancelled() and making.exception() is None:
            await asyncio.to_thread(making.result().close)
        raise
