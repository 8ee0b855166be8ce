"""Fine-tunes a pretrained Llama-shaped language model with LoRA on any UTF-8 texts.  [shell]

Gradients travel block by block; of the nine components those without LoRA are empty. There are no buckets outside the
blocks.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import transformers
from peft import LoraConfig
from torch import nn

from worker_agent.tasks.language_modeling import LanguageModelTask, make_windows, read_texts
from worker_agent.tasks.pretrained import add_lora, load_model, load_tokenizer, save_adapter, weights_name
from worker_agent.training.rng import initial_weights
from worker_agent.training.task import TaskContext


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalLmLoraOptions:
    """`task.options` of `causal_lm_lora`."""

    model: str = "model"
    """Folder of the pretrained model and its tokenizer in the run's files."""
    train: tuple[str, ...] = ("train.txt",)
    """Training texts in the run's files."""
    evaluation: tuple[str, ...] = ()
    """Held-out texts; without any, the end of every training text is held out."""
    held_out_fraction: float = 0.05
    """How much of every training text is held out when there are no held-out texts."""
    evaluation_windows: int = 0
    """Held-out windows that are evaluated, evenly spaced. 0: all."""
    context: int = 64
    """Tokens of one sample."""
    lora_rank: int = 8
    """Rank of the two LoRA matrices."""
    lora_alpha: float = 16.0
    """LoRA's output is scaled by alpha / rank."""
    lora_dropout: float = 0.0
    """Dropout in front of LoRA."""
    lora_modules: tuple[str, ...] = ("q_proj", "v_proj")
    """Names of the projections that get LoRA."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        if self.context < 1 or self.lora_rank < 1 or not self.lora_modules:
            raise ValueError("context and lora_rank must be at least 1, and lora_modules not empty")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction is {self.held_out_fraction}; it must be in [0, 1)")


class CausalLmLora(LanguageModelTask):
    """The task."""

    Options: ClassVar[type[Any]] = CausalLmLoraOptions
    model: nn.Module

    def __init__(self, options: CausalLmLoraOptions, context: TaskContext) -> None:
        """Reads model and texts, and draws LoRA's weights."""
        self._options, self._device = options, context.device
        folder = context.files.folder(options.model)
        tokenizer = load_tokenizer(folder, options.model)
        train, held_out = read_texts(context.files, options.train, options.evaluation, options.held_out_fraction)
        self.use_texts(
            make_windows(train, tokenizer, options.context, 0),
            make_windows(held_out, tokenizer, options.context, options.evaluation_windows),
        )
        base = load_model(transformers.AutoModelForCausalLM, folder, options.model)
        self._weights_name = weights_name(type(base).__name__, folder)
        with initial_weights(context.seed):
            adapted = add_lora(base, _lora_config(options), options.model)
        self.model = adapted.to(context.device)

    def model_name(self) -> str:
        """Names the pretrained weights and what LoRA's shapes do not show."""
        return f"{self._weights_name} alpha={self._options.lora_alpha} context={self._options.context}"

    def save(self, folder: Path) -> None:
        """Writes the adapter in PEFT's format."""
        save_adapter(self.model, folder / "adapter", self._weights_name)


def _lora_config(options: CausalLmLoraOptions) -> LoraConfig:
    return LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=options.lora_dropout,
        target_modules=list(options.lora_modules),
        task_type="CAUSAL_LM",
    )
