"""What a coordinator remembers of its run for those who watch: curves, durations, events.  [core]"""

from collections import deque

from coordinator_service.watch.curve import Curve, Durations
from coordinator_service.watch.view import Event, Point

_MOST_EVENTS = 100
_LONGEST = 500
"""Characters of a sentence."""


class History:
    """Bounded, however long the run is."""

    def __init__(self) -> None:
        """Starts empty."""
        self.training = Curve()
        self.evaluations = Curve(200)
        self.durations = Durations()
        """Of training steps that this process committed."""
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened, oldest first."""
        return tuple(self._events)

    def trained(self, point: Point, seconds: float) -> None:
        """Takes a training step that was committed."""
        self.training.add(point)
        self.durations.add(seconds)

    def happened(self, event: Event) -> None:
        """Takes an event; from any thread."""
        sentence = event.sentence if len(event.sentence) <= _LONGEST else event.sentence[: _LONGEST - 4] + " ..."
        self._events.append(
            Event(
                unix_time=event.unix_time,
                level=event.level,
                sentence=" ".join(sentence.split()),
                committed_steps=event.committed_steps,
            )
        )
