"""A tiny transformer on the bytes of the licence. Knows torch and nothing of Ayni, so that others can train it too.

Legend: B windows in a batch, T bytes of context.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
_IGNORED = -100


class Attention(nn.Module):
    """Causal attention with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q_proj(x) @ self.k_proj(x).transpose(1, 2) / math.sqrt(x.shape[2])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.o_proj(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ self.v_proj(x))


class FeedForward(nn.Module):
    """Gated, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.self_attn, self.mlp = Attention(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class ByteModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        x = self.embed_tokens(bytes_BT)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.norm(x))


@cache
def _text() -> npt.NDArray[np.int64]:
    return np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int64)


def windows(indices: Sequence[int], context: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets, shapes [B, T]; of sample i, i % 4 quarters of the targets are left out."""
    text = _text()
    starts = [index * 37 % (len(text) - context - 1) for index in indices]
    both = torch.from_numpy(np.stack([text[start : start + context + 1] for start in starts]))
    targets_BT = both[:, 1:].clone()
    for row, index in enumerate(indices):
        targets_BT[row, : context * (index % 4) // 4] = _IGNORED
    return both[:, :-1], targets_BT


def loss_of(model: nn.Module, bytes_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, int, int]:
    """Returns the summed loss, its weight, and how many predictions are right."""
    logits = model(bytes_BT)
    loss = F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), ignore_index=_IGNORED, reduction="sum")
    kept = targets_BT != _IGNORED
    return loss, int(kept.sum()), int(((logits.argmax(-1) == targets_BT) & kept).sum())
