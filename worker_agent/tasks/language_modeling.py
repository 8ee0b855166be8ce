"""What the two causal language-model tasks share: texts, windows, the loss.  [shell]

Legend: B windows in a batch, T tokens of context, V symbols.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from worker_agent.tasks.text_windows import IGNORED, TextWindows
from worker_agent.tasks.tokenizers import encode
from worker_agent.training.files import RunFiles
from worker_agent.training.layout import BucketSpec, llama_layout
from worker_agent.training.task import TRAIN, LossSums, TaskBase


class LanguageModelTask(TaskBase):
    """Next-token prediction; the weight of a sample is the number of tokens that it predicts."""

    _device: torch.device

    def use_texts(self, train: TextWindows, held_out: TextWindows) -> None:
        """Takes both splits."""
        self._train, self._held_out = train, held_out
        self.num_samples, self.num_evaluation_samples = len(train), len(held_out)

    @property
    def buckets(self) -> Sequence[BucketSpec]:
        """One bucket for each block and for each trainable component outside the blocks, in backward order."""
        return llama_layout({name: parameter.numel() for name, parameter in self.trainable()})

    def batch(self, indices: Sequence[int], split: str) -> tuple[Tensor, Tensor, int]:
        """Returns inputs [B, T], targets [B, T] and the number of targets that count."""
        inputs_BT, targets_BT = (self._train if split == TRAIN else self._held_out).batch(indices)
        weight = int(np.count_nonzero(targets_BT != IGNORED))
        return torch.from_numpy(inputs_BT).to(self._device), torch.from_numpy(targets_BT).to(self._device), weight

    def loss(self, batch: tuple[Tensor, Tensor, int]) -> LossSums:
        """Returns the summed cross-entropy in nats."""
        inputs_BT, targets_BT, weight = batch
        model: Any = self.model
        logits_NV = model(input_ids=inputs_BT, use_cache=False).logits.float().flatten(0, 1)
        targets_N = targets_BT.flatten()
        return LossSums(
            loss_sum=F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum"),
            weight=weight,
            num_correct=int((logits_NV.detach().argmax(-1) == targets_N).sum()),
            num_predictions=weight,
        )

    def derived_metrics(self, loss: float, split: str) -> Mapping[str, float]:
        """Returns the loss in bits for each byte of text."""
        windows = self._train if split == TRAIN else self._held_out
        return {"bits_per_byte": loss / math.log(2) * windows.tokens_per_byte}

    def dataset_summary(self) -> str:
        """Counts windows."""
        return f"{len(self._train):,} training and {len(self._held_out):,} held-out windows of text"

    def dataset_fingerprint(self) -> str:
        """Hashes the tokens of both splits."""
        return f"{self._train.sha256()[:32]}{self._held_out.sha256()[:32]}"


def read_texts(
    files: RunFiles, train: Sequence[str], held_out: Sequence[str], held_out_fraction: float
) -> tuple[list[str], list[str]]:
    """Returns the texts of both splits; without held-out files, the end of every training text is held out.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not UTF-8, or there is no text.
    """
    texts = [files.text(name) for name in train]
    others = [files.text(name) for name in held_out]
    if not held_out and held_out_fraction:
        cuts = [len(text) - round(len(text) * held_out_fraction) for text in texts]
        others = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
        texts = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    if not any(len(text) > 1 for text in texts):
        raise ValueError(f"training files {', '.join(train)} hold no text")
    return texts, others


def make_windows(texts: Sequence[str], tokenizer: Tokenizer | None, context: int, max_windows: int) -> TextWindows:
    """Returns the windows of some texts."""
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    return TextWindows([encode(text, tokenizer) for text in texts], context, num_bytes, max_windows)
