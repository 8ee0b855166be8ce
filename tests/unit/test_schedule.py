"""Learning rate and clipping."""

import math

import pytest

from ayni.run_config import OptimizerConfig
from coordinator_service.schedule import clip_factor, learning_rate

CONFIG = OptimizerConfig(learning_rate=0.1, warmup_steps=4, final_learning_rate=0.01, clip_norm=1.0)


def test_warmup_is_linear_and_ends_at_the_peak():
    assert [learning_rate(CONFIG, step, 20) for step in range(5)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


def test_cosine_falls_to_the_final_rate():
    middle = learning_rate(CONFIG, 12, 20)
    assert middle == pytest.approx(0.01 + 0.09 * (1 + math.cos(math.pi / 2)) / 2)
    assert learning_rate(CONFIG, 20, 20) == pytest.approx(0.01)
    rates = [learning_rate(CONFIG, step, 20) for step in range(4, 21)]
    assert rates == sorted(rates, reverse=True)


def test_constant_and_endless_runs_keep_the_peak():
    constant = OptimizerConfig(learning_rate=0.1, schedule="constant")
    assert {learning_rate(constant, step, 20) for step in range(20)} == {0.1}
    assert learning_rate(CONFIG, 1000, 0) == 0.1


def test_clip_comes_after_the_mean():
    after = clip_factor(CONFIG, 5.0) * 5.0
    assert after == pytest.approx(1.0)
    clipped_first = (1.0 + 0.0) / 2
    assert clipped_first != pytest.approx(after)


@pytest.mark.parametrize(("norm", "factor"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (4.0, 0.25)])
def test_clip_factor(norm, factor):
    assert clip_factor(CONFIG, norm) == factor


def test_clip_can_be_switched_off():
    assert clip_factor(OptimizerConfig(clip_norm=0), 1e9) == 1.0
