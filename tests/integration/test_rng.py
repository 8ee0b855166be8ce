"""Random draws are keyed by (seed, step, micro-batch) and nothing else."""

import random

import numpy as np
import torch
from torch import nn

from worker_agent.training import rng


def draws() -> tuple[bytes, float, float]:
    return torch.rand(4).numpy().tobytes(), float(np.random.random()), random.random()


def test_a_micro_batch_draws_the_same_whatever_was_drawn_before() -> None:
    rng.seed_microbatch(7, 3, 2)
    first = draws()
    torch.rand(1000), np.random.random(17), random.random()
    rng.seed_microbatch(7, 3, 1)
    rng.seed_microbatch(7, 3, 2)
    assert draws() == first


def test_seed_step_and_micro_batch_each_change_the_draws() -> None:
    seen = set()
    for numbers in [(7, 3, 2), (8, 3, 2), (7, 4, 2), (7, 3, 3), (7, 32, 0), (73, 2, 0)]:
        rng.seed_microbatch(*numbers)
        seen.add(draws())
    assert len(seen) == 6


def test_keys_are_63_bits_and_fixed() -> None:
    """Two versions of a worker must agree, so the numbers are written down."""
    assert rng.key("microbatch", 7, 3, 2) == 5102965894447366839
    assert 0 <= rng.key("weights", 2**62) < 2**63


def test_initial_weights_come_from_the_seed_and_leave_the_generator_alone() -> None:
    torch.manual_seed(1)
    with rng.initial_weights(5):
        first = nn.Linear(3, 3).weight.detach().clone()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == after
    with rng.initial_weights(5):
        assert torch.equal(nn.Linear(3, 3).weight, first)
    with rng.initial_weights(6):
        assert not torch.equal(nn.Linear(3, 3).weight, first)
