"""A plain single-process torch loop on the same global batches, as float32 and as float64.

It shares the task's model and data, the sample order and the seeding of random draws with what it checks, and nothing
else: loss, mean, clipping, schedule and optimizer are torch's own or written down again.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ayni.order import microbatch_positions, samples_at
from ayni.run_config import OptimizerConfig, RunConfig
from tests.support.equality_cases import Case
from worker_agent.training.rng import seed_microbatch
from worker_agent.training.task import EVALUATION, TRAIN, Task

IGNORED = -100
Named = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PlainRun:
    """What the plain loop saw.

    Attributes:
        losses: mean loss of each step's global batch, before the update.
        clipped_steps: steps whose gradient was longer than the limit.
        gradient: mean gradient of the first step, before clipping.
        parameters: trainable parameters after the first step.
        evaluation_loss: mean held-out loss after the last step.
    """

    losses: list[float]
    clipped_steps: int
    gradient: Named
    parameters: Named
    evaluation_loss: float


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Sum-loss gradient of one micro-batch of the first step; its weight."""

    gradient: Named
    weight: int


class PlainLoop:
    """One replica of a task's model in one precision."""

    def __init__(self, case: Case, task: Task, config: RunConfig, dtype: torch.dtype) -> None:
        """Copies the task's model as it is now."""
        self._case, self._task, self._config = case, task, config
        self._model = copy.deepcopy(task.model).to(dtype)
        if dtype == torch.float64:
            _use_exact_norms(self._model)
        names = [name for name, _ in task.trainable()]
        parameters = dict(self._model.named_parameters())
        self._trained = {name: parameters[name] for name in names}
        self._optimizer = _optimizer(config.optimizer, list(self._trained.values()))

    def run(self, num_steps: int) -> PlainRun:
        """Trains, then evaluates the held-out data."""
        losses: list[float] = []
        clipped, gradient, parameters = 0, Named(), Named()
        for step in range(num_steps):
            self._model.train()
            losses.append(self._backward(step))
            gradient = gradient or self._gradient()
            clipped += self._clip()
            self._optimizer.param_groups[0]["lr"] = _learning_rate(self._config.optimizer, step, num_steps)
            self._optimizer.step()
            parameters = parameters or {name: p.detach().clone() for name, p in self._trained.items()}
        return PlainRun(
            losses=losses,
            clipped_steps=clipped,
            gradient=gradient,
            parameters=parameters,
            evaluation_loss=self._evaluate(),
        )

    def microbatches(self) -> list[Microbatch]:
        """Returns what each micro-batch of the first step contributes."""
        self._model.train()
        found = []
        for number, samples in enumerate(self._microbatch_samples(0)):
            self._optimizer.zero_grad(set_to_none=True)
            seed_microbatch(self._config.seed, 0, number)
            loss_sum, weight = self._loss_sum(samples, TRAIN)
            loss_sum.backward()
            found.append(Microbatch(gradient=self._gradient(), weight=weight))
        self._optimizer.zero_grad(set_to_none=True)
        return found

    def update_from(self, gradient: Named, num_steps: int) -> Named:
        """Makes one first step from a given mean gradient and returns the parameters after it."""
        for name, parameter in self._trained.items():
            parameter.grad = gradient[name].to(parameter.dtype).clone()
        self._clip()
        self._optimizer.param_groups[0]["lr"] = _learning_rate(self._config.optimizer, 0, num_steps)
        self._optimizer.step()
        return {name: parameter.detach() for name, parameter in self._trained.items()}

    def _backward(self, step: int) -> float:
        """Leaves the gradient of the mean loss over the global batch on the parameters; returns that loss."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._case.whole_batch:
            logits, targets = self._case.logits(self._model, self._task.batch(self._samples(step), TRAIN))
            loss = F.cross_entropy(logits, targets, ignore_index=IGNORED)
            loss.backward()
            return loss.item()
        total = sum(self._weight(samples) for samples in self._microbatch_samples(step))
        losses = 0.0
        for number, samples in enumerate(self._microbatch_samples(step)):
            seed_microbatch(self._config.seed, step, number)
            loss = self._loss_sum(samples, TRAIN)[0] / total
            loss.backward()
            losses += loss.item()
        return losses

    def _loss_sum(self, samples: Sequence[int], split: str) -> tuple[Tensor, int]:
        logits, targets = self._case.logits(self._model, self._task.batch(samples, split))
        weight = int((targets != IGNORED).sum())
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"), weight

    def _weight(self, samples: Sequence[int]) -> int:
        batch: Any = self._task.batch(samples, TRAIN)
        return int((batch[2] != IGNORED).sum())

    def _samples(self, step: int) -> list[int]:
        size = self._config.batch.samples
        return samples_at(self._config.seed, step * size, (step + 1) * size, self._task.num_samples).tolist()

    def _microbatch_samples(self, step: int) -> Iterator[list[int]]:
        batch, samples = self._config.batch, self._samples(step)
        for number in range(batch.microbatches):
            start, stop = microbatch_positions(0, batch.samples, batch.microbatches, number)
            yield samples[start:stop]

    def _gradient(self) -> Named:
        return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in self._trained.items()}

    def _clip(self) -> bool:
        gradients = [parameter.grad for parameter in self._trained.values() if parameter.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        limit = self._config.optimizer.clip_norm
        if not limit or norm <= limit:
            return False
        for gradient in gradients:
            gradient.mul_(limit / norm)
        return True

    @torch.no_grad()
    def _evaluate(self) -> float:
        self._model.eval()
        sums = [self._loss_sum([sample], EVALUATION) for sample in range(self._task.num_evaluation_samples)]
        return sum(loss.item() for loss, _ in sums) / sum(weight for _, weight in sums)


def _optimizer(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if config.name == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, weight_decay=config.weight_decay)
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(parameters, betas=betas, eps=config.epsilon, weight_decay=config.weight_decay)


def _learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    angle = math.pi * (step - config.warmup_steps) / (num_steps - config.warmup_steps)
    low, high = config.final_learning_rate, config.learning_rate
    return low + (high - low) * 0.5 * (1 + math.cos(angle))


def _use_exact_norms(model: nn.Module) -> None:
    """Replaces norms that compute in float32 whatever their input is (as Llama's do)."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm: Any = module
            exact = nn.RMSNorm(norm.weight.numel(), eps=norm.variance_epsilon, dtype=torch.float64)
            exact.weight = norm.weight
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, exact)
