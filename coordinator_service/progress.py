"""Where the run stands, for status and for decisions that look back.  [shell]"""

import math
import time
from collections.abc import Iterable

from ayni.step_values import Commit
from coordinator_service.store_records import CommitRecord
from coordinator_service.values import Waiting
from coordinator_service.watch.history import History
from coordinator_service.watch.view import Point


class Progress:
    """State, last values and rates of the run."""

    def __init__(self, committed_steps: int = 0, initial_step: int = 0) -> None:
        """Starts waiting for workers.

        Args:
            committed_steps: steps that are behind the run already.
            initial_step: step that the run as a whole began with.
        """
        self.initial_step = initial_step
        self.state = "waiting"
        """"waiting", "running", "paused", "finished", "halted" or "suspended"."""
        self.detail = ""
        """Why the run was halted."""
        self.waiting: Waiting | None = None
        self.first_step = committed_steps
        """Step that this process began with."""
        self.committed_steps = committed_steps
        self.evaluated_steps = 0
        """Steps behind the newest evaluation."""
        self.stored_steps = 0
        """Steps behind the newest train state that is stored as objects."""
        self.settled_steps = committed_steps
        """Steps behind the newest train state that was stored or given up."""
        self.extra_leases = 0
        self.regroups = 0
        self.skipped_microbatches = 0
        self.norm_alarms = 0
        self.divergences = 0
        self.step = 0
        self.attempt = 0
        self.kind = "train"
        self.loss: float | None = None
        self.evaluation_loss: float | None = None
        self.evaluation_accuracy: float | None = None
        self.best: float | None = None
        self.samples_per_second = 0.0
        self.step_seconds = 0.0
        self.peak_reducer_bytes = 0
        self.voided_attempts = 0
        self.storing_steps = 0
        """Steps behind the train state that is being stored; 0 for none."""
        self.history = History()
        self.started = time.monotonic()
        self._opened = self.started

    @property
    def has_begun(self) -> bool:
        """Whether steps were committed: who joins now needs the run's state."""
        return self.committed_steps > self.initial_step

    @property
    def ended(self) -> bool:
        """Whether no step will follow."""
        return self.state in ("finished", "halted", "suspended")

    def wait(self, waiting: Waiting) -> bool:
        """Notes a wait; returns whether its reason is a new one."""
        changed = self.waiting != waiting
        self.state = "paused" if self.has_begun else "waiting"
        self.waiting = waiting
        return changed

    def go(self) -> None:
        """Notes that there are enough workers."""
        self.state, self.waiting = "running", None

    def remember(self, records: Iterable[CommitRecord]) -> None:
        """Takes the curves of what earlier processes committed."""
        for record in records:
            curve = self.history.training if record.kind == "train" else self.history.evaluations
            accuracy = record.num_correct / record.num_predictions if record.num_predictions else None
            curve.add(Point(step=record.step, unix_time=record.unix_time, loss=record.loss, accuracy=accuracy))

    def open(self, step: int, attempt: int, kind: str) -> None:
        """Notes a new attempt."""
        self.step, self.attempt, self.kind = step, attempt, kind
        self._opened = time.monotonic()

    def commit(self, kind: str, told: Commit, num_samples: int, score: float | None) -> None:
        """Notes a commit."""
        self.step_seconds = time.monotonic() - self._opened
        if kind == "train":
            self.committed_steps = told.step + 1
            self.loss = _known(told.global_loss)
            rate = num_samples / max(self.step_seconds, 1e-9)
            self.history.trained(_point(told, rate), self.step_seconds)
            self.samples_per_second = (
                rate if not self.samples_per_second else 0.7 * self.samples_per_second + 0.3 * rate
            )
            return
        self.evaluated_steps = told.step
        self.history.evaluations.add(_point(told))
        self.evaluation_loss = _known(told.global_loss)
        self.evaluation_accuracy = told.num_correct / told.num_predictions if told.num_predictions else None
        if told.best:
            self.best = score

    def finish(self) -> None:
        """Notes that the last step is committed."""
        self.state = "finished"

    def suspend(self) -> None:
        """Notes that another process will go on with the run."""
        self.state, self.waiting = "suspended", None

    def halt(self, detail: str) -> None:
        """Notes that the run stops."""
        self.state, self.detail = "halted", detail


def _known(loss: float) -> float | None:
    return None if math.isnan(loss) else loss


def _point(told: Commit, rate: float | None = None) -> Point:
    return Point(
        step=told.step,
        unix_time=time.time(),
        loss=_known(told.global_loss),
        samples_per_second=rate,
        accuracy=told.num_correct / told.num_predictions if told.num_predictions else None,
    )
