"""Prints a hash of what the host optimizers do, for comparison between processors; run in a process of its own.

    python -m tests.support.optimizer_bytes THREADS

One line, JSON: the hash of the updated parameters, the processor features that numpy dispatches to, and torch's level.
With 0 threads torch is left out. The numbers are made from a counter-based generator's raw words by exact operations,
so that they are the same everywhere.
"""

import hashlib
import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ayni.buckets import FLAT
from ayni.run_config import OptimizerConfig
from worker_agent.training.layout import flat_layout
from worker_agent.training.optimizer import make_optimizer

SIZES = {"a": 70_001, "b": 33, "c": 1}
CONFIGS = [
    OptimizerConfig(weight_decay=0.1),
    OptimizerConfig(beta1=0.87, beta2=0.983, epsilon=1e-7),
    OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.03),
]
RATE, CLIP, STEPS = 0.013, 0.37, 12
Vector = npt.NDArray[np.float32]


def numbers(seed: int, count: int) -> Vector:
    """Returns float32 values of both signs and magnitudes from 2**-31 to 1; every one is exact."""
    words = np.random.Philox(key=seed).random_raw(count)
    mantissa = (words & 0xFFFFFF).astype(np.float32) / np.float32(2**24) - np.float32(0.5)
    values: Vector = np.ldexp(mantissa, -((words >> 24) % 31).astype(np.int32))
    return values


def with_numpy(config: OptimizerConfig, parameters: list[Vector]) -> None:
    """Updates through the optimizer alone."""
    optimizer = make_optimizer(config, parameters)
    ends = np.cumsum([array.size for array in parameters])[:-1]
    for step in range(STEPS):
        gradients = np.split(numbers(100 + step, sum(SIZES.values())), ends)
        optimizer.step(gradients, learning_rate=RATE / (step + 1), clip_factor=CLIP)


def with_torch(config: OptimizerConfig, parameters: list[Vector]) -> None:
    """Updates torch parameters that share the arrays' memory."""
    import torch

    from worker_agent.training.update import make_update

    named = [(name, torch.nn.Parameter(torch.from_numpy(array))) for name, array in zip(SIZES, parameters, strict=True)]
    update = make_update("host", config, named, flat_layout(SIZES))
    for step in range(STEPS):
        mean = numbers(100 + step, sum(SIZES.values()))
        update.step({FLAT: mean}, learning_rate=RATE / (step + 1), clip_factor=CLIP)


def torch_level(threads: int) -> str:
    """Sets torch's threads and returns its vector level."""
    import torch

    torch.set_num_threads(threads)
    return torch.backends.cpu.get_cpu_capability()


def dispatched() -> list[str]:
    """Returns the processor features beyond its baseline that numpy uses in this process."""
    config: Any = np.show_config(mode="dicts")
    return list(config["SIMD Extensions"].get("found", []))


def main() -> None:
    """Prints the line."""
    threads = int(sys.argv[1])
    level = torch_level(threads) if threads else ""
    digest = hashlib.sha256()
    for config in CONFIGS:
        parameters = [numbers(seed, size) for seed, size in enumerate(SIZES.values())]
        (with_torch if threads else with_numpy)(config, parameters)
        for array in parameters:
            digest.update(array.astype("<f4").tobytes())
    print(json.dumps({"host": digest.hexdigest(), "numpy": dispatched(), "torch": level}))


if __name__ == "__main__":
    main()
