"""The run: its members, the step in progress, and what workers' calls lead to.  [shell]

`driver.Driver` makes the steps. One event loop owns everything here.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ayni import failpoints
from ayni.errors import (
    AyniError,
    BadChunk,
    BadRequest,
    Checksum,
    Halted,
    Incompatible,
    LeaseRevoked,
    NonFinite,
    RoundRestarted,
    RunEnded,
    RunStarted,
    SpecMismatch,
    StaleStep,
    StepVoided,
    UnknownWorker,
    WeightMismatch,
)
from ayni.step_values import Commit, Origin, Report
from coordinator_service import plan
from coordinator_service.conduct import Conduct
from coordinator_service.config import RunFile
from coordinator_service.epochs import Epochs, Seat
from coordinator_service.leases import Key, Lease, Moment
from coordinator_service.live import LiveStep, Offer
from coordinator_service.member_states import MemberStates
from coordinator_service.membership import Applicant, Epoch, Member, Membership
from coordinator_service.progress import Progress
from coordinator_service.regrouping import Regrouping
from coordinator_service.releases import Releases
from coordinator_service.rounds import Exchange
from coordinator_service.same_host import SameHost
from coordinator_service.signals import Signal
from coordinator_service.store import RunStore
from coordinator_service.stored_states import StoredStates
from coordinator_service.values import ExchangeNews, Shutdown
from coordinator_service.wire_types import WireTypes, chosen_before
from coordinator_service.writing import Notes, Writing

_log = logging.getLogger(__name__)

_FATAL = (NonFinite, SpecMismatch, BadChunk, WeightMismatch)
"""Refusals of a contribution's content: unless a policy tolerates it, they halt the run and name the worker."""

_OWN_FAULT = (BadChunk, BadRequest, Checksum, WeightMismatch)
"""Refusals that say nothing about other workers: whoever gets one contradicts itself, or sends what can't be read."""

_REMEMBERED = 8
"""Commits that are answered again."""

_NEXT_ID, _UPDATE = "next_worker_id", "update"


