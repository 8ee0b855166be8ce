"""One membership: the assignment stream, heartbeats, contributions and commits.  [shell]

Everything here runs on the event loop. Two tasks live as long as the membership: one reads the assignment stream, one
sends heartbeats. Work on a lease (a contribution, a commit) is a task; when the lease is void, all its work is stopped
before the next lease is handed out, so that no buffer of a void attempt is touched any more.

How work ends: a verdict of the coordinator is raised as it is. When only the transport of one call broke, the verdict
was lost on its way. A commit is asked for again; a contribution is made again by an elastic worker. For any other
worker the assignment stream tells the truth: a newer lease, a refusal, or that the coordinator is gone.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

from ayni.buckets import Bucket
from ayni.errors import (
    AyniError,
    Deadline,
    LeaseRevoked,
    NotLeased,
    StaleEpoch,
    StaleStep,
    StepVoided,
    UnknownWorker,
)
from ayni.logs import ChangeLogger
from worker_agent.assignment_frames import Frame, Regroup, Revoked, Shutdown, StateOffer, Waiting
from worker_agent.attempt import Attempt, Held
from worker_agent.coordinator import Coordinator
from worker_agent.exchange import Contribution, Outcome
from worker_agent.faults import TransportBroken
from worker_agent.groups import Groups
from worker_agent.heart import Heart
from worker_agent.messages import Membership
from worker_agent.news import News, voided
from worker_agent.repeating import Repeating
from worker_agent.same_host import SameHost
from worker_agent.session import Commit, Report, ShardAssignment
from worker_agent.standing import Standing

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LEAVE_SECONDS = 5.0
_LAST_WORD_SECONDS = 2.0

_OVER = (StaleEpoch, StaleStep, StepVoided, NotLeased)
"""Refusals that say that the attempt, or the lease, is over."""


class Member:
    """A worker's membership in a run."""

    def __init__(
        self,
        coordinator: Coordinator,
        membership: Membership,
        exchange_timeout: timedelta,
        standing: Standing,
        on_offer: Callable[[StateOffer], None],
    ) -> None:
        """Takes over a membership that Join has given.

        Args:
            coordinator: has joined.
            membership: what Join answered.
            exchange_timeout: longest time for one bucket, or for one commit.
            standing: what this worker says of itself.
            on_offer: is told where the state can be had that this worker lacks.
        """
        self.membership = membership
        self.news = News()
        self._coordinator = coordinator
        self._timeout = exchange_timeout.total_seconds()
        self._standing = standing
        self._on_offer = on_offer
        self._attempt: Attempt | None = None
        self._lives: list[asyncio.Task[None]] = []
        self._leaving = False
        self._changes = ChangeLogger(_log)
        self._same_host = SameHost(membership.shared_memory, membership.session, standing.vectors)
        self._heart = Heart(coordinator, membership, standing, self._changes)
        repeating = Repeating(coordinator, self.news, standing, self._same_host)
        self._groups = Groups(repeating, membership, standing, self._heart)

    @property
    def taken(self) -> ShardAssignment | None:
        """Primary lease that was handed out last."""
        return self._heart.taken

    def start_heart(self) -> None:
        """Starts heartbeats."""
        self._start_life(self._beat())

    async def share_memory(self) -> None:
        """Connects to the memory of a coordinator on this host, so that the first gradients can go through it."""
        await self._same_host.regions()

    def listen(self) -> None:
        """Says that the worker is ready, and reads the assignment stream from then on."""
        self._start_life(self._listen())

    def beat_now(self) -> None:
        """Sends the next heartbeat at once."""
        self._heart.beat_now()

    async def next_assignment(self) -> ShardAssignment | None:
        """Waits for the next lease; None when the run is over. Work on the lease before it has ended then.

        Raises:
            AyniError: the coordinator refused.
            CoordinatorLost: the coordinator is gone.
        """
        while True:
            await self.news.more()
            if self._attempt:
                await self._attempt.stop(
                    voided(self._attempt.primary.assignment, "the worker went on to what came next")
                )
                await self._groups.ended()
            assignment = self.news.take()
            if assignment:
                self._heart.taken, self._attempt = assignment, Attempt(assignment)
            if assignment or self.news.ending:
                return assignment

    async def contribute(self, assignment: ShardAssignment, bucket: Bucket, contribution: Contribution) -> Outcome:
        """Contributes to one reduction and receives its mean.

        Raises:
            StepVoided: the attempt was given up.
            LeaseRevoked: the lease, an extra one, was taken back.
            AyniError: the coordinator refused.
            ConnectionError: the coordinator, or only this stream, broke.
        """
        held = self._held(assignment)
        task = _current_task()
        held.contributions.add(task)
        try:
            work = partial(self._groups.reduce, bucket, contribution)
            return await self._guarded(held, work, f"the mean of {contribution.name}")
        except BaseException:
            # Before anybody hears of it, and may write to the parts again.
            self._standing.vectors.give_up(contribution.parts)
            raise
        finally:
            held.contributions.discard(task)

    async def commit(self, assignment: ShardAssignment, report: Report) -> Commit | ShardAssignment:
        """Waits for the lease's contributions, then says that it is done and waits for the step's commit.

        Returns:
            The commit; or an extra lease of the same attempt, as soon as there is one. The coordinator's answer for
            this lease goes on being waited for meanwhile.

        Raises:
            StepVoided: the attempt was given up.
            LeaseRevoked: the lease, an extra one, was taken back.
            AyniError: the coordinator refused.
            ConnectionError: the coordinator is gone.
        """
        held = self._held(assignment)
        if held.commit is None:
            work = partial(self._commit, held, report)
            held.commit = asyncio.create_task(self._guarded(held, work, f"the commit of step {assignment.step}"))
            held.commit.add_done_callback(self._note_answer)
        assert self._attempt
        return await self._outcome(self._attempt, held)

    def unanswered(self) -> tuple[ShardAssignment, Report] | None:
        """Returns the primary lease that the coordinator was told is done, if it has not answered."""
        primary = self._attempt.primary if self._attempt else None
        if primary is None or primary.asked is None or primary.is_void:
            return None
        return primary.assignment, primary.asked

    async def ask(self, assignment: ShardAssignment, report: Report) -> Commit:
        """Asks what became of a lease of an earlier membership that was done.

        Raises:
            AyniError: the coordinator refused, or has ended this membership.
            ConnectionError: the coordinator is gone.
        """
        asking = asyncio.create_task(self._coordinator.commit(assignment, report))
        failing = asyncio.create_task(self.news.failure())
        try:
            await asyncio.wait({asking, failing}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                commit = asking.result()
                self._standing.note_commit(assignment, report, commit)
                return commit
            if failing.done() and (error := failing.result()):
                raise error
            raise _deadline(f"the fate of step {assignment.step}", self._timeout)
        finally:
            asking.cancel()
            failing.cancel()

    async def leave(self, reason: str, parameters_sha256: str) -> None:
        """Ends the membership and the connection. Never fails: who can't be told learns it from the broken stream."""
        self._leaving = True
        try:
            await self._coordinator.leave(reason, parameters_sha256, timedelta(seconds=_LEAVE_SECONDS))
        except (AyniError, ConnectionError) as error:
            _log.debug("could not say goodbye: %s", error)
        # Only now: a stream that breaks before the goodbye would be taken for a death.
        await self.abandon("the worker left")

    async def abandon(self, reason: str) -> None:
        """Ends all work and the connection, without a goodbye."""
        # First, since work whose cancellation gets lost in a failure of the same moment ends with its group alone.
        self._groups.leave("its membership is over")
        if self._attempt:
            await self._attempt.stop(voided(self._attempt.primary.assignment, reason))
        await self._groups.close()
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        await self._same_host.close()
        await self._coordinator.close()

    def fail(self, error: Exception) -> None:
        """Ends the membership with an error that every wait raises from now on; nothing happens after its end."""
        if self.news.ending:
            return
        self.news.end(error)
        self._standing.settled.announce()
        if self._attempt:
            self._attempt.cancel(error)

    async def _commit(self, held: Held, report: Report) -> Commit:
        await asyncio.gather(*(asyncio.shield(task) for task in held.contributions))
        held.asked = report
        try:
            commit = await self._groups.commit(held.assignment, report)
        except (UnknownWorker, TransportBroken):
            raise
        except AyniError:
            held.asked = None
            raise
        held.asked = None
        self._standing.note_commit(held.assignment, report, commit)
        return commit

    async def _outcome(self, attempt: Attempt, held: Held) -> Commit | ShardAssignment:
        """Waits for the answer to the primary lease, for the end of this lease if it is an extra one, or for more."""
        assignment = attempt.primary.assignment
        while True:
            first = attempt.primary.commit
            if first is None:
                raise RuntimeError(f"step {assignment.step}: commit the attempt's first lease before an extra one")
            if first.done():
                await attempt.stop_extras("the attempt is over")
                return first.result()
            assert held.commit
            if held.commit.done():
                held.commit.result()
            if extra := self.news.take_extra(assignment):
                attempt.add(extra)
                return extra
            await self.news.change.wait()

    def _note_answer(self, commit: "asyncio.Task[Commit]") -> None:
        """Wakes who waits for a commit; an error that nobody waits for any more is nobody's."""
        if not commit.cancelled():
            commit.exception()
        self.news.change.announce()

    def _held(self, assignment: ShardAssignment) -> Held:
        held = self._attempt.held(assignment) if self._attempt else None
        if held is None:
            raise voided(assignment, "it is not the lease that this worker took last")
        if held.commit is None or not held.commit.done():
            held.check()
        return held

    async def _guarded(self, held: Held, work: Callable[[], Awaitable[T]], what: str) -> T:
        """Runs work on a lease, which can be stopped by cancelling its task."""
        held.check()
        task = _current_task()
        held.begin(task)
        try:
            return await self._explained(held, work(), what)
        except asyncio.CancelledError:
            raise held.why_stopped() from None
        except StepVoided as error:
            if self._attempt and self._attempt.primary is held:
                self._attempt.cancel(error)
            raise
        except LeaseRevoked as error:
            held.cancel(error)
            raise
        finally:
            held.end(task)

    async def _explained(self, held: Held, work: Awaitable[T], what: str) -> T:
        """Bounds work on a lease, and raises the true reason when it fails."""
        assignment = held.assignment
        try:
            async with asyncio.timeout(self._timeout):
                return await work
        except TimeoutError:
            raise _deadline(f"{what} ({self.news.waiting_for})", self._timeout) from None
        except (*_OVER, LeaseRevoked) as error:
            if assignment.extra:
                raise held.revoked(error.message) from error
            if isinstance(error, NotLeased | StepVoided):
                raise
            raise voided(assignment, error.message) from error
        except UnknownWorker as error:
            raise await self._last_word(error) from None
        except TransportBroken as error:
            raise await self._truth(assignment, error) from error

    async def _truth(self, assignment: ShardAssignment, broken: TransportBroken) -> Exception:
        """Learns from the assignment stream why a call broke; one lease is enough time for the coordinator."""
        lease = self.membership.lease.total_seconds()
        try:
            async with asyncio.timeout(lease):
                return await self.news.truth_about(assignment)
        except TimeoutError:
            return TransportBroken(f"{broken}; the coordinator said nothing about it within {lease:g} s", broken.code)

    async def _last_word(self, refusal: UnknownWorker) -> Exception:
        """Returns why membership ended: the assignment stream knows it, other calls only that there is none."""
        failing = asyncio.create_task(self.news.failure())
        await asyncio.wait({failing}, timeout=_LAST_WORD_SECONDS)
        failing.cancel()
        ending = self.news.ending
        return ending if isinstance(ending, UnknownWorker) else refusal

    async def _listen(self) -> None:
        """Reads the assignment stream to its end."""
        standing = self._standing
        try:
            said = standing.completed_steps, standing.parameters_sha256, standing.origin
            async for frame in self._coordinator.assignments(*said):
                self._heart.heard()
                self._take(frame)
            self.fail(self._heart.lost("it ended the assignment stream without a word"))
        except AyniError as error:
            self.fail(error)
        except TransportBroken as error:
            self.fail(self._heart.lost(str(error)))

    async def _beat(self) -> None:
        error = await self._heart.beat()
        self.fail(await self._last_word(error) if isinstance(error, UnknownWorker) else error)

    def _start_life(self, life: Awaitable[None]) -> None:
        task = asyncio.ensure_future(life)
        self._lives.append(task)
        task.add_done_callback(self._check_life)

    def _check_life(self, life: "asyncio.Task[None]") -> None:
        """Makes a bug in one of the two tasks end the membership instead of hanging every wait."""
        error = None if life.cancelled() else life.exception()
        if isinstance(error, Exception):
            self.fail(error)

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, ShardAssignment):
            self._groups.told(frame)
            self.news.assign(frame)
        elif isinstance(frame, Regroup):
            self._groups.regroup(frame)
        elif isinstance(frame, Revoked):
            self.news.revoke(frame.lease_id)
            self._groups.revoke(frame.lease_id)
            if self._attempt:
                self._attempt.revoke(frame.lease_id, frame.reason)
        elif isinstance(frame, StateOffer):
            self._on_offer(frame)
        elif isinstance(frame, Waiting):
            self.news.wait(frame.reason)
            self._changes.log_if_changed("waiting", frame.reason)
        else:
            self._end(frame)

    def _end(self, shutdown: Shutdown) -> None:
        if not self._leaving:
            _log.info("%s: %s", "let go" if shutdown.drained else "the run is over", shutdown.reason)
        self._standing.checkpoint_writer = shutdown.checkpoint_writer
        self.news.end(shutdown)
        self._standing.settled.announce()


def _current_task() -> "asyncio.Task[object]":
    task = asyncio.current_task()
    assert task
    return task


def _deadline(what: str, seconds: float) -> Deadline:
    return Deadline(f"waited {seconds:g} s in vain for {what}", waiting_for=what, timeout=seconds)
