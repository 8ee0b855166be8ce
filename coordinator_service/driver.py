"""The story of a run: one step after another, each in as many attempts as it takes.  [shell]"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ayni import failpoints
from ayni.errors import Diverged, Halted, StepVoided
from ayni.step_values import Origin
from coordinator_service import plan
from coordinator_service.epochs import Seat
from coordinator_service.leases import Moment, Totals
from coordinator_service.link_watch import LinkWatch
from coordinator_service.live import LiveStep
from coordinator_service.membership import Epoch
from coordinator_service.onboarding import Onboarding
from coordinator_service.recovery import Recovery
from coordinator_service.run import AGREEMENTS, Run
from coordinator_service.state_keeper import StateKeeper
from coordinator_service.step_opening import StepOpening
from coordinator_service.store_records import EpochRecord
from coordinator_service.watch.event_log import EACH_STEP
from coordinator_service.watch.step_spans import StepSpans

_log = logging.getLogger(__name__)

FINISHED = "finished_steps"
"""Fact of the store: the run has reached its last step, and how many that were."""


class Driver:
    """Makes a run's steps."""

    def __init__(
        self,
        run: Run,
        recovery: Recovery,
        keeper: StateKeeper,
        onboarding: Onboarding,
        spans: StepSpans | None = None,
    ) -> None:
        """Drives a run; has its state kept, and handed to those who lack it; traces its steps, if asked."""
        self._run = run
        self._recovery = recovery
        self._keeper = keeper
        self._onboarding = onboarding
        self._link_watch = LinkWatch(run)
        self._spans = spans or StepSpans(None)
        self._opening = StepOpening(run, self._spans)
        self._store = run.store
        self._writing = run.writing
        self._file = run.file
        self._epochs = run.epochs
        self._progress = run.progress
        self._announced = run.epochs.core.epoch.number
        """Number of the newest epoch that is in the store."""
        self._suspending = asyncio.Event()
        self._last_step: int | None = None
        """Step that a run that is being suspended does not begin any more; None when it is not known yet."""
        self._remember()

    async def drive(self) -> None:
        """Makes every step, then says goodbye. Ends early when the run is halted."""
        ticks = self._file.timeouts.heartbeat_interval.total_seconds()
        beside = [
            asyncio.create_task(self._epochs.watch_leases(ticks)),
            asyncio.create_task(self._run.notes.keep()),
            asyncio.create_task(self._keeper.keep()),
            asyncio.create_task(self._onboarding.keep()),
        ]
        try:
            await self._make_all()
        except OSError as error:
            # The workers are not sent away: they have the run's state, and the next coordinator needs them.
            _log.error("the run's state can't be kept in %s: %s", self._store.path, error)
            if not self._progress.ended:
                self._progress.suspend()
        except Exception as error:
            _log.exception("the coordinator failed")
            self._run.halt(Halted(f"the coordinator failed: {error!r}", detail=repr(error)))
            raise
        finally:
            if self._progress.state != "suspended":
                await self._wait_until_empty()
            for task in beside:
                task.cancel()
            await self._keeper.close()
            await self._onboarding.close()

    def suspend(self) -> None:
        """Ends this process's part in the run, soon: after the step in progress, or after one more whose state is kept.

        Workers are not told. They lose the connection, and come back to the coordinator that is started next.
        """
        keeps = bool(self._file.state.store_every) and bool(self._epochs.able)
        within = self._file.timeouts.shutdown.total_seconds()
        first = "; its state is stored first, if its workers stay" if keeps else ""
        _log.info("suspending the run within %g s%s", within, first)
        self._last_step = self._progress.committed_steps if not keeps or self._run.live is None else None
        for seat in self._epochs.able if keeps else ():
            seat.publish_requested = True
        self._suspending.set()
        self._epochs.changed.notify()

    async def _make_all(self) -> None:
        making = asyncio.create_task(self._make_each())
        suspending = asyncio.create_task(self._suspending.wait())
        try:
            await asyncio.wait({making, suspending}, return_when=asyncio.FIRST_COMPLETED)
            if self._suspending.is_set() and not making.done():
                await asyncio.wait({making}, timeout=self._file.timeouts.shutdown.total_seconds())
            if not making.done():
                making.cancel()
                await asyncio.wait({making})
                self._progress.suspend()
            else:
                making.result()
        finally:
            suspending.cancel()
        committed, stored = self._progress.committed_steps, self._progress.stored_steps
        if self._progress.state == "suspended" and self._file.state.store_every and stored < committed:
            newest = f"the newest stored one is that behind step {stored}" if stored else "none is"
            _log.warning("suspended without the state behind step %d being stored: %s", committed, newest)

    async def _make_each(self) -> None:
        while work := self._next_work():
            if self._suspending.is_set() and work[0] == "train":
                if await self._ends_here(work[1]):
                    return
            if not await self._make(*work):
                return
        await self._recovery.farewell()
        await self._keeper.settle(self._progress.committed_steps)
        if not self._progress.ended:
            finished = {FINISHED: str(self._progress.committed_steps)}
            await self._writing.write("that the run is finished", self._store.set_facts, finished)
            self._progress.finish()
            self._run.goodbye("the last step is committed", finished=True)

    async def _ends_here(self, step: int) -> bool:
        """Returns whether a run that is being suspended makes no further step."""
        if self._last_step is None:
            await self._until_settled()
            self._last_step = step + 1
            return False
        if step < self._last_step:
            return False
        await self._keeper.final(step, self._file.timeouts.shutdown.total_seconds() / 2)
        self._progress.suspend()
        return True

    async def _until_settled(self) -> None:
        """Waits until due states are stored and every worker knows it: only then it may publish a last one."""
        within = self._file.timeouts.shutdown.total_seconds() / 4
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._keeper.settle(self._progress.committed_steps)
                beats = {seat.member.worker_id: seat.beats for seat in self._epochs.able}
                while any(seat.beats == beats.get(seat.member.worker_id) for seat in self._epochs.able):
                    await self._epochs.heard.wait()

    def _remember(self) -> None:
        """Takes over what was committed before: workers that never heard of the last commits may ask again."""
        commits = self._store.commits()
        self._progress.remember(commits)
        self._run.conduct.remember([*self._store.superseded(), *commits])
        for record in commits:
            if record.kind == "train":
                self._run.states.lineage.note(record.step, Origin(epoch=record.epoch, attempt=record.attempt))
        for record in commits[-2:]:
            moment = Moment(epoch=record.epoch, step=record.step, attempt=record.attempt)
            self._run.remember(moment, record.kind, record.told())
        self._progress.evaluated_steps, self._progress.best = plan.evaluated(self._file, commits)

    def _next_work(self) -> tuple[str, int] | None:
        """Returns kind and step of what comes next; None at the end."""
        steps = self._progress.committed_steps
        is_due = steps > self._progress.initial_step and plan.evaluates_after(self._file, steps)
        if is_due and self._evaluation_samples and self._progress.evaluated_steps < steps:
            return "evaluate", steps
        if not self._file.num_steps or steps < self._file.num_steps:
            return "train", steps
        return None

    @property
    def _evaluation_samples(self) -> int:
        return int(self._epochs.core.agreed.get("num_evaluation_samples", "0") or 0)

    async def _make(self, kind: str, step: int) -> bool:
        """Makes one step, in as many attempts as it takes. Returns whether the run goes on."""
        attempt = 0
        while epoch := await self._world(kind, step):
            if (kind, step) != self._next_work():
                return True
            live = self._opening.open(kind, step, attempt, epoch, self._evaluation_samples)
            watching = asyncio.create_task(self._run.releases.watch(live))
            try:
                await self._commit(live, await self._all_committed(live))
                return True
            except StepVoided as voided:
                live.fail(voided)  # Also where everything was committed, and the audit said no.
                _log.warning("%s", voided.message)
                self._progress.voided_attempts += 1
                self._spans.voided(voided.message)
                attempt += 1
                self._halt_if_hopeless(live.core.label, attempt, voided.message)
            except (Diverged, Halted) as error:
                self._run.halt(error)
            finally:
                watching.cancel()
                live.close()
                self._run.live = None
        return False

    def _halt_if_hopeless(self, label: str, attempts: int, last: str) -> None:
        if attempts >= self._file.max_attempts and not self._progress.ended:
            sentence = f"{label} was given up {attempts} times (max_attempts); the last time because {last}"
            self._run.halt(Halted(sentence, detail=sentence))

    async def _world(self, kind: str, step: int) -> Epoch | None:
        """Waits until enough workers are ready, or the run has gone back; None when it has ended."""
        while not self._progress.ended:
            if (kind, step) != self._next_work():
                return self._epochs.core.epoch
            before = self._epochs.core.epoch.number
            epoch, reason = self._epochs.form_epoch()
            if epoch and not self._progress.waiting and epoch.number == before:
                return epoch  # It is on disk already.
            if epoch:
                await self._recovery.comeback()
                epoch, reason = self._epochs.form_epoch()
            if epoch:
                self._progress.go()
                await self._announce(epoch)
                if all(worker in self._epochs.seats for worker in epoch.workers):
                    return epoch
                continue
            await self._recovery.pass_over()
            patience = self._recovery.patience()
            if self._suspending.is_set():
                self._progress.suspend()
                return None
            if patience == 0.0:
                await self._recovery.go_back()
                continue
            self._recovery.wait(reason)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._epochs.changed.wait()
        return None

    async def _announce(self, epoch: Epoch) -> None:
        """Keeps a new membership before anybody hears of it: its number must never be used again."""
        if epoch.number <= self._announced:
            return
        record = EpochRecord(
            number=epoch.number,
            worker_names=tuple(self._epochs.core.names(epoch.workers)),
            committed_steps=self._progress.committed_steps,
            unix_time=time.time(),
        )
        await self._writing.write(f"epoch {epoch.number}", self._store.begin_epoch, record)
        self._announced = epoch.number
        if not self._progress.has_begun:
            agreed = {name: self._epochs.core.agreed.get(name, "") for name in AGREEMENTS}
            said = {name: value for name, value in agreed.items() if value}
            await self._writing.write("what the workers agree on", self._store.set_facts, said)
        await self._run.decide_update(epoch)
        failpoints.hit("coordinator.epoch.stored")

    async def _all_committed(self, live: LiveStep) -> Totals:
        timeout = self._file.timeouts.step.total_seconds()
        waiter = asyncio.create_task(live.all_committed.wait())
        ends: set[asyncio.Future[Any]] = {waiter, live.ended}
        done, _ = await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if live.ended in done:
            live.ended.result()
        if not done:
            who = ", ".join(dict.fromkeys(lease.worker_name for lease in live.core.uncommitted))
            raise Halted(f"{live.core.label} took longer than {timeout:g} s; waited for {who}", detail=who)
        if self._audited(live):
            self._run.conduct.audit(live)
        totals = live.core.totals()
        if totals.global_loss is not None and not math.isfinite(totals.global_loss):
            sentence = f"{live.core.label}: the workers' losses, each finite, add up to more than float64 holds"
            raise Halted(sentence, detail=sentence)
        return totals

    def _audited(self, live: LiveStep) -> bool:
        return bool(self._file.audit_every) and live.core.step % self._file.audit_every == 0

    async def _commit(self, live: LiveStep, totals: Totals) -> None:
        late = self._left_behind(live)
        writer = self._epochs.writer([worker for worker in live.epoch.workers if live.core.has_committed(worker)])
        committed = plan.committed(self._file, live.core, totals, self._progress.best, writer)
        names = [seat.member.name for seat in late]
        record = plan.record(self._file, live.core, live.layout, committed, names, time.time())
        record = replace(record, wire_type=live.wire_type)
        await self._writing.write(f"the commit of {live.core.label}", self._store.commit, record)
        failpoints.hit("coordinator.commit.stored")
        if live.ended.done():
            raise Halted(f"the run ended while {live.core.label} was being written", detail=live.core.label)
        self._run.remember(live.moment, live.core.kind, committed)
        score = plan.is_better(self._file, totals, self._progress.best)[1] if live.core.kind == "evaluate" else None
        self._progress.commit(live.core.kind, committed, live.layout.num_samples, score)
        if live.core.kind == "train":
            self._settle_members(live, late)
        live.ended.set_result(committed)
        self._run.conduct.note_commit(live.core.label, record)
        _log.info("%s", plan.sentence(live.core, committed, self._progress.step_seconds), extra=EACH_STEP)
        self._spans.committed(committed.global_loss, len({lease.worker_id for lease in live.core.live}))
        self._epochs.let_go(self._progress.committed_steps, needed=self._file.min_workers)
        if live.core.kind == "train":
            await self._link_watch.note(live)
        self._run.changed.notify()

    def _left_behind(self, live: LiveStep) -> list[Seat]:
        """Returns the members that the step goes on without."""
        held = {lease.worker_id for lease in live.core.live if not lease.is_extra}
        gone = [worker for worker in live.epoch.workers if worker not in held]
        return [self._epochs.seats[worker] for worker in gone if worker in self._epochs.seats]

    def _settle_members(self, live: LiveStep, late: Sequence[Seat]) -> None:
        """Notes what a training step's commit means for the members."""
        if live.core.step == self._progress.first_step:
            self._epochs.forget_initial_hashes()
        for seat in late:
            name = seat.member.name
            _log.warning("worker %s was left behind at step %d", name, live.core.step, extra={"worker": name})
            self._run.states.follow(seat)
        self._mark_outsiders(live)
        if live.publishers:
            self._keeper.published_after(live)
        for worker in live.publishers:
            publisher = self._epochs.seats.get(worker)
            if publisher and publisher not in late:
                publisher.publish_requested = False

    def _mark_outsiders(self, live: LiveStep) -> None:
        """Makes followers of those who came while the step was open: it has gone past them."""
        committed = self._progress.committed_steps
        for worker, seat in list(self._epochs.seats.items()):
            is_outside = worker not in live.epoch.workers and seat.member.ready and not seat.following
            if not (is_outside and self._file.task.name) or seat.completed_steps == committed:
                continue
            if seat.elastic:
                self._run.states.follow(seat)
            else:
                self._epochs.expel(worker, f"its parameters have had {seat.completed_steps} updates, not {committed}")

    async def _wait_until_empty(self) -> None:
        """Waits for the members to leave, up to the shutdown timeout."""
        timeout = self._file.timeouts.shutdown.total_seconds()
        try:
            async with asyncio.timeout(timeout):
                while self._epochs.seats:
                    await self._epochs.changed.wait()
        except TimeoutError:
            names = ", ".join(seat.member.name for seat in self._epochs.seats.values())
            _log.warning("still there after %g s: %s", timeout, names)