class Run:
    """Owns the members and the step in progress."""

    def __init__(self, file: RunFile, store: RunStore) -> None:
        """Goes on where the store stands, waiting for workers; `Driver` does the rest."""
        self.file = file
        self.store = store
        facts, epoch, initial = store.facts(), store.last_epoch(), file.state.resume_step
        self.progress = Progress(max(initial, store.committed_steps()), initial)
        self.changed = Signal()
        """Notified when anything that status shows may have changed."""
        self.ended = asyncio.Event()
        """Set when no step will follow."""
        self.epochs = Epochs(
            Membership(
                min_workers=file.min_workers,
                start_workers=file.min_workers if self.progress.has_begun else file.num_starters,
                max_workers=file.max_workers,
                lease=file.timeouts.lease.total_seconds(),
                epoch=epoch.number if epoch else 0,
                next_id=int(facts.get(_NEXT_ID, "0")),
            ),
            flow_limit=file.worker_window_chunks,
            on_gone=self._gone,
        )
        self.epochs.core.agreed = self._given_agreements()
        self.writing = Writing(file, self.epochs, self.progress, self.changed)
        self.notes = Notes(store)
        self.conduct = Conduct(file, self.epochs, self.progress, self.notes, facts)
        self.regrouping = Regrouping(file, self.epochs, self.progress)
        self.releases = Releases(file, self.epochs, self.progress, self.regrouping)
        self.states = MemberStates(self.epochs, self.progress, self.changed)
        self.stored = StoredStates(store, lambda: self.progress.ended)
        self.stored_source: tuple[str, int] | None = None
        """Run and steps of the stored state that members have to load, when nobody has a newer one."""
        self.stored_problem = ""
        """Why the last try to load it failed, for people; empty for none."""
        self.live: LiveStep | None = None
        self.same_host = SameHost()
        """What is shared with workers of this host; nothing until the server says so."""
        self.wire_types = WireTypes(file.wire_type, file.wire_changes, *chosen_before(facts))
        self._commits: dict[tuple[Moment, str], Commit] = {}
        self._update = facts.get(_UPDATE, "") if file.optimizer.update == "auto" else file.optimizer.update
        self._stopped = False

    async def join(self, applicant: Applicant) -> Member:
        """Admits a worker.

        Raises:
            RunEnded, RunStarted: it is too late.
            AyniError: see `Membership.admit`.
        """
        if self.progress.state == "suspended":
            sentence = "this coordinator is being stopped; join the one that is started next"
            raise UnknownWorker(sentence, worker_id="none")
        if self.progress.ended:
            raise RunEnded(
                f"run {self.file.run_id} is {self.progress.state}: {self.progress.detail}",
                state=self.progress.state,
                detail=self.progress.detail,
            )
        committed = self.progress.committed_steps
        if self.progress.has_begun and self.file.task.name and not applicant.elastic:
            raise RunStarted(
                f"run {self.file.run_id} has committed {committed} steps, and this worker says that it can't be handed "
                "the run's state; start it before the first step, or join as an elastic worker",
                committed_step=committed - 1,
            )
        member = self.epochs.join(applicant)
        self.notes.add({_NEXT_ID: str(self.epochs.core.next_id)})
        try:
            await self.notes.write()
        except OSError as error:  # Sessions and epochs keep workers apart even if a number comes twice.
            _log.warning("the number of worker %s is not kept yet: %s", member.name, error)
        failpoints.hit("coordinator.join.admitted")
        return member

    def ready(self, seat: Seat, completed_steps: int, parameters_sha256: str, origin: Origin | None = None) -> None:
        """Makes a member ready; one whose parameters are not those of the run follows until they are.

        Raises:
            Incompatible: its parameters have had another number of updates than the run, and it can't be handed others.
            Diverged: see `Epochs.ready`.
        """
        self._refuse_if_halted()
        committed = self.progress.committed_steps
        seat.completed_steps, seat.origin = completed_steps, origin
        is_current = completed_steps == committed and self.states.is_ours(seat)
        is_behind = bool(self.file.task.name) and not is_current
        if is_behind and not seat.elastic:
            raise Incompatible(
                f"completed_steps differs: the run has committed {committed}, the worker's parameters have had "
                f"{completed_steps} updates",
                field="completed_steps",
                coordinator=committed,
                worker=completed_steps,
            )
        if is_behind:
            self.states.follow(seat)
        self.epochs.ready(seat, "" if is_behind else parameters_sha256)
        if self.progress.waiting:
            seat.outbox.put_nowait(self.progress.waiting)

    def check_lease(self, seat: Seat, key: Key) -> None:
        """Refuses a lease that is not the worker's own in the open attempt; see `Step.lease`."""
        self._open_step(key).core.lease(seat.member.worker_id, key)

    def begin(self, seat: Seat, key: Key, offer: Offer) -> Exchange:
        """Opens a contribution.

        Raises:
            AyniError: it is refused; see `Step.lease` and `Step.begin`.
        """
        live = self._open_step(key)
        lease = live.core.lease(seat.member.worker_id, key)
        with self._disagreeing(live, lease):
            exchange = live.begin(lease, seat.flow, offer, self.file.window_chunks, again=seat.elastic)
        self.releases.note_sent(live, seat.member.worker_id)
        return exchange

    async def commit(self, seat: Seat, key: Key, kind: str, report: Report) -> Commit:
        """Notes that a worker is done and waits for the step's commit; a committed step is answered again.

        Raises:
            StepVoided: the attempt was given up.
            RoundRestarted: another exchange group was formed.
            AyniError: it is refused.
        """
        if told := self._commits.get((key.moment, kind)):
            return told
        live = self._open_step(key)
        lease = live.core.lease(seat.member.worker_id, key)
        if not self.states.lineage.has(live.core.step, report.origin):
            report = replace(report, parameters_sha256="")  # They are known to differ, and prove nothing.
        with self._disagreeing(live, lease):
            is_news = live.commit(lease, report)
        if is_news:
            self.conduct.note_report(live, lease, report)
        seat.times = report.times
        if is_news and not report.following:
            seat.speed = plan.smoothed(seat.speed, live.samples_of(lease), report.times.compute)
        seat.member.activity = "waiting"
        if report.following:
            seat.tainted = seat.tainted and report.origin is not None
        elif live.core.kind == "train":
            self.states.completed(seat, live.core.step, report.origin)
        self.releases.note_sent(live, seat.member.worker_id)
        self.changed.notify()
        return await live.outcome()

    def remember(self, moment: Moment, kind: str, told: Commit) -> None:
        """Keeps a commit, to answer it again to a worker that asks again."""
        if kind == "train":
            self.states.lineage.note(moment.step, Origin(epoch=moment.epoch, attempt=moment.attempt))
        self._commits[(moment, kind)] = told
        while len(self._commits) > _REMEMBERED:
            self._commits.pop(next(iter(self._commits)))

    def forget(self, steps: int) -> None:
        """Answers no commit again that was taken back: whoever asks is told that it does not count."""
        for moment, kind in list(self._commits):
            if moment.step > steps or (moment.step == steps and kind == "train"):
                del self._commits[(moment, kind)]

    def broke(self, seat: Seat, exchange: Exchange) -> None:
        """A contribution's stream ended before its last byte, or before its mean was sent.

        An elastic worker may begin it again, and if it does not, it is late at some time, or gone.
        """
        if self.live and self.live.core is exchange.step and not self.live.ended.done() and not seat.elastic:
            self.live.void(f"the stream of worker {seat.member.name} for {exchange.label} broke")

    @contextlib.contextmanager
    def _disagreeing(self, live: LiveStep, lease: Lease) -> Iterator[None]:
        """Makes the step again where a worker says another weight than one that is gone said of the same micro-batches.

        Nobody can tell who is right, but what the other left is worth nothing then.
        """
        try:
            yield
        except WeightMismatch as error:
            if not lease.is_extra:
                raise
            live.void(f"{error.message}, as a worker said whose lease is over")
            raise live.ended.exception() or error from error

    def note_sent(self, seat: Seat) -> None:
        """Notes that all bytes of one of a worker's contributions came."""
        if self.live:
            self.releases.note_sent(self.live, seat.member.worker_id)

    def note_exchange(self, seat: Seat, news: ExchangeNews) -> None:
        """Takes what a worker says of its exchange group; a reduction that failed for good halts the run."""
        if self.live and news.failed and self.live.generation == news.generation:
            self.halt(Halted(news.failed, detail=news.failed), seat.member.name)
        if self.live and self.regrouping.hear(self.live, seat, news):
            self.releases.note_sent(self.live, seat.member.worker_id)

    def note_refusal(self, error: AyniError, seat: Seat) -> None:
        """A contribution was refused. If its content is wrong, policy says what becomes of the worker and the run."""
        if isinstance(error, _FATAL):
            self._blame(error, seat)

    def note_failure(self, error: AyniError, seat: Seat) -> None:
        """A contribution that had begun failed: unless the step itself took it back, its worker is to blame."""
        if not isinstance(error, StepVoided | Halted | RoundRestarted | LeaseRevoked):
            self._blame(error, seat)

    def _blame(self, error: AyniError, seat: Seat) -> None:
        """Lets a worker go whose work others can do; otherwise the run stops."""
        if seat.elastic and isinstance(error, _OWN_FAULT):
            self.epochs.expel(seat.member.worker_id, error.message)
        elif self.conduct.tolerates(error) and seat.elastic:
            self.conduct.refuse(seat, error)
        else:
            self.halt(error, seat.member.name)

    def note_held(self) -> None:
        """Keeps the most bytes that the reducer has held."""
        if self.live:
            self.progress.peak_reducer_bytes = max(self.progress.peak_reducer_bytes, self.live.core.held_bytes)

    @property
    def update_mode(self) -> str:
        """Where the optimizer runs; empty while that is not decided."""
        return self._update

    async def decide_update(self, epoch: Epoch) -> None:
        """Decides where the optimizer runs; "auto" is decided once, by the first epoch's kinds of device."""
        if not self._update:
            seats = [self.epochs.seats[worker] for worker in epoch.workers if worker in self.epochs.seats]
            kinds = {seat.member.applicant.backend for seat in seats}
            self._update = "host" if len(kinds) > 1 or "wgpu" in kinds else "device"  # wgpu: GPUs of any makers
            await self.writing.write("where the optimizer runs", self.store.set_facts, {_UPDATE: self._update})
            _log.info("optimizer update runs on the %s (backends: %s)", self._update, ", ".join(sorted(kinds)))

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

    @property
    def wire_type(self) -> str:
        """Element type that contributions travel in: to the open step, or else to the next one."""
        return self.live.wire_type if self.live else self.wire_types.now

    def final_hashes(self) -> dict[str, str]:
        """Returns the parameter hash that each worker gave when it left."""
        return dict(self.epochs.final_hashes)

    def absent(self, names: Iterable[str]) -> list[str]:
        """Returns which of these workers are not ready."""
        ready = {seat.member.name for seat in self.epochs.seats.values() if seat.member.ready}
        return sorted(set(names) - ready)

    def _given_agreements(self) -> dict[str, str]:
        """Returns what all workers must share before any has said it. A wrong worker that left must not bind others."""
        samples = self.file.num_training_samples
        given = {"num_training_samples": str(samples)} if samples else {}
        if self.progress.has_begun:
            facts = self.store.facts()
            given |= {name: facts[name] for name in AGREEMENTS if facts.get(name)}
        return given

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
        if self.live:
            self.releases.lose(self.live, member.worker_id, f"worker {member.name} left: {reason}")
        self.same_host.drop(member.worker_id)
        if not self.epochs.seats and not self.progress.has_begun:
            self.epochs.core.agreed = self._given_agreements()
        self.changed.notify()

    def goodbye(self, reason: str, *, finished: bool) -> None:
        """Tells every member that the run is over."""
        steps, writer = self.progress.committed_steps, self.epochs.writer(sorted(self.epochs.seats))
        self.ended.set()
        told = Shutdown(reason=reason, finished=finished, committed_steps=steps, checkpoint_writer=writer)
        self.epochs.dismiss(told)
        self.changed.notify()


AGREEMENTS = ("task_fingerprint", "dataset_fingerprint", "num_training_samples", "num_evaluation_samples")
"""What all workers of a run must share, by name."""


def _without_detail(error: AyniError) -> dict[str, str]:
    return {key: value for key, value in error.metadata.items() if key != "detail"}
