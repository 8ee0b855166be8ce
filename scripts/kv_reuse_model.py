"""The language model of `kv_reuse.py`: loads it, and decodes with keys and values in pages.

Legend: L layers, B blocks, T tokens of a page, H heads, D elements of a head, n new tokens, S all tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from scripts.paged_cache import Pages, PagesShape

TINY_NAME = "tiny Llama, random weights of seed 0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """What a model wrote."""

    tokens: list[int]
    first_token_s: float
    """Time until the first token was known."""


def load(folder: str) -> Any:
    """Returns the model of a folder in float32; a tiny one without a folder."""
    if not folder:
        return tiny_llama()
    # Here, since they take seconds to load and the tiny model does without.
    from transformers import AutoModelForCausalLM

    from worker_agent.tasks.pretrained import load_model

    return load_model(AutoModelForCausalLM, Path(folder), folder).eval()


def name_of(folder: str) -> str:
    """Returns a name that differs whenever the weights do; every object's key depends on it."""
    if not folder:
        return TINY_NAME
    from worker_agent.tasks.pretrained import weights_name

    return weights_name("causal_lm", Path(folder))


def tiny_llama() -> LlamaForCausalLM:
    """Returns a Llama of three layers, with weights so large that what it writes depends on all that it has read."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=8192, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def shape_of(model: Any, num_blocks: int, page_size: int) -> PagesShape:
    """Returns the shape of a model's paged cache."""
    config = model.config
    return PagesShape(
        num_layers=config.num_hidden_layers,
        num_blocks=num_blocks,
        page_size=page_size,
        num_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )


class PagedLayer(DynamicLayer):
    """One layer's keys and values of one sequence, as the model sees them: read from pages, and written into them."""

    def __init__(self, pages: torch.Tensor, table: torch.Tensor, length: int) -> None:
        """Takes one layer's pages [2, B, T, H, D], the sequence's blocks in order, and how many tokens they hold."""
        super().__init__()
        self._pages, self._table, self._length = pages, table, length
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new tokens, shape [1, H, n, D]; returns keys and values of all tokens, shape [1, H, S, D] each."""
        page_size, stop = self._pages.shape[2], self._length + key_states.shape[2]
        places = torch.arange(self._length, stop)
        blocks, slots = self._table[places // page_size], places % page_size
        for half, states in zip(self._pages, (key_states, value_states), strict=True):
            half[blocks, slots] = states[0].transpose(0, 1)
        self._length = stop
        used = self._table[: -(-stop // page_size)]
        keys, values = (half[used].flatten(0, 1)[:stop].transpose(0, 1)[None] for half in self._pages)
        return keys, values

    def get_seq_length(self) -> int:
        """Returns the number of tokens that are held."""
        return self._length


def paged(pages: Pages, table: Sequence[int], length: int) -> Cache:
    """Returns the cache of a sequence whose first `length` tokens are in pages already."""
    blocks = torch.tensor(table)
    return Cache(layers=[PagedLayer(layer, blocks, length) for layer in pages.layers])


def reference(model: Any, tokens: Sequence[int], count: int) -> Generated:
    """Generates with the cache that transformers has: no pages, nothing reused."""
    return greedy(model, DynamicCache(), tokens, count)


def greedy(model: Any, cache: Cache, tokens: Sequence[int], count: int) -> Generated:
    """Reads tokens that follow what is in the cache, then writes the likeliest next token, `count` times."""
    began, step, times, new = time.perf_counter(), list(tokens), [], []
    with torch.inference_mode():
        for _ in range(count):
            # By its place, since the cache has two names among the releases of transformers.
            logits = model(torch.tensor([step]), None, None, cache, use_cache=True, logits_to_keep=1).logits
            step = [int(logits[0, -1].argmax())]
            new += step
            times.append(time.perf_counter() - began)
    return Generated(tokens=new, first_token_s=times[0])
