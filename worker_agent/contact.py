"""First contact: trying until the coordinator answers.  [shell]"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from ayni.channels import UNREACHED
from worker_agent.backoff import delays
from worker_agent.faults import CoordinatorUnreachable, NotACoordinator, TransportBroken

_log = logging.getLogger(__name__)

T = TypeVar("T")

_FOREIGN = ("UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED")
"""Codes that say that somebody answers, but not a coordinator, or not to us."""


async def first_contact(call: Callable[[timedelta], Awaitable[T]], address: str, allowance: timedelta) -> T:
    """Makes a call that may be repeated, until it is answered.

    Args:
        call: makes one try within the given time.
        address: of the coordinator, for people.
        allowance: how long to go on.

    Raises:
        AyniError: the coordinator refused; that is an answer.
        CoordinatorUnreachable: the allowance is used up.
        NotACoordinator: something else answers.
    """
    now = asyncio.get_running_loop().time
    end = now() + allowance.total_seconds()
    for number, delay in enumerate(delays(random.random), start=1):
        try:
            return await call(timedelta(seconds=max(1.0, end - now())))
        except TransportBroken as error:
            if error.code in _FOREIGN:
                raise NotACoordinator(f"what answers at {address} is no Ayni coordinator: {error}") from error
            if now() >= end:
                raise _gave_up(address, allowance, number, error) from error
            wait = min(delay, end - now())
            _log.warning("try %d: %s; next try in %.1f s", number, error, wait)
            await asyncio.sleep(wait)
    raise AssertionError("there is always another delay")


def _gave_up(address: str, allowance: timedelta, tries: int, error: TransportBroken) -> CoordinatorUnreachable:
    return CoordinatorUnreachable(
        f"the coordinator at {address} did not answer within {allowance.total_seconds():g} s "
        f"({tries} {'tries' if tries > 1 else 'try'}): {error}; {UNREACHED}"
    )
