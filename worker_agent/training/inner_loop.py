"""The inner steps of a lease, for local updates: one for each micro-batch.  [shell]

What goes out is how far the lease's inner steps went from the outer parameters, times the weight of all of its samples.
It is one vector for the whole lease, so it stands in the place of the first micro-batch that counts: that one is said
to weigh as much as all, and to have all of the loss, and the others nothing. The tree then adds the workers' vectors as
it adds gradients, and the mean is weighted by samples or tokens.

An inner step's gradient goes through the host, also where the inner optimizer runs on a device.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from ayni.run_config import RunConfig
from ayni.schedule import clip_factor, learning_rate
from worker_agent.session import MicrobatchStats, Vector
from worker_agent.training.finite import first_problem
from worker_agent.training.gradients import Send, ShardGradients, ShardSums
from worker_agent.training.layout import BucketSpec
from worker_agent.training.local_update import LocalUpdate
from worker_agent.training.microbatches import Microbatches
from worker_agent.training.shard import Shard

log = logging.getLogger(__name__)


class InnerLoop:
    """Makes the inner steps of one replica's leases."""

    def __init__(
        self,
        microbatches: Microbatches,
        gradients: ShardGradients,
        config: RunConfig,
        update: Callable[[], LocalUpdate],
    ) -> None:
        """Takes what computes, and how to get at the update, which is another one after a state was restored."""
        self._microbatches, self._gradients, self._config, self._update = microbatches, gradients, config, update

    def train(self, shard: Shard, send: Send) -> None:
        """Makes a lease's inner steps, hands over how far they went, and goes back to the outer parameters."""
        lease, update = shard.assignment, self._update()
        update.set_out()
        try:
            for microbatch in lease.microbatches:
                self._inner_step(update, shard, microbatch)
            shard.sums = self._gradients.begin(
                lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches, send
            )
            self._collect(update, shard)
        finally:
            update.go_back()
        shard.computed = time.perf_counter()
        shard.is_whole = True
        self._gradients.finish()

    def _inner_step(self, update: LocalUpdate, shard: Shard, microbatch: int) -> None:
        sums = self._microbatches.loss(shard, microbatch)
        if not sums.weight:
            shard.add_stats(microbatch, sums)
        elif self._microbatches.is_finite(shard, microbatch, sums):
            own = self._gradients.begin(0, 1, 1, _send_nothing)
            if self._microbatches.backward(shard, microbatch, sums):
                shard.add_stats(microbatch, sums)
                self._step(update, shard.assignment.step, sums.weight, own)
            else:
                shard.add_non_finite(microbatch)
            self._gradients.release(own)
        else:
            shard.add_non_finite(microbatch)

    def _step(self, update: LocalUpdate, step: int, weight: int, own: ShardSums) -> None:
        """Makes one inner step from a micro-batch's summed gradient, which becomes its mean."""
        gradient = {}
        for spec, sums in own.entries:
            (part,) = sums.parts()
            assert part is not None
            gradient[spec.bucket] = np.divide(part, np.float32(weight), out=part)
        optimizer = self._config.optimizer
        update.inner.step(
            gradient,
            learning_rate=learning_rate(optimizer, step, self._config.num_steps),
            clip_factor=clip_factor(optimizer, math.sqrt(own.square_sum())),
        )

    def _collect(self, update: LocalUpdate, shard: Shard) -> None:
        """Puts the lease's distance in the place of the first micro-batch that counts."""
        counted = [stats for stats in shard.stats if stats.weight]
        distance = self._gradients.leaves()
        if counted:
            update.distances(sum(stats.weight for stats in counted), distance)
            counted = self._checked(update, shard, counted, distance.values())
        for microbatch in shard.assignment.microbatches:
            if counted and microbatch == counted[0].microbatch:
                self._gradients.push()
            else:
                self._gradients.skip()
        shard.stats = [_said(stats, counted) for stats in shard.stats]

    def _checked(
        self, update: LocalUpdate, shard: Shard, counted: list[MicrobatchStats], distance: Iterable[Vector]
    ) -> list[MicrobatchStats]:
        """Leaves the whole lease out if its distance is not finite and the policy is not "halt"."""
        if self._config.non_finite == "halt" or all(first_problem(values_N) is None for values_N in distance):
            return counted
        log.warning(
            "step %d: the inner steps of micro-batches %d to %d led to parameters that are not finite; the lease is "
            "left out, and the inner optimizer starts again",
            shard.assignment.step,
            shard.assignment.microbatch_start,
            shard.assignment.microbatch_stop - 1,
        )
        update.inner.reset()
        numbers = {stats.microbatch for stats in counted}
        shard.stats = [
            replace(_without_weight(stats), non_finite=True) if stats.microbatch in numbers else stats
            for stats in shard.stats
        ]
        return []


def _said(stats: MicrobatchStats, counted: Sequence[MicrobatchStats]) -> MicrobatchStats:
    """Returns what is said of a micro-batch: the first one that counts stands for all."""
    if not stats.weight:
        return stats
    if stats != counted[0]:
        return _without_weight(stats)
    return replace(
        stats,
        weight=sum(each.weight for each in counted),
        loss_sum=math.fsum(each.loss_sum or 0.0 for each in counted),
        num_correct=sum(each.num_correct for each in counted),
        num_predictions=sum(each.num_predictions for each in counted),
    )


def _without_weight(stats: MicrobatchStats) -> MicrobatchStats:
    return MicrobatchStats(microbatch=stats.microbatch, weight=0, loss_sum=0.0)


def _send_nothing(spec: BucketSpec, parts: list[Vector | None]) -> None:
    """Keeps a single micro-batch's gradient here."""
