"""The training loop of one worker.  [shell]

One turn: take a lease; for each leased micro-batch compute the summed loss and, while backward still runs, hand over
the buckets; commit; take the means; update. An evaluation is a turn without gradients. Before the commit further leases
may come, on what others did not do. A voided attempt drops its results and takes the next lease, which names the same
step again; gradients that were complete are sent again, not computed again, when a lease has the same micro-batches.

A worker whose parameters lag behind the run takes part without micro-batches and keeps the means, until a state of
another worker has come (`following`).
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from ayni import failpoints
from ayni.errors import LeaseRevoked, StepVoided
from ayni.logs import set_fields
from ayni.run_config import RunConfig
from worker_agent.session import Commit, Report, Session, ShardAssignment, StepTimes, Woken
from worker_agent.training.catching_up import CatchingUp
from worker_agent.training.checkpoint_writer import CheckpointWriter
from worker_agent.training.contributing import Contributor
from worker_agent.training.error_feedback import ROUNDED, ErrorFeedback
from worker_agent.training.events import StepEvent, TrainResult
from worker_agent.training.following import Follower, StateSource
from worker_agent.training.gradients import ShardGradients
from worker_agent.training.inner_loop import InnerLoop
from worker_agent.training.local_update import LocalUpdate
from worker_agent.training.microbatches import Microbatches
from worker_agent.training.precision import check_precision
from worker_agent.training.replica import Replica
from worker_agent.training.residual_files import UnwrittenResiduals
from worker_agent.training.residual_files import load as load_residuals
from worker_agent.training.shard import Shard
from worker_agent.training.task import EVALUATION, TRAIN, Task
from worker_agent.training.turn import Turn
from worker_agent.training.update import warm_up

log = logging.getLogger(__name__)

OnEvent = Callable[[StepEvent], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """What a worker decides for itself."""

    checkpoint_folder: Path | None = None
    """Where the worker that the run names writes the best and the last checkpoint; None for none."""
    checkpoint_every: int = 0
    """Steps between "last" checkpoints. 0: only at the end."""
    means_timeout_s: float = 600.0
    """Longest wait for the means of a step that is already committed, for the session to give buffers back, and for a
    checkpoint to be written."""
    state_source: StateSource | None = None
    """Where the run's state comes from when this worker lags behind; None for nowhere, then lagging is an error."""
    follow_bytes: int = 1 << 30
    """Most memory for means that are kept while the run's state is on its way."""


DEFAULTS = TrainingConfig()


def _ignore(event: StepEvent) -> None:
    """Takes an event that nobody asked for."""


def train(
    session: Session,
    task: Task,
    config: RunConfig,
    training: TrainingConfig = DEFAULTS,
    on_event: OnEvent = _ignore,
) -> TrainResult:
    """Trains a task until the session says that the run is over; see `Trainer.train`."""
    trainer = Trainer(task, config, training)
    try:
        return trainer.train(session, on_event)
    finally:
        trainer.close()


