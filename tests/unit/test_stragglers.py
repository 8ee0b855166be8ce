"""Deadlines that follow how long steps take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator_service.stragglers import Arrivals

BOUNDS = {"shortest": 2.0, "longest": 60.0, "mad_factor": 6.0}


def after(seconds, kind="train"):
    arrivals = Arrivals()
    for second in seconds:
        arrivals.note(kind, second)
    return arrivals


def test_while_few_arrivals_are_known_the_deadline_is_a_multiple_of_the_latest():
    assert after([]).deadline("train", **BOUNDS) == 60
    assert after([3.0, 5.0, 1.0]).deadline("train", **BOUNDS) == 20
    assert after([0.1] * 7).deadline("train", **BOUNDS) == 2
    assert after([30.0] * 7).deadline("train", **BOUNDS) == 60
    assert after([3.0] * 8).deadline("train", **BOUNDS) == pytest.approx(3.9)


def test_the_deadline_is_the_median_and_so_many_deviations():
    assert after([8, 9, 10, 11, 12] * 2).deadline("train", **BOUNDS) == pytest.approx(10 + 6 * 1)
    assert after([8, 9, 10, 11, 12] * 2).deadline("train", **BOUNDS | {"mad_factor": 2}) == pytest.approx(10 + 2 * 1)


def test_equal_arrivals_leave_room_for_noise():
    assert after([10.0] * 20).deadline("train", **BOUNDS) == pytest.approx(10 * 1.3)


def test_a_few_very_late_ones_have_little_influence():
    assert after([10, 11, 9, 10, 10, 11, 9, 10, 500]).deadline("train", **BOUNDS) <= 10 + 6 * 1


def test_it_follows_when_everything_becomes_slower_and_forgets():
    arrivals = after([1.0] * 1000 + [20.0] * 64)
    assert arrivals.deadline("train", **BOUNDS) == pytest.approx(20 * 1.3)


def test_kinds_of_steps_do_not_mix():
    arrivals = after([10.0] * 20)
    assert arrivals.deadline("evaluate", **BOUNDS) == 60
    for _ in range(8):
        arrivals.note("evaluate", 2.0)
    assert arrivals.deadline("evaluate", **BOUNDS) == pytest.approx(2.6)
    assert arrivals.deadline("train", **BOUNDS) == pytest.approx(13)


@given(seconds=st.lists(st.floats(0, 1e4), max_size=100))
def test_it_is_within_its_bounds_and_above_half_of_the_arrivals(seconds):
    deadline = after(seconds).deadline("train", **BOUNDS)
    assert 2 <= deadline <= 60
    recent = seconds[-64:]
    assert deadline == 60 or sum(second <= deadline for second in recent) >= len(recent) / 2
