"""What an operator may do to a run that goes on: drain a worker, have the train state stored.  [shell]

Neither can change a committed byte: a worker leaves between two steps, and a state is stored as those that are due.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from coordinator_service.run import Run

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What became of a wish."""

    is_done: bool
    """Whether it is, or will be, fulfilled."""
    sentence: str


class Operator:
    """Fulfils wishes, or says why not. Belongs to the event loop."""

    def __init__(self, run: Run, ask_for_state: Callable[[], None]) -> None:
        """Acts on a run; `ask_for_state` has the state behind the next step stored."""
        self._run = run
        self._ask_for_state = ask_for_state

    def drain(self, worker_id: int) -> Answer:
        """Lets a worker go after the step in progress; asking twice changes nothing."""
        run = self._run
        seat = run.epochs.seats.get(worker_id)
        if run.progress.ended or seat is None or seat.dismissed:
            return _no(f"worker {worker_id} is no member of the run any more")
        name, needed = seat.member.name, run.file.min_workers
        rest = [one for one in run.epochs.able if one is not seat and not one.draining]
        if run.progress.has_begun and not seat.following and len(rest) < needed:
            return _no(
                f"worker {name} can't be drained: {len(rest)} of the run's workers would be left that are up to date, "
                f"and it needs {needed} (min_workers)"
            )
        if not seat.draining:
            _log.info("the operator drains worker %s", name)
            seat.draining = True
        needed = needed if run.progress.has_begun else 0
        in_step = run.live.epoch.workers if run.live else ()
        run.epochs.let_go(run.progress.committed_steps, needed=needed, in_step=in_step)
        run.changed.notify()
        return _yes(f"worker {name} leaves after the step in progress")

    def checkpoint(self) -> Answer:
        """Has the train state behind the next step stored."""
        if refusal := checkpoint_refusal(self._run):
            return _no(refusal)
        _log.info("the operator asks for a checkpoint")
        self._ask_for_state()
        self._run.changed.notify()
        return _yes("the state behind the next step is being stored")


def checkpoint_refusal(run: Run) -> str:
    """Returns why no state can be stored at an operator's wish; empty where one can."""
    if not run.file.state.store_every:
        return "this run stores no states (state.store_every is 0)"
    if run.progress.ended:
        return "no step follows: the run is over"
    if not run.epochs.able:
        return "no worker is here that has the run's parameters"
    return ""


def _yes(sentence: str) -> Answer:
    return Answer(is_done=True, sentence=sentence)


def _no(sentence: str) -> Answer:
    return Answer(is_done=False, sentence=sentence)
