"""A small flat task of its own: LoRA and a head on a frozen random encoder, trained on made-up sequences.

Samples have unequal lengths, a quarter of them has no label (weight 0), and hidden units are dropped at random.

Legend: B samples in a batch, T tokens in its longest sample, H width, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker_agent.training.rng import initial_weights
from worker_agent.training.task import TRAIN, LossSums, TaskBase, TaskContext

UNLABELLED = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOptions:
    samples: int = 160
    evaluation_samples: int = 40
    symbols: int = 64
    classes: int = 5
    width: int = 24
    rank: int = 4
    longest: int = 20
    dropout: float = 0.1


class LoraEncoder(nn.Module):
    """Frozen embedding and projection; trained are a LoRA pair on the projection and a head."""

    def __init__(self, options: SequenceOptions) -> None:
        super().__init__()
        self.embedding = nn.Embedding(options.symbols, options.width).requires_grad_(False)
        self.projection = nn.Linear(options.width, options.width).requires_grad_(False)
        self.lora_a = nn.Linear(options.width, options.rank, bias=False)
        self.lora_b = nn.Linear(options.rank, options.width, bias=False)
        self.head = nn.Linear(options.width, options.classes)
        self.dropout = options.dropout

    def forward(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        states_BTH = self.embedding(tokens_BT)
        states_BTH = torch.tanh(self.projection(states_BTH) + self.lora_b(self.lora_a(states_BTH)))
        mask_BT1 = mask_BT.unsqueeze(-1).to(states_BTH.dtype)
        mean_BH = (states_BTH * mask_BT1).sum(1) / mask_BT1.sum(1)
        if self.training and self.dropout:
            # Drawn as float32 whatever the model's type, so that a float64 twin drops the same units.
            # On the CPU, so that every device drops the same ones.
            keep_BH = (torch.rand(mean_BH.shape, dtype=torch.float32) >= self.dropout).to(mean_BH.device, mean_BH.dtype)
            mean_BH = mean_BH * keep_BH / (1 - self.dropout)
        return self.head(mean_BH)


class SequenceTask(TaskBase):
    Options: ClassVar[type[Any]] = SequenceOptions

    def __init__(self, options: SequenceOptions, context: TaskContext) -> None:
        self._splits = {
            split: _sequences(options, count, index)
            for index, (split, count) in enumerate(
                {TRAIN: options.samples, "evaluation": options.evaluation_samples}.items()
            )
        }
        self.num_samples, self.num_evaluation_samples = options.samples, options.evaluation_samples
        with initial_weights(context.seed):
            self.model = LoraEncoder(options)
        self.model.to(context.device)
        self._device = context.device

    def batch(self, indices: Sequence[int], split: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens [B, T], mask [B, T] and labels [B]."""
        samples = [self._splits[split][index] for index in indices]
        longest = max(tokens.size for tokens, _ in samples)
        tokens_BT = np.zeros((len(samples), longest), np.int64)
        mask_BT = np.zeros((len(samples), longest), np.int64)
        for row, (tokens, _) in enumerate(samples):
            tokens_BT[row, : tokens.size], mask_BT[row, : tokens.size] = tokens, 1
        labels_B = torch.tensor([label for _, label in samples])
        return (
            torch.from_numpy(tokens_BT).to(self._device),
            torch.from_numpy(mask_BT).to(self._device),
            labels_B.to(self._device),
        )

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> LossSums:
        tokens_BT, mask_BT, labels_B = batch
        logits_BK = self.model(tokens_BT, mask_BT)
        weight = int((labels_B != UNLABELLED).sum())
        return LossSums(
            loss_sum=F.cross_entropy(logits_BK, labels_B, ignore_index=UNLABELLED, reduction="sum"),
            weight=weight,
            num_correct=int((logits_BK.argmax(-1) == labels_B).sum()),
            num_predictions=weight,
        )


def _sequences(options: SequenceOptions, count: int, split: int) -> list[tuple[np.ndarray, int]]:
    """Draws sequences whose symbols come more often from their class's range."""
    rng = np.random.Generator(np.random.Philox(key=[17, split]))
    per_class = options.symbols // options.classes
    sequences = []
    for _ in range(count):
        label, length = int(rng.integers(options.classes)), int(rng.integers(1, options.longest + 1))
        typical = label * per_class + rng.integers(per_class, size=length)
        tokens = np.where(rng.random(length) < 0.5, typical, rng.integers(options.symbols, size=length))
        sequences.append((tokens, UNLABELLED if rng.random() < 0.25 else label))
    return sequences
