"""What a worker of the churn bench computes and writes down, whoever averages its gradients.

Knows torch and nothing of Ayni: it also runs in the virtual environments of others.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.chaos_model import ByteModel, loss_of, windows

WIDTH, NUM_BLOCKS, CONTEXT = 32, 2, 32
LEARNING_RATE = 3e-3
BATCH = 24
"""Samples of a step over all workers."""


def arguments() -> argparse.ArgumentParser:
    """The flags that all workers have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--workers", type=int, required=True, help="workers when all are there")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device-ms", type=float, required=True, help="wait for each sample")
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--tuned", action="store_true", help="short timeouts instead of the defaults")
    return parser


def model() -> nn.Module:
    """The same initial weights everywhere."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    return ByteModel(WIDTH, NUM_BLOCKS)


def loss_for(network: nn.Module, first: int, count: int, device_ms: float) -> Tensor:
    """The mean loss of some samples, after the wait that stands for a device."""
    inputs, targets = windows(range(first, first + count), CONTEXT)
    loss, weight, _ = loss_of(network, inputs, targets)
    time.sleep(device_ms * count / 1000)
    return loss / max(weight, 1)


def hash_of(network: nn.Module) -> str:
    """SHA-256 over all parameters."""
    digest = hashlib.sha256()
    for parameter in network.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


class Lines:
    """Writes one line for each step, as it happens."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("a", buffering=1)

    def write(self, **values: object) -> None:
        """Adds the time and writes."""
        self._stream.write(json.dumps({"time": time.time(), **values}) + "\n")
