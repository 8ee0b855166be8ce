"""Compares finished runs with one another and with plain loops.

How relative errors are measured. An element's error is |x - reference| / max(|reference|, floor), and the largest
element counts. The floor is there because an element that is nearly zero by cancellation has no digits of its own to
be right in: it inherits the absolute error of the terms that cancelled.

- gradient: mean gradient of step 0 against a float64 model. Floor: the largest element of the parameter's gradient.
  What is left is the rounding of a float32 forward and backward, which the plain float32 loop has too.
- sum: the same mean against the float64 sum of the micro-batch gradients of a float32 model. Floor: the mean magnitude
  of that element's own terms. This leaves the reduction alone, element by element.
- update: parameters after step 0 against float64 torch's optimizer on the workers' mean. Floor: how far the parameter's
  farthest element moved.
- parameters: parameters after step 0 against a float64 run from end to end. Floor: the parameter's largest element.
  For SGD alone: AdamW's first update is near +-learning rate whatever the gradient's size, so it magnifies the
  rounding of gradients near zero without bound.

`naive` is the gradient error of the mean of the workers' means: what the check would see of an unweighted reduction.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tests.support.equality_reference import Microbatch, Named, PlainLoop, PlainRun
from tests.support.equality_runs import Run, WorkerRecord
from worker_agent.training.layout import BucketSpec

MAX_REL_ERR = 1e-6
MAX_LOSS_DIFF = 1e-4
LEAST_NAIVE_ERR = 1e-4
"""An unweighted reduction must be this far off, or the check proves nothing."""


@dataclass(frozen=True, kw_only=True)
class References:
    """What runs are compared with.

    Attributes:
        float32: the plain loop.
        float64: the plain loop in double precision.
        microbatches32: micro-batch gradients of step 0 in float32.
        microbatches64: the same of the float64 model.
        initial: parameters before step 0.
    """

    float32: PlainRun
    float64: PlainRun
    microbatches32: list[Microbatch]
    microbatches64: list[Microbatch]
    initial: Named


def relative_error(values: Named, reference: Named, floors: Named) -> float:
    """Returns the largest error of any element; see the module docstring."""
    return max(float(_errors(values[name], reference[name], floors[name]).max()) for name in reference)


def _errors(values: Tensor, reference: Tensor, floor: Tensor) -> Tensor:
    difference = (values.double() - reference.double()).abs()
    scale = torch.maximum(reference.double().abs(), floor.double())
    # Where even the floor is zero, so must be the value.
    return torch.where(scale > 0, difference / scale, torch.where(difference > 0, torch.inf, 0.0))


def largest(values: Named) -> Named:
    """Returns the largest magnitude of each tensor."""
    return {name: tensor.abs().max() for name, tensor in values.items()}


def gradient_error(values: Named, references: References) -> float:
    """Returns the error of a mean gradient against the float64 model."""
    return relative_error(values, references.float64.gradient, largest(references.float64.gradient))


def sum_error(mean: Named, microbatches: Sequence[Microbatch]) -> float:
    """Returns the error of a mean against the float64 sum of float32 micro-batch gradients."""
    total = sum(item.weight for item in microbatches)
    sums, terms = {}, {}
    for name in mean:
        stacked = torch.stack([item.gradient[name].double() for item in microbatches if item.weight])
        sums[name], terms[name] = stacked.sum(0) / total, stacked.abs().sum(0) / total
    return relative_error(mean, sums, terms)


def own_microbatches(run: Run, references: References) -> list[Microbatch]:
    """Returns the first step's float32 micro-batch gradients as they were rounded by the device that computed each."""
    found = list(references.microbatches32)
    for worker in run.workers:
        for number in range(*worker.steps[0]["microbatches"]):
            names = {name: f"term/{number}/{name}" for name in references.initial}
            own = {name: torch.from_numpy(worker.arrays[key]) for name, key in names.items() if key in worker.arrays}
            found[number] = replace(found[number], gradient=own) if own else found[number]
    return found


def device_error(run: Run, references: References) -> float:
    """Returns how far micro-batch gradients of other devices are from the CPU's; 0 if no other device computed any."""
    pairs = zip(own_microbatches(run, references), references.microbatches32, strict=True)
    errors = [relative_error(own.gradient, cpu.gradient, largest(cpu.gradient)) for own, cpu in pairs if own is not cpu]
    return max(errors, default=0.0)


