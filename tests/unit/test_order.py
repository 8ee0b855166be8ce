"""Sample order: every sample once in each pass, and the same on every machine."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.order import microbatch_positions, permutation, samples_at


@given(seed=st.integers(0, 2**63 - 1), dataset_pass=st.integers(0, 1000), num=st.integers(1, 300))
def test_a_pass_uses_every_sample_once(seed, dataset_pass, num):
    assert sorted(permutation(seed, dataset_pass, num)) == list(range(num))


@pytest.mark.parametrize(
    ("seed", "dataset_pass", "expected"),
    [
        (42, 0, [7, 1, 6, 4, 3, 5, 9, 0, 2, 8]),
        (42, 1, [4, 9, 5, 3, 0, 2, 7, 1, 6, 8]),
        (2**63 - 1, 5, [5, 3, 1, 0, 2, 4]),
    ],
)
def test_order_is_the_same_for_ever(seed, dataset_pass, expected):
    assert permutation(seed, dataset_pass, len(expected)).tolist() == expected


@given(seed=st.integers(0, 99), num=st.integers(1, 50), start=st.integers(0, 200), length=st.integers(0, 120))
def test_positions_run_on_through_passes(seed, num, start, length):
    expected = [int(permutation(seed, p // num, num)[p % num]) for p in range(start, start + length)]
    assert samples_at(seed, start, start + length, num).tolist() == expected


def test_two_workers_after_one_go_on_where_it_stopped():
    before = samples_at(7, 0, 4, 16)
    after = samples_at(7, 4, 16, 16)
    assert sorted([*before, *after]) == list(range(16))


@given(position=st.integers(0, 1000), samples=st.integers(0, 500), num=st.integers(1, 64))
def test_microbatches_cover_the_step(position, samples, num):
    spans = [microbatch_positions(position, samples, num, m) for m in range(num)]
    assert spans[0][0] == position
    assert spans[-1][1] == position + samples
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    sizes = {stop - start for start, stop in spans}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("start", "stop", "num"), [(0, 1, 0), (-1, 2, 5), (3, 2, 5)])
def test_impossible_positions_are_refused(start, stop, num):
    with pytest.raises(ValueError, match="no samples"):
        samples_at(0, start, stop, num)
