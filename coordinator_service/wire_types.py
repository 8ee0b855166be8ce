"""Which element type each step's gradients travel in.  [core]

A run begins with the type of its run file. It may become a narrower one between two steps, never a wider one again:
chosen while the run goes on (`link_plan`), or said beforehand for a replay. Steps that are made again after the run has
gone back travel in the type of now, so that no worker ever sees a wider one after a narrower one.
"""

import math
from collections.abc import Mapping

NARROWER = {"float32": "bfloat16", "bfloat16": "int8", "float16": "int8"}
"""The next type of each one with fewer bytes, one step at a time."""

WIRE_TYPE = "wire_type"
"""Fact of the store: the type that was chosen last, in place of the run file's."""

EXCHANGE_BEFORE = "wire_type_exchange_before"
"""Fact of the store: seconds that the exchange of a step took before that choice, so that it stays known whether the
choice helped."""


class WireTypes:
    """The wire type of a run as it goes on."""

    def __init__(self, first: str, changes: Mapping[str, str], chosen: str = "", before: str = "") -> None:
        """Begins with the run file's.

        Args:
            first: of the run file.
            changes: types that are said beforehand, by the step from which on they are in force; see `check_changes`.
            chosen: what the store keeps; empty for nothing.
            before: what the store keeps of the exchange before; empty for nothing.
        """
        self.now = chosen or first
        """Type of the step in progress, or else of the next one."""
        self.exchange_before_s = float(before or math.inf)
        """Seconds that the exchange took before an earlier process chose the type; infinite for not known."""
        self._changes = {int(step): wire_type for step, wire_type in changes.items()}

    def at(self, step: int) -> str:
        """Returns the type of a step that begins now."""
        begun = [first for first in self._changes if first <= step]
        said = self._changes[max(begun)] if begun else self.now
        if said in narrower_than(self.now):
            self.now = said
        return self.now

    def choose(self, wire_type: str) -> None:
        """Makes this the type of the next step, which opens once it is stored."""
        assert wire_type in narrower_than(self.now), f"gradients would travel in {wire_type} after {self.now}"
        self.now = wire_type


def chosen_before(facts: Mapping[str, str]) -> tuple[str, str]:
    """Returns what a store keeps of the last choice: the type, and the exchange before; empty for nothing."""
    return facts.get(WIRE_TYPE, ""), facts.get(EXCHANGE_BEFORE, "")


def narrower_than(wire_type: str) -> list[str]:
    """Returns all types with fewer bytes that may follow on one."""
    found = []
    while wire_type := NARROWER.get(wire_type, ""):
        found.append(wire_type)
    return found


def check_changes(first: str, changes: Mapping[str, str]) -> None:
    """Refuses changes that are no steps, or that make the type a wider one; raises ValueError."""
    for step in changes:
        if not step.isdecimal():
            raise ValueError(f"wire_changes.{step}: {step!r} is no step")
    for step in sorted(changes, key=int):
        if changes[step] not in narrower_than(first):
            known = ", ".join(narrower_than(first)) or "none"
            raise ValueError(f"wire_changes.{step} is {changes[step]!r}; after {first} it may be: {known}")
        first = changes[step]
