"""Heartbeats of one membership.  [shell]

A lost heartbeat is nothing; silence for a whole lease is the end, because by then the coordinator may have given the
worker's leases to others.
"""

import asyncio
import contextlib

from ayni.errors import AyniError
from ayni.logs import ChangeLogger
from worker_agent.coordinator import Coordinator
from worker_agent.faults import CoordinatorLost, TransportBroken
from worker_agent.messages import NO_FAILURE, Membership
from worker_agent.session import ShardAssignment
from worker_agent.standing import Standing

_IMPATIENT_S = 0.05
"""Pause between heartbeats while training waits for the answer of one."""
_SOON_S = 0.02
"""How long a heartbeat waits for another call that says the same."""


class Heart:
    """Says at intervals that this worker is there, and hears whether the coordinator is."""

    def __init__(
        self, coordinator: Coordinator, membership: Membership, standing: Standing, changes: ChangeLogger
    ) -> None:
        """Prepares heartbeats.

        Args:
            coordinator: has joined.
            membership: says how often.
            standing: what is said.
            changes: logs what breaks, once.
        """
        self.taken: ShardAssignment | None = None
        """Primary lease that was handed out last."""
        self.last_heard = _now()
        self._coordinator = coordinator
        self._membership = membership
        self._standing = standing
        self._changes = changes
        self._beat_now = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None

    def beat_now(self) -> None:
        """Sends the next heartbeat at once."""
        self._beat_now.set()

    def beat_soon(self) -> None:
        """Sends a heartbeat in a moment, unless it is spared."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(_SOON_S, self._beat_at_last)

    def spare(self) -> None:
        """Spares the heartbeat that is to be sent soon: another call says the same."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    def _beat_at_last(self) -> None:
        self._soon = None
        self._beat_now.set()

    async def beat(self) -> Exception:
        """Beats until membership is over; returns why."""
        while True:
            self._beat_now.clear()
            try:
                await self._beat_once()
            except AyniError as error:
                return error
            except TransportBroken as error:
                self._changes.log_if_changed("heartbeat", str(error))
                if _now() - self.last_heard > self._membership.lease.total_seconds():
                    return self.lost(str(error))
            await self._pause()

    def lost(self, reason: str) -> CoordinatorLost:
        """Returns the error that says that the coordinator is gone."""
        silence = _now() - self.last_heard
        return CoordinatorLost(
            f"the coordinator at {self._coordinator.address} is gone (last heard of {silence:.1f} s ago): {reason}; "
            f"{self._standing.lost_advice}"
        )

    def heard(self) -> None:
        """Notes a sign of life of the coordinator."""
        self.last_heard = _now()

    async def _beat_once(self) -> None:
        standing = self._standing
        sign = standing.sign_of_life(self.taken)
        settled = await self._coordinator.heartbeat(sign, self._membership.lease)
        self.heard()
        if standing.failed_offer == sign.failed_offer:
            standing.failed_offer = NO_FAILURE
        if settled != standing.settled_steps:
            standing.settled_steps = settled
            standing.settled.announce()

    async def _pause(self) -> None:
        pause = self._membership.heartbeat_interval.total_seconds()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(pause, _IMPATIENT_S) if self._standing.is_awaiting_settled else pause):
                await self._beat_now.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()
