"""The run: its members, the step in progress, and what workers' calls lead to.  [shell]

`driver.Driver` makes the steps. One event loop owns everything here.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ayni.buckets import Bucket
from ayni.errors import (
    AyniError,
    BadChunk,
    Halted,
    Incompatible,
    NonFinite,
    RunEnded,
    RunStarted,
    SpecMismatch,
    StaleStep,
    StepVoided,
    WeightMismatch,
)
from ayni.step_values import Commit, MicrobatchStats, StepTimes
from ayni.tensors import TensorSpec
from coordinator_service import plan
from coordinator_service.config import RunFile
from coordinator_service.epochs import Epochs, Seat
from coordinator_service.live import LiveStep
from coordinator_service.membership import Applicant, Epoch, Member, Membership
from coordinator_service.progress import Progress
from coordinator_service.rounds import Exchange
from coordinator_service.signals import Signal
from coordinator_service.steps import Key, Moment
from coordinator_service.values import Shutdown

_log = logging.getLogger(__name__)

_FATAL = (NonFinite, SpecMismatch, BadChunk, WeightMismatch)
"""Refusals of a contribution's content: the policy is to halt the run and name the worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a worker says when it has done its lease."""

    kind: str
    num_buckets: int
    stats: Sequence[MicrobatchStats]
    parameters_sha256: str
    times: StepTimes


