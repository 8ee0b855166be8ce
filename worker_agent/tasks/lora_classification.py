"""Fine-tunes a pretrained text encoder with LoRA to tell classes of text apart.  [shell]

Legend: B samples in a batch, T tokens in its longest sample, H width of the encoder, K classes.

The encoder is frozen but for LoRA on its query and value projections; a linear head reads the L2-normalised mean of
its token states. All trainable parameters travel as one flat vector: LoRA parameters, then the head.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from worker_agent.tasks.labelled_texts import LabelledText, label_indices, parse_labelled_texts
from worker_agent.tasks.pretrained import add_lora, load_model, load_tokenizer, save_adapter, weights_name
from worker_agent.training.files import RunFiles
from worker_agent.training.fingerprint import samples_sha256
from worker_agent.training.rng import initial_weights
from worker_agent.training.task import TRAIN, LossSums, TaskBase, TaskContext, host_copy


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraClassificationOptions:
    """`task.options` of `lora_classification`."""

    model: str = "model"
    """Folder of the pretrained encoder and its tokenizer in the run's files."""
    train: str = "train.jsonl"
    """Training samples: JSON lines with "text" and "label"."""
    evaluation: str = "test.jsonl"
    """Held-out samples; empty for none."""
    max_tokens: int = 64
    """Longer texts are cut."""
    lora_rank: int = 8
    """Rank of the two LoRA matrices."""
    lora_alpha: float = 16.0
    """LoRA's output is scaled by alpha / rank."""
    lora_dropout: float = 0.0
    """Dropout in front of LoRA."""
    lora_modules: tuple[str, ...] = ("query", "value")
    """Names of the projections that get LoRA."""
    encoder_dropout: float | None = None
    """Dropout inside the encoder; nothing keeps the pretrained model's own."""
    head_scale: float = 10.0
    """What the normalised mean is multiplied by before the head."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        if self.max_tokens < 3 or self.lora_rank < 1 or not self.lora_modules:
            raise ValueError("max_tokens must be at least 3, lora_rank at least 1, and lora_modules not empty")


class EncoderClassifier(nn.Module):
    """Encoder, masked mean, normalisation, linear head."""

    def __init__(self, encoder: nn.Module, width: int, num_classes: int, head_scale: float) -> None:
        """Draws the head's weights from torch's CPU generator."""
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, num_classes)
        self._head_scale = head_scale

    def forward(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Returns logits, shape [B, K]."""
        states_BTH = self.encoder(input_ids=tokens_BT, attention_mask=mask_BT).last_hidden_state
        weights_BT1 = mask_BT.unsqueeze(-1).to(states_BTH.dtype)
        mean_BH = (states_BTH * weights_BT1).sum(1) / weights_BT1.sum(1)
        logits_BK: Tensor = self.head(F.normalize(mean_BH, dim=-1) * self._head_scale)
        return logits_BK


@dataclass(frozen=True, slots=True)
class _Sample:
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    label: int


class LoraClassification(TaskBase):
    """The task."""

    Options: ClassVar[type[Any]] = LoraClassificationOptions
    model: EncoderClassifier

    def __init__(self, options: LoraClassificationOptions, context: TaskContext) -> None:
        """Reads model and data from the run's files."""
        self._options, self._device = options, context.device
        train = _read(context.files, options.train)
        held_out = _read(context.files, options.evaluation) if options.evaluation else []
        self._labels = label_indices(train, held_out)
        folder = context.files.folder(options.model)
        tokenizer = load_tokenizer(folder, options.model)
        self._padding = tokenizer.token_to_id("[PAD]") or 0
        self._samples = _encode(tokenizer, train, self._labels, options.max_tokens)
        self._held_out = _encode(tokenizer, held_out, self._labels, options.max_tokens)
        self.num_samples, self.num_evaluation_samples = len(train), len(held_out)
        self.model = _build(folder, options, context.seed, len(self._labels)).to(context.device)
        self._weights_name = weights_name(type(self.model.encoder).__name__, folder)

    def batch(self, indices: Sequence[int], split: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns token ids [B, T], mask [B, T] and labels [B], int64."""
        source = self._samples if split == TRAIN else self._held_out
        samples = [source[index] for index in indices]
        longest = max(sample.tokens.size for sample in samples)
        tokens_BT = np.full((len(samples), longest), self._padding, np.int64)
        mask_BT = np.zeros((len(samples), longest), np.int64)
        for row, sample in enumerate(samples):
            tokens_BT[row, : sample.tokens.size] = sample.tokens
            mask_BT[row, : sample.tokens.size] = 1
        labels_B = np.array([sample.label for sample in samples], np.int64)
        tokens, mask, labels = (torch.from_numpy(values).to(self._device) for values in (tokens_BT, mask_BT, labels_B))
        return tokens, mask, labels

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> LossSums:
        """Returns the summed cross-entropy; the weight is the number of samples."""
        tokens_BT, mask_BT, labels_B = batch
        logits_BK = self.model(tokens_BT, mask_BT).float()
        return LossSums(
            loss_sum=F.cross_entropy(logits_BK, labels_B, reduction="sum"),
            weight=len(labels_B),
            num_correct=int((logits_BK.detach().argmax(-1) == labels_B).sum()),
            num_predictions=len(labels_B),
        )

    def model_name(self) -> str:
        """Names the pretrained weights and what LoRA's shapes do not show."""
        options = self._options
        return (
            f"{self._weights_name} alpha={options.lora_alpha} scale={options.head_scale} classes={sorted(self._labels)}"
        )

    def dataset_summary(self) -> str:
        """Counts samples and classes."""
        return f"{super().dataset_summary()} of {len(self._labels)} classes"

    def dataset_fingerprint(self) -> str:
        """Hashes the token ids and labels of both splits."""
        return samples_sha256((sample.tokens, sample.label) for sample in [*self._samples, *self._held_out])

    def save(self, folder: Path) -> None:
        """Writes the adapter in PEFT's format, the head as safetensors, and the classes as JSON."""
        save_adapter(self.model.encoder, folder / "adapter", self._weights_name)
        save_file(host_copy(list(self.model.head.named_parameters())), folder / "head.safetensors")
        described = {"classes": list(self._labels), "options": asdict(self._options)}
        (folder / "classifier.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _read(files: RunFiles, name: str) -> list[LabelledText]:
    return parse_labelled_texts(files.text(name), name)


def _encode(
    tokenizer: Tokenizer, texts: Sequence[LabelledText], labels: dict[str, int], max_tokens: int
) -> list[_Sample]:
    tokenizer.enable_truncation(max_tokens)
    encodings = tokenizer.encode_batch([text.text for text in texts])
    return [
        _Sample(np.array(encoding.ids, np.int64), labels[text.label])
        for encoding, text in zip(encodings, texts, strict=True)
    ]


def _build(folder: Path, options: LoraClassificationOptions, seed: int, num_classes: int) -> EncoderClassifier:
    encoder = load_model(transformers.AutoModel, folder, options.model)
    config: Any = encoder.config
    if options.encoder_dropout is not None:
        for module in encoder.modules():
            if isinstance(module, nn.Dropout):
                module.p = options.encoder_dropout
    lora = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=options.lora_dropout,
        target_modules=list(options.lora_modules),
    )
    with initial_weights(seed):
        adapted = add_lora(encoder, lora, options.model)
        return EncoderClassifier(adapted, config.hidden_size, num_classes, options.head_scale)
