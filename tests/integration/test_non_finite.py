"""Policies for losses and gradients that are not finite: the micro-batch is left out before anything is added."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ayni.run_config import BatchConfig, EvaluationConfig, OptimizerConfig, RunConfig, TaskConfig
from tests.support.local_session import LocalRun
from tests.support.toy_task import ToyTask, toy_task
from worker_agent.training.events import TrainResult
from worker_agent.training.loop import train
from worker_agent.training.task import LossSums

SEED = 3
BAD_STEP, BAD_MICROBATCH = 2, 5


class _BadGradient(torch.autograd.Function):
    """Passes a value on; its gradient has an infinite element."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        changed = gradients[0].clone()
        changed.reshape(-1)[0] = math.inf
        return changed


class PoisonedTask(ToyTask):
    """Some training samples have a loss, or the gradient of the first layer, that is not finite."""

    kind = ""
    bad_samples: frozenset[int] = frozenset()

    def batch(self, indices: Any, split: str) -> Any:
        x, y, targets = super().batch(indices, split)
        is_bad = split == "train" and bool(self.bad_samples & set(indices))
        return x, y, targets, is_bad

    def loss(self, batch: Any) -> LossSums:
        x, y, targets, is_bad = batch
        if is_bad and self.kind == "loss":
            y = y * math.nan
        if is_bad and self.kind == "gradient":
            weight, bias = self.model.get_parameter("0.weight"), self.model.get_parameter("0.bias")
            hidden = torch.nn.functional.linear(x, _BadGradient.apply(weight), bias)
            predicted = self.model.get_submodule("3")(torch.tanh(hidden))
            loss = (((predicted - y) ** 2) * targets).sum()
            return LossSums(loss_sum=loss, weight=int(targets.sum()), num_correct=1, num_predictions=int(targets.sum()))
        return super().loss((x, y, targets))


def config(**changes: object) -> RunConfig:
    values: dict[str, object] = {
        "seed": SEED,
        "num_steps": 5,
        "task": TaskConfig(name="toy"),
        "batch": BatchConfig(samples=16, microbatches=8, evaluation_samples=5),
        "optimizer": OptimizerConfig(learning_rate=0.05, clip_norm=0.5),
        "non_finite": "skip",
    }
    return RunConfig(**(values | changes))  # type: ignore[arg-type]


def poisoned(kind: str, zero_weight: bool = False) -> PoisonedTask:
    """A task in which one micro-batch of one step is bad; samples are used once in these runs."""
    from ayni import order

    task = toy_task(SEED, buckets=2, num_samples=80)
    task.__class__ = PoisonedTask
    assert isinstance(task, PoisonedTask)
    start = BAD_STEP * 16 + BAD_MICROBATCH * 2
    task.kind, task.bad_samples = kind, frozenset(order.samples_at(SEED, start, start + 2, 80).tolist())
    return task


def run(kind: str, shares: list[int], run_config: RunConfig) -> tuple[LocalRun, list[TrainResult]]:
    tasks = [poisoned(kind) for _ in shares]
    local = LocalRun(run_config, 12, shares)
    results = local.run(lambda session: train(session, tasks[session.worker_id], run_config))
    return local, [result for result in results if isinstance(result, TrainResult)]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("shares", [[8], [3, 5], [5, 3], [5, 1, 2]])
@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_a_micro_batch_that_is_not_finite_is_left_out(kind: str, shares: list[int], policy: str) -> None:
    local, results = run(kind, shares, config(non_finite=policy))
    assert len({result.parameters_sha256 for result in results}) == 1
    flagged = [
        (step, stats.microbatch) for step, all_ in enumerate(local.stats) for stats in all_.values() if stats.non_finite
    ]
    assert flagged == [(BAD_STEP, BAD_MICROBATCH)]
    bad = local.stats[BAD_STEP][BAD_MICROBATCH]
    assert (bad.weight, bad.loss_sum, bad.num_correct, bad.num_predictions) == (0, 0.0, 0, 0)
    assert all(np.isfinite(mean).all() for step in local.means for mean in step.values())
    assert all(math.isfinite(commit.global_loss) for commit in local.commits)


def test_the_bytes_are_those_of_a_run_whose_micro_batch_has_no_samples_that_count() -> None:
    """Left out is the same as without weight: the mean is over the rest."""

    class Unweighted(PoisonedTask):
        def loss(self, batch: Any) -> LossSums:
            x, y, targets, is_bad = batch
            sums = ToyTask.loss(self, (x, y, targets & (not is_bad)))
            return sums

    local, results = run("gradient", [3, 5], config())
    task = poisoned("none")
    task.__class__ = Unweighted
    other = LocalRun(config(), 12)
    expected = train(other.session(0), task, config())
    assert other.gradient_hashes == local.gradient_hashes
    assert {result.parameters_sha256 for result in results} == {expected.parameters_sha256}


@pytest.mark.parametrize(("kind", "why"), [("loss", "its loss is nan"), ("gradient", "flat, 0.weight[0]: inf")])
def test_it_is_said_once_with_what_this_worker_knows(kind: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    run(kind, [8], config())
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("step 2: micro-batch 5 (positions 42 to 43) is left out on this worker: ")
    assert why in said[0]


def test_good_values_give_the_same_bytes_with_and_without_checks() -> None:
    hashes = set()
    for policy in ("halt", "skip"):
        local, results = run("none", [3, 5], config(non_finite=policy))
        hashes.add((results[0].parameters_sha256, str(local.gradient_hashes)))
    assert len(hashes) == 1


def test_halt_hands_the_value_over_for_the_coordinator_to_refuse() -> None:
    local, _ = run("loss", [8], config(non_finite="halt", num_steps=3))
    bad = local.stats[BAD_STEP][BAD_MICROBATCH]
    assert bad.weight > 0
    assert not bad.non_finite
    assert bad.loss_sum is not None
    assert math.isnan(bad.loss_sum)


def test_an_evaluation_loss_that_is_not_finite_is_left_out_too() -> None:
    class BadEvaluation(PoisonedTask):
        def batch(self, indices: Any, split: str) -> Any:
            x, y, targets, _ = super().batch(indices, split)
            return x, y, targets, split == "evaluation" and 0 in indices

    run_config = config(num_steps=2, evaluation=EvaluationConfig(every_steps=1))
    task = poisoned("loss")
    task.bad_samples = frozenset()
    task.__class__ = BadEvaluation
    local = LocalRun(run_config, 12)
    train(local.session(0), task, run_config)
    assert all(math.isfinite(evaluation.global_loss) for evaluation in local.evaluations)
    assert local.evaluations[0].total_weight < 24


def test_a_report_says_the_squares_of_what_was_sent() -> None:
    local, _ = run("none", [8], config(num_steps=1))
    weight = local.commits[0].total_weight
    total = sum(float(((mean.astype(np.float64) * weight) ** 2).sum()) for mean in local.means[0].values())
    ((_, report),) = local.train_reports[0]
    assert report.square_sum == pytest.approx(total, rel=1e-5)