def least_part(run: Run) -> int:
    """Returns the fewest micro-batches with any weight that all workers of one backend had in a step."""
    backends = {worker.backend for worker in run.workers}
    return min(
        sum(weight > 0 for w in run.workers if w.backend == backend for weight in w.steps[step]["weights"])
        for backend in backends
        for step in range(len(run.workers[0].steps))
    )


def update_error(loop64: PlainLoop, run: "FirstStep", initial: Named, num_steps: int) -> float:
    """Returns the error of the first update; `loop64` has made no step, and makes one here."""
    expected = loop64.update_from(run.mean, num_steps)
    moved = {name: (value - initial[name].double()).abs().max() for name, value in expected.items()}
    return relative_error(run.parameters, expected, moved)


def parameters_error(run: "FirstStep", references: References) -> float:
    """Returns the error of the parameters after step 0 against a float64 run from end to end."""
    return relative_error(run.parameters, references.float64.parameters, largest(references.float64.parameters))


def naive_error(run: Run, references: References) -> float:
    """Returns how far the mean of the workers' means is from the float64 gradient."""
    means = []
    for worker in run.workers:
        start, stop = worker.steps[0]["microbatches"]
        if shard := [item for item in references.microbatches64[start:stop] if item.weight]:
            weight = sum(item.weight for item in shard)
            means.append({n: _added([item.gradient[n] for item in shard]) / weight for n in shard[0].gradient})
    return gradient_error({n: _added([mean[n] for mean in means]) / len(means) for n in means[0]}, references)


def _added(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """What a worker held after step 0, by parameter name."""

    mean: Named
    parameters: Named


def first_step(worker: WorkerRecord, specs: Sequence[BucketSpec], initial: Named) -> FirstStep:
    """Takes a worker's recorded arrays apart."""
    mean = {
        name: torch.from_numpy(worker.arrays[f"mean/{spec.bucket}"][place]).view(initial[name].shape)
        for spec in specs
        for name, place in spec.slices()
    }
    parameters = {name: torch.from_numpy(worker.arrays[f"parameters/{name}"]) for name in initial}
    return FirstStep(mean=mean, parameters=parameters)


def same_gradients(runs: Iterable[Run]) -> tuple[bool, int]:
    """Returns whether all workers of all runs hold the same means in every step and bucket; and the number of means."""
    held = [{(s["step"], b): h for s in w.steps for b, h in s["means"].items()} for run in runs for w in run.workers]
    return all(left == right for left, right in pairwise(held)), sum(map(len, held))


def same_parameters(runs: Iterable[Run]) -> tuple[bool, int]:
    """Returns whether all workers of all runs hold the same parameters after every step; and the number of hashes."""
    held = [[step["parameters"] for step in w.steps] for run in runs for w in run.workers]
    return all(left == right for left, right in pairwise(held)) and all(map(all, held)), sum(map(len, held))


def same_commits(runs: Iterable[Run]) -> bool:
    """Returns whether every commit said the same to all workers of all runs; who writes checkpoints, in each run."""
    told = [[[{**s["commit"], "attempt": 0} for s in w.steps] for w in run.workers] for run in runs]
    within = all(left == right for workers in told for left, right in pairwise(workers))
    numbers = [[{**commit, "checkpoint_writer": ""} for commit in workers[0]] for workers in told]
    return within and all(left == right for left, right in pairwise(numbers))


def loss_differences(run: Run, plain: PlainRun) -> dict[str, float]:
    """Returns how far the last training loss and the held-out loss are from a plain loop's."""
    worker = run.workers[0]
    return {
        "train": abs(worker.steps[-1]["commit"]["global_loss"] - plain.losses[-1]),
        "held_out": abs(worker.evaluation_loss - plain.evaluation_loss),
    }


def unequal_shares(run: Run) -> bool:
    """Returns whether no step gave all workers the same number of micro-batches.

    How far shares part follows measured speed, so a short run on a busy machine may stay as even as it can be; the
    numbers of micro-batches are chosen so that they never divide evenly.
    """
    return all(max(step) > min(step) for step in run.shares)


def largest_skew(run: Run) -> int:
    """Returns the largest difference between two workers' shares in one step, in micro-batches."""
    return max(max(step) - min(step) for step in run.shares)


def weights(run: Run) -> list[int]:
    """Returns the weights of all micro-batches of the run."""
    return [weight for worker in run.workers for step in worker.steps for weight in step["weights"]]
