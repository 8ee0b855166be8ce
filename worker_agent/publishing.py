"""Publishes a training worker's state after an update, where it is due or another worker lacks it.  [shell]"""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from ayni.errors import Deadline, StorageFailed, TooLarge
from worker_agent.state_schedule import Todo
from worker_agent.train_state import Loaded, TrainState

_log = logging.getLogger(__name__)


class Membership(Protocol):
    """What is asked of a membership, and told to it; see `WorkerClient`."""

    @property
    def settled_steps(self) -> int:
        """Steps behind the newest state that the coordinator has had stored, or has given up."""

    def wait_settled(self, steps: int, within: timedelta) -> None:
        """Waits until the state behind so many steps is settled."""

    def publish(self, steps: int) -> None:
        """Says that the state behind so many steps can be read from this worker."""


class Publisher:
    """Publishes on the training thread, between two steps."""

    def __init__(self, state: TrainState, within: timedelta) -> None:
        """Takes where the state goes, and the longest wait for the one before to be settled."""
        self._state = state
        self._within = within

    def updated(
        self, membership: Membership, completed_steps: int, make: Callable[[], Loaded], *, is_asked: bool
    ) -> None:
        """Publishes the state after an update, if there is a reason to. One that can't be published is told and left.

        Args:
            membership: the present one.
            completed_steps: updates that the parameters have had.
            make: returns the state, as `Trainer.state`.
            is_asked: the coordinator asked for it with the step's lease.
        """
        schedule = self._state.schedule
        if is_asked:
            schedule.ask()
        todo = schedule.todo(completed_steps, membership.settled_steps)
        if todo is Todo.NOTHING:
            return
        try:
            if todo is Todo.SETTLE_FIRST:
                membership.wait_settled(schedule.published_steps, self._within)
            self._state.publish(*make())
        except (Deadline, StorageFailed, TooLarge) as error:
            _log.warning("the state behind step %d is not published: %s", completed_steps, error)
            return
        membership.publish(completed_steps)
