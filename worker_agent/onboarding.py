"""Takes the run's state from where the coordinator offers it, while the others keep training.  [shell]

An offer names a peer whose host tier holds the state, or the run that stored it as objects. A peer is reached by the
engines that both sides have, shared memory on one host; one that nobody can dial through the coordinator, which passes
the reads on. One offer is taken at a time: the coordinator makes a new one when the one before is of no use any more.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ayni import failpoints
from ayni.errors import BadRequest, Deadline
from worker_agent.assignment_frames import StateOffer
from worker_agent.blocks.engines.grpc_engine import Relay, Relays
from worker_agent.bridge import Bridge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker_agent.train_state import Loaded, TrainState

_log = logging.getLogger(__name__)

RELAY_HEADER = "ayni-relay"
SESSION_HEADER = "ayni-session"


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayConfig:
    """How blocks of workers that nobody can dial are read through the coordinator."""

    coordinator: str
    """Its address, host:port."""
    relays: Relays
    """Where this worker's engine looks up who is reached through it."""
    session: Callable[[], str]
    """Returns the secret of this worker's present membership."""


class Onboarding:
    """Takes offers, one at a time."""

    def __init__(self, network: Bridge, state: "TrainState", relay: RelayConfig, within: timedelta) -> None:
        """Takes where the state goes, how to reach peers that can't be dialled, and the longest time for one offer."""
        self._network = network
        self._state = state
        self._relay = relay
        self._within = within.total_seconds()
        self._taking: Future[Loaded] | None = None

    def take(self, offer: StateOffer) -> "Future[Loaded]":
        """Starts to fetch a state, and gives up the one before; returns at once. May be called from any thread.

        Returns:
            A future of tensors and facts. It fails with an error whose sentence says why, and is cancelled by a newer
            offer or by `stop`.
        """
        self.stop()
        self._taking = taking = self._network.submit(self._take(offer))
        return taking

    def stop(self) -> None:
        """Gives up what is being fetched: the state is here, or is not needed any more."""
        if self._taking:
            self._taking.cancel()

    async def _take(self, offer: StateOffer) -> "Loaded":
        what = _described(offer)
        _log.info("fetching %s", what)
        try:
            async with asyncio.timeout(self._within):
                loaded = await self._work(offer)
        except TimeoutError:
            raise Deadline(
                f"{what} did not come within {self._within:g} s (onboard_timeout)",
                waiting_for=what,
                timeout=self._within,
            ) from None
        failpoints.hit("worker.onboarding.done")
        return loaded

    async def _work(self, offer: StateOffer) -> "Loaded":
        if offer.metadata is None:
            if not offer.run_id:
                raise BadRequest(f"offer {offer.offer_id} names neither a worker nor a stored state", field="source")
            return await self._state.fetch(offer.run_id, offer.completed_steps)
        with self._reached(offer, offer.metadata.incarnation):
            return await self._state.onboard(offer.metadata, offer.worker_name, offer.completed_steps, self._within)

    @contextmanager
    def _reached(self, offer: StateOffer, incarnation: int) -> "Iterator[None]":
        """Has a peer that nobody can dial reached through the coordinator for as long as the context lasts."""
        if not offer.relayed:
            yield
            return
        headers = {RELAY_HEADER: str(offer.worker_id), SESSION_HEADER: self._relay.session()}
        self._relay.relays[incarnation] = Relay(address=self._relay.coordinator, headers=headers)
        try:
            yield
        finally:
            self._relay.relays.pop(incarnation, None)


def _described(offer: StateOffer) -> str:
    behind = f"the state behind step {offer.completed_steps}"
    if offer.metadata is None:
        return f"{behind} that run {offer.run_id} has stored"
    return f"{behind} from worker {offer.worker_name}{' through the coordinator' if offer.relayed else ''}"
