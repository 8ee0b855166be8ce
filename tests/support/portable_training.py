"""Usage: python -m tests.support.portable_training ENGINE FOLDER. Trains on an engine and on the CPU, and compares.

A program of its own, because engines change torch for the whole process. Prints one JSON object. ENGINE is one of
backend wgpu's, or "cuda".
"""

import json
import platform
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ayni.run_config import TaskConfig
from tests.support.tiny_models import WORDS, files_below, write_llama
from worker_agent.portable.opening import OpenEngine, open_engine
from worker_agent.training.load import load_task
from worker_agent.training.task import TRAIN, Task, host_copy

WHEELS = (("linux", "x86_64"), ("darwin", "arm64"), ("win32", "AMD64"))
"""Systems that torchvulkan is made for, as in the extra."""
ENGINES = ["torchvulkan", "wgpu_gemm"] if (sys.platform, platform.machine()) in WHEELS else ["wgpu_gemm"]
SEED = 5
PRETRAIN = TaskConfig(
    name="causal_lm",
    options={
        **{"context": 32, "width": 64, "inner_width": 128, "num_blocks": 2},
        **{"num_heads": 4, "num_key_value_heads": 2, "held_out_fraction": 0.1},
    },
)
LORA = TaskConfig(
    name="causal_lm_lora",
    options={"context": 16, "lora_rank": 4, "lora_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]},
)
ROWS = 4
STEPS = 5


@dataclass
class Trained:
    """What a few steps gave, all of it on the CPU."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    devices: list[str]


def main() -> int:
    engine, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    files = write_files(folder)
    opened = open_cuda() if engine == "cuda" else open_engine(engine, min_flops=0)
    result: dict[str, Any] = {"device_name": opened.device_name, "software": opened.software}
    for name, config in (("pretrain", PRETRAIN), ("lora", LORA)):
        result[name] = compare(config, files, opened)
    result["fallbacks"] = opened.fallbacks()
    in_bfloat16(opened)
    result["fallbacks_with_bfloat16"] = opened.fallbacks()
    print(json.dumps(result))
    return 0


def open_cuda() -> OpenEngine:
    # TF32 would be another arithmetic.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return OpenEngine(
        engine="cuda",
        device=torch.device("cuda", 0),
        device_name=torch.cuda.get_device_name(0),
        software=False,
        fallbacks=lambda: 0,
    )


def write_files(folder: Path) -> dict[str, Path]:
    """A language model to adapt, and a text."""
    write_llama(folder / "model")
    text = " ".join(WORDS[(index * 7 + index // 5) % len(WORDS)] for index in range(1200))
    (folder / "train.txt").write_text(text)
    return files_below(folder)


def compare(config: TaskConfig, files: dict[str, Path], opened: OpenEngine) -> dict[str, Any]:
    plain = trained(load_task(config, files, SEED, "cpu"), torch.float32, nullcontext, lambda: 0)[0]
    exact = trained(load_task(config, files, SEED, "cpu"), torch.float64, nullcontext, lambda: 0)[0]
    task = load_task(config, files, SEED, opened.device)
    first, products = trained(task, torch.float32, opened.context, opened.products or (lambda: 0))
    again, _ = trained(load_task(config, files, SEED, opened.device), torch.float32, opened.context, lambda: 0)
    learned = first.gradients[0].keys()
    return {
        "losses": first.losses,
        "loss_error": max(abs(own - other) for own, other in zip(first.losses, plain.losses, strict=True)),
        "gradient_error": gradient_error(first, plain),
        "gradient_error_float64": gradient_error(first, exact),
        "cpu_gradient_error_float64": gradient_error(plain, exact),
        "devices": sorted(set(first.devices)),
        "products": products,
        "bitwise_again": same(first, again),
        "frozen_unchanged": all(torch.equal(first.before[n], first.after[n]) for n in first.before.keys() - learned),
        "learned_changed": all(not torch.equal(first.before[n], first.after[n]) for n in learned),
        "saved_equal": saved_equal(task, files),
    }


def trained(
    task: Task, dtype: torch.dtype, context: Callable[[], Any], products: Callable[[], int]
) -> tuple[Trained, list[int]]:
    """Makes steps of AdamW with clipping; the second result counts products after each forward and backward."""
    task.model.to(dtype)
    task.model.eval()
    named = task.trainable()
    optimizer = torch.optim.AdamW([parameter for _, parameter in named], lr=2e-3)
    result = Trained([], [], whole(task), {}, [str(parameter.device.type) for parameter in task.model.parameters()])
    counts = []
    with context():
        for step in range(STEPS):
            sums = task.loss(task.batch(range(step * ROWS, (step + 1) * ROWS), TRAIN))
            loss = sums.loss_sum / sums.weight
            counts.append(products())
            loss.backward()
            counts.append(products())
            result.losses.append(float(loss.detach()))
            result.gradients.append(host_copy([(n, p.grad) for n, p in named if p.grad is not None]))
            torch.nn.utils.clip_grad_norm_([parameter for _, parameter in named], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    result.after = whole(task)
    return result, counts[:2]


def whole(task: Task) -> dict[str, Tensor]:
    return host_copy(list(task.model.named_parameters()))


def gradient_error(own: Trained, other: Trained) -> float:
    """Of the first step: largest difference, relative to the largest element of each tensor."""
    errors = []
    for name, reference in other.gradients[0].items():
        difference = (own.gradients[0][name].double() - reference.double()).abs().max()
        scale = reference.double().abs().max()
        errors.append(difference / scale if scale else difference)
    return float(torch.stack(errors).max())


def same(left: Trained, right: Trained) -> bool:
    pairs = [(left.after, right.after), *zip(left.gradients, right.gradients, strict=True)]
    return left.losses == right.losses and all(torch.equal(a[n], b[n]) for a, b in pairs for n in a)


def saved_equal(task: Task, files: dict[str, Path]) -> bool:
    """Whether what a task saves from the device holds the device's numbers, read on the CPU."""
    from safetensors.torch import load_file

    folder = files["train.txt"].parent / f"saved-{type(task).__name__}"
    folder.mkdir(exist_ok=True)
    task.save(folder)
    [path] = folder.rglob("*.safetensors")
    stored = [tensor.double().sum().item() for tensor in load_file(path).values()]
    own = [tensor.double().sum().item() for tensor in host_copy(task.trainable()).values()]
    return sorted(stored) == sorted(own)


def in_bfloat16(opened: OpenEngine) -> None:
    """The positive control: work that drivers without bfloat16 can't do."""
    left = torch.randn(8, 8).to(torch.bfloat16).to(opened.device).requires_grad_()
    with opened.context():
        (left @ left).float().sum().backward()


if __name__ == "__main__":
    sys.exit(main())
