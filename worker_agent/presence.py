"""A worker's presence in a run: one membership after another.  [shell]

An elastic worker that loses the coordinator, or whose membership was ended, comes back in the background
(`worker_agent.rejoining`) while whoever waits goes on waiting. Work of a lost membership is void; only a commit that
was asked for and not answered is asked for again. Any other worker has one membership, and its end is raised.

Everything here runs on the event loop.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta

from ayni.buckets import Bucket
from ayni.errors import Deadline, LeaseRevoked, StepVoided, UnknownWorker
from ayni.step_values import Origin
from worker_agent.assignment_frames import Shutdown, StateOffer
from worker_agent.changes import Change
from worker_agent.exchange import Contribution, Outcome
from worker_agent.faults import CoordinatorLost, TransportBroken
from worker_agent.member import Member
from worker_agent.messages import FailedOffer
from worker_agent.news import voided
from worker_agent.rejoining import Fate, Patience, Rejoining
from worker_agent.reminders import reminders
from worker_agent.session import Commit, Report, ShardAssignment, Woken
from worker_agent.standing import Standing

_log = logging.getLogger(__name__)

_LOSSES = (CoordinatorLost, TransportBroken, UnknownWorker)
"""Ends of a membership that an elastic worker comes back from."""

OnOffer = Callable[[StateOffer], None]
OnMember = Callable[[Member], None]


class Presence:
    """A worker in a run."""

    def __init__(self, rejoining: Rejoining, standing: Standing, patience: Patience) -> None:
        """Takes what makes memberships; `join` makes the first.

        Args:
            rejoining: makes memberships.
            standing: what this worker says of itself.
            patience: how long to wait.
        """
        self.standing = standing
        self.change = Change()
        """Announced when there is another membership, or none any more."""
        self._rejoining = rejoining
        self._patience = patience
        self._member: Member | None = None
        self._ending: Exception | None = None
        self._fate: Fate | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._on_offer: OnOffer | None = None
        self._offer: StateOffer | None = None
        self._on_member: OnMember | None = None

    @property
    def member(self) -> Member:
        """The membership of now, or the last one."""
        assert self._member
        return self._member

    @property
    def ending(self) -> Shutdown | Exception | None:
        """How everything ended, if it has."""
        ending = self.member.news.ending
        if self._ending or isinstance(ending, Shutdown):
            return self._ending or ending
        return None if self._is_loss(ending) else ending

    async def join(self, within: timedelta) -> None:
        """Joins the run.

        Raises:
            AyniError: the coordinator refused.
            CoordinatorUnreachable: it did not answer in time.
        """
        self._member = await self._rejoining.first(within, self._offered)
        self._member.listen()
        if self.standing.elastic:
            self._keeper = asyncio.create_task(self._keep())

    def on_offer(self, callback: OnOffer) -> None:
        """Calls back with each offer of a state, on the event loop; with the last one at once, if it came already."""
        self._on_offer = callback
        if self._offer:
            callback(self._offer)

    def on_member(self, callback: OnMember) -> None:
        """Calls back, on the event loop, with the membership of now and with each later one."""
        self._on_member = callback
        callback(self.member)

    def wake(self) -> None:
        """Makes the next `next_assignment`, or the one that waits, raise `Woken`."""
        self._woken.set()

    def progress(self, completed_steps: int, origin: Origin | None = None, *, beat: bool = False) -> None:
        """Notes how many updates the parameters have had; with `beat` the coordinator is told at once."""
        self.standing.progress(completed_steps, origin)
        if beat:
            self.member.beat_now()

    def fail_offer(self, failed: FailedOffer) -> None:
        """Tells the coordinator at once that an offered state could not be taken."""
        self.standing.failed_offer = failed
        self.member.beat_now()

    def publish(self, steps: int) -> None:
        """Tells the coordinator, soon, that the state behind so many steps can be read from this worker."""
        self.standing.published_steps = steps
        self.member.beat_now()

    async def next_assignment(self, within: timedelta) -> ShardAssignment | None:
        """Waits for the next lease; None when the run is over. Work on the lease before it has ended then.

        Raises:
            Woken: `wake` was called.
            AyniError: the coordinator refused.
            CoordinatorLost: the coordinator is gone.
            Deadline: nothing came in time.
        """
        seconds = within.total_seconds()
        if self.member.news.has_lease and not self._woken.is_set():
            async with asyncio.timeout(seconds):
                return await self._next()
        taking, waking = asyncio.create_task(self._next()), asyncio.create_task(self._woken.wait())
        try:
            with reminders(self._idle_reason):
                await asyncio.wait({taking, waking}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                return taking.result()
            if not self._woken.is_set():
                raise _deadline(f"an assignment ({self.member.news.waiting_for})", seconds)
            self._woken.clear()
            raise Woken
        finally:
            waking.cancel()
            taking.cancel()
            await asyncio.gather(taking, waking, return_exceptions=True)

    async def contribute(self, assignment: ShardAssignment, bucket: Bucket, contribution: Contribution) -> Outcome:
        """Contributes to one reduction and receives its mean; see `Member.contribute`."""
        member = self.member
        try:
            return await member.contribute(assignment, bucket, contribution)
        except _LOSSES as error:
            raise self._consequence(member, assignment, error) from None

    async def commit(self, assignment: ShardAssignment, report: Report) -> Commit | ShardAssignment:
        """Waits for the step's commit, or for an extra lease; see `Member.commit`.

        A coordinator that is lost meanwhile is asked again when it is back.
        """
        member = self.member
        try:
            if self._fate and self._fate.assignment == assignment:
                return await self._known(self._fate)
            return await member.commit(assignment, report)
        except _LOSSES as error:
            consequence = self._consequence(member, assignment, error)
            fate = self._fate_of(member)
            if fate is None or fate.assignment != assignment or not isinstance(consequence, StepVoided):
                raise consequence from None
            return await self._known(fate)

    async def settled(self, steps: int, within: timedelta) -> None:
        """Waits until the coordinator has had the state behind a step stored, or has given it up.

        Raises:
            Deadline: it said neither in time.
        """
        standing = self.standing
        try:
            async with asyncio.timeout(within.total_seconds()):
                while standing.settled_steps < steps and not self.ending:
                    standing.is_awaiting_settled = True
                    self.member.beat_now()
                    await standing.settled.wait()
        except TimeoutError:
            what = f"the coordinator to have the state behind step {steps} stored"
            raise _deadline(what, within.total_seconds()) from None
        finally:
            standing.is_awaiting_settled = False

    def fail(self, error: Exception) -> None:
        """Ends everything with an error that every wait raises from now on."""
        self._end(error)
        if self._keeper:
            self._keeper.cancel()
        self.member.fail(error)

    async def leave(self, reason: str, parameters_sha256: str) -> None:
        """Ends the presence and the connection. Never fails: who can't be told learns it from the broken stream."""
        if self._keeper:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        member = self.member
        if self._is_loss(member.news.ending):
            await member.abandon(reason)
        else:
            await member.leave(reason, parameters_sha256)
        await self.standing.peers.close()

    async def _next(self) -> ShardAssignment | None:
        while True:
            member = self.member
            if self._ending:
                raise self._ending
            try:
                assignment = await member.next_assignment()
            except _LOSSES as error:
                if not self._is_loss(error):
                    raise
                await self._other_than(member)
            else:
                self._fate = None
                if assignment and assignment.discard_state:
                    self.progress(0)
                return assignment

    def _idle_reason(self) -> str:
        """Returns what all wait for; empty while a step is made."""
        news = self.member.news
        return news.waiting_for if news.is_idle and not news.ending else ""

    async def _keep(self) -> None:
        """Comes back, each time that the membership is lost."""
        try:
            while (lost := await self.member.news.failure()) and self._is_loss(lost):
                await self._come_back(lost)
        except Exception as final:  # Whatever it is, every wait must learn of it.
            self._end(final)

    async def _come_back(self, lost: Exception) -> None:
        fate = self._fate_of(self.member)
        self._member = await self._rejoining.again(self.member, lost, fate, self._offered)
        self._member.listen()
        if self._on_member:
            self._on_member(self._member)
        self.change.announce()

    def _end(self, error: Exception) -> None:
        self._ending = self._ending or error
        if self._fate:
            self._fate.fail(self._ending)
        self.standing.settled.announce()
        self.change.announce()

    async def _other_than(self, member: Member) -> None:
        """Waits until there is another membership, or the last word."""
        while self._member is member and not self._ending:
            await self.change.wait()

    def _is_loss(self, error: object) -> bool:
        return self.standing.elastic and isinstance(error, _LOSSES)

    def _consequence(self, member: Member, assignment: ShardAssignment, error: Exception) -> Exception:
        """Returns what a lost membership means for work on a lease."""
        if self._ending:
            return self._ending
        if not self._is_loss(error) or isinstance(member.news.ending, Shutdown):
            return error
        member.fail(error)
        if assignment.extra:
            reason = "the coordinator was lost"
            return LeaseRevoked(f"the extra lease is over: {reason}", lease=assignment.lease_id, detail=reason)
        return voided(assignment, "the coordinator was lost before it was known to be done")

    def _fate_of(self, member: Member) -> Fate | None:
        """Returns the commit of a lost membership that is to be asked for again, if there is one."""
        if self._fate is None and (unanswered := member.unanswered()):
            self._fate = Fate(*unanswered)
        return self._fate

    async def _known(self, fate: Fate) -> Commit:
        seconds = self._patience.exchange.total_seconds()
        try:
            async with asyncio.timeout(seconds):
                return await fate.known()
        except TimeoutError:
            raise _deadline(f"the commit of step {fate.assignment.step}", seconds) from None

    def _offered(self, offer: StateOffer) -> None:
        if offer.problem:
            self.fail_offer(FailedOffer(offer_id=offer.offer_id, reason=offer.problem))
            return
        self._offer = offer
        if self._on_offer:
            self._on_offer(offer)


def _deadline(what: str, seconds: float) -> Deadline:
    return Deadline(f"waited {seconds:g} s in vain for {what}", waiting_for=what, timeout=seconds)
