"""Values that are not finite are found, and sums of squares do not overflow."""

import math

import numpy as np
import pytest

from worker_agent.training.finite import BLOCK_ELEMENTS, first_problem, square_sum


@pytest.mark.parametrize("index", [0, 5, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 6])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_value_that_is_not_finite_is_named(index: int, value: float) -> None:
    values = np.ones(2 * BLOCK_ELEMENTS + 7, np.float32)
    assert first_problem(values) is None
    values[index] = value
    values[-1] = math.nan
    found = first_problem(values)
    assert found is not None
    assert found.index == index
    assert str(found.value) == str(math.nan if index == values.size - 1 else value)


def test_the_largest_finite_values_are_fine_and_their_squares_do_not_overflow() -> None:
    largest = np.full(10, np.finfo(np.float32).max, np.float32)
    assert first_problem(largest) is None
    assert square_sum(largest) == pytest.approx(10 * float(largest[0]) ** 2)


def test_the_sum_of_squares_is_that_of_float64() -> None:
    values = np.random.default_rng(1).standard_normal(3 * BLOCK_ELEMENTS + 5).astype(np.float32)
    assert square_sum(values) == pytest.approx(float((values.astype(np.float64) ** 2).sum()), rel=1e-5)
    assert square_sum(np.zeros(0, np.float32)) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_sum_of_squares_of_what_is_not_finite_is_not_finite(value: float) -> None:
    assert not math.isfinite(square_sum(np.array([1.0, value], np.float32)))
