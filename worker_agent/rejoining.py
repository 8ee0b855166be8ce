"""Becoming a member, for the first time and again.  [shell]

Coming back is a row of tries with a connection of their own each, so that a coordinator that was started elsewhere
under the same name is found. All tries of one return share a nonce: a Join whose answer was lost gives the same
membership again. Before the worker says what it can compute next, it asks what became of the step whose commit it was
waiting for: so no update is forgotten, and none is made twice.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from ayni import failpoints
from ayni.errors import (
    AyniError,
    Halted,
    IdentityTaken,
    Incompatible,
    Quarantined,
    RunEnded,
    TokenRefused,
    UnknownWorker,
    WorldFull,
)
from ayni.logs import ChangeLogger
from worker_agent.assignment_frames import StateOffer
from worker_agent.backoff import delays
from worker_agent.contact import first_contact
from worker_agent.coordinator import Coordinator
from worker_agent.faults import START_AGAIN, CoordinatorLost, TransportBroken
from worker_agent.member import Member
from worker_agent.messages import NO_FAILURE, JoinFacts, Membership
from worker_agent.news import voided
from worker_agent.session import Commit, Report, ShardAssignment
from worker_agent.standing import Standing

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_TRY_S = 5.0
"""Longest time for one Join: the coordinator may be elsewhere by now, where the next try dials."""

_FINAL = (Halted, Incompatible, Quarantined, RunEnded, TokenRefused)
"""Verdicts on a worker that asks for a commit again, and not on that commit."""
_PASSING = (IdentityTaken, TransportBroken, UnknownWorker, WorldFull)
"""Why a try may fail and a later one succeed: the coordinator still believes in the membership that was lost, or
another worker has the place for now."""

OnOffer = Callable[[StateOffer], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a worker waits."""

    exchange: timedelta
    """Longest time for one bucket, or for one commit."""
    rejoin: timedelta
    """How long to try to come back."""


class Fate:
    """A commit that was asked for when the coordinator was lost."""

    def __init__(self, assignment: ShardAssignment, report: Report) -> None:
        """Starts unknown."""
        self.assignment = assignment
        self.report = report
        self._future: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(lambda future: future.cancelled() or future.exception())

    @property
    def is_known(self) -> bool:
        """Whether there is an answer."""
        return self._future.done()

    async def known(self) -> Commit:
        """Waits for the answer.

        Raises:
            StepVoided: the step was not committed with this worker's contribution.
            Exception: there is no answer any more.
        """
        return await asyncio.shield(self._future)

    async def learn(self, asking: Awaitable[Commit]) -> None:
        """Notes what the coordinator answers.

        Raises:
            AyniError: the answer concerns the worker, not the commit.
            TransportBroken: there was no answer.
        """
        try:
            commit = await asking
        except (*_FINAL, UnknownWorker):
            raise
        except AyniError as error:
            self.fail(voided(self.assignment, error.message))
        else:
            self._future.set_result(commit)

    def fail(self, error: Exception) -> None:
        """Notes that there is no commit, if nothing is known yet."""
        if not self._future.done():
            self._future.set_exception(error)


class Rejoining:
    """Makes memberships of one worker."""

    def __init__(
        self,
        dial: Callable[[], Coordinator],
        facts: JoinFacts,
        standing: Standing,
        patience: Patience,
    ) -> None:
        """Takes what a Join says.

        Args:
            dial: gives a coordinator behind a new connection; called on the event loop.
            facts: what a Join says; the nonce is made here.
            standing: what this worker says of itself.
            patience: how long to wait.
        """
        self._dial = dial
        self._facts = facts
        self._standing = standing
        self._patience = patience

    async def first(self, within: timedelta, on_offer: OnOffer) -> Member:
        """Joins for the first time.

        Raises:
            AyniError: the coordinator refused.
            CoordinatorUnreachable: it did not answer in time.
        """
        coordinator, facts = self._dial(), self._fresh_facts()
        try:
            joining = first_contact(lambda limit: coordinator.join(facts, limit), coordinator.address, within)
            member = self._member(coordinator, await joining, on_offer)
            await member.share_memory()
            return member
        except BaseException:
            await coordinator.close()
            raise

    async def again(self, lost: Member, why: Exception, fate: Fate | None, on_offer: OnOffer) -> Member:
        """Comes back after a membership was lost. The new one is not listening yet.

        Raises:
            CoordinatorLost: the allowance is used up.
            AyniError: the coordinator refused for good.
        """
        began, limit = _now(), self._patience.rejoin.total_seconds()
        _log.warning("%s; rejoining for up to %g s", _without_advice(why), limit)
        await lost.abandon("the coordinator was lost")
        facts, changes, tries = self._fresh_facts(), ChangeLogger(_log, logging.DEBUG), 0
        self._standing.failed_offer = NO_FAILURE
        for delay in delays(random.random, _FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            await asyncio.sleep(delay)
            tries += 1
            try:
                member = await self._try(facts, lost.membership, fate, on_offer)
            except _PASSING as error:
                changes.log_if_changed("rejoin", str(error))
                if _now() - began >= limit:
                    raise self._gave_up(limit, tries, error) from error
            else:
                seconds, steps = _now() - began, self._standing.completed_steps
                number = member.membership.worker_id
                _log.warning("rejoined as worker %d after %.1f s with %d steps completed", number, seconds, steps)
                return member
        raise AssertionError("there is always another delay")

    async def _try(self, facts: JoinFacts, before: Membership, fate: Fate | None, on_offer: OnOffer) -> Member:
        coordinator = self._dial()
        try:
            membership = await self._joined(coordinator, facts, before)
            member = self._member(coordinator, membership, on_offer)
        except BaseException:
            await coordinator.close()
            raise
        try:
            await member.share_memory()
            if fate and not fate.is_known:
                await fate.learn(member.ask(fate.assignment, fate.report))
        except BaseException:
            await member.abandon("it was lost again")
            raise
        return member

    async def _joined(self, coordinator: Coordinator, facts: JoinFacts, before: Membership) -> Membership:
        within = timedelta(seconds=_TRY_S)
        try:
            return await coordinator.join(facts, within)
        except IdentityTaken:
            # Most likely by this worker, whose broken connection the coordinator has not noticed.
            await coordinator.end(before, "its connection was lost, and it is back", within)
            return await coordinator.join(facts, within)

    def _member(self, coordinator: Coordinator, membership: Membership, on_offer: OnOffer) -> Member:
        failpoints.hit("worker.joined")
        member = Member(coordinator, membership, self._patience.exchange, self._standing, on_offer)
        member.start_heart()
        return member

    def _fresh_facts(self) -> JoinFacts:
        return replace(self._facts, join_nonce=secrets.token_hex(16))

    def _gave_up(self, limit: float, tries: int, error: Exception) -> CoordinatorLost:
        return CoordinatorLost(
            f"this worker lost its place in the run and could not come back within {limit:g} s ({tries} tries): "
            f"{error}; start it again when the coordinator is back"
        )


def _without_advice(error: Exception) -> str:
    return str(error).removesuffix(f"; {START_AGAIN}")


def _now() -> float:
    return asyncio.get_running_loop().time()