class Run:
    """Owns the members, the step in progress and the store."""

    def __init__(self, file: RunFile) -> None:
        """Starts waiting for workers; `Driver` does the rest."""
        self.file = file
        self.progress = Progress(file.state.resume_step)
        self.changed = Signal()
        """Notified when anything that status shows may have changed."""
        self.ended = asyncio.Event()
        """Set when no step will follow."""
        self.epochs = Epochs(
            Membership(
                min_workers=file.min_workers,
                start_workers=file.num_starters,
                max_workers=file.max_workers,
                lease=file.timeouts.lease.total_seconds(),
            ),
            flow_limit=file.worker_window_chunks,
            on_gone=self._gone,
        )
        self.epochs.core.agreed = self._given_agreements()
        self.live: LiveStep | None = None
        self.last_commit: tuple[Moment, str, Commit] | None = None
        self._next_lease = 0
        self._update = file.optimizer.update
        self._stopped = False

    def join(self, applicant: Applicant) -> Member:
        """Admits a worker.

        Raises:
            RunEnded, RunStarted: it is too late.
            AyniError: see `Membership.admit`.
        """
        if self.progress.ended:
            raise RunEnded(
                f"run {self.file.run_id} is {self.progress.state}: {self.progress.detail}",
                state=self.progress.state,
                detail=self.progress.detail,
            )
        committed = self.progress.committed_steps
        if committed > self.progress.first_step and self.file.task.name:
            raise RunStarted(
                f"run {self.file.run_id} has committed {committed} steps and this version can't hand its state to a "
                "newcomer; start the worker before the first step",
                committed_step=committed - 1,
            )
        return self.epochs.join(applicant)

    def ready(self, seat: Seat, completed_steps: int, parameters_sha256: str) -> None:
        """Makes a member ready.

        Raises:
            Incompatible: its parameters have had another number of updates than the run.
            Diverged: see `Epochs.ready`.
        """
        self._refuse_if_halted()
        committed = self.progress.committed_steps
        if self.file.task.name and completed_steps != committed:
            raise Incompatible(
                f"completed_steps differs: the run has committed {committed}, the worker's parameters have had "
                f"{completed_steps} updates",
                field="completed_steps",
                coordinator=committed,
                worker=completed_steps,
            )
        self.epochs.ready(seat, parameters_sha256)
        if self.progress.waiting:
            seat.outbox.put_nowait(self.progress.waiting)

    def check_lease(self, seat: Seat, key: Key) -> None:
        """Refuses a lease that is not the worker's own in the open attempt; see `Step.lease`."""
        self._open_step(key).core.lease(seat.member.worker_id, key)

    def begin(
        self, seat: Seat, key: Key, bucket: Bucket, spec: TensorSpec, stats: Sequence[MicrobatchStats]
    ) -> Exchange:
        """Opens a contribution.

        Raises:
            AyniError: it is refused; see `Step.lease` and `Step.begin`.
        """
        live = self._open_step(key)
        lease = live.core.lease(seat.member.worker_id, key)
        return live.begin(lease, seat.flow, bucket, spec, stats, self.file.window_chunks)

    async def commit(self, seat: Seat, key: Key, report: Report) -> Commit:
        """Notes that a worker is done and waits for the step's commit; a committed step is answered again.

        Raises:
            StepVoided: the attempt was given up.
            AyniError: it is refused.
        """
        if self.last_commit and self.last_commit[:2] == (key.moment, report.kind):
            return self.last_commit[2]
        live = self._open_step(key)
        lease = live.core.lease(seat.member.worker_id, key)
        live.core.commit(lease, report.num_buckets, report.stats, report.parameters_sha256)
        seat.times = report.times
        seat.speed = plan.smoothed(seat.speed, live.samples_of(lease), report.times.compute)
        seat.member.activity = "waiting"
        self.changed.notify()
        if live.core.done:
            live.all_committed.set()
        return await asyncio.shield(live.ended)

    def broke(self, seat: Seat, exchange: Exchange) -> None:
        """A contribution's stream ended before its last byte, or before its mean was sent."""
        if self.live and self.live.core is exchange.step and not self.live.ended.done():
            self.live.void(f"the stream of worker {seat.member.name} for {exchange.label} broke")

    def note_refusal(self, error: AyniError, worker_name: str) -> None:
        """A contribution was refused. If its content is wrong, its step can't be completed and the run stops."""
        if isinstance(error, _FATAL):
            self.halt(error, worker_name)

    def published(self, seat: Seat, steps: int) -> None:
        """Notes that a worker's host tier holds the train state behind so many steps."""
        if steps > seat.published_steps:
            seat.published_steps = steps
            self.changed.notify()

    def note_held(self) -> None:
        """Keeps the most bytes that the reducer has held."""
        if self.live:
            self.progress.peak_reducer_bytes = max(self.progress.peak_reducer_bytes, self.live.core.held_bytes)

    @property
    def update_mode(self) -> str:
        """Where the optimizer runs; empty while that is not decided."""
        return "" if self._update == "auto" else self._update

    def decide_update(self, epoch: Epoch) -> str:
        """Returns where the optimizer runs; "auto" is decided once, by the first epoch's kinds of device."""
        if self._update == "auto":
            kinds = {self.epochs.seats[worker].member.applicant.backend for worker in epoch.workers}
            self._update = "host" if len(kinds) > 1 else "device"
            _log.info("optimizer update runs on the %s (backends: %s)", self._update, ", ".join(sorted(kinds)))
        return self._update

    def take_lease_id(self) -> int:
        """Returns a lease id that was never used before."""
        self._next_lease += 1
        return self._next_lease

    async def next_change(self, pause: float, limit: float) -> None:
        """Waits `pause` seconds, then until status may show something new, at most for `limit`; not past the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self.ended.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self.ended.is_set() else limit):
                await self.changed.wait()

    def halt(self, error: AyniError, worker_name: str = "") -> None:
        """Stops the run and tells everybody why, and whose fault it is where that is known."""
        if self.progress.ended:
            return
        named = not worker_name or worker_name in error.message or "worker" in error.metadata
        detail = error.message if named else f"worker {worker_name}: {error.message}"
        halted = Halted(f"the run was halted: {detail}", detail=detail, **_without_detail(error))
        _log.error("%s", halted.message)
        self.progress.halt(detail)
        if self.live:
            self.live.fail(halted)
        self.ended.set()
        self.epochs.dismiss(halted)
        self.epochs.changed.notify()
        self.changed.notify()

    def stop(self, reason: str) -> None:
        """Ends the run early at an operator's wish."""
        if not self.progress.ended:
            self._stopped = True
            self.progress.halt(reason)
            if self.live:
                self.live.fail(StepVoided(f"{self.live.core.label} was given up: {reason}", detail=reason))
            self.goodbye(reason, finished=False)
            self.epochs.changed.notify()

    def final_hashes(self) -> dict[str, str]:
        """Returns the parameter hash that each worker gave when it left."""
        return dict(self.epochs.final_hashes)

    def _given_agreements(self) -> dict[str, str]:
        """Returns what all workers must share before any has said it. A wrong worker that left must not bind others."""
        samples = self.file.num_training_samples
        return {"num_training_samples": str(samples)} if samples else {}

    def _open_step(self, key: Key) -> LiveStep:
        self._refuse_if_halted()
        if self.live is None:
            raise StaleStep(
                f"no step is open; step {key.moment.step} attempt {key.moment.attempt} is over",
                step=key.moment.step,
                attempt=key.moment.attempt,
                current_step=self.progress.committed_steps,
                current_attempt=0,
            )
        return self.live

    def _refuse_if_halted(self) -> None:
        if self._stopped:
            raise StepVoided(f"the run was stopped: {self.progress.detail}", detail=self.progress.detail)
        if self.progress.state == "halted":
            raise Halted(f"the run was halted: {self.progress.detail}", detail=self.progress.detail)

    def _gone(self, member: Member, reason: str) -> None:
        if self.live and self.live.needs(member.worker_id):
            self.live.void(f"worker {member.name} left: {reason}")
        if not self.epochs.seats and self.progress.committed_steps == self.progress.first_step:
            self.epochs.core.agreed = self._given_agreements()
        self.changed.notify()

    def goodbye(self, reason: str, *, finished: bool) -> None:
        """Tells every member that the run is over."""
        steps = self.progress.committed_steps
        self.ended.set()
        self.epochs.dismiss(Shutdown(reason=reason, finished=finished, committed_steps=steps))
        self.changed.notify()


def _without_detail(error: AyniError) -> dict[str, str]:
    return {key: value for key, value in error.metadata.items() if key != "detail"}
