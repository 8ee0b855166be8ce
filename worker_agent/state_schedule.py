"""When a worker that trains publishes its state.  [core]

There are two reasons: the run file says so (`state.publish_every`), or another worker lacks the state and the
coordinator asked for it. Only one state is published at a time, and one that is to be stored is not replaced before the
coordinator has said that it is settled: stored, or given up. A later one that is to be stored as well waits for that,
and training with it; any other reason is put off to a later step instead.
"""

from enum import Enum

from ayni.run_config import StateConfig


class Todo(Enum):
    """What a worker does with its state after an update."""

    NOTHING = "nothing"
    PUBLISH = "publish"
    SETTLE_FIRST = "settle first"
    """Wait until what is published is settled, then publish."""


class StateSchedule:
    """Decides after each update. Remembers what is published, and whether somebody asked."""

    def __init__(self, config: StateConfig) -> None:
        """Takes what the run says about its state; nothing is published yet."""
        self._config = config
        self._is_asked = False
        self.published_steps = 0
        """Steps behind the state that is published; 0 for none."""

    def ask(self) -> None:
        """Has the state published as soon as that replaces none that is to be stored."""
        self._is_asked = True

    def published(self, steps: int) -> None:
        """Notes what is published now; 0 for nothing."""
        self.published_steps = steps
        if steps:
            self._is_asked = False

    def is_due(self, completed_steps: int) -> bool:
        """Says whether the run file asks for the state after so many steps to be published."""
        every = self._config.publish_every
        return every > 0 and completed_steps > 0 and completed_steps % every == 0

    def is_to_be_stored(self, steps: int) -> bool:
        """Says whether the run file asks for the state after so many steps to be stored."""
        every = self._config.store_every
        return every > 0 and steps > 0 and steps % every == 0

    def todo(self, completed_steps: int, settled_steps: int) -> Todo:
        """Says what to do after an update.

        Args:
            completed_steps: updates that the parameters have had now.
            settled_steps: steps behind the newest state that the coordinator has had stored or has given up.
        """
        if self.published_steps == completed_steps or not (self.is_due(completed_steps) or self._is_asked):
            return Todo.NOTHING
        if not self.is_to_be_stored(self.published_steps) or settled_steps >= self.published_steps:
            return Todo.PUBLISH
        return Todo.SETTLE_FIRST if self.is_to_be_stored(completed_steps) else Todo.NOTHING
