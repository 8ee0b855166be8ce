"""Shares in proportion to speed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator_service.shards import plan_shards

speeds = st.lists(st.floats(0.01, 1000), min_size=1, max_size=12)


@given(num=st.integers(0, 500), speeds=speeds)
def test_shards_are_disjoint_exhaustive_and_within_one_of_the_proportion(num, speeds):
    shards = plan_shards(num, speeds)
    assert [m for start, stop in shards for m in range(start, stop)] == list(range(num))
    for (start, stop), speed in zip(shards, speeds, strict=True):
        assert abs((stop - start) - num * speed / sum(speeds)) < 1 + 1e-6


@pytest.mark.parametrize(
    ("num", "speeds", "counts"),
    [
        (10, [1, 1, 1], [4, 3, 3]),
        (10, [0, 0, 0], [4, 3, 3]),
        (0, [1, 2], [0, 0]),
        (1, [1, 1, 1], [1, 0, 0]),
        (100, [1] * 7, [15, 15, 14, 14, 14, 14, 14]),
        (7, [4, 2, 1], [4, 2, 1]),
        (8, [3, 1], [6, 2]),
        (9, [2, 0, 1], [4, 3, 2]),
    ],
)
def test_largest_remainder(num, speeds, counts):
    assert [stop - start for start, stop in plan_shards(num, speeds)] == counts
