"""Whose state a follower is offered, and who is asked to publish one.  [core]

Theory of operation. A follower can use a state behind step `needs` or a later one. A *route* is a way to it: a worker,
dialled by the follower or relayed by the coordinator. Routes that failed less often for this follower come first, so
that a route is tried again only after all others; then workers that publish something new enough already, so that
several followers share one publication. Where nobody does, the fastest worker is asked to publish, but none whose state
is being read: it would replace what the reader is in the middle of. A route that failed is left alone for a while, and
longer each time.

Time comes in as `now`, seconds on any steady clock. Does not know what a state is, nor how it travels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0

STORE = -1
"""In place of a worker's number: the object store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One way to a state."""

    worker_id: int
    """Who has it; STORE for the object store."""
    relayed: bool = False
    """Whether the coordinator passes the reads on, because nobody can dial the worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A worker whose parameters are up to date."""

    worker_id: int
    name: str
    published_steps: int
    """Steps behind the state that it publishes; 0 for none."""
    speed: float = 0.0
    has_address: bool = True
    is_attached: bool = False
    num_readers: int = 0
    """Offers of its state that are out."""
    is_asked: bool = False
    """Whether it was asked to publish and has not done so yet."""
    may_be_asked: bool = True
    """Whether it would publish when it is asked: it can, and holds nothing that must be stored before."""

    @property
    def routes(self) -> tuple[Route, ...]:
        """Ways to its state, the better one first."""
        direct = (Route(worker_id=self.worker_id),) if self.has_address else ()
        relayed = (Route(worker_id=self.worker_id, relayed=True),) if self.is_attached else ()
        return direct + relayed


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Offer the state of this route."""

    route: Route
    steps: int
    """Steps behind the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Ask this worker to publish."""

    worker_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Do nothing now."""

    reason: str
    """Sentence for people."""


Decision = Offer | Ask | Wait


class Failures:
    """What failed for one follower so far."""

    def __init__(self) -> None:
        """Starts with nothing failed."""
        self._counts: dict[Route, int] = {}
        self._last: dict[Route, float] = {}

    def note(self, now: float, route: Route) -> None:
        """Counts a failure."""
        self._counts[route] = self.count(route) + 1
        self._last[route] = now

    def count(self, route: Route) -> int:
        """Returns how often a route has failed."""
        return self._counts.get(route, 0)

    def of_worker(self, worker_id: int) -> int:
        """Returns how often any route to a worker has failed."""
        return sum(count for route, count in self._counts.items() if route.worker_id == worker_id)

    def is_resting(self, now: float, route: Route) -> bool:
        """Says whether it is too early to try a route again."""
        count = self.count(route)
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(count - 1, 16))
        return count > 0 and now < self._last[route] + pause


def choose(
    now: float, needs: int, holders: Sequence[Holder], failures: Failures, stored_steps: int | None = None
) -> Decision:
    """Says what to do for one follower that has no offer.

    Args:
        now: the moment.
        needs: a state behind fewer steps is of no use.
        holders: all other workers that are up to date.
        failures: of this follower.
        stored_steps: steps behind the stored state that the run has gone back to; None when it has not.
    """
    routes = [(holder, route) for holder in holders for route in holder.routes]
    if not routes:
        return _from_store(now, needs, failures, stored_steps) or Wait(reason=_nobody(holders))
    fewest = min(failures.count(route) for _, route in routes)
    best = [(holder, route) for holder, route in routes if failures.count(route) == fewest]
    rested = [(holder, route) for holder, route in best if not failures.is_resting(now, route)]
    if not rested:
        return Wait(reason="every worker that has the state was tried; trying again soon")
    if published := [(holder, route) for holder, route in rested if holder.published_steps >= max(needs, 1)]:
        holder, route = min(published, key=lambda pair: _preference(failures, *pair))
        return Offer(route=route, steps=holder.published_steps)
    return _ask([holder for holder, _ in rested], failures)


def _ask(holders: Sequence[Holder], failures: Failures) -> Decision:
    """Asks the fastest, unless one was asked already."""
    if asked := next((holder for holder in holders if holder.is_asked), None):
        return Wait(reason=f"waiting for worker {asked.name} to publish its state")
    able = [holder for holder in holders if holder.may_be_asked and not holder.num_readers]
    if not able:
        busy = "; ".join(f"worker {holder.name} {_why_not(holder)}" for holder in holders)
        return Wait(reason=f"nobody can be asked for the state now: {busy}")
    holder = min(able, key=lambda one: (failures.of_worker(one.worker_id), -one.speed, one.worker_id))
    return Ask(worker_id=holder.worker_id)


def _preference(failures: Failures, holder: Holder, route: Route) -> tuple[object, ...]:
    num_failed = failures.of_worker(holder.worker_id)
    return num_failed, route.relayed, holder.num_readers, -holder.speed, holder.worker_id


def _from_store(now: float, needs: int, failures: Failures, stored_steps: int | None) -> Decision | None:
    if stored_steps is None or stored_steps < needs:
        return None
    route = Route(worker_id=STORE)
    if failures.is_resting(now, route):
        return Wait(reason="the stored state could not be loaded; trying again soon")
    return Offer(route=route, steps=stored_steps)


def _nobody(holders: Sequence[Holder]) -> str:
    if not holders:
        return "no worker that is up to date is here"
    names = ", ".join(holder.name for holder in holders)
    return f"nobody can reach the workers that have the state ({names}): start them with --attach always"


def _why_not(holder: Holder) -> str:
    if holder.num_readers:
        return "is being read by another"
    return "holds a state that is being stored, or can't be asked"
