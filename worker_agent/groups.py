"""The exchange group that this worker is in, and what it has brought to the attempt that the group reduces.  [shell]

Only the newest group counts. When the coordinator names another one, everything that was brought in this attempt is
brought again, whatever had become of it: under the new group nobody has anything. The training loop sees none of it. A
bucket's future is done when its mean is there for the first time; a commit waits until all has been brought under the
newest group, and is said again when the coordinator answers that the group has changed.

Belongs to the event loop; one membership has one `Groups`.
"""

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from ayni.buckets import Bucket
from ayni.errors import (
    BadChunk,
    Checksum,
    Incompatible,
    NonFinite,
    RoundRestarted,
    SpecMismatch,
    StaleEpoch,
    WeightMismatch,
)
from ayni.step_values import ExchangeGroup
from worker_agent.assignment_frames import Regroup
from worker_agent.backoff import delays
from worker_agent.changes import Change
from worker_agent.contributions import Offer
from worker_agent.exchange import Contribution, Outcome
from worker_agent.group_exchange import Brought, GroupExchange
from worker_agent.messages import Membership
from worker_agent.news import voided
from worker_agent.repeating import Repeating
from worker_agent.session import Commit, Report, ShardAssignment
from worker_agent.slice_offers import Moment, Terms
from worker_agent.standing import Standing

_log = logging.getLogger(__name__)

