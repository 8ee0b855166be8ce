"""Which commits the run's present state is made of.  [core]

Theory of operation. A state is told by how many steps it has behind it and by the commit of the last one. Where steps
were taken back and made again, a state of the commits before has as many steps behind it, and may have other bytes.
Epochs only grow and seldom change, so that a few entries stand for any number of steps: each says where an epoch and an
attempt begin.
"""

from bisect import bisect_right

from ayni.step_values import Origin


class Lineage:
    """Epoch and attempt of each training step that counts."""

    def __init__(self) -> None:
        """Starts without a commit."""
        self._begins: list[int] = []
        self._origins: list[Origin] = []
        self._steps = 0

    def note(self, step: int, origin: Origin) -> None:
        """Notes the commit of the next step; nothing happens where it is known."""
        if step < self._steps:
            return
        if not self._origins or self._origins[-1] != origin:
            self._begins.append(step)
            self._origins.append(origin)
        self._steps = step + 1

    def rewind(self, steps: int) -> None:
        """Forgets all that came after so many steps."""
        self._steps = min(self._steps, steps)
        count = bisect_right(self._begins, self._steps - 1)
        del self._begins[count:], self._origins[count:]

    def has(self, completed_steps: int, origin: Origin | None) -> bool:
        """Says whether a state may be of these commits.

        Args:
            completed_steps: steps behind it.
            origin: the commit of the last one; None for not known, which is believed. So is what comes before the first
                commit: the beginning, or a state of another run.
        """
        known = self._of(completed_steps - 1)
        return origin is None or known is None or origin == known

    def _of(self, step: int) -> Origin | None:
        place = bisect_right(self._begins, step) - 1
        return self._origins[place] if place >= 0 and step < self._steps else None
