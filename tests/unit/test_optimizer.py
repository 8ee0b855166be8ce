"""The host optimizers: every rounding is written down here once more, scalar by scalar."""

import math

import numpy as np
import pytest

from ayni.run_config import OptimizerConfig
from worker_agent.training import optimizer
from worker_agent.training.optimizer import HostOptimizer, Vector, make_optimizer, power

F = np.float32


def vectors(seed: int, *sizes: int) -> list[Vector]:
    rng = np.random.Generator(np.random.Philox(seed))
    return [rng.standard_normal(size, dtype=np.float32) for size in sizes]


def adamw_by_hand(config: OptimizerConfig, p: F, m: F, v: F, g: F, t: int, rate: float, clip: float) -> tuple[F, F, F]:
    """One element, one float32 operation at a time."""
    g = F(g * F(clip))
    m = F(F(m * F(config.beta1)) + F(g * F(1.0 - config.beta1)))
    v = F(F(v * F(config.beta2)) + F(F(g * g) * F(1.0 - config.beta2)))
    root = F(F(np.sqrt(v)) / F(math.sqrt(1.0 - power(config.beta2, t))))
    change = F(F(m / F(root + F(config.epsilon))) * F(rate / (1.0 - power(config.beta1, t))))
    return F(F(p * F(1.0 - rate * config.weight_decay)) - change), m, v


def sgd_by_hand(config: OptimizerConfig, p: F, m: F, v: F, g: F, t: int, rate: float, clip: float) -> tuple[F, F, F]:
    g = F(g * F(clip))
    if config.weight_decay:
        g = F(g + F(p * F(config.weight_decay)))
    m = F(F(m * F(config.momentum)) + g) if config.momentum else m
    return F(p - F((m if config.momentum else g) * F(rate))), m, v


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(),
        OptimizerConfig(weight_decay=0.1, beta1=0.85, beta2=0.97, epsilon=1e-6),
        OptimizerConfig(name="sgd"),
        OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.01),
    ],
    ids=lambda config: f"{config.name}-{config.weight_decay}",
)
def test_every_element_is_rounded_operation_by_operation(config: OptimizerConfig) -> None:
    parameters = vectors(1, 7, 3)
    by_hand = adamw_by_hand if config.name == "adamw" else sgd_by_hand
    states = [[(p, F(0), F(0)) for p in array] for array in parameters]
    host = make_optimizer(config, parameters)
    for t in range(1, 6):
        gradients, rate, clip = vectors(10 + t, 7, 3), 0.01 / t, 1.0 / t
        host.step(gradients, learning_rate=rate, clip_factor=clip)
        states = [
            [by_hand(config, *state, g, t, rate, clip) for state, g in zip(row, gradient, strict=True)]
            for row, gradient in zip(states, gradients, strict=True)
        ]
    expected = [np.array([state[0] for state in row], np.float32).tobytes() for row in states]
    assert [array.tobytes() for array in parameters] == expected
    assert host.num_updates == 5


def test_gradients_are_not_changed_and_parameters_are_updated_in_place() -> None:
    (parameter,), (gradient,) = vectors(1, 9), vectors(2, 9)
    before, kept = parameter.copy(), gradient.copy()
    make_optimizer(OptimizerConfig(), [parameter]).step([gradient], learning_rate=0.1, clip_factor=0.5)
    assert (parameter != before).all()
    assert (gradient == kept).all()


def _train(host: HostOptimizer, size: int) -> None:
    for step in range(3):
        host.step(vectors(step, size), learning_rate=0.01, clip_factor=0.9)


def test_the_block_size_has_no_influence(monkeypatch: pytest.MonkeyPatch) -> None:
    size, results = 1001, []
    for elements in (1, 7, 64, 1001, 4096):
        monkeypatch.setattr(optimizer, "BLOCK_ELEMENTS", elements)
        (parameter,) = vectors(9, size)
        _train(make_optimizer(OptimizerConfig(weight_decay=0.1), [parameter]), size)
        results.append(parameter.tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_moments_that_are_put_back_continue_the_same_run(name: str) -> None:
    config = OptimizerConfig(name=name, momentum=0.9)
    (parameter,) = vectors(9, 20)
    host = make_optimizer(config, [parameter])
    _train(host, 20)
    copy = parameter.copy()
    other = make_optimizer(config, [copy])
    for key, arrays in host.moments().items():
        for mine, theirs in zip(other.moments()[key], arrays, strict=True):
            mine[...] = theirs
    other.num_updates = host.num_updates
    _train(host, 20)
    _train(other, 20)
    assert parameter.tobytes() == copy.tobytes()


def test_clipping_is_applied_to_the_mean_gradient() -> None:
    """Gradients (10, 0) and (0, 0), clip 1: the mean (5, 0) is clipped to (1, 0), never each one before."""
    parameter = np.zeros(2, np.float32)
    mean = np.array([5.0, 0.0], np.float32)
    make_optimizer(OptimizerConfig(name="sgd"), [parameter]).step([mean], learning_rate=1.0, clip_factor=1.0 / 5.0)
    assert parameter.tolist() == [-1.0, 0.0]


def test_power_is_exact_where_floats_are() -> None:
    assert [power(2.0, exponent) for exponent in range(6)] == [1, 2, 4, 8, 16, 32]
    assert power(0.999, 100_000) == pytest.approx(0.999**100_000, rel=1e-12)


@pytest.mark.parametrize("bad", [np.zeros(3, np.float64), np.zeros((2, 2), np.float32), np.zeros(6, np.float32)[::2]])
def test_arrays_of_another_kind_are_refused(bad: Vector) -> None:
    with pytest.raises(ValueError, match="parameter array 0 must be flat, contiguous float32"):
        make_optimizer(OptimizerConfig(), [bad])
