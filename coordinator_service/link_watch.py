"""Watches what the exchange takes of each step: says what would help, or changes the wire type.  [shell]

A change is stored before the next step opens, so that a coordinator that is started again goes on with it; beside it
how long the exchange took before, so that a change which did not help is followed by no other one there either. Medians
begin anew after a restart: nothing changes before as many steps were measured as at the beginning.
"""

import logging

from ayni.tensors import payload_bytes
from coordinator_service.epochs import Seat
from coordinator_service.link_plan import Choice, LinkPlan
from coordinator_service.live import LiveStep
from coordinator_service.run import Run
from coordinator_service.wire_types import EXCHANGE_BEFORE, WIRE_TYPE

_log = logging.getLogger(__name__)


class LinkWatch:
    """Watches a run's training steps."""

    def __init__(self, run: Run) -> None:
        """Watches from now on."""
        self._run = run
        file = run.file
        is_local = file.local_update.enabled
        share = file.exchange_share if file.auto_wire or not is_local else 0.0
        microbatches = file.batch.microbatches if is_local else 0
        self._plan = LinkPlan(run.wire_types.now, share, microbatches, run.wire_types.exchange_before_s)

    async def note(self, live: LiveStep) -> None:
        """Takes a committed step.

        Raises:
            OSError: a change could not be stored.
        """
        seats = self._run.epochs.seats
        workers = [seats[w] for w in {lease.worker_id for lease, _ in live.core.contributions()} & seats.keys()]
        num_bytes = _num_bytes(live)
        self._run.regrouping.observe(live, [seat.times for seat in workers], num_bytes)
        if live.wire_type != self._plan.wire_type:
            self._plan.changed(live.wire_type)
        if advice := self._plan.observe([seat.times for seat in workers], num_bytes):
            _log.info("%s", advice)
        choice = self._plan.choice() if self._run.file.auto_wire else None
        if choice and self._is_possible(choice, workers):
            await self._change(live, choice)

    def _is_possible(self, choice: Choice, workers: list[Seat]) -> bool:
        """Returns whether every member can go along, and bytes travel at all: those in shared memory don't."""
        applicants = [seat.member.applicant for seat in self._run.epochs.seats.values()]
        if not all(a.follows_wire_type and choice.wire_type in a.wire_types for a in applicants):
            return False
        return not all(self._run.same_host.is_connected(seat.member.worker_id) for seat in workers)

    async def _change(self, live: LiveStep, choice: Choice) -> None:
        # At once: a worker that joins while it is being stored must be asked for the new type.
        self._run.wire_types.choose(choice.wire_type)
        facts = {WIRE_TYPE: choice.wire_type, EXCHANGE_BEFORE: repr(choice.exchange_s)}
        await self._run.writing.write("the wire type", self._run.store.set_facts, facts)
        _log.info("from step %d on %s", live.core.step + 1, choice.sentence)


def _num_bytes(live: LiveStep) -> int:
    """Returns the bytes of a step's gradients on the wire, one way."""
    if live.peers:
        return payload_bytes(live.peers.slices.num_elements, live.wire_type)
    return sum(payload_bytes(r.spec.num_elements, r.spec.dtype) for r in live.core.rounds.values())
