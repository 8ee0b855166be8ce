"""What is trained, as the training loop sees it.  [shell]

A task of your own is a class with this constructor and these members; `TaskBase` fills in what most tasks share, so
that a model, a `batch`, a `loss` and two sample counts are enough:

    class MyTask(TaskBase):
        Options = MyOptions                      # a frozen dataclass: the keys of `task.options` in the run file

        def __init__(self, options: MyOptions, context: TaskContext) -> None: ...

The run file names it as "module:MyTask"; the module must be on every worker's Python path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from worker_agent.training.files import RunFiles
from worker_agent.training.fingerprint import task_fingerprint
from worker_agent.training.layout import BucketSpec, flat_layout

TRAIN = "train"
EVALUATION = "evaluation"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskContext:
    """What a task is built from, besides its options."""

    files: RunFiles
    """The run's files, by the names that the coordinator gave them."""
    seed: int
    """The run's seed; draw initial weights inside `rng.initial_weights(seed)`, on the CPU."""
    device: torch.device
    """Where the model goes after it was built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSums:
    """One micro-batch's result."""

    loss_sum: Tensor
    """Sum, never mean, of the loss over `weight`; a scalar with a gradient function when training."""
    weight: int
    """Samples, or non-ignored tokens."""
    num_correct: int = 0
    num_predictions: int = 0


class Task(Protocol):
    """A model and its data."""

    @property
    def model(self) -> nn.Module:
        """The model, on its device."""

    @property
    def num_samples(self) -> int:
        """Training samples."""

    @property
    def num_evaluation_samples(self) -> int:
        """Held-out samples; 0 when there are none."""

    @property
    def buckets(self) -> Sequence[BucketSpec]:
        """Which trainable parameter travels in which bucket, in backward order."""

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the trainable parameters by name, in an order that is the same on every worker."""

    def batch(self, indices: Sequence[int], split: str) -> Any:
        """Returns what `loss` takes, for some samples of a split ("train" or "evaluation"), on the task's device."""

    def loss(self, batch: Any) -> LossSums:
        """Returns the summed loss of a batch. Samples must not influence one another's loss."""

    def derived_metrics(self, loss: float, split: str) -> Mapping[str, float]:
        """Returns further numbers that follow from a mean loss, such as bits per byte."""

    def summary(self) -> str:
        """Describes the model, for people, in at most 256 bytes."""

    def dataset_summary(self) -> str:
        """Describes the data, for people, in at most 256 bytes."""

    def fingerprint(self) -> str:
        """Returns SHA-256 over the model's name and its trainable parameters' names, shapes and dtypes, in hex."""

    def dataset_fingerprint(self) -> str:
        """Returns SHA-256 over the samples as the worker sees them, in hex; empty for not checked."""

    def save(self, folder: Path) -> None:
        """Writes the trained model in its natural format to an existing, empty folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """Options of a task that has none."""


class TaskBase:
    """Defaults for a task: everything trainable travels as one flat vector and is saved as one safetensors file."""

    Options: ClassVar[type[Any]] = NoOptions
    model: nn.Module
    num_samples: int
    num_evaluation_samples: int = 0

    @property
    def buckets(self) -> Sequence[BucketSpec]:
        """One flat bucket."""
        return flat_layout({name: parameter.numel() for name, parameter in self.trainable()})

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Returns what has `requires_grad`, in the model's order."""
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def derived_metrics(self, loss: float, split: str) -> Mapping[str, float]:
        """Returns nothing more."""
        return {}

    def model_name(self) -> str:
        """Names the model in the fingerprint; add a hash of whatever is frozen."""
        return type(self.model).__name__

    def summary(self) -> str:
        """Names the model and counts its parameters."""
        total = sum(parameter.numel() for parameter in self.model.parameters())
        trained = sum(parameter.numel() for _, parameter in self.trainable())
        return f"{type(self.model).__name__}, {trained:,} of {total:,} parameters trainable"

    def dataset_summary(self) -> str:
        """Counts the samples."""
        return f"{self.num_samples:,} training and {self.num_evaluation_samples:,} held-out samples"

    def fingerprint(self) -> str:
        """Hashes the model's name and the trainable parameters."""
        return task_fingerprint(self.model_name(), self.trainable())

    def dataset_fingerprint(self) -> str:
        """Returns nothing: the data is not checked."""
        return ""

    def save(self, folder: Path) -> None:
        """Writes the trainable parameters to `trainable.safetensors`."""
        save_file(host_copy(self.trainable()), folder / "trainable.safetensors")


def host_copy(parameters: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns contiguous copies on the CPU that share no memory with the parameters (one copy)."""
    return {name: parameter.detach().cpu().clone().contiguous() for name, parameter in parameters}
