"""Computes the micro-batches of leases: summed loss forward, gradients backward.  [shell]

With the policy "halt" nothing is checked here: a value that is not finite is found where gradients are reduced, and
buckets leave while the last backward is still running. With "skip" and "quarantine" a micro-batch's loss is looked at
before its backward, and its whole gradient after, before anything is added; one that is not finite is left out, as if
its samples had no weight. Buckets leave only after the last backward then: overlap is the price.
"""

import logging
import math
import time
from typing import Any

import torch

from ayni import order
from ayni.run_config import RunConfig
from worker_agent.training import rng
from worker_agent.training.gradients import Send, ShardGradients
from worker_agent.training.precision import autocast
from worker_agent.training.shard import Shard
from worker_agent.training.task import EVALUATION, TRAIN, LossSums, Task

log = logging.getLogger(__name__)


class Microbatches:
    """The micro-batches of one replica."""

    def __init__(self, task: Task, config: RunConfig, gradients: ShardGradients) -> None:
        """Takes the task and what collects its gradients."""
        self._task, self._config, self._gradients = task, config, gradients
        self._checks = config.non_finite != "halt"

    def train(self, shard: Shard, send: Send) -> None:
        """Computes a lease's gradients; `send` may be called from inside the last backward."""
        lease = shard.assignment
        self._task.model.train()
        shard.sums = self._gradients.begin(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches, send)
        for microbatch in lease.microbatches:
            self._add(shard, microbatch)
        shard.computed = time.perf_counter()
        shard.is_whole = True
        self._gradients.finish()

    def evaluate(self, shard: Shard) -> None:
        """Computes a lease's losses on held-out samples."""
        self._task.model.eval()
        with torch.no_grad():
            for microbatch in shard.assignment.microbatches:
                sums = self.loss(shard, microbatch)
                if self.is_finite(shard, microbatch, sums):
                    shard.add_stats(microbatch, sums)
                else:
                    shard.add_non_finite(microbatch)
        shard.computed = time.perf_counter()
        shard.is_whole = True

    def loss(self, shard: Shard, microbatch: int) -> LossSums:
        """Computes a micro-batch's loss, with random draws of its own."""
        rng.seed_microbatch(self._config.seed, shard.assignment.step, microbatch)
        start, stop = shard.assignment.positions(microbatch)
        if start == stop:
            # Fewer samples than micro-batches: the task is not asked for a batch of nothing.
            return LossSums(loss_sum=torch.zeros(()), weight=0)
        began = time.perf_counter()
        batch = self._batch(shard.assignment.kind, start, stop)
        shard.data_s += time.perf_counter() - began
        with autocast(self._config.precision, self._task.model):
            return self._task.loss(batch)

    def is_finite(self, shard: Shard, microbatch: int, sums: LossSums) -> bool:
        """Returns whether a loss may count; says so if not. Always with the policy "halt"."""
        if not self._checks or not sums.weight or math.isfinite(loss := float(sums.loss_sum.detach())):
            return True
        self._say_skipped(shard, microbatch, f"its loss is {loss}")
        return False

    def backward(self, shard: Shard, microbatch: int, sums: LossSums) -> bool:
        """Adds a micro-batch's gradient once all of it is there; returns whether it is finite, and says so if not."""
        if not self._checks:
            self._gradients.backward(sums.loss_sum, last=False)
            return True
        if problem := self._gradients.backward_checked(sums.loss_sum):
            self._say_skipped(shard, microbatch, f"its gradient is not finite, first in {problem}")
        return not problem

    def _add(self, shard: Shard, microbatch: int) -> None:
        sums = self.loss(shard, microbatch)
        if not sums.weight:
            shard.add_stats(microbatch, sums)
            self._gradients.skip()
        elif self._checks:
            self._add_checked(shard, microbatch, sums)
        else:
            # What is said of the last micro-batch goes with the buckets that leave in its backward.
            shard.add_stats(microbatch, sums)
            self._gradients.backward(sums.loss_sum, last=microbatch + 1 == shard.assignment.microbatch_stop)

    def _add_checked(self, shard: Shard, microbatch: int, sums: LossSums) -> None:
        if self.is_finite(shard, microbatch, sums) and self.backward(shard, microbatch, sums):
            shard.add_stats(microbatch, sums)
        else:
            shard.add_non_finite(microbatch)
            self._gradients.skip()

    def _batch(self, kind: str, start: int, stop: int) -> Any:
        """Returns a micro-batch's samples as the task makes them."""
        if kind != "train":
            return self._task.batch(range(start, stop), EVALUATION)
        samples = order.samples_at(self._config.seed, start, stop, self._task.num_samples)
        return self._task.batch(samples.tolist(), TRAIN)

    def _say_skipped(self, shard: Shard, microbatch: int, why: str) -> None:
        lease = shard.assignment
        start, stop = lease.positions(microbatch)
        log.warning(
            "%s %d: micro-batch %d (positions %d to %d) is left out on this worker: %s",
            "step" if lease.kind == "train" else "evaluation after step",
            lease.step,
            microbatch,
            start,
            stop - 1,
            why,
        )
