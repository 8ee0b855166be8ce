"""Which published state is stored next, by whom, and which ones nobody can store any more.  [core]

Theory of operation. All members whose parameters are up to date make the same steps, and publish the state behind a
step before they contribute to the next one. So a due state is *passed* as soon as one of them has had more updates:
whoever does not hold it then never will. Before, everybody is waited for; after, those who hold it store it, and where
nobody does it is missed. Members keep a due state until it is settled, which means stored or missed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What is known of one member."""

    worker_id: int
    published_steps: int
    """Steps behind the state that it holds for others; 0 for none."""
    completed_steps: int = 0
    """Updates that its parameters have had; 0 for not said."""

    @property
    def newest(self) -> int:
        """Steps that it is known to have made."""
        return max(self.published_steps, self.completed_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """Have these members store the state behind this step."""

    steps: int
    worker_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Missed:
    """No member holds the state behind this step, or ever will."""

    steps: int


def next_state(
    every: int, settled: int, members: Sequence[Standing], extra: Iterable[int] = (), *, is_last: bool = False
) -> Store | Missed | None:
    """Says what becomes of the oldest due state that is not settled; None: wait.

    Args:
        every: steps between due states; 0: only `extra` ones are due.
        settled: steps behind the newest state that is settled.
        members: those whose parameters are up to date.
        extra: further due states.
        is_last: no step will follow, and nobody else is waited for.
    """
    newest = max((member.newest for member in members), default=0)
    for steps in _due(every, settled, newest, extra):
        holders = tuple(member.worker_id for member in members if member.published_steps == steps)
        if len(holders) == len(members) or (holders and (is_last or newest > steps)):
            return Store(steps=steps, worker_ids=holders)
        return Missed(steps=steps) if newest > steps else None
    return None


def _due(every: int, settled: int, newest: int, extra: Iterable[int]) -> Iterator[int]:
    """Yields the due states that members may hold, the oldest first."""
    first = (settled // every + 1) * every if every else newest + 1
    regular = range(first, newest + 1, every or 1)
    yield from sorted({*regular[:1], *(steps for steps in extra if settled < steps <= newest)})
