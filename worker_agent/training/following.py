"""A worker whose parameters lag behind the run: it keeps means until it has a state to apply them to.  [shell]

A follower gets leases without micro-batches, and with them the mean and the commit of each step. Another worker's state
takes a while to arrive, and the run goes on meanwhile; applied to that state, the means that were kept lead to the very
parameters that everybody has. They must go on from the state without a gap, so a state from before the first mean that
was kept is of no use, and another one is asked for.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ayni.buckets import Bucket
from worker_agent.session import Commit, ShardAssignment, Vector

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A whole train state, as `Trainer.state` of another worker returned it."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, str]
    completed_steps: int


class StateSource(Protocol):
    """Gets states from other workers or from where they are stored. Thread-safe; nothing here waits."""

    def poll(self) -> State | None:
        """Hands over the newest state that has come whole since the last call; each state once."""

    def want(self, from_step: int) -> None:
        """Says that a state behind at least so many steps is needed; an older one that has come is dropped."""

    def reject(self, reason: str) -> None:
        """Says that what was handed over, or is under way, is of no use: another one is to be asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptStep:
    """A committed step that is still to be applied."""

    lease: ShardAssignment
    commit: Commit
    means: Mapping[Bucket, Vector]


class Follower:
    """Keeps means, and says when there is a state for them."""

    def __init__(self, source: StateSource, limit_bytes: int) -> None:
        """Starts with nothing kept.

        Args:
            source: where states come from.
            limit_bytes: most bytes of means to keep; one step's are always kept.
        """
        self._source, self._limit = source, limit_bytes
        self._steps: list[KeptStep] = []
        self._bytes = 0
        self._first = 0
        self._began = 0.0
        self.is_active = False

    def follow(self, step: int, why: str) -> None:
        """Begins to follow from a step on, or goes on; `why` says in what the parameters differ from the run's."""
        if not self.is_active:
            log.warning("%s, the run is at step %d: following until a state arrives", why, step)
            self.is_active, self._began = True, time.perf_counter()
            self._start_afresh(step)
        elif step != self._first + len(self._steps):
            log.info("the run goes on with step %d: the means of %s are dropped", step, _steps(len(self._steps)))
            self._start_afresh(step)

    def keep(self, lease: ShardAssignment, commit: Commit, means: Mapping[Bucket, Vector]) -> None:
        """Keeps a committed step, with copies of its means."""
        size = sum(values.nbytes for values in means.values())
        if self._steps and self._bytes + size > self._limit:
            reason = (
                f"the means of {_steps(len(self._steps))} since step {self._first} take {self._bytes:,} bytes, and no "
                f"state has come to apply them to; follow_bytes allows {self._limit:,}"
            )
            log.warning("%s; they are dropped, and another state is asked for", reason)
            self._start_afresh(lease.step)
            self._source.reject(reason)
        copies = {bucket: values.copy() for bucket, values in means.items()}
        self._steps.append(KeptStep(lease=lease, commit=commit, means=copies))
        self._bytes += size

    def take_state(self, open_step: int | None = None) -> State | None:
        """Returns a state that has come and that what was kept goes on from; None if there is none yet.

        Args:
            open_step: the step that is under way; None for none.
        """
        state = self._source.poll()
        if state is None:
            return None
        steps = state.completed_steps
        if self.is_active and steps < self._first:
            self.reject(f"the state behind step {steps} is too old: means are kept from step {self._first} on")
            return None
        if open_step is not None and steps > open_step:
            self.reject(f"the state behind step {steps} is ahead of the run, which is at step {open_step}")
            return None
        return state

    def steps_from(self, completed_steps: int) -> list[KeptStep]:
        """Returns what is kept of a step on, in order."""
        return [kept for kept in self._steps if kept.lease.step >= completed_steps]

    def reject(self, reason: str) -> None:
        """Asks for another state."""
        log.warning("%s; another one is asked for", reason)
        self._source.reject(reason)

    def caught_up(self, state: State, completed_steps: int) -> None:
        """Ends following."""
        seconds = time.perf_counter() - self._began if self.is_active else 0.0
        log.info(
            "caught up with the run after %.1f s: the state behind step %d, and the means of %s since",
            seconds,
            state.completed_steps,
            _steps(completed_steps - state.completed_steps),
        )
        self.is_active = False
        self._drop()

    def _start_afresh(self, step: int) -> None:
        self._drop()
        self._first = step
        self._source.want(step)

    def _drop(self) -> None:
        self._steps, self._bytes = [], 0


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"
