"""A task that trains in milliseconds: a two-layer network with dropout on made-up samples of unequal weight."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ayni.buckets import FLAT, Bucket
from worker_agent.training.layout import BucketSpec, flat_layout
from worker_agent.training.rng import initial_weights
from worker_agent.training.task import LossSums, TaskBase, TaskContext


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyOptions:
    """Options of ToyTask."""

    num_samples: int = 40
    width: int = 8
    dropout: float = 0.0
    buckets: int = 1
    zero_weight_from: int = 10**9
    """Samples from this one on weigh nothing."""
    dtype: str = "float32"


class ToyTask(TaskBase):
    """Regression on 5 inputs; sample i has i % 3 + 1 targets, so micro-batches weigh differently."""

    Options: ClassVar[type[Any]] = ToyOptions

    def __init__(self, options: ToyOptions, context: TaskContext) -> None:
        self.options = options
        self.num_samples, self.num_evaluation_samples = options.num_samples, 12
        with initial_weights(context.seed):
            self.model = nn.Sequential(
                nn.Linear(5, options.width), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(options.width, 3)
            ).to(getattr(torch, options.dtype))
        rng = np.random.Generator(np.random.Philox(7))
        count = options.num_samples + self.num_evaluation_samples
        self._x = torch.from_numpy(rng.standard_normal((count, 5), dtype=np.float32)).to(getattr(torch, options.dtype))
        self._y = torch.from_numpy(rng.standard_normal((count, 3), dtype=np.float32)).to(getattr(torch, options.dtype))

    @property
    def buckets(self) -> Sequence[BucketSpec]:
        sizes = {name: parameter.numel() for name, parameter in self.trainable()}
        if self.options.buckets == 1:
            return flat_layout(sizes)
        last = {name: size for name, size in sizes.items() if name.startswith("3.")}
        first = {name: size for name, size in sizes.items() if name.startswith("0.")}
        return (
            BucketSpec(bucket=Bucket("non_block", 0), names=tuple(last), sizes=tuple(last.values())),
            BucketSpec(bucket=FLAT, names=tuple(first), sizes=tuple(first.values())),
        )

    def batch(self, indices: Sequence[int], split: str) -> tuple[Tensor, Tensor, Tensor]:
        shift = 0 if split == "train" else self.options.num_samples
        rows = torch.tensor([index + shift for index in indices])
        targets = torch.arange(3)[None, :] <= (rows % 3)[:, None]
        targets &= (rows < self.options.zero_weight_from)[:, None] | (rows >= self.options.num_samples)[:, None]
        return self._x[rows], self._y[rows], targets

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> LossSums:
        x, y, targets = batch
        predicted = self.model(x)
        loss = (F.mse_loss(predicted, y, reduction="none") * targets).sum()
        right = ((predicted.detach() > 0) == (y > 0)) & targets
        weight = int(targets.sum())
        return LossSums(loss_sum=loss, weight=weight, num_correct=int(right.sum()), num_predictions=weight)


def toy_task(seed: int = 3, **options: Any) -> ToyTask:
    """Returns the task with its initial weights."""
    from worker_agent.training.files import RunFiles

    return ToyTask(ToyOptions(**options), TaskContext(files=RunFiles({}), seed=seed, device=torch.device("cpu")))