class Trainer:
    """One replica and what trains it. Outlives a session, so that a worker can rejoin."""

    def __init__(self, task: Task, config: RunConfig, training: TrainingConfig = DEFAULTS) -> None:
        """Prepares buffers; the optimizer is made when the first lease says where updates run."""
        check_precision(config.precision, task.model)
        if config.optimizer.update != "host":
            warm_up()
        self._task, self._config, self._training = task, config, training
        specs = tuple(task.buckets)
        self._num_buckets = len(specs)
        self.replica = Replica(task, config, specs)
        self._gradients = ShardGradients(task.trainable(), specs)
        self._microbatches = Microbatches(task, config, self._gradients)
        inner = InnerLoop(self._microbatches, self._gradients, config, self._local_update)
        work = inner if config.local_update.enabled else self._microbatches
        self._feedback: ErrorFeedback | None = None
        self._contributor = Contributor(work, self._gradients, specs)
        self._follow_wire(config.wire_type)
        follower = Follower(training.state_source, training.follow_bytes) if training.state_source else None
        self._catching_up = CatchingUp(self.replica, self._contributor, follower)
        self._checkpoints = CheckpointWriter(training.checkpoint_folder) if training.checkpoint_folder else None
        self._times = StepTimes()
        self._began = time.perf_counter()
        self._result = TrainResult(completed_steps=0, skipped_steps=0, voided_steps=0, wall_s=0.0, parameters_sha256="")

    @property
    def completed_steps(self) -> int:
        """Updates that the parameters have had."""
        return self.replica.completed_steps

    @property
    def is_following(self) -> bool:
        """Whether the parameters lag behind the run, as far as is known."""
        return self._catching_up.is_following

    def parameters_sha256(self) -> str:
        """Returns the hash of the trainable parameters, for the coordinator to compare."""
        return self.replica.parameters_sha256()

    def close(self) -> None:
        """Takes the hooks off the model, and waits for a checkpoint that is being written."""
        self._gradients.close()
        if self._checkpoints:
            self._checkpoints.close(self._training.means_timeout_s)

    def load(self, checkpoint: Path, update: str) -> None:
        """Continues from a checkpoint's state; `update` is "host" or "device", as it was written.

        Raises:
            ValueError: the checkpoint is damaged, or of another task or optimizer.
        """
        self._contributor.start_over()
        self.replica.load(checkpoint, update)
        self._take_residuals(checkpoint.parent)

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns copies of everything that training goes on from (parameters, optimizer), and facts about it."""
        return self.replica.state()

    def restore(self, what: str, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
        """Goes on from what `state` of an equal replica returned; `what` names it in errors.

        Raises:
            ValueError: it is damaged, or of another task or optimizer.
        """
        self._contributor.start_over()
        self.replica.restore(what, tensors, facts)
        self._take_residuals(self._training.checkpoint_folder)

    def train(self, session: Session, on_event: OnEvent = _ignore) -> TrainResult:
        """Trains until the session says that the run is over.

        Raises:
            AyniError: the coordinator refused.
            OSError: a checkpoint could not be written.
        """
        self._began = time.perf_counter()
        self._gradients.new_vector = session.new_vector
        while (lease := self._receive(session)) is not None:
            set_fields(rank=lease.rank, epoch=lease.epoch, step=lease.step)
            failpoints.hit("worker.lease.taken")
            if self._checkpoints:
                self._checkpoints.check()
            event = self._train_step(session, lease) if lease.kind == "train" else self._evaluate(session, lease)
            if event is not None:
                on_event(event)
        self._catching_up.take_state()
        if self.completed_steps:
            self._write(session, "last")
            self._keep_residuals()
        if self._checkpoints:
            self._checkpoints.wait(self._training.means_timeout_s)
        return replace(
            self._result,
            completed_steps=self.completed_steps,
            wall_s=time.perf_counter() - self._began,
            parameters_sha256="" if self.is_following else self.parameters_sha256(),
        )

    def _receive(self, session: Session) -> ShardAssignment | None:
        """Waits for a lease; takes a state that comes meanwhile."""
        while True:
            try:
                return session.receive_shard()
            except Woken:
                if self._catching_up.take_state():
                    session.caught_up(self.completed_steps, self.replica.origin)

    def _train_step(self, session: Session, lease: ShardAssignment) -> StepEvent | None:
        turn = Turn(Shard(lease))
        follows = self._catching_up.lags(session, lease)
        self.replica.prepare(lease.update)
        self._follow_wire(lease.wire_type)
        try:
            commit = turn.settle(session, partial(self._contribute, session, turn, follows))
            committed = time.perf_counter()
            for future in turn.primary.futures:
                future.result(self._training.means_timeout_s)
        except (StepVoided, LeaseRevoked) as error:
            self._give_up(turn, error)
            return None
        turn.wait(self._training.means_timeout_s)
        failpoints.hit("worker.commit.received")
        session.report("updating")
        updating = time.perf_counter()
        if follows:
            note = self._catching_up.keep(lease, commit, self._contributor.means)
        else:
            note = self._apply(lease, commit)
        self._contributor.release(turn.shards)
        updated = time.perf_counter()
        self._times = turn.primary.times(committed, updated, turn.extras)
        self._result = replace(self._result, train_loss=commit.global_loss)
        every = self._training.checkpoint_every
        if not follows and every and self.completed_steps % every == 0:
            note = self._write(session, "last") or note
        stored_every = self._config.state.store_every or every
        if lease.publish_state or (stored_every and self.completed_steps % stored_every == 0):
            self._keep_residuals()
        event = self._event(turn, commit, self._times, note, follows)
        return replace(event, moments=turn.moments(committed, updating, updated))

    def _evaluate(self, session: Session, lease: ShardAssignment) -> StepEvent | None:
        turn = Turn(Shard(lease))
        follows = self._catching_up.lags(session, lease)
        try:
            commit = turn.settle(session, partial(self._measure, session, turn, follows))
        except (StepVoided, LeaseRevoked) as error:
            self._give_up(turn, error)
            return None
        times = turn.primary.times(turn.primary.computed, turn.primary.computed, turn.extras)
        note = self._write(session, "best") if commit.best and not follows else ""
        event = self._event(turn, commit, times, note, follows)
        best = event if commit.best else self._result.best
        self._result = replace(self._result, evaluation=event, best=best)
        return event

    def _contribute(self, session: Session, turn: Turn, follows: bool, shard: Shard) -> None:
        """Works on one training lease of a turn."""
        self._contributor.contribute(session, shard)
        is_audited = shard is turn.primary and not follows
        shard.report = Report(
            num_buckets=self._num_buckets,
            microbatches=tuple(shard.stats),
            parameters_sha256=self._audit_hash(shard.assignment.step) if is_audited else "",
            times=self._reported_times(turn, shard),
            following=follows,
            square_sum=self._contributor.square_sum(shard),
            origin=self.replica.origin,
        )

    def _measure(self, session: Session, turn: Turn, follows: bool, shard: Shard) -> None:
        """Works on one evaluation lease of a turn."""
        session.report("evaluating")
        self._microbatches.evaluate(shard)
        times = shard.computing_times()
        shard.report = Report(num_buckets=0, microbatches=tuple(shard.stats), times=times, following=follows)

    def _apply(self, lease: ShardAssignment, commit: Commit) -> str:
        """Updates the parameters and counts the step; returns why nothing was changed, if so."""
        has_changed = self.replica.apply(lease, commit, self._contributor.means)
        failpoints.hit("worker.updated")
        if has_changed:
            return ""
        self._result = replace(self._result, skipped_steps=self._result.skipped_steps + 1)
        return "no sample of the step has any weight"

    def _give_up(self, turn: Turn, error: StepVoided | LeaseRevoked) -> None:
        """Ends a turn that led to no commit, and keeps what was computed in it."""
        lease = turn.lease
        self._result = replace(self._result, voided_steps=self._result.voided_steps + 1)
        log.info("attempt %d at step %d was voided: %s", lease.attempt, lease.step, error)
        turn.wait(self._training.means_timeout_s)
        self._contributor.keep(turn.shards)

    def _follow_wire(self, wire_type: str) -> None:
        """Begins to make up for rounding, with the first step whose wire type asks for it; no wider one follows it."""
        if self._feedback is None and wire_type in ROUNDED:
            sizes = {bucket: mean_N.size for bucket, mean_N in self._contributor.means.items()}
            self._feedback = self._contributor.feedback = ErrorFeedback(wire_type, sizes)

    def _local_update(self) -> LocalUpdate:
        update = self.replica.update
        assert isinstance(update, LocalUpdate)
        return update

    def _audit_hash(self, step: int) -> str:
        """Returns the hash that goes with a commit; empty when no audit is due. The reduction runs meanwhile."""
        every = self._config.audit_every
        return self.parameters_sha256() if every and step % every == 0 else ""

    def _reported_times(self, turn: Turn, shard: Shard) -> StepTimes:
        """Returns the times that go with a commit: what comes after it is the step before's."""
        known = shard.computing_times()
        return replace(self._times, data=known.data, compute=known.compute) if shard is turn.primary else known

    def _write(self, session: Session, name: str) -> str:
        """Begins to write a checkpoint if this worker is the one that does; returns a note."""
        if self._checkpoints is None or not session.writes_checkpoints or self.is_following:
            return ""
        path = self._checkpoints.start(
            name, self._task, self.replica.update, self.completed_steps, self._training.means_timeout_s
        )
        return f"writing {path}"

    def _keep_residuals(self) -> None:
        """Begins to write what rounding keeps back, for a run that goes on from the parameters of now."""
        if self._feedback is None or self._checkpoints is None or self.is_following:
            return
        residuals = UnwrittenResiduals(
            completed_steps=self.completed_steps,
            parameters_sha256=self.parameters_sha256(),
            residuals=self._feedback.copies(),
        )
        self._checkpoints.start_residuals(residuals, self._training.means_timeout_s)

    def _take_residuals(self, checkpoints: Path | None) -> None:
        """Goes on with what rounding had kept back of the parameters of now, where this worker wrote it down."""
        if self._feedback is None or checkpoints is None:
            return
        sizes = {bucket: values.size for bucket, values in self._feedback.residuals.items()}
        if found := load_residuals(checkpoints, self.completed_steps, self.parameters_sha256(), sizes):
            self._feedback.restore(found)

    def _event(self, turn: Turn, commit: Commit, times: StepTimes, note: str, follows: bool) -> StepEvent:
        split = TRAIN if turn.lease.kind == "train" else EVALUATION
        derived = self._task.derived_metrics(commit.global_loss, split) if commit.total_weight else {}
        event = turn.primary.event(commit, times, turn.extras, derived)
        return replace(
            event,
            note=note,
            following=follows,
            publish_state=turn.lease.publish_state and not follows,
            elapsed_s=time.perf_counter() - self._began,
        )
