"""Trains a Llama-shaped language model from scratch on any UTF-8 texts.  [shell]

Gradients travel block by block (nine components) and per component outside the blocks, in backward order. With tied
embeddings there is no lm_head: its gradient is part of the embedding's.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from worker_agent.tasks import quiet  # noqa: F401 - imported for what it switches off
from worker_agent.tasks.language_modeling import LanguageModelTask, make_windows, read_texts
from worker_agent.tasks.tokenizers import BYTE_VOCABULARY, train_bpe
from worker_agent.training.files import RunFiles
from worker_agent.training.rng import initial_weights
from worker_agent.training.task import TaskContext, host_copy


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalLmOptions:
    """`task.options` of `causal_lm`."""

    train: tuple[str, ...] = ("train.txt",)
    """Training texts in the run's files."""
    evaluation: tuple[str, ...] = ()
    """Held-out texts; without any, the end of every training text is held out."""
    held_out_fraction: float = 0.05
    """How much of every training text is held out when there are no held-out texts."""
    evaluation_windows: int = 0
    """Held-out windows that are evaluated, evenly spaced. 0: all."""
    tokenizer: str = "bytes"
    """"bytes", or "bpe": tokenizer.json of the run's files if there is one, else trained on the training texts."""
    vocabulary: int = 2048
    """Symbols of a "bpe" tokenizer that is trained."""
    context: int = 128
    """Tokens of one sample."""
    width: int = 128
    """Width of the residual stream."""
    inner_width: int = 352
    """Width inside the feed-forward part."""
    num_blocks: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads."""
    num_key_value_heads: int = 0
    """Heads of keys and values; 0 for as many as attention heads."""
    tied_embeddings: bool = False
    """Whether the head is the embedding."""
    dropout: float = 0.0
    """Dropout on attention weights."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        if self.tokenizer not in ("bytes", "bpe"):
            raise ValueError(f'tokenizer is {self.tokenizer!r}; it must be "bytes" or "bpe"')
        if self.width % self.num_heads or self.width // self.num_heads % 2:
            raise ValueError(f"width ({self.width}) must be an even multiple of num_heads ({self.num_heads})")
        if self.num_heads % (self.num_key_value_heads or self.num_heads):
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of {self.num_key_value_heads=}")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction is {self.held_out_fraction}; it must be in [0, 1)")


class CausalLm(LanguageModelTask):
    """The task."""

    Options: ClassVar[type[Any]] = CausalLmOptions
    model: nn.Module

    def __init__(self, options: CausalLmOptions, context: TaskContext) -> None:
        """Reads the texts and draws the weights."""
        self._options, self._device = options, context.device
        train, held_out = read_texts(context.files, options.train, options.evaluation, options.held_out_fraction)
        self._tokenizer = _tokenizer(options, context.files, train)
        self.use_texts(
            make_windows(train, self._tokenizer, options.context, 0),
            make_windows(held_out, self._tokenizer, options.context, options.evaluation_windows),
        )
        self._config = _llama_config(options, self._tokenizer)
        with initial_weights(context.seed):
            model: nn.Module = LlamaForCausalLM(self._config)
        self.model = model.to(context.device)

    def model_name(self) -> str:
        """Names the architecture's numbers."""
        ignored = {"train", "evaluation", "held_out_fraction", "evaluation_windows"}
        numbers = {name: value for name, value in asdict(self._options).items() if name not in ignored}
        return f"llama {json.dumps(numbers, sort_keys=True)}"

    def save(self, folder: Path) -> None:
        """Writes a transformers model folder, and the tokenizer if it is not bytes."""
        model: Any = self.model
        model.save_pretrained(folder, state_dict=host_copy(self.trainable()))
        if self._tokenizer is not None:
            self._tokenizer.save(str(folder / "tokenizer.json"))


def _tokenizer(options: CausalLmOptions, files: RunFiles, texts: list[str]) -> Tokenizer | None:
    if options.tokenizer == "bytes":
        return None
    if "tokenizer.json" in files:
        return Tokenizer.from_file(str(files.path("tokenizer.json")))
    return train_bpe(texts, options.vocabulary)


def _llama_config(options: CausalLmOptions, tokenizer: Tokenizer | None) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() if tokenizer else BYTE_VOCABULARY,
        hidden_size=options.width,
        intermediate_size=options.inner_width,
        num_hidden_layers=options.num_blocks,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_key_value_heads or options.num_heads,
        max_position_embeddings=options.context,
        tie_word_embeddings=options.tied_embeddings,
        attention_dropout=options.dropout,
        initializer_range=options.initializer_range,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
