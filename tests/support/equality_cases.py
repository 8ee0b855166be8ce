"""What the equality program trains: run files, and how a plain loop calls each task's model."""

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

Logits = Callable[[Any, Any], tuple[Tensor, Tensor]]
"""Takes (model, batch); returns logits [B, K] and targets [B], -100 where there is none."""

_SYLLABLES = "ka lo mi ne su ta wa ri po che qu illa inti ayni mink'a".split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One task, trained by every number of workers from the same run file."""

    name: str
    run: Mapping[str, Any]
    """The run file, but for the number of workers."""
    logits: Logits
    """A function of a module, because workers get the case from another process."""
    whole_batch: bool
    """Whether the plain loop makes one forward of the global batch; else one for each micro-batch, because random
    draws are keyed by micro-batch."""
    extra_forwards: tuple[int, ...] = (0, 6, 14, 3, 9)
    """Forward passes that each worker makes and throws away before the one that counts: machines of unequal speed."""

    def run_for(self, num_workers: int, num_steps: int) -> dict[str, Any]:
        """Returns the run file's values for a number of workers."""
        run = copy.deepcopy(dict(self.run))
        return {**run, "run_id": f"{self.name}-{num_workers}", "num_steps": num_steps, "min_workers": num_workers}


def make_cases(folder: Path) -> list[Case]:
    """Returns the cases; writes their data to `folder`."""
    return [_causal_lm(folder / "texts"), _flat()]


def updated_on_host(case: Case) -> Case:
    """Returns a case as devices of several kinds train it: each of them rounds an optimizer's step in its own way."""
    optimizer = {**case.run["optimizer"], "update": "host"}
    return replace(case, run={**case.run, "optimizer": optimizer})


def files_of(case: Case) -> dict[str, Path]:
    """Returns the files of a case's run by the run's names."""
    folder = case.run.get("artifacts")
    return {path.name: path for path in sorted(Path(folder).iterdir())} if folder else {}


def _causal_lm(folder: Path) -> Case:
    """A tiny language model, block by block, host update: short texts make windows of very unequal weight."""
    names = _write_texts(folder)
    options = {
        **{"train": names, "held_out_fraction": 0.1, "tokenizer": "bytes", "context": 32},
        **{"width": 32, "inner_width": 48, "num_blocks": 2, "num_heads": 2},
    }
    return Case(
        name="causal_lm",
        run={
            "artifacts": str(folder),
            "seed": 11,
            "task": {"name": "causal_lm", "options": options},
            "batch": {"samples": 25, "microbatches": 11, "evaluation_samples": 16},
            "optimizer": {
                **{"name": "adamw", "learning_rate": 2e-3, "warmup_steps": 5, "weight_decay": 0.01},
                **{"clip_norm": 1.0, "update": "host"},
            },
        },
        logits=_causal_lm_logits,
        whole_batch=True,
    )


def _flat() -> Case:
    """LoRA and a head as one flat vector, torch's own SGD, dropout, and micro-batches without any label."""
    return Case(
        name="flat_lora",
        run={
            "seed": 12,
            "task": {"name": "tests.support.equality_task:SequenceTask", "options": {}},
            "batch": {"samples": 26, "microbatches": 13, "evaluation_samples": 8},
            "optimizer": {
                **{"name": "sgd", "learning_rate": 0.5, "momentum": 0.9, "weight_decay": 1e-4},
                **{"schedule": "constant", "clip_norm": 0.2, "update": "device"},
            },
        },
        logits=_flat_logits,
        whole_batch=False,
    )


def _causal_lm_logits(model: nn.Module, batch: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor]:
    inputs_BT, targets_BT, _ = batch
    logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
    return logits_BTV.flatten(0, 1), targets_BT.flatten()


def _flat_logits(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens_BT, mask_BT, labels_B = batch
    return model(tokens_BT, mask_BT), labels_B


def _write_texts(folder: Path) -> list[str]:
    """Writes made-up texts of 10 to 250 bytes; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(5)
    names = [f"text{number:02d}.txt" for number in range(60)]
    for name in names:
        words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(rng.randint(2, 35))]
        (folder / name).write_text(" ".join(words), encoding="utf-8")
    return names
