"""A word at growing intervals about a wait that goes on.  [shell]

A program of one's own that never set logging up sees warnings and nothing below them; so who waits long for others
says so as a warning, whatever was said once at a lower level.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_S = 10.0
"""How long a wait is before it is spoken of; the next interval is twice as long, and so on."""
LONGEST_S = 600.0

_log = logging.getLogger(__name__)


@contextmanager
def reminders(reason: Callable[[], str]) -> Iterator[None]:
    """Warns, while the block waits on the event loop, that it still does.

    Args:
        reason: returns what is being waited for, as "waiting for ..."; empty for what needs no words now.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    timer: asyncio.TimerHandle | None = None

    def wait(seconds: float) -> None:
        nonlocal timer
        timer = loop.call_later(seconds, remind, seconds)

    def remind(seconds: float) -> None:
        if sentence := reason():
            _log.warning("for %.0f s now: %s", loop.time() - began, sentence)
        wait(min(2 * seconds, LONGEST_S))

    wait(FIRST_S)
    try:
        yield
    finally:
        assert timer
        timer.cancel()
