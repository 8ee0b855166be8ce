"""Which owner reduces which part of a bucket."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.buckets import FLAT, NON_BLOCK_COMPONENTS, Bucket
from ayni.reduce.digest import SEGMENT
from ayni.slices import slice_bounds

BUCKETS = st.one_of(
    st.just(FLAT),
    st.integers(0, 200).map(lambda index: Bucket("block", index)),
    st.integers(0, len(NON_BLOCK_COMPONENTS) - 1).map(lambda index: Bucket("non_block", index)),
)


@given(st.integers(1, 40 * SEGMENT), st.integers(1, 12), BUCKETS)
def test_slices_make_up_the_bucket_as_evenly_as_segments_allow(num_elements, num_owners, bucket):
    bounds = slice_bounds(num_elements, num_owners, bucket)
    assert len(bounds) == num_owners
    assert (bounds[0][0], bounds[-1][1]) == (0, num_elements)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    assert all(start % SEGMENT == 0 for start, stop in bounds if start < stop)
    segments = [-(-(stop - start) // SEGMENT) for start, stop in bounds]
    assert max(segments) - min(segments) <= 1
    assert slice_bounds(num_elements, num_owners, bucket) == bounds


@pytest.mark.parametrize("num_owners", [2, 3, 5])
def test_small_buckets_spread_over_the_owners(num_owners):
    buckets = [Bucket("block", index) for index in range(4 * num_owners)]
    owners = Counter(
        owner
        for bucket in buckets
        for owner, (start, stop) in enumerate(slice_bounds(1000, num_owners, bucket))
        if start < stop
    )
    assert owners == dict.fromkeys(range(num_owners), 4)


def test_buckets_of_different_kinds_do_not_all_begin_with_the_same_owner():
    buckets = [FLAT, *(Bucket("non_block", index) for index in range(3)), Bucket("block", 0)]
    firsts = [next(i for i, (a, b) in enumerate(slice_bounds(10, 5, bucket)) if a < b) for bucket in buckets]
    assert sorted(firsts) == [0, 1, 2, 3, 4]
