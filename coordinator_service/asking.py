"""Asks workers to publish their state for others, and sees whether they do.  [shell]

Whoever is to publish hears it in its next lease, so that the state is the one behind a whole step.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from coordinator_service.epochs import Seat
from coordinator_service.run import Run

_log = logging.getLogger(__name__)

_PATIENCE_S = 2.0
_PATIENCE_STEPS = 1
"""How long, and for how many steps after the one that it was asked in, a worker may take to say that it has published.
"""


@dataclass(kw_only=True, slots=True)
class _Asked:
    """A worker that was asked to publish."""

    published_before: int
    told_at: tuple[float, int] | None = None
    """When the step was committed whose lease told it: the moment, and the steps that were committed."""


class Asking:
    """Who was asked, and has not published since."""

    def __init__(self, run: Run, clock: Callable[[], float]) -> None:
        """Asks members of a run."""
        self._run = run
        self._clock = clock
        self._asked: dict[int, _Asked] = {}

    def is_asked(self, worker_id: int) -> bool:
        """Says whether a worker is yet to publish."""
        return worker_id in self._asked

    def may_ask(self, seat: Seat) -> bool:
        """Says whether a worker would publish when it is asked: it can, and holds nothing that is to be stored."""
        return seat.elastic and not self._is_storing(seat)

    def ask(self, worker_id: int) -> str:
        """Asks a worker with its next lease; returns its name."""
        seat = self._run.epochs.seats[worker_id]
        self._asked[worker_id] = _Asked(published_before=seat.published_steps)
        seat.publish_requested = True
        _log.info("asking worker %s to publish its state for others", seat.member.name)
        self._run.changed.notify()
        return seat.member.name

    def take_back(self) -> None:
        """Nobody needs a state any more: asks nobody who has not been told yet."""
        for number in [one for one, asked in self._asked.items() if asked.told_at is None]:
            del self._asked[number]
            if seat := self._run.epochs.seats.get(number):
                seat.publish_requested = False

    def let_pass(self) -> list[int]:
        """Forgets who has published or is gone, and who let the chance pass; returns the last ones."""
        passed = []
        for number, asked in list(self._asked.items()):
            seat = self._run.epochs.seats.get(number)
            if seat is None or seat.following or seat.published_steps > asked.published_before:
                del self._asked[number]
            elif asked.told_at is None:
                if not seat.publish_requested:
                    asked.told_at = self._clock(), self._run.progress.committed_steps
            elif self._is_past(seat, *asked.told_at):
                del self._asked[number]
                _log.warning("worker %s was asked to publish its state and did not", seat.member.name)
                passed.append(number)
        return passed

    def _is_past(self, seat: Seat, moment: float, steps: int) -> bool:
        is_late = self._clock() - moment > _PATIENCE_S
        has_moved_on = self._run.progress.committed_steps >= steps + _PATIENCE_STEPS
        return is_late and has_moved_on and not self._is_storing(seat)

    def _is_storing(self, seat: Seat) -> bool:
        every, published = self._run.file.state.store_every, seat.published_steps
        return bool(every and published % every == 0 and published > self._run.progress.settled_steps)
