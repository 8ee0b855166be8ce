"""Norms that are far from what is usual."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator_service.norms import NormHistory


def known(norms):
    history = NormHistory()
    for norm in norms:
        history.is_outlier(norm)
    return history


def test_nothing_is_far_before_16_norms_are_known():
    assert not known([1.0] * 15).is_outlier(1e9)
    assert known([1.0] * 16).is_outlier(1e9)


@given(scale=st.floats(1e-6, 1e6), noise=st.lists(st.floats(-1e-3, 1e-3), min_size=16, max_size=40))
def test_constant_norms_do_not_alarm_on_noise_but_on_a_factor_of_five(scale, noise):
    history = NormHistory()
    assert not any(history.is_outlier(scale * (1 + part)) for part in noise)
    assert not history.is_outlier(3.9 * scale)
    assert history.is_outlier(5 * scale)


def test_norms_that_scatter_widely_need_more():
    draw = random.Random(3)
    scattered = [math.exp(draw.gauss(0, 0.5)) for _ in range(64)]
    assert not known(scattered).is_outlier(6.0)
    assert known(scattered).is_outlier(math.exp(10 * 0.5))


@pytest.mark.parametrize("seed", range(20))
def test_norms_of_a_training_run_do_not_alarm(seed):
    draw, history = random.Random(seed), NormHistory()
    assert not any(history.is_outlier(10 * 0.99**step * math.exp(draw.gauss(0, 0.3))) for step in range(500))


def test_small_norms_do_not_alarm_and_zero_is_not_noted():
    assert not known([1.0] * 20).is_outlier(1e-9)
    assert not known([0.0] * 20 + [1.0] * 15).is_outlier(1e9)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_what_is_not_finite_is_far_and_spoils_nothing(norm):
    history = known([1.0] * 20)
    assert history.is_outlier(norm)
    assert known([]).is_outlier(norm)
    assert not history.is_outlier(1.1)
    assert history.is_outlier(9.0)


def test_a_new_usual_is_learnt():
    history = known([1.0] * 64)
    alarms = [history.is_outlier(100.0) for _ in range(64)]
    assert alarms[0]
    assert not alarms[-1]
