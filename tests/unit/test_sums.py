"""Arithmetic of a reduction: blocks change no bit, and nothing that is not finite gets through."""

import math
from fractions import Fraction

import numpy as np
import pytest

from ayni.kernels.current import use
from ayni.kernels.loading import compiled
from ayni.kernels.numpy_kernels import NumpyKernels
from ayni.reduce.sums import BLOCK, SQUARES, add, divide, is_finite, mean, out_for, segment_squares

SIZES = [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 12_345]


@pytest.fixture(autouse=True, params=["numpy", "compiled"])
def _loops(request):
    """Each test runs with either loops."""
    before = use(compiled() if request.param == "compiled" else NumpyKernels())
    yield
    use(before)


def values(size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-30, 30, size)).astype(np.float32)


def frozen(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight", [1, 3, 64, (1 << 24) + 1])
def test_a_mean_in_blocks_has_the_bits_of_one_at_once(size, weight):
    left, right = values(size, 1), values(size, 2)
    expected = divide(left + right, weight)
    for one, other in ((left.copy(), right.copy()), (frozen(left), right.copy()), (frozen(left), frozen(right))):
        out = out_for(one, other)
        found = mean(one, other, weight, out)
        assert found.bad is None
        assert out.tobytes() == expected.tobytes()
        whole = size // SQUARES * SQUARES
        assert found.square_sums in ([], segment_squares(expected[:whole]))


def test_a_mean_goes_where_it_is_told_to_and_leaves_its_sums_alone():
    left, right, out = frozen(values(BLOCK + 5, 1)), frozen(values(BLOCK + 5, 2)), np.empty(BLOCK + 5, np.float32)
    mean(left, right, 3, out)
    assert out.tobytes() == divide(left + right, 3).tobytes()
    assert left.tobytes() == values(BLOCK + 5, 1).tobytes()


def test_one_sum_alone_is_divided():
    total = values(BLOCK + 5)
    out = np.empty_like(total)
    mean(frozen(total), None, 7, out)
    assert out.tobytes() == divide(total.copy(), 7).tobytes()


def test_a_sum_beyond_float32_is_found_where_it_is():
    left = np.ones(2 * BLOCK, np.float32)
    left[BLOCK + 3] = 3e38
    out = np.empty_like(left)
    assert mean(frozen(left), frozen(left), 1, out).bad == BLOCK + 3
    assert math.isinf(out[BLOCK + 3])


def test_a_sum_begins_with_a_line_of_the_cache():
    left, right = frozen(values(1000, 1)), frozen(values(1000, 2))
    total = add(left, right)
    assert total.ctypes.data % 64 == 0
    assert total.tobytes() == (values(1000, 1) + values(1000, 2)).tobytes()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 499, 999])
def test_what_is_not_finite_is_found(value, place):
    array = values(1000)
    assert is_finite(array)
    array[place] = value
    assert not is_finite(array)


def test_the_largest_and_the_smallest_numbers_are_finite():
    limits = np.finfo(np.float32)
    numbers = [limits.max, limits.min, limits.tiny, -limits.tiny, limits.smallest_subnormal, 0.0, -0.0]
    assert is_finite(np.array(numbers * 100, np.float32))


@pytest.mark.parametrize("size", [1, SQUARES - 1, SQUARES, SQUARES + 1, 3 * SQUARES + 17])
def test_squares_are_summed_by_segments(size):
    array = values(size)
    sums = segment_squares(array)
    assert len(sums) == -(-size // SQUARES)
    for start, total in zip(range(0, size, SQUARES), sums, strict=True):
        exact = sum(Fraction(float(value)) ** 2 for value in array[start : start + SQUARES])
        assert abs(Fraction(total) - exact) <= exact * Fraction(1, 10**13)


def test_the_order_in_which_squares_are_added_is_fixed():
    """Pairs as numpy makes them: eight sums side by side in runs of 128, the same on every processor."""

    def in_pairs(numbers: list[float]) -> float:
        if len(numbers) > 128:
            half = len(numbers) // 2 // 8 * 8
            return in_pairs(numbers[:half]) + in_pairs(numbers[half:])
        sums = numbers[:8]
        for start in range(8, len(numbers), 8):
            sums = [total + number for total, number in zip(sums, numbers[start : start + 8], strict=True)]
        return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))

    array = values(2 * SQUARES)
    squares = [float(value) ** 2 for value in array]
    assert segment_squares(array) == [in_pairs(squares[:SQUARES]), in_pairs(squares[SQUARES:])]
