"""Whether the coordinator or the workers reduce the next step: the arithmetic of topology "auto".  [core]

Legend: V gradient bytes of a step on the wire, one way; N workers, of which K own slices; C and W bytes a second and
direction that the coordinator's and a worker's link carry.

Theory of operation. With "star" every worker sends V and receives V, and all of it passes the coordinator: the exchange
takes max(N V / C, V / W). With "sharded" an owner sends and receives (N + K - 2) V / K, which is 2 V (N - 1) / N where
everybody owns a slice, and others V: it takes f V / W with f = max((N + K - 2) / K, 1 if K < N). The exchange times of
steps that were made give the rates: t seconds with star show N V / t as C, and V / t as the least that W is there; with
sharded they show f V / t as W. A rate that is not known yet counts as the other one. So the second way is tried once it
promises enough, and what it really takes decides from then on.

Where all workers share memory with the coordinator no byte travels. Then it reduces, unless the workers share memory
with one another, too, and V is so large that sums on all processors are worth more messages.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

_STEPS = 10
"""Steps that a rate is the median of."""
_FEWEST = 3
"""Steps after which a rate counts."""
_SHARED_BYTES = 32 << 20
"""Gradient bytes from which on workers that share memory with one another are quicker than one coordinator."""
_MARGIN = 0.9
"""Part of its time that the other way must promise to need at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What is known before a step.

    Attributes:
        num_workers: N.
        num_owners: K.
        obstacle: why the workers can't reduce, for people; empty if they can.
        shares_memory: whether all workers share memory with the coordinator.
        peers_share_memory: whether they do with one another.
    """

    num_workers: int
    num_owners: int
    obstacle: str = ""
    shares_memory: bool = False
    peers_share_memory: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Who reduces, and why, for people; the sentence is empty where it is the same as before."""

    topology: str
    sentence: str = ""


class TopologyPlan:
    """Watches a run's steps, and chooses for the next one."""

    def __init__(self) -> None:
        """Begins with the coordinator."""
        self._num_bytes = 0
        self._coordinator: deque[float] = deque(maxlen=_STEPS)
        self._worker: deque[float] = deque(maxlen=_STEPS)
        self._star: deque[float] = deque(maxlen=_STEPS)
        """Bytes a second that one worker got rid of with star."""
        self._topology = "star"
        self._told = ""

    def observe(self, topology: str, exchange_s: float, num_bytes: int, situation: Situation) -> None:
        """Takes how long a step's exchange took: the shortest of the workers', which contains no wait for the last one.

        Args:
            topology: of the step.
            exchange_s: 0 where it was hidden behind the computing, which shows nothing.
            num_bytes: V.
            situation: in which the step was made.
        """
        if num_bytes:
            self._num_bytes = num_bytes
        if exchange_s <= 0 or not num_bytes or situation.num_workers < 2 or situation.shares_memory:
            return
        if topology == "star":
            self._coordinator.append(situation.num_workers * num_bytes / exchange_s)
            self._star.append(num_bytes / exchange_s)
        else:
            self._worker.append(_sharded_factor(situation) * num_bytes / exchange_s)

    def choose(self, situation: Situation) -> Choice:
        """Returns who reduces the next step."""
        topology, key, why = self._decide(situation)
        self._topology = topology
        is_news, self._told = key != self._told, key
        return Choice(topology=topology, sentence=f"topology auto: {topology}, because {why}" if is_news else "")

    def _decide(self, now: Situation) -> tuple[str, str, str]:
        """Returns the topology, what makes the decision another one than the last, and why."""
        if now.obstacle:
            return "star", f"obstacle {now.obstacle}", now.obstacle
        if now.num_workers == 1:
            return "sharded", "alone", "one worker alone has nothing to exchange"
        if now.shares_memory:
            return self._in_memory(now)
        if len(self._coordinator) < _FEWEST and len(self._worker) < _FEWEST:
            return "star", "unknown", f"the links are not measured yet ({_FEWEST} steps are enough)"
        return self._compare(now)

    def _in_memory(self, now: Situation) -> tuple[str, str, str]:
        why = "all workers share memory with the coordinator, so no bytes travel"
        if not now.peers_share_memory:
            return "star", "memory", why
        if not self._num_bytes:
            return "star", "memory, unknown", f"{why}, and how many there are is not known yet"
        size = f"{self._num_bytes / 1e6:.3g} MB a step"
        if self._num_bytes < _SHARED_BYTES:
            return "star", "memory, little", f"{why}, and {size} are soon added"
        return "sharded", "memory, much", f"all workers share memory with one another, and each adds a part of {size}"

    def _compare(self, now: Situation) -> tuple[str, str, str]:
        coordinator, worker, link = self._rates()
        volume, count = self._num_bytes, now.num_workers
        star_s = max(count * volume / coordinator, volume / link)
        sharded_s = _sharded_factor(now) * volume / worker
        other, ours, theirs = (
            ("sharded", star_s, sharded_s) if self._topology == "star" else ("star", sharded_s, star_s)
        )
        topology = other if theirs < _MARGIN * ours else self._topology
        why = (
            f"{volume / 1e6:.3g} MB a step among {count} workers ({now.num_owners} own slices) take "
            f"max({count} x {volume / 1e6:.3g} MB / {coordinator / 1e6:.4g} MB/s, {volume / 1e6:.3g} MB / "
            f"{link / 1e6:.4g} MB/s) = {star_s:.3g} s with star and {_sharded_factor(now):.3g} x "
            f"{volume / 1e6:.3g} MB / {worker / 1e6:.4g} MB/s = {sharded_s:.3g} s with sharded"
        )
        return topology, f"rates {topology}", why

    def _rates(self) -> tuple[float, float, float]:
        """Returns C, and W with sharded and with star: there it is no less than what was seen."""
        coordinator = median(self._coordinator) if len(self._coordinator) >= _FEWEST else 0.0
        worker = median(self._worker) if len(self._worker) >= _FEWEST else 0.0
        seen = median(self._star) if self._star else 0.0
        coordinator, worker = coordinator or worker, worker or coordinator
        return coordinator, worker, max(worker, seen)


def _sharded_factor(situation: Situation) -> float:
    """Returns how often a worker that has most to do sends the gradients' bytes when the workers reduce."""
    count, owners = situation.num_workers, max(1, situation.num_owners)
    return max((count + owners - 2) / owners, 1.0 if owners < count else 0.0)