_FINAL = (NonFinite, SpecMismatch, WeightMismatch, BadChunk, Checksum)
"""What no other group changes: the coordinator is told, and halts the run."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class _Entry:
    """What one lease brings to one bucket."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.first: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """How it ended when it ended for the first time."""
        self.first.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.done_under: Moment | None = None
        self.sent_under: Moment | None = None
        self.error: Exception | None = None
        self.task: asyncio.Task[None] | None = None

    def fail(self, error: Exception) -> None:
        """Notes that there is no mean."""
        self.error = error
        if not self.first.done():
            self.first.set_exception(error)


class Beats(Protocol):
    """Sends heartbeats."""

    def beat_now(self) -> None:
        """Sends one at once."""

    def beat_soon(self) -> None:
        """Sends one, unless it is spared."""

    def spare(self) -> None:
        """Says that another call that leaves now says what the one would say that is to be sent soon."""


class Groups:
    """What this worker does in exchange groups, one after the other."""

    def __init__(self, repeating: Repeating, membership: Membership, standing: Standing, beats: Beats) -> None:
        """Starts without a group.

        Args:
            repeating: calls the coordinator, which reduces what no group does.
            membership: of this worker.
            standing: what it says of itself, and its ways of exchange.
            beats: sends heartbeats.
        """
        self._repeating = repeating
        self._membership = membership
        self._standing = standing
        self._beats = beats
        self._terms: Terms | None = None
        self._entries: list[_Entry] = []
        self._said = ""
        """Who reduces, as it was logged last."""
        self._primary = -1
        """Lease that the attempt began with."""
        self._num_buckets: dict[int, int] = {}
        """Buckets that something is brought to under each lease; 0 for not known yet."""
        self._ending: set[asyncio.Task[None]] = set()
        self._change = Change()
        standing.peers.on_lost = self._lost

    def told(self, assignment: ShardAssignment) -> None:
        """Takes a lease that the coordinator has given; a first one ends all work on the attempt before."""
        if assignment.extra:
            return
        self._primary = assignment.lease_id
        self._num_buckets.clear()
        self._drop_all("the coordinator has leased another attempt")
        if assignment.group is None:
            if self._said and assignment.kind == "train":
                self._log("the coordinator reduces gradients")
            self.leave("this attempt has no exchange group")
            return
        moment = Moment(
            generation=assignment.group.generation,
            epoch=assignment.epoch,
            step=assignment.step,
            attempt=assignment.attempt,
        )
        self._enter(
            Terms(
                moment=moment,
                group=assignment.group,
                worker_id=self._membership.worker_id,
                wire_type=assignment.wire_type or self._membership.wire_type,
                num_microbatches=assignment.num_microbatches,
            )
        )

    def regroup(self, frame: Regroup) -> None:
        """Takes another group for the attempt: all that was brought is brought again."""
        terms = self._terms
        if terms is None or (terms.moment.step, terms.moment.attempt) != (frame.step, frame.attempt):
            _log.debug("a group came for step %d attempt %d, which is over", frame.step, frame.attempt)
            return
        if frame.group.generation <= terms.moment.generation:
            return
        _log.info(
            "step %d: %d workers reduce among themselves, anew: %s", frame.step, len(frame.group.members), frame.reason
        )
        self._stop(self._entries)
        moment = replace(terms.moment, generation=frame.group.generation)
        self._enter(replace(terms, moment=moment, group=frame.group))
        for entry in self._entries:
            self._start(entry)

    async def reduce(self, bucket: Bucket, contribution: Contribution) -> Outcome:
        """Contributes to one reduction and receives its mean: from the lease's exchange group, or the coordinator.

        Raises:
            StepVoided: the attempt is over.
            AyniError: what was brought, or came out, is wrong; or the coordinator refused.
            TransportBroken: see `Repeating.contribute`.
        """
        offer = contribution.offer
        if offer is None or offer.assignment.group is None:
            return await self._repeating.contribute(bucket, contribution)
        if not self._is_for(offer.assignment):
            raise voided(offer.assignment, "it belongs to another attempt than the exchange group")
        entry = _Entry(offer)
        self._entries.append(entry)
        self._start(entry)
        try:
            return await asyncio.shield(entry.first)
        except asyncio.CancelledError:
            self._drop([entry], voided(offer.assignment, "the worker gave it up"))
            await self.ended()
            raise

    async def commit(self, assignment: ShardAssignment, report: Report) -> Commit:
        """Says that a lease is done, as often as the group changes, and waits for the step's commit.

        Raises:
            StepVoided: the attempt is over.
            AyniError: the coordinator refused; or what was brought again is wrong.
            TransportBroken: the coordinator is gone.
        """
        if assignment.group is None:
            return await self._repeating.commit(assignment, report)
        self._num_buckets[assignment.lease_id] = report.num_buckets
        self._tell_of(assignment.lease_id)
        while True:
            terms = await self._settled(assignment)
            self._beats.spare()
            taken = () if assignment.extra else self._exchange(terms.group).slices(terms.moment)
            said = replace(report, generation=terms.moment.generation, slices=taken)
            try:
                return await self._repeating.commit(assignment, said)
            except RoundRestarted as error:
                _log.debug("step %d: to be committed again: %s", assignment.step, error)
                await self._newer(assignment, terms.moment)

    def revoke(self, lease_id: int) -> None:
        """Ends what was brought under a lease that was taken back; without its first lease a worker is in no group."""
        own = [entry for entry in self._entries if entry.offer.assignment.lease_id == lease_id]
        if lease_id == self._primary:
            self._drop_all("its lease was taken back")
            self.leave("the others went on without this worker")
        for entry in own:
            self._drop([entry], voided(entry.offer.assignment, "its lease was taken back"))

    async def ended(self) -> None:
        """Waits until nothing works any more on what was dropped."""
        others = self._ending - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)

    async def close(self) -> None:
        """Ends all work; the membership is over."""
        self._drop_all("the membership is over")
        self.leave("its membership is over")
        await self.ended()

    def _enter(self, terms: Terms) -> None:
        self._terms = terms
        group = terms.group
        who = f"{len(group.owners)} of {len(group.members)} workers"
        self._log(f"{who} reduce gradients among themselves (topology {group.topology})")
        self._say(terms.moment.generation)
        self._exchange(terms.group).regroup(terms)
        self._change.announce()

    def leave(self, why: str) -> None:
        """Takes no part in the exchange group any more; nothing happens where there is none."""
        terms, self._terms = self._terms, None
        if terms:
            self._say(0)
            self._exchange(terms.group).end(why)
        self._change.announce()

    def _log(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            _log.info("%s", sentence)

    def _say(self, generation: int) -> None:
        """Has heartbeats speak of another generation, of which nothing is known yet."""
        self._standing.generation = generation
        self._standing.contributed_leases = self._standing.lost_owners = ()
        self._standing.failed_reduction = ""

    def _start(self, entry: _Entry) -> None:
        assert self._terms
        entry.error = None
        entry.task = asyncio.create_task(self._bring(entry, self._terms))

    def _stop(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            task, entry.task = entry.task, None
            if task and not task.done():
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    def _drop(self, entries: Sequence[_Entry], why: Exception) -> None:
        """Stops work for good; whoever waits for its first end learns why."""
        self._stop(entries)
        for entry in entries:
            entry.fail(why)
        dropped = set(entries)
        self._entries = [entry for entry in self._entries if entry not in dropped]
        self._change.announce()

    def _drop_all(self, why: str) -> None:
        for entry in list(self._entries):
            self._drop([entry], voided(entry.offer.assignment, why))

    async def _bring(self, entry: _Entry, terms: Terms) -> None:
        """Brings something under one group, until it is done or the group is replaced."""
        own = asyncio.current_task()
        brought = Brought(
            offer=entry.offer,
            has_mean=entry.first.done(),
            on_sent=lambda: self._sent(entry, terms.moment),
            is_wanted=lambda: entry.task is own,
        )
        outcome: Outcome | Exception | None = None
        for delay in delays(random.random, _FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                outcome = await self._exchange(terms.group).reduce(brought)
            except (RoundRestarted, StaleEpoch) as error:
                _log.debug("%s is to be brought again: %s", entry.offer.name, error)
            except Exception as error:  # Whatever it is, whoever waits must learn of it.
                outcome = error
            # A group of tasks that is cancelled while one of them fails raises the failure, and no cancellation.
            if outcome or entry.task is not own:
                break
            await asyncio.sleep(delay)
        if entry.task is own:
            self._note(entry, terms.moment, outcome)

    def _note(self, entry: _Entry, moment: Moment, outcome: Outcome | Exception | None) -> None:
        if isinstance(outcome, Exception):
            if isinstance(outcome, _FINAL) and not self._standing.failed_reduction:
                self._standing.failed_reduction = outcome.message
                self._beats.beat_now()
            entry.fail(outcome)
        else:
            assert outcome, "only what was stopped has no outcome"
            entry.done_under = moment
            if not entry.first.done():
                entry.first.set_result(outcome)
        self._change.announce()

    async def _settled(self, assignment: ShardAssignment) -> Terms:
        """Waits until all that a lease brings was brought under the newest group; returns its terms."""
        while True:
            if self._terms is None or not self._is_for(assignment):
                raise voided(assignment, "the worker is in another attempt, or in no exchange group any more")
            own = [entry for entry in self._entries if entry.offer.assignment.lease_id == assignment.lease_id]
            for entry in own:
                if entry.error:
                    raise entry.error
            if all(entry.done_under == self._terms.moment for entry in own):
                return self._terms
            await self._change.wait()

    async def _newer(self, assignment: ShardAssignment, moment: Moment) -> None:
        """Waits for another group than that of a moment."""
        while self._terms and self._terms.moment == moment and self._is_for(assignment):
            await self._change.wait()

    def _sent(self, entry: _Entry, moment: Moment) -> None:
        """Notes that something has left whole, and tells the coordinator when it was the last of its lease."""
        if self._terms is None or self._terms.moment != moment or entry.sent_under == moment:
            return
        entry.sent_under = moment
        lease_id = entry.offer.assignment.lease_id
        self._num_buckets.setdefault(lease_id, entry.offer.num_buckets)
        self._tell_of(lease_id)

    def _tell_of(self, lease_id: int) -> None:
        """Tells the coordinator that a lease's contributions have left, if all have."""
        own = [entry for entry in self._entries if entry.offer.assignment.lease_id == lease_id]
        num_sent = sum(self._terms is not None and entry.sent_under == self._terms.moment for entry in own)
        said = self._standing.contributed_leases
        if 0 < num_sent == self._num_buckets[lease_id] and lease_id not in said:
            self._standing.contributed_leases = (*said, lease_id)
            self._beats.beat_soon()

    def _lost(self, generation: int, members: Sequence[int]) -> None:
        said = self._standing.lost_owners
        news = [member for member in members if member not in said]
        if news and self._terms and self._terms.moment.generation == generation:
            names = ", ".join(self._terms.name_of(member) for member in news)
            _log.warning("%s, which reduces slices, can't be reached from here: the coordinator is told", names)
            self._standing.lost_owners = (*said, *news)
            self._beats.beat_now()

    def _exchange(self, group: ExchangeGroup) -> GroupExchange:
        found = self._standing.peers.exchanges.get(group.topology)
        if found is None:
            known = ", ".join(self._standing.peers.topologies) or "none but star"
            raise Incompatible(
                f"the coordinator asks for topology {group.topology}; this worker takes part in {known}",
                field="topologies",
                expected=group.topology,
                received=known,
            )
        return found

    def _is_for(self, assignment: ShardAssignment) -> bool:
        moment = self._terms.moment if self._terms else None
        said = (assignment.epoch, assignment.step, assignment.attempt)
        return moment is not None and (moment.epoch, moment.step, moment.attempt) == said
