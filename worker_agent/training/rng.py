"""Random draws that do not depend on who computes a micro-batch.  [shell]

Every draw of a micro-batch (dropout, augmentation) comes from generators that are seeded just before it by (run seed,
step, micro-batch): not by worker, attempt or the draws before. Initial weights are drawn on the CPU from the run's
seed, so they are the same on every kind of device. Draws made on a GPU differ from draws made on a CPU.

Torch's default generators belong to the process: two training loops in threads of one process would share them.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_microbatch(seed: int, step: int, microbatch: int) -> None:
    """Seeds torch's (all devices), numpy's and Python's default generators for one micro-batch of one step."""
    _seed_all(key("microbatch", seed, step, microbatch))


@contextmanager
def initial_weights(seed: int) -> Iterator[None]:
    """Draws inside come from the run's seed; torch's CPU generator is put back afterwards.

    Build the model on the CPU inside, and move it to its device outside.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key("weights", seed))
        yield


def key(purpose: str, *numbers: int) -> int:
    """Returns a 63-bit generator seed; differs for every purpose and every tuple of numbers."""
    text = "|".join(["ayni", purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "little") >> 1


def _seed_all(value: int) -> None:
    torch.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)
