"""Between the coordinator's offers and the training loop: fetches what is offered, hands over what has come.  [shell]

Offers arrive on the event loop, the training loop asks on its own thread. What is fetched when a newer offer comes, or
when the loop says that it is of no use, is dropped.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from worker_agent.assignment_frames import StateOffer
from worker_agent.onboarding import Onboarding
from worker_agent.state_blocks import is_damage
from worker_agent.train_state import Loaded, steps_of
from worker_agent.training.following import State

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What the coordinator and the training loop are told; each is called from any thread."""

    failed: Callable[[int, str, bool], None]
    """The offer with this number could not be taken, and why; and whether that is because a stored state is damaged."""
    published: Callable[[int], None]
    """The state behind so many steps can be read from this worker now."""
    arrived: Callable[[], None]
    """A state is here: the loop is to look, even where it waits for a lease."""


class OfferedStates:
    """States from other workers or from the object store; see `training.following.StateSource`. Thread-safe."""

    def __init__(self, onboarding: Onboarding, answers: Answers) -> None:
        """Takes who fetches, and who is told."""
        self._onboarding = onboarding
        self._answers = answers
        self._lock = threading.Lock()
        self._needs: int | None = None
        self._offer_id = 0
        self._here: State | None = None

    def offered(self, offer: StateOffer) -> None:
        """Takes an offer of the coordinator; it replaces the one before."""
        with self._lock:
            needs, self._offer_id, self._here = self._needs, offer.offer_id, None
        if needs is not None and offer.completed_steps < needs:
            self._fail(offer.offer_id, f"means are kept from step {needs} on; an older state is of no use")
            return
        taking = self._onboarding.take(offer)
        taking.add_done_callback(lambda done: self._taken(offer, done))

    def want(self, from_step: int) -> None:
        """See StateSource."""
        with self._lock:
            self._needs = from_step
            if self._here and self._here.completed_steps < from_step:
                self._here = None

    def poll(self) -> State | None:
        """See StateSource."""
        with self._lock:
            state, self._here = self._here, None
        return state

    def reject(self, reason: str) -> None:
        """See StateSource."""
        with self._lock:
            offer_id, self._here = self._offer_id, None
        self._onboarding.stop()
        if offer_id:
            self._fail(offer_id, reason)

    def _taken(self, offer: StateOffer, done: "Future[Loaded]") -> None:
        try:
            loaded = done.result()
        except CancelledError:
            return
        except Exception as error:
            _log.debug("traceback", exc_info=True)
            self._fail(offer.offer_id, str(error) or repr(error), offer.metadata is None and is_damage(error))
            return
        steps = steps_of(loaded)
        with self._lock:
            if offer.offer_id != self._offer_id:
                return
            self._here = State(tensors=loaded[0], facts=loaded[1], completed_steps=steps)
        self._answers.published(steps)
        self._answers.arrived()

    def _fail(self, offer_id: int, reason: str, is_damaged: bool = False) -> None:
        with self._lock:
            if self._offer_id == offer_id:
                self._offer_id = 0
        _log.warning("the offered state could not be taken: %s", reason)
        self._answers.failed(offer_id, reason, is_damaged)
