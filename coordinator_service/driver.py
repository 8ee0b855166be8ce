"""The story of a run: one step after another, each in as many attempts as it takes.  [shell]"""

import asyncio
import logging
import math
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

from ayni.errors import Diverged, Halted, StepVoided
from ayni.tensors import itemsize
from coordinator_service import plan
from coordinator_service.live import LiveStep
from coordinator_service.membership import Epoch
from coordinator_service.run import Run
from coordinator_service.state_keeper import StateKeeper
from coordinator_service.steps import Lease, Totals
from coordinator_service.store import RunStore
from coordinator_service.values import Waiting

_log = logging.getLogger(__name__)


class Driver:
    """Makes a run's steps."""

    def __init__(self, run: Run, store: RunStore, keeper: StateKeeper) -> None:
        """Drives a run, keeps its commits in a store, and has its state kept."""
        self._run = run
        self._keeper = keeper
        self._store = store
        self._file = run.file
        self._epochs = run.epochs
        self._progress = run.progress

    async def drive(self) -> None:
        """Makes every step, then says goodbye. Ends early when the run is halted."""
        ticks = self._file.timeouts.heartbeat_interval.total_seconds()
        watcher = asyncio.create_task(self._epochs.watch_leases(ticks))
        keeping = asyncio.create_task(self._keeper.keep())
        try:
            for kind, step in self._work():
                if not await self._make(kind, step):
                    return
            await self._keeper.settle(self._progress.committed_steps)
            self._progress.finish()
            self._run.goodbye("the last step is committed", finished=True)
        except Exception as error:
            self._run.halt(Halted(f"the coordinator failed: {error!r}", detail=repr(error)))
            raise
        finally:
            await self._wait_until_empty()
            for task in (watcher, keeping):
                task.cancel()
            await self._keeper.close()

    def _work(self) -> Iterator[tuple[str, int]]:
        step = self._progress.first_step
        while not self._file.num_steps or step < self._file.num_steps:
            yield "train", step
            step += 1
            if plan.evaluates_after(self._file, step) and self._evaluation_samples:
                yield "evaluate", step

    @property
    def _evaluation_samples(self) -> int:
        return int(self._epochs.core.agreed.get("num_evaluation_samples", "0") or 0)

    async def _make(self, kind: str, step: int) -> bool:
        """Makes one step, in as many attempts as it takes. Returns whether the run goes on."""
        attempt = 0
        while epoch := await self._world():
            live = self._open(kind, step, attempt, epoch)
            try:
                await self._commit(live, await self._all_committed(live))
                return True
            except StepVoided as voided:
                _log.warning("%s", voided.message)
                attempt += 1
                self._halt_if_hopeless(live.core.label, attempt, voided.message)
            except (Diverged, Halted) as error:
                self._run.halt(error)
            except (OSError, sqlite3.Error) as error:
                sentence = f"the commit of {live.core.label} can't be written to {self._store.path}: {error}"
                self._run.halt(Halted(sentence, detail=sentence))
            finally:
                live.close()
                self._run.live = None
        return False

    def _halt_if_hopeless(self, label: str, attempts: int, last: str) -> None:
        if attempts >= self._file.max_attempts and not self._progress.ended:
            sentence = f"{label} was given up {attempts} times (max_attempts); the last time because {last}"
            self._run.halt(Halted(sentence, detail=sentence))

    async def _world(self) -> Epoch | None:
        """Waits until enough workers are ready; None when the run has ended."""
        while not self._progress.ended:
            epoch, reason = self._epochs.form_epoch()
            if epoch:
                self._progress.go()
                return epoch
            if self._file.task.name and self._progress.committed_steps > self._progress.first_step:
                sentence = f"too few workers are left ({reason}), and this version can't hand the run's state to others"
                self._run.halt(Halted(sentence, detail=sentence))
                return None
            if self._progress.wait(Waiting(reason=reason)):
                _log.info("%s", reason)
                self._epochs.broadcast(Waiting(reason=reason))
                self._run.changed.notify()
            await self._epochs.changed.wait()
        return None

    def _open(self, kind: str, step: int, attempt: int, epoch: Epoch) -> LiveStep:
        update = self._run.decide_update(epoch)
        seats = [self._epochs.seats[worker] for worker in epoch.workers]
        layout = plan.lay_out(self._file, kind, step, self._evaluation_samples, [seat.speed for seat in seats])
        leases = [
            Lease(
                lease_id=self._run.take_lease_id(),
                worker_id=seat.member.worker_id,
                worker_name=seat.member.name,
                start=layout.shards[rank][0],
                stop=layout.shards[rank][1],
            )
            for rank, seat in enumerate(seats)
        ]
        chunk_elements = self._file.chunk_bytes // itemsize(self._file.wire_type)
        self._run.live = LiveStep(layout, attempt, epoch, leases, chunk_elements, self._run.changed)
        self._progress.open(step, attempt, kind)
        for seat, lease in zip(seats, leases, strict=True):
            seat.share = (lease.stop - lease.start) / max(1, layout.num_microbatches)
            seat.outbox.put_nowait(self._run.live.assignment(lease, update))
        self._run.changed.notify()
        return self._run.live

    async def _all_committed(self, live: LiveStep) -> Totals:
        timeout = self._file.timeouts.step.total_seconds()
        waiter = asyncio.create_task(live.all_committed.wait())
        ends: set[asyncio.Future[Any]] = {waiter, live.ended}
        done, _ = await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if live.ended in done:
            live.ended.result()
        if not done:
            who = ", ".join(lease.worker_name for lease in live.core.uncommitted)
            raise Halted(f"{live.core.label} took longer than {timeout:g} s; waited for {who}", detail=who)
        if self._audited(live):
            live.core.check_hashes()
        totals = live.core.totals()
        if totals.global_loss is not None and not math.isfinite(totals.global_loss):
            sentence = f"{live.core.label}: the workers' losses, each finite, add up to more than float64 holds"
            raise Halted(sentence, detail=sentence)
        return totals

    def _audited(self, live: LiveStep) -> bool:
        return bool(self._file.audit_every) and live.core.step % self._file.audit_every == 0

    async def _commit(self, live: LiveStep, totals: Totals) -> None:
        committed = plan.committed(self._file, live.core, totals, self._progress.best)
        record = plan.record(live.core, live.layout, committed, time.time())
        await asyncio.to_thread(self._store.commit, record)
        if live.ended.done():
            raise Halted(f"the run ended while {live.core.label} was being written", detail=live.core.label)
        self._run.last_commit = (live.moment, live.core.kind, committed)
        score = plan.is_better(self._file, totals, self._progress.best)[1] if live.core.kind == "evaluate" else None
        self._progress.commit(live.core.kind, committed, live.layout.num_samples, score)
        if live.core.kind == "train" and live.core.step == self._progress.first_step:
            self._epochs.forget_initial_hashes()
            self._store.set_facts(self._epochs.core.agreed)
        live.ended.set_result(committed)
        _log.info("%s", plan.sentence(live.core, committed, self._progress.step_seconds))
        self._run.changed.notify()

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
