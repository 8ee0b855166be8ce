"""Whose parameters are those of the run, by what the members say of them.  [shell]

A member says how many updates its parameters have had, and which commit the last one came from. Parameters that are not
of the commits that count are thrown away, however many updates they have had: the member follows until it has taken
another state. A member that doesn't say the commit is believed.
"""

import logging

from ayni.step_values import Origin
from coordinator_service.epochs import Epochs, Seat
from coordinator_service.lineage import Lineage
from coordinator_service.progress import Progress
from coordinator_service.signals import Signal

_log = logging.getLogger(__name__)


class MemberStates:
    """What the members have, and what they can't take."""

    def __init__(self, epochs: Epochs, progress: Progress, changed: Signal) -> None:
        """Judges a run's members; `changed` is notified when status may have changed."""
        self.lineage = Lineage()
        """The commits that count."""
        self._epochs = epochs
        self._progress = progress
        self._changed = changed

    def is_ours(self, seat: Seat) -> bool:
        """Says whether a member's parameters may be of the commits that count."""
        is_ahead = seat.completed_steps > self._progress.committed_steps
        return not is_ahead and self.lineage.has(seat.completed_steps, seat.origin)

    def is_held(self, seat: Seat) -> bool:
        """Says whether a member is known to have the run's state behind as many steps as it says."""
        return seat.member.ready and not seat.tainted and not seat.unproven and self.is_ours(seat)

    def completed(self, seat: Seat, completed_steps: int, origin: Origin | None) -> None:
        """Notes how many updates a member's parameters have had; a follower may be up to date by that."""
        is_news = (completed_steps, origin) != (seat.completed_steps, seat.origin)
        seat.completed_steps, seat.origin = completed_steps, origin
        if not seat.following:
            return
        if not self.is_ours(seat):
            if is_news:
                self.follow(seat)
        elif not seat.unproven and completed_steps == self._progress.committed_steps:
            seat.lead()
            _log.info("worker %s has the run's state behind step %d", seat.member.name, completed_steps)
            self._epochs.changed.notify()
            self._changed.notify()

    def follow(self, seat: Seat) -> None:
        """Makes a member a follower; one whose parameters are not of the commits that count throws them away."""
        is_ours = self.is_ours(seat)
        seat.follow(tainted=seat.tainted or seat.unproven or not is_ours)
        if not is_ours:
            _log.warning(
                "worker %s has parameters of %d updates that are not those of the run: it gets another state",
                seat.member.name,
                seat.completed_steps,
            )

    def went_back(self, steps: int) -> None:
        """Notes that the run went back to a state behind so many steps: who has it leads, everybody else follows."""
        self.lineage.rewind(steps)
        for seat in self._epochs.seats.values():
            seat.damaged_offers = 0
            if seat.completed_steps == steps and self.is_held(seat):
                seat.lead()
            else:
                self.follow(seat)

    def published(self, seat: Seat, steps: int) -> None:
        """Notes that a member's host tier holds the train state behind so many steps."""
        if steps != seat.published_steps:
            seat.published_steps = steps
            self._changed.notify()

    def failed_offer(self, seat: Seat, offer_id: int, reason: str, *, is_damaged: bool) -> None:
        """Notes that a follower could not take an offer; what it kept of the run's steps is void then."""
        if offer_id != seat.failed_offer[0]:
            seat.failed_offer, seat.follow_from = (offer_id, reason), None
            seat.damaged_offers += is_damaged
            self._changed.notify()
