"""One membership: the assignment stream, heartbeats, contributions and commits.  [shell]

Everything here runs on the event loop. Two tasks live as long as the membership: one reads the assignment stream, one
sends heartbeats. Work on a lease (a contribution, a commit) is a task of its caller's; when the lease is void, all its
work is stopped before the next lease is handed out, so that no buffer of a void attempt is touched any more.

How work ends: a verdict of the coordinator is raised as it is. When only the transport of one call broke, the verdict
was lost on its way, and the assignment stream tells the truth: a newer lease, a refusal, or that the coordinator is
gone. A contribution is never repeated; a commit, which may be, is.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from typing import TypeVar

from ayni.buckets import Bucket
from ayni.errors import AyniError, Deadline, StaleEpoch, StaleStep, StepVoided, UnknownWorker
from ayni.logs import ChangeLogger
from worker_agent.backoff import delays
from worker_agent.coordinator import Coordinator, translated
from worker_agent.exchange import Contribution, Outcome, Traffic, exchange
from worker_agent.faults import CoordinatorLost, TransportBroken
from worker_agent.messages import Membership, Shutdown, SignOfLife, Waiting
from worker_agent.news import News, voided
from worker_agent.session import Commit, MicrobatchStats, ShardAssignment, StepTimes

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LEAVE_SECONDS = 5.0
_LAST_WORD_SECONDS = 2.0
_IMPATIENT_S = 0.05
"""Pause between heartbeats while training waits for the answer of one."""


class Member:
    """A worker's membership in a run."""

    def __init__(self, coordinator: Coordinator, membership: Membership, exchange_timeout: timedelta) -> None:
        """Takes over a membership that Join has given.

        Args:
            coordinator: has joined.
            membership: what Join answered.
            exchange_timeout: longest time for one bucket, or for one commit.
        """
        self.membership = membership
        self.news = News()
        self.traffic = Traffic()
        self.activity = "loading"
        self.taken: ShardAssignment | None = None
        """Lease that was handed out last."""
        self._coordinator = coordinator
        self._timeout = exchange_timeout.total_seconds()
        self._work: set[asyncio.Task[object]] = set()
        """Everything that is done for the lease that was handed out last; there is no other."""
        self._stopped_by: Exception | None = None
        self._contributions: set[asyncio.Task[object]] = set()
        self._listener: asyncio.Task[None] | None = None
        self._heart: asyncio.Task[None] | None = None
        self._leaving = False
        self._changes = ChangeLogger(_log)
        self._last_heard = self._now()
        self._published_steps = 0
        self._settled_steps = 0
        self._settled = asyncio.Event()
        self._is_awaiting_settled = False
        self._beat_now = asyncio.Event()

    def start(self, completed_steps: int, parameters_sha256: str) -> None:
        """Opens the assignment stream and starts heartbeats."""
        self._listener = asyncio.create_task(self._listen(completed_steps, parameters_sha256))
        self._heart = asyncio.create_task(self._beat())
        for life in (self._listener, self._heart):
            life.add_done_callback(self._check_life)

    async def next_assignment(self, within: timedelta) -> ShardAssignment | None:
        """Waits for the next lease; None when the run is over. Work on the lease before it has ended then.

        Raises:
            AyniError: the coordinator refused.
            CoordinatorLost: the coordinator is gone.
            Deadline: nothing came in time.
        """
        try:
            async with asyncio.timeout(within.total_seconds()):
                assignment = await self.news.next_assignment()
        except TimeoutError:
            raise _deadline(f"an assignment ({self.news.waiting_for})", within.total_seconds()) from None
        if self.taken:
            await self._stop_work(voided(self.taken, "the worker went on to what came next"))
        self.taken = assignment or self.taken
        return assignment

    async def contribute(self, assignment: ShardAssignment, bucket: Bucket, contribution: Contribution) -> Outcome:
        """Contributes to one reduction and receives its mean.

        Raises:
            StepVoided: the attempt was given up.
            AyniError: the coordinator refused.
            ConnectionError: the coordinator, or only this stream, broke.
        """
        self._check_taken(assignment)
        task = _current_task()
        self._contributions.add(task)
        try:
            work = self._exchange(bucket, contribution)
            return await self._guarded(assignment, work, f"the mean of {contribution.name}")
        finally:
            self._contributions.discard(task)

    async def commit(
        self,
        assignment: ShardAssignment,
        num_buckets: int,
        microbatches: Sequence[MicrobatchStats],
        parameters_sha256: str,
        times: StepTimes,
    ) -> Commit:
        """Waits for this lease's contributions, then says that the lease is done and waits for the step's commit.

        Raises:
            StepVoided: the attempt was given up.
            AyniError: the coordinator refused.
            ConnectionError: the coordinator is gone.
        """
        self._check_taken(assignment)
        work = self._commit(assignment, num_buckets, microbatches, parameters_sha256, times)
        return await self._guarded(assignment, work, f"the commit of step {assignment.step}")

    def publish(self, steps: int) -> None:
        """Tells the coordinator, soon, that the state behind so many steps can be read from this worker."""
        self._published_steps = steps
        self._beat_now.set()

    async def settled(self, steps: int, within: timedelta) -> None:
        """Waits until the coordinator has had the state behind a step stored, or has given it up.

        Raises:
            Exception: membership ended.
            Deadline: it said neither in time.
        """
        try:
            async with asyncio.timeout(within.total_seconds()):
                while self._settled_steps < steps and not self.news.ending:
                    self._is_awaiting_settled = True
                    self._beat_now.set()
                    await self._settled.wait()
        except TimeoutError:
            what = f"the coordinator to have the state behind step {steps} stored"
            raise _deadline(what, within.total_seconds()) from None
        finally:
            self._is_awaiting_settled = False

    async def leave(self, reason: str, parameters_sha256: str) -> None:
        """Ends the membership and the connection. Never fails: who can't be told learns it from the broken stream."""
        self._leaving = True
        try:
            await self._coordinator.leave(reason, parameters_sha256, timedelta(seconds=_LEAVE_SECONDS))
        except (AyniError, ConnectionError) as error:
            _log.debug("could not say goodbye: %s", error)
        # Only now: a stream that breaks before the goodbye would be taken for a death.
        if self.taken:
            await self._stop_work(voided(self.taken, "the worker left"))
        lives = [life for life in (self._listener, self._heart) if life]
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        await self._coordinator.close()

    def fail(self, error: Exception) -> None:
        """Ends the membership with an error that every wait raises from now on; nothing happens after its end."""
        if self.news.ending:
            return
        self.news.end(error)
        self._wake_settled()
        self._cancel_work(error)

    async def _exchange(self, bucket: Bucket, contribution: Contribution) -> Outcome:
        with translated(f"the stream of {contribution.name}", self._coordinator.address):
            return await exchange(self._coordinator.reduction(bucket), contribution, self.traffic)

    async def _commit(
        self,
        assignment: ShardAssignment,
        num_buckets: int,
        microbatches: Sequence[MicrobatchStats],
        parameters_sha256: str,
        times: StepTimes,
    ) -> Commit:
        await asyncio.gather(*(asyncio.shield(task) for task in self._contributions))
        # A commit may be repeated: a committed step is answered again with the same values.
        for delay in delays(random.random):
            try:
                return await self._coordinator.commit(assignment, num_buckets, microbatches, parameters_sha256, times)
            except TransportBroken as error:
                if self.news.ending:
                    raise
                _log.warning("%s; asking again in %.1f s", error, delay)
                await asyncio.sleep(delay)
        raise AssertionError("there is always another delay")

    def _check_taken(self, assignment: ShardAssignment) -> None:
        if assignment != self.taken:
            raise voided(assignment, "it is not the lease that this worker took last")

    async def _guarded(self, assignment: ShardAssignment, work: Awaitable[T], what: str) -> T:
        """Runs work on a lease, which can be stopped by cancelling its task."""
        task = _current_task()
        self._work.add(task)
        try:
            return await self._explained(assignment, work, what)
        except asyncio.CancelledError:
            raise self._why_stopped(assignment) from None
        except StepVoided as error:
            self._cancel_work(error)
            raise
        finally:
            self._work.discard(task)

    async def _explained(self, assignment: ShardAssignment, work: Awaitable[T], what: str) -> T:
        """Bounds work on a lease, and raises the true reason when it fails."""
        try:
            async with asyncio.timeout(self._timeout):
                return await work
        except TimeoutError:
            raise _deadline(f"{what} ({self.news.waiting_for})", self._timeout) from None
        except (StaleEpoch, StaleStep) as error:
            raise voided(assignment, error.message) from error
        except UnknownWorker as error:
            raise await self._last_word(error) from None
        except TransportBroken as error:
            raise await self._truth(assignment, error) from error

    def _why_stopped(self, assignment: ShardAssignment) -> Exception:
        """Returns a fresh error for each task that was stopped."""
        why = self._stopped_by
        if isinstance(why, StepVoided):
            return StepVoided(why.message, **why.metadata)
        return why or voided(assignment, "the worker gave it up")

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
        if self._listener:
            await asyncio.wait({self._listener}, timeout=_LAST_WORD_SECONDS)
        ending = self.news.ending
        return ending if isinstance(ending, UnknownWorker) else refusal

    async def _stop_work(self, why: Exception) -> None:
        if tasks := self._cancel_work(why):
            await asyncio.wait(tasks)

    def _cancel_work(self, why: Exception) -> list[asyncio.Task[object]]:
        """Cancels all other work on the lease, each with the same error, and returns it."""
        self._stopped_by = why
        tasks = [task for task in self._work if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    async def _listen(self, completed_steps: int, parameters_sha256: str) -> None:
        """Reads the assignment stream to its end."""
        try:
            async for frame in self._coordinator.assignments(completed_steps, parameters_sha256):
                self._last_heard = self._now()
                self._take(frame)
            self.fail(self._lost("it ended the assignment stream without a word"))
        except AyniError as error:
            self.fail(error)
        except TransportBroken as error:
            self.fail(self._lost(str(error)))

    def _check_life(self, life: "asyncio.Task[None]") -> None:
        """Makes a bug in one of the two tasks end the membership instead of hanging every wait."""
        error = None if life.cancelled() else life.exception()
        if isinstance(error, Exception):
            self.fail(error)

    def _take(self, frame: ShardAssignment | Waiting | Shutdown) -> None:
        if isinstance(frame, ShardAssignment):
            self.news.waiting_for = f"step {frame.step} attempt {frame.attempt} is in progress"
            self.news.assign(frame)
        elif isinstance(frame, Shutdown):
            if not self._leaving:
                _log.info("the run is over: %s", frame.reason)
            self.news.end(frame)
            self._wake_settled()
        else:
            self.news.waiting_for = frame.reason
            self._changes.log_if_changed("waiting", frame.reason)

    async def _beat(self) -> None:
        """Sends heartbeats. A lost one is nothing; silence for a whole lease is the end."""
        interval = self.membership.heartbeat_interval
        while not isinstance(self.news.ending, Exception):
            self._beat_now.clear()
            try:
                settled = await self._coordinator.heartbeat(self._sign_of_life(), self.membership.lease)
                self._last_heard = self._now()
                if settled > self._settled_steps:
                    self._settled_steps = settled
                    self._wake_settled()
            except UnknownWorker as error:
                self.fail(await self._last_word(error))
            except AyniError as error:
                self.fail(error)
            except TransportBroken as error:
                self._changes.log_if_changed("heartbeat", str(error))
                self._fail_if_silent(error)
            with contextlib.suppress(TimeoutError):
                pause = interval.total_seconds()
                async with asyncio.timeout(min(pause, _IMPATIENT_S) if self._is_awaiting_settled else pause):
                    await self._beat_now.wait()

    def _sign_of_life(self) -> SignOfLife:
        taken = self.taken
        return SignOfLife(
            epoch=taken.epoch if taken else 0,
            step=taken.step if taken else -1,
            activity=self.activity,
            published_steps=self._published_steps,
        )

    def _wake_settled(self) -> None:
        settled, self._settled = self._settled, asyncio.Event()
        settled.set()

    def _fail_if_silent(self, error: TransportBroken) -> None:
        if self._now() - self._last_heard > self.membership.lease.total_seconds():
            self.fail(self._lost(str(error)))

    def _lost(self, reason: str) -> CoordinatorLost:
        silence = self._now() - self._last_heard
        return CoordinatorLost(
            f"the coordinator at {self._coordinator.address} is gone (last heard of {silence:.1f} s ago): {reason}; "
            "start this worker again when the coordinator is back"
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _current_task() -> "asyncio.Task[object]":
    task = asyncio.current_task()
    assert task
    return task


def _deadline(what: str, seconds: float) -> Deadline:
    return Deadline(f"waited {seconds:g} s in vain for {what}", waiting_for=what, timeout=seconds)
