"""Which train states this run has stored, kept with the run's facts.  [shell]

What is noted survives the coordinator: that a state is about to be stored, so that what a crash or a full disk left of
it can be told from another run's, and removed; and that it is stored whole, so that a run can go back to it.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from coordinator_service.writing import until_done

_log = logging.getLogger(__name__)

STORED_STATES = "stored_states"
"""Fact: JSON of what is stored whole: blocks of each state, by its steps."""
_LEFTOVERS = "leftover_states"
"""Fact: the same of what is of no use, as far as it is there."""
_BEGUN = "storing_steps"
"""Fact of earlier versions: steps behind the state that was being stored last."""


class Facts(Protocol):
    """Where facts are kept; see `store.RunStore`. Calls block."""

    def facts(self) -> dict[str, str]:
        """Returns all of them."""

    def set_facts(self, facts: dict[str, str]) -> None:
        """Keeps some, durably."""


class StoredStates:
    """What is stored. Calls that change it last until that is written."""

    def __init__(self, facts: Facts, is_over: Callable[[], bool] = lambda: False) -> None:
        """Reads what is known; once it is over, what can't be written is not tried again."""
        found = facts.facts()
        self._facts = facts
        self._is_over = is_over
        self._turn = asyncio.Lock()
        self.whole = _states(found.get(STORED_STATES))
        """Blocks of each state that is stored whole, by its steps."""
        self.leftovers = _states(found.get(_LEFTOVERS))
        """The same of what is of no use: states of which a part is there, that are damaged, or that were taken back.
        0 blocks where the number is not known."""
        if (begun := int(found.get(_BEGUN) or 0)) and begun not in self.whole:
            self.leftovers.setdefault(begun, 0)

    def newest(self, committed_steps: int) -> int:
        """Returns the steps behind the newest whole state of the steps that are committed; 0 for none."""
        return max((steps for steps in self.whole if steps <= committed_steps), default=0)

    def beyond(self, keep: int) -> dict[int, int]:
        """Returns the states that are more than the newest `keep`, the oldest first, with their numbers of blocks."""
        steps = sorted(self.whole)
        return {one: self.whole[one] for one in steps[: max(0, len(steps) - keep)]}

    async def begin(self, steps: int, num_blocks: int) -> None:
        """Notes that a state is about to be stored."""
        self.leftovers[steps] = num_blocks
        await self._keep()

    async def done(self, steps: int) -> None:
        """Notes that a state is stored whole."""
        self.whole[steps] = self.leftovers.pop(steps)
        await self._keep()

    async def spoil(self, *steps: int) -> None:
        """Notes that states are of no use any more."""
        self.leftovers |= {one: self.whole.pop(one) for one in steps if one in self.whole}
        await self._keep()

    async def removed(self, steps: int) -> None:
        """Notes that nothing is left of a state."""
        self.whole.pop(steps, None)
        self.leftovers.pop(steps, None)
        await self._keep()

    async def _keep(self) -> None:
        async with self._turn:
            facts = {STORED_STATES: json.dumps(self.whole), _LEFTOVERS: json.dumps(self.leftovers), _BEGUN: ""}
            await until_done(partial(self._facts.set_facts, facts), self._note_failure)

    def _note_failure(self, error: OSError) -> None:
        if self._is_over():
            raise error
        _log.warning("what is stored can't be noted, and is tried again: %s", error)


def _states(text: str | None) -> dict[int, int]:
    return {int(steps): num_blocks for steps, num_blocks in json.loads(text or "{}").items()}
