"""Mistakes that a reduction can make, each with numbers that show it.

Each example has a known result, the naive formula's result, and ours, computed by the code that runs in production.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ayni import tensors
from ayni.buckets import FLAT
from ayni.errors import Diverged
from ayni.reduce.reduction import Round
from ayni.run_config import OptimizerConfig
from ayni.step_values import MicrobatchStats
from ayni.tensors import TensorSpec
from coordinator_service import schedule
from coordinator_service.audit import compare_hashes
from coordinator_service.leases import Lease, Moment
from coordinator_service.steps import Step
from worker_agent.training.optimizer import make_optimizer

Vector = np.ndarray


@dataclass(frozen=True, kw_only=True)
class CounterExample:
    """One mistake."""

    name: str
    expected: Sequence[float]
    naive: Callable[[], Sequence[float]]
    ours: Callable[[], Sequence[float]]

    def is_met_by(self, result: Sequence[float]) -> bool:
        """Returns whether a result is the expected one, to float32's precision."""
        return bool(np.allclose(result, self.expected, rtol=1e-6, atol=0.0, equal_nan=False))


def counter_examples() -> list[CounterExample]:
    """Returns all of them."""
    return [
        _shares_of_3_3_4(),
        CounterExample(
            name="1 sample against 9",
            expected=[0.1],
            naive=lambda: [(1 + 0) / 2],
            ours=lambda: reduce_sums([np.array([1.0]), np.array([0.0])], [1, 9]),
        ),
        CounterExample(
            name="optimizer step on the own gradient before the mean",
            expected=[0.0],
            naive=lambda: [_replicas_differ(step_on_own_gradient=True)],
            ours=lambda: [_replicas_differ(step_on_own_gradient=False)],
        ),
        CounterExample(
            name="clip before the reduction",
            expected=[1.0, 0.0],
            naive=lambda: list(np.mean([_clipped(np.array([10.0, 0.0])), _clipped(np.zeros(2))], axis=0)),
            ours=lambda: _clipped_update([np.array([10.0, 0.0]), np.array([0.0, 0.0])]),
        ),
        CounterExample(
            name="mean of mean losses",
            expected=[1.75],
            naive=lambda: [(1.0 + 2.0) / 2],
            ours=lambda: [_global_loss([(1, 1.0), (3, 2.0)])],
        ),
        CounterExample(
            name="float16 sum before the division",
            expected=[40000.0],
            naive=_float16_sum,
            ours=lambda: reduce_sums([np.array([40000.0])] * 3, [1, 1, 1], wire_type="float16"),
        ),
    ]


def reduce_sums(sums: Sequence[Vector], weights: Sequence[int], wire_type: str = "float32") -> list[float]:
    """Reduces one sum-loss gradient for each of some workers, over the given wire type."""
    return list(_reduced(sums, weights, wire_type)[0])


def _reduced(sums: Sequence[Vector], weights: Sequence[int], wire_type: str) -> tuple[Vector, Round]:
    spec = TensorSpec(dtype=wire_type, num_elements=sums[0].size)
    workers = range(len(sums))
    round_ = Round(label="step 0, flat", spec=spec, num_microbatches=len(sums), chunk_elements=64, expected=workers)
    emitted = [reduced for w in workers for reduced in round_.begin(w, f"w{w}", spec, {w: weights[w]})]
    for worker in workers:
        sent = tensors.encode(sums[worker].astype(np.float32), wire_type)
        emitted += round_.contribute(worker, 0, 0, tensors.decode(bytes(sent), wire_type))
    [mean] = emitted
    return mean.values_C, round_


def _shares_of_3_3_4() -> CounterExample:
    """Squared error of y = w x on ten samples, at w = 0: the gradient of a sample is -2 x y."""
    x, y = np.arange(1.0, 11.0), 3 * np.arange(1.0, 11.0) - 5
    gradients = [(-2 * x * y)[start:stop] for start, stop in ((0, 3), (3, 6), (6, 10))]
    return CounterExample(
        name="shares of 3, 3 and 4 samples",
        expected=[float(np.mean(-2 * x * y))],
        naive=lambda: [float(np.mean([shard.mean() for shard in gradients]))],
        ours=lambda: reduce_sums([np.array([shard.sum()]) for shard in gradients], [3, 3, 4]),
    )


def _replicas_differ(*, step_on_own_gradient: bool) -> float:
    """Returns 1 if the coordinator finds two replicas' parameters different after one step, else 0."""
    config = OptimizerConfig(name="sgd", learning_rate=0.5)
    own = [np.array([1.0, -2.0], np.float32), np.array([3.0, 4.0], np.float32)]
    mean = np.array(reduce_sums(own, [1, 1]), np.float32)
    hashes = {}
    for worker, gradient in enumerate(own):
        parameters = np.array([0.5, 0.25], np.float32)
        optimizer = make_optimizer(config, [parameters])
        for step in [gradient, mean] if step_on_own_gradient else [mean]:
            optimizer.step([step], learning_rate=config.learning_rate, clip_factor=1.0)
        hashes[f"w{worker}"] = parameters.tobytes().hex()
    try:
        compare_hashes("step 1", hashes)
    except Diverged:
        return 1.0
    return 0.0


def _clipped(gradient: Vector, limit: float = 1.0) -> Vector:
    return gradient * min(1.0, limit / max(float(np.linalg.norm(gradient)), 1e-12))


def _clipped_update(gradients: Sequence[Vector]) -> list[float]:
    """Returns what one step of SGD with learning rate 1 takes off the parameters."""
    config = OptimizerConfig(name="sgd", learning_rate=1.0, clip_norm=1.0)
    mean, round_ = _reduced(gradients, [1] * len(gradients), "float32")
    parameters = np.zeros(mean.size, np.float32)
    factor = schedule.clip_factor(config, math.sqrt(round_.square_sum))
    make_optimizer(config, [parameters]).step([mean], learning_rate=1.0, clip_factor=factor)
    return list(0.0 - parameters)


def _global_loss(samples_and_means: Sequence[tuple[int, float]]) -> float:
    """Returns the loss that a commit carries for workers with (samples, mean loss)."""
    num = len(samples_and_means)
    leases = [Lease(lease_id=w, worker_id=w, worker_name=f"w{w}", start=w, stop=w + 1) for w in range(num)]
    step = Step(moment=Moment(epoch=1, step=0, attempt=0), kind="train", num_microbatches=num, leases=leases)
    spec = TensorSpec(dtype="float32", num_elements=1)
    for lease, (weight, mean) in zip(leases, samples_and_means, strict=True):
        stats = MicrobatchStats(microbatch=lease.start, weight=weight, loss_sum=weight * mean)
        step.begin(lease, FLAT, spec, [stats])
    loss = step.totals().global_loss
    assert loss is not None
    return loss


def _float16_sum() -> list[float]:
    with np.errstate(over="ignore"):
        return [float(sum([np.float16(40000)] * 3, np.float16(0)) / np.float16(3))]
