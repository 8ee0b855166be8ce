"""The training loop of one worker.  [shell]

One turn: take a lease; for each leased micro-batch compute the summed loss and, while backward still runs, hand over
the buckets; commit; take the means; update. An evaluation is a turn without gradients. A voided attempt drops its
results and takes the next lease, which names the same step again; gradients that were complete are sent again, not
computed again, when the lease is the same.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ayni import order
from ayni.errors import StepVoided
from ayni.run_config import RunConfig
from worker_agent.session import Commit, Session, ShardAssignment, StepTimes, Vector
from worker_agent.training import rng
from worker_agent.training.checkpoint import CheckpointFolder, restore, state_of
from worker_agent.training.events import StepEvent, TrainResult
from worker_agent.training.fingerprint import parameters_sha256
from worker_agent.training.gradients import Send, ShardGradients
from worker_agent.training.layout import BucketSpec
from worker_agent.training.precision import autocast, check_precision
from worker_agent.training.shard import Shard
from worker_agent.training.task import EVALUATION, TRAIN, LossSums, Task
from worker_agent.training.update import Update, make_update, warm_up

log = logging.getLogger(__name__)

OnEvent = Callable[[StepEvent], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """What a worker decides for itself."""

    checkpoint_folder: Path | None = None
    """Where rank 0 writes the best and the last checkpoint; None for none."""
    checkpoint_every: int = 0
    """Steps between "last" checkpoints. 0: only at the end."""
    means_timeout_s: float = 600.0
    """Longest wait for the means of a step that is already committed, and for the session to give buffers back."""


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
    """One replica: the task, its gradients and its optimizer. Outlives a session, so that a worker can rejoin."""

    def __init__(self, task: Task, config: RunConfig, training: TrainingConfig = DEFAULTS) -> None:
        """Prepares buffers; the optimizer is made when the first lease says where updates run."""
        check_precision(config.precision, task.model)
        warm_up()
        self._task, self._config, self._training = task, config, training
        self._specs: Sequence[BucketSpec] = tuple(task.buckets)
        self._gradients = ShardGradients(task.trainable(), self._specs)
        self._means = {spec.bucket: np.zeros(spec.num_elements, np.float32) for spec in self._specs}
        self._update: Update | None = None
        self._kept: Shard | None = None
        self._times = StepTimes()
        self._checkpoints = CheckpointFolder(training.checkpoint_folder) if training.checkpoint_folder else None
        self._rank = -1
        self._began = time.perf_counter()
        self._result = TrainResult(completed_steps=0, skipped_steps=0, voided_steps=0, wall_s=0.0, parameters_sha256="")
        self.completed_steps = 0

    def parameters_sha256(self) -> str:
        """Returns the hash of the trainable parameters, for the coordinator to compare."""
        return self._update.parameters_sha256() if self._update else parameters_sha256(self._task.trainable())

    def close(self) -> None:
        """Takes the hooks off the model."""
        self._gradients.close()

    def load(self, checkpoint: Path, update: str) -> None:
        """Continues from a checkpoint's state; `update` is "host" or "device", as it was written.

        Raises:
            ValueError: the checkpoint is damaged, or of another task or optimizer.
        """
        self._update = make_update(update, self._config.optimizer, self._task.trainable(), self._specs)
        self.completed_steps = CheckpointFolder(checkpoint.parent).load(checkpoint.name, self._task, self._update)

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns copies of everything that training goes on from (parameters, optimizer), and facts about it."""
        tensors, facts = state_of(self._task, self._update, self.completed_steps)
        return tensors, {**facts, **self._own_facts()}

    def restore(self, what: str, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
        """Goes on from what `state` of an equal replica returned; `what` names it in errors.

        Raises:
            ValueError: it is damaged, or of another task or optimizer.
        """
        for name, own in self._own_facts().items():
            if facts.get(name, own) != own:
                raise ValueError(f"{what} was written with {name} {facts[name]}, but this run has {name} {own}")
        kind = facts.get("update", "")
        self._update = make_update(kind, self._config.optimizer, self._task.trainable(), self._specs) if kind else None
        self.completed_steps = restore(what, tensors, facts, self._task, self._update)

    def _own_facts(self) -> dict[str, str]:
        """Returns what must be the same where a run goes on, beside the task."""
        return {"seed": str(self._config.seed), "optimizer": self._config.optimizer.name}

    def train(self, session: Session, on_event: OnEvent = _ignore) -> TrainResult:
        """Trains until the session says that the run is over.

        Raises:
            AyniError: the coordinator refused.
            OSError: a checkpoint could not be written.
        """
        self._began = time.perf_counter()
        while (lease := session.receive_shard()) is not None:
            self._rank = lease.rank
            turn = self._train_step if lease.kind == "train" else self._evaluate
            event = turn(session, Shard(lease))
            if event is not None:
                on_event(event)
        if self.completed_steps:
            self._write("last")
        return replace(
            self._result,
            completed_steps=self.completed_steps,
            wall_s=time.perf_counter() - self._began,
            parameters_sha256=self.parameters_sha256(),
        )

    def _train_step(self, session: Session, shard: Shard) -> StepEvent | None:
        lease = shard.assignment
        self._check_turn(lease)
        try:
            self._contribute(session, shard)
            commit = session.commit(
                lease,
                num_buckets=len(self._specs),
                microbatches=tuple(shard.stats),
                parameters_sha256=self._audit_hash(lease.step),
                times=self._reported_times(shard),
            )
            committed = time.perf_counter()
            for future in shard.futures:
                future.result(self._training.means_timeout_s)
        except StepVoided as error:
            self._void(shard, error)
            return None
        session.report("updating")
        note = self._apply(lease, commit)
        self._times = shard.times(committed, time.perf_counter())
        self._result = replace(self._result, train_loss=commit.global_loss)
        every = self._training.checkpoint_every
        if every and self.completed_steps % every == 0:
            note = self._write("last") or note
        return self._event(shard, commit, self._times, note)

    def _contribute(self, session: Session, shard: Shard) -> None:
        """Computes and hands over the gradients of a lease, or hands over those that a voided attempt left."""
        lease = shard.assignment

        def send(spec: BucketSpec, parts: list[Vector | None]) -> None:
            future = session.contribute(
                lease,
                spec.bucket,
                parts,
                tuple(shard.stats),
                out=self._means[spec.bucket],
                component_sizes=spec.component_sizes,
            )
            shard.add_future(future)

        kept, self._kept = self._kept, None
        if kept is not None and kept.span == shard.span:
            shard.stats = kept.stats
            shard.computed = time.perf_counter()
            self._gradients.resend(send)
        else:
            session.report("computing")
            self._compute(shard, send)
        self._kept = shard
        session.report("exchanging")

    def _compute(self, shard: Shard, send: Send) -> None:
        """Computes a lease's gradients; `send` is called from inside the last backward."""
        lease = shard.assignment
        self._task.model.train()
        self._gradients.begin(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches, send)
        for microbatch in lease.microbatches:
            sums = self._forward(shard, microbatch)
            if sums.weight:
                self._gradients.backward(sums.loss_sum, last=microbatch + 1 == lease.microbatch_stop)
            else:
                self._gradients.skip()
        shard.computed = time.perf_counter()
        self._gradients.finish()

    def _evaluate(self, session: Session, shard: Shard) -> StepEvent | None:
        lease = shard.assignment
        session.report("evaluating")
        self._task.model.eval()
        with torch.no_grad():
            for microbatch in lease.microbatches:
                self._forward(shard, microbatch)
        shard.computed = time.perf_counter()
        times = shard.times_so_far()
        try:
            commit = session.commit(lease, num_buckets=0, microbatches=tuple(shard.stats), times=times)
        except StepVoided as error:
            self._void(shard, error)
            return None
        event = self._event(shard, commit, times, self._write("best") if commit.best else "")
        best = event if commit.best else self._result.best
        self._result = replace(self._result, evaluation=event, best=best)
        return event

    def _forward(self, shard: Shard, microbatch: int) -> LossSums:
        """Computes a micro-batch's loss, with random draws of its own."""
        rng.seed_microbatch(self._config.seed, shard.assignment.step, microbatch)
        start, stop = shard.assignment.positions(microbatch)
        if start == stop:
            # Fewer samples than micro-batches: the task is not asked for a batch of nothing.
            nothing = LossSums(loss_sum=torch.zeros(()), weight=0)
            shard.add_stats(microbatch, nothing)
            return nothing
        began = time.perf_counter()
        batch = self._batch(shard.assignment.kind, start, stop)
        shard.data_s += time.perf_counter() - began
        with autocast(self._config.precision, self._task.model):
            sums = self._task.loss(batch)
        shard.add_stats(microbatch, sums)
        return sums

    def _batch(self, kind: str, start: int, stop: int) -> Any:
        """Returns a micro-batch's samples as the task makes them."""
        if kind != "train":
            return self._task.batch(range(start, stop), EVALUATION)
        samples = order.samples_at(self._config.seed, start, stop, self._task.num_samples)
        return self._task.batch(samples.tolist(), TRAIN)

    def _apply(self, lease: ShardAssignment, commit: Commit) -> str:
        """Updates the parameters and counts the step; returns why nothing was changed, if so."""
        self._kept = None
        self.completed_steps += 1
        if self._update is None:
            self._update = make_update(lease.update, self._config.optimizer, self._task.trainable(), self._specs)
        if not commit.total_weight:
            self._result = replace(self._result, skipped_steps=self._result.skipped_steps + 1)
            log.warning("step %d changed nothing: its samples have no weight", lease.step)
            return "no sample of the step has any weight"
        self._update.step(self._means, learning_rate=commit.learning_rate, clip_factor=commit.clip_factor)
        return ""

    def _void(self, shard: Shard, error: StepVoided) -> None:
        """Waits until the session has let go of all buffers."""
        lease = shard.assignment
        self._result = replace(self._result, voided_steps=self._result.voided_steps + 1)
        log.info("attempt %d at step %d was voided: %s", lease.attempt, lease.step, error)
        _, held = wait_for_futures(shard.futures, self._training.means_timeout_s)
        if held:
            raise RuntimeError(
                f"{len(held)} reductions of a voided attempt at step {lease.step} did not end within "
                f"{self._training.means_timeout_s:.0f} s"
            ) from error

    def _check_turn(self, lease: ShardAssignment) -> None:
        if self._update is not None and lease.update and lease.update != self._update.kind:
            raise RuntimeError(
                f"this worker's optimizer runs on the {self._update.kind}, as in the state that it goes on from, but "
                f"the run says {lease.update}; set optimizer.update to {self._update.kind}"
            )
        if lease.step != self.completed_steps:
            raise RuntimeError(
                f"this worker's parameters have had {self.completed_steps} updates, but the coordinator leased it step "
                f"{lease.step}; it needs the state of a worker that is up to date"
            )

    def _audit_hash(self, step: int) -> str:
        """Returns the hash that goes with a commit; empty when no audit is due. The reduction runs meanwhile."""
        every = self._config.audit_every
        return self.parameters_sha256() if every and step % every == 0 else ""

    def _reported_times(self, shard: Shard) -> StepTimes:
        """Returns the times that go with a commit: what comes after it is the step before's."""
        known = shard.times_so_far()
        return replace(self._times, data=known.data, compute=known.compute)

    def _write(self, name: str) -> str:
        """Writes a checkpoint if this worker is the one that does; returns a note."""
        if self._checkpoints is None or self._rank != 0:
            return ""
        path = self._checkpoints.save(name, self._task, self._update, self.completed_steps)
        return f"wrote {path}"

    def _event(self, shard: Shard, commit: Commit, times: StepTimes, note: str) -> StepEvent:
        split = TRAIN if shard.assignment.kind == "train" else EVALUATION
        derived = self._task.derived_metrics(commit.global_loss, split) if commit.total_weight else {}
        return shard.event(commit, times, time.perf_counter() - self._began, note, derived)
