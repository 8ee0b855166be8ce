"""Which train states this run has stored, kept with the run's facts.  [shell]

What is noted survives the coordinator: that a state is about to be stored, so that what a crash left of it can be told
from another run's; and that it is stored whole, so that a run can go back to it, and it can be removed later.
"""

import asyncio
import json
from typing import Protocol

STORED_STEPS = "stored_steps"
"""Fact: steps behind the newest stored state."""
_STATES = "stored_states"
"""Fact: JSON of what is stored: blocks of each state, by its steps."""
_BEGUN = "storing_steps"
"""Fact: steps behind the state that was being stored last."""


class Facts(Protocol):
    """Where facts are kept; see `store.RunStore`. Calls block."""

    def facts(self) -> dict[str, str]:
        """Returns all of them."""

    def set_facts(self, facts: dict[str, str]) -> None:
        """Keeps some, durably."""


class StoredStates:
    """What is stored. Call from one task at a time."""

    def __init__(self, facts: Facts) -> None:
        """Takes where facts are kept."""
        self._facts = facts

    async def begin(self, steps: int) -> bool:
        """Notes that a state is about to be stored; says whether this run has tried that before."""
        facts = await asyncio.to_thread(self._facts.facts)
        known = str(steps) in _states(facts) or facts.get(_BEGUN) == str(steps)
        await asyncio.to_thread(self._facts.set_facts, {_BEGUN: str(steps)})
        return known

    async def done(self, steps: int, num_blocks: int) -> None:
        """Notes that a state is stored whole."""
        facts = await asyncio.to_thread(self._facts.facts)
        states = {**_states(facts), str(steps): num_blocks}
        newest = {_STATES: json.dumps(states), STORED_STEPS: str(steps)}
        await asyncio.to_thread(self._facts.set_facts, newest)

    async def beyond(self, keep: int) -> dict[int, int]:
        """Returns the states that are more than the newest `keep`, the oldest first, with their numbers of blocks."""
        states = _states(await asyncio.to_thread(self._facts.facts))
        steps = sorted(map(int, states))
        return {one: states[str(one)] for one in steps[: max(0, len(steps) - keep)]}

    async def removed(self, steps: int) -> None:
        """Notes that a state is not stored any more."""
        states = _states(await asyncio.to_thread(self._facts.facts))
        states.pop(str(steps), None)
        await asyncio.to_thread(self._facts.set_facts, {_STATES: json.dumps(states)})


def _states(facts: dict[str, str]) -> dict[str, int]:
    states: dict[str, int] = json.loads(facts.get(_STATES, "{}"))
    return states
