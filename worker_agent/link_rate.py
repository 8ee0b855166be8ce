"""Measures what the connection to a coordinator carries, with real calls.  [shell]"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

from worker_agent.coordinator import Coordinator
from worker_agent.doctor_report import Link
from worker_agent.faults import TransportBroken

_SMALL_CALLS = 20
_CALL_BYTES = 1 << 20
_AT_A_TIME = 4
"""Calls on their way at once, so that the way there and back is not what is measured."""
_CALL_LIMIT = timedelta(seconds=30)


async def measure(coordinator: Coordinator, run_id: str, duration: timedelta) -> Link:
    """Measures round trips, then each direction for so long.

    Raises:
        AyniError: the coordinator refused.
        TransportBroken: the connection broke.
    """
    address = coordinator.address
    try:
        round_trip = await _round_trip(coordinator)
    except TransportBroken as error:
        if error.code != "UNIMPLEMENTED":
            raise
        began = time.monotonic()
        await coordinator.get_run("", _CALL_LIMIT)
        return Link(
            coordinator=address,
            run_id=run_id,
            round_trip_s=time.monotonic() - began,
            problem="this coordinator is older than the call that measures them",
        )
    padding = bytes(_CALL_BYTES)
    out = await _rate(lambda: coordinator.measure(padding, 0, _CALL_LIMIT), duration)
    into = await _rate(lambda: coordinator.measure(b"", _CALL_BYTES, _CALL_LIMIT), duration)
    return Link(coordinator=address, run_id=run_id, round_trip_s=round_trip, out_bytes_per_s=out, in_bytes_per_s=into)


async def _round_trip(coordinator: Coordinator) -> float:
    """Returns the median time of a call without bytes."""
    times = []
    for _ in range(_SMALL_CALLS):
        began = time.monotonic()
        await coordinator.measure(b"", 0, _CALL_LIMIT)
        times.append(time.monotonic() - began)
    return statistics.median(times)


async def _rate(call: Callable[[], Awaitable[None]], duration: timedelta) -> float:
    """Returns bytes per second of calls that follow one another, some at a time, for so long; one of each at least."""
    began = time.monotonic()

    async def follow() -> int:
        count = 0
        while not count or time.monotonic() - began < duration.total_seconds():
            await call()
            count += 1
        return count

    counts = await asyncio.gather(*(follow() for _ in range(_AT_A_TIME)))
    return sum(counts) * _CALL_BYTES / (time.monotonic() - began)
