"""The job of `chaos.py`: a tiny language model on the bytes of the licence, with steps of any length.

It is a real transformer in several buckets, whose micro-batches weigh differently, and it computes in milliseconds.
What a step takes beyond that is waited for, as a worker waits for its accelerator: on a machine where workers share the
cores, a step that computes would show how they take them from one another.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from scripts.chaos_model import ByteModel, loss_of, windows
from worker_agent.training.layout import BucketSpec, llama_layout
from worker_agent.training.rng import initial_weights
from worker_agent.training.task import TRAIN, LossSums, TaskBase, TaskContext


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosOptions:
    """Options of ChaosTask."""

    num_samples: int = 4800
    device_ms: float = 0.0
    """Time that the worker waits for each sample, as for an accelerator."""
    spoilt: tuple[int, ...] = ()
    """Samples whose loss is not a number."""
    width: int = 32
    num_blocks: int = 2
    context: int = 32


class ChaosTask(TaskBase):
    """Next-byte prediction; of sample i, i % 4 quarters are masked out, so that micro-batches weigh differently."""

    Options: ClassVar[type[Any]] = ChaosOptions

    def __init__(self, options: ChaosOptions, context: TaskContext) -> None:
        self.num_samples = options.num_samples
        self._options = options
        self._spoilt = frozenset(options.spoilt)
        with initial_weights(context.seed):
            self.model = ByteModel(options.width, options.num_blocks)

    @property
    def buckets(self) -> Sequence[BucketSpec]:
        return llama_layout({name: parameter.numel() for name, parameter in self.trainable()})

    def batch(self, indices: Sequence[int], split: str) -> tuple[Tensor, Tensor, float]:
        inputs, targets = windows(indices, self._options.context)
        spoilt = split == TRAIN and not self._spoilt.isdisjoint(indices)
        return inputs, targets, math.nan if spoilt else 1.0

    def loss(self, batch: tuple[Tensor, Tensor, float]) -> LossSums:
        inputs, targets, factor = batch
        loss, weight, right = loss_of(self.model, inputs, targets)
        time.sleep(self._options.device_ms * len(inputs) / 1000)
        return LossSums(loss_sum=loss * factor, weight=weight, num_correct=right, num_predictions=weight)
