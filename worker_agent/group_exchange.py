"""How workers reduce among themselves, whichever way: what is brought, and what a way of exchange does.  [shell]"""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from ayni.shm.host import SharedMemoryOffer
from ayni.step_values import SliceDigest
from worker_agent.contributions import Offer
from worker_agent.exchange import Outcome
from worker_agent.slice_offers import Moment, Terms

OnLost = Callable[[int, Sequence[int]], None]
"""Is told a generation, and members that could not be reached under it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Brought:
    """What a lease brings to one bucket, under one generation. Its parts stay as they are until the attempt is over."""

    offer: Offer
    has_mean: bool
    """Whether the mean is in `offer.out` already, under a generation before: whoever has it may use it."""
    on_sent: Callable[[], None]
    """To be called when all of it has left; more often does no harm."""
    is_wanted: Callable[[], bool] = lambda: True
    """Whether anybody waits for it still. Who tries again asks, since a cancellation that comes at the moment of a
    failure gets lost in it."""


class GroupExchange(Protocol):
    """One way of exchange; outlives groups and memberships. Called on the event loop."""

    def regroup(self, terms: Terms) -> None:
        """Works under these terms from now on: what is under way under others is given up."""

    def end(self, why: str) -> None:
        """Works under no terms until the next `regroup`."""

    async def reduce(self, brought: Brought) -> Outcome:
        """Brings something to a bucket and takes the mean, if it is not an extra lease's. Is cancelled by a regroup.

        Raises:
            RoundRestarted, StaleEpoch: has to be brought again, under these terms or the next.
            AyniError: what was brought, or came out, is wrong.
        """

    def slices(self, moment: Moment) -> tuple[SliceDigest, ...]:
        """Returns what this worker took down of the means, for the coordinator."""

    async def close(self) -> None:
        """Lets go of connections; nothing is called afterwards."""


@dataclass(kw_only=True, slots=True)
class Peers:
    """How a worker takes part in exchanges among workers, whichever membership it has."""

    exchanges: dict[str, GroupExchange] = field(default_factory=dict)
    """By topology."""
    address: str = ""
    """Where others dial this worker to have slices reduced; empty when nobody can."""
    store_address: str = ""
    """Where its store for rendezvous listens; empty for none."""
    shared_memory: SharedMemoryOffer | None = None
    """Where workers of its host share memory with it; None for nowhere."""
    server: AsyncExitStack = field(default_factory=AsyncExitStack)
    """What this worker listens with for it, where nothing else of it listens."""
    on_lost: OnLost = lambda generation, members: None
    """Tells the coordinator, while there is a membership."""

    @property
    def topologies(self) -> tuple[str, ...]:
        """What the worker takes part in."""
        return tuple(self.exchanges)

    def lost(self, generation: int, members: Sequence[int]) -> None:
        """Tells the coordinator that members could not be reached."""
        self.on_lost(generation, members)

    async def close(self) -> None:
        """Closes every exchange, and stops listening. May be called again."""
        while self.exchanges:
            _, exchange = self.exchanges.popitem()
            await exchange.close()
        await self.server.aclose()
