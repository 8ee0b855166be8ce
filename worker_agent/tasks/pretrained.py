"""Pretrained transformers and LoRA, as the tasks in tree use them.  [shell]

Everything is read from the run's files; nothing is ever asked of a hub.
"""

import hashlib
import warnings
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch import nn

from worker_agent.tasks import quiet  # noqa: F401 - imported for what it switches off
from worker_agent.training.fingerprint import file_sha256


def load_model(auto_class: Any, folder: Path, name: str) -> nn.Module:
    """Returns a pretrained model in float32 on the CPU.

    Args:
        auto_class: `transformers.AutoModel` or one of its kind.
        folder: config.json and safetensors weights.
        name: the folder's name in the run, for messages.

    Raises:
        ValueError: the folder holds no model that this class can load, or not all of its weights.
    """
    model: nn.Module
    try:
        model, found = auto_class.from_pretrained(
            folder, local_files_only=True, dtype="float32", output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"folder {name!r} of the run is no model that {auto_class.__name__} can load: {error}"
        ) from error
    # An encoder's pooler is left out by some folders, and is not used here.
    missing = sorted(key for key in found["missing_keys"] if not key.startswith("pooler."))
    if missing or found["mismatched_keys"]:
        raise ValueError(
            f"folder {name!r} of the run does not fit {type(model).__name__}: {len(missing)} weights are missing "
            f"({', '.join(missing[:3])}), {len(found['mismatched_keys'])} have another shape"
        )
    return model


def load_tokenizer(folder: Path, name: str) -> Tokenizer:
    """Returns a folder's tokenizer, without truncation and padding.

    Raises:
        ValueError: there is none, or it can't be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"folder {name!r} of the run has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def add_lora(model: nn.Module, config: LoraConfig, name: str) -> nn.Module:
    """Freezes a model and adds LoRA to it, with weights drawn from torch's CPU generator.

    Raises:
        ValueError: the model has none of the target modules.
    """
    try:
        with warnings.catch_warnings():
            # PEFT asks for an attribute that transformers has renamed.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        linear = sorted(
            {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        )
        raise ValueError(
            f"model {name!r} ({type(model).__name__}) does not fit: LoRA wants modules named "
            f"{', '.join(sorted(config.target_modules or ()))}; its linear modules are {', '.join(linear) or 'none'}"
        ) from error
    return adapted


def save_adapter(model: nn.Module, folder: Path, base_name: str) -> None:
    """Writes LoRA's weights in PEFT's own format; the adapter's file names its base by `base_name`, not by a path."""
    adapted: Any = model
    for config in adapted.peft_config.values():
        config.base_model_name_or_path = base_name
    adapted.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)


def weights_name(model_type: str, folder: Path) -> str:
    """Returns a name for pretrained weights that differs whenever their bytes do."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return f"{model_type}@{digest.hexdigest()[:16]}"
