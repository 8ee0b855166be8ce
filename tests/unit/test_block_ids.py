"""Ids as runs and back, whatever their number; and failures of all blocks of a transfer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks.ids import MAX_BLOCK_IDS, as_ids, from_runs, to_runs
from ayni.blocks.transfers import AllFailed, BlockFailure, Failure, TransferFailed, TransferResult, refused
from ayni.errors import BadRequest, PeerLost, TooLarge

GONE = PeerLost("it is gone", peer="x", detail="x")
STARTS = st.integers(0, (1 << 63) - 50)


@given(st.lists(st.tuples(STARTS, st.integers(1, 40)), max_size=40))
def test_runs_stand_for_their_ids(runs):
    ids = from_runs([start for start, _ in runs], [count for _, count in runs])
    assert ids.dtype == np.int64
    assert ids.tolist() == [start + i for start, count in runs for i in range(count)]
    again = to_runs(ids)
    assert from_runs(again.starts, again.counts).tolist() == ids.tolist()
    assert len(again.starts) == int(np.count_nonzero(np.diff(ids) != 1)) + (len(ids) > 0)


@pytest.mark.parametrize("num_ids", [16, 17])
def test_runs_of_short_and_long_lists_are_the_fewest(num_ids):
    together, apart = to_runs(as_ids(range(5, 5 + num_ids))), to_runs(as_ids(range(0, 2 * num_ids, 2)))
    assert (together.starts, together.counts) == ((5,), (num_ids,))
    assert (apart.starts, apart.counts) == (tuple(range(0, 2 * num_ids, 2)), ())


@pytest.mark.parametrize(
    ("starts", "counts", "error"),
    [
        ([1, 2], [1], BadRequest),
        ([1, 2], [0, 1], BadRequest),
        ([1, 2], [0, 2], BadRequest),
        ([-1], [], BadRequest),
        ([1 << 63], [], BadRequest),
        ([(1 << 64) - 1], [2], BadRequest),
        ([(1 << 63) - 1], [2], BadRequest),
        ([0], [MAX_BLOCK_IDS + 1], TooLarge),
        ([0, 0], [MAX_BLOCK_IDS, 1], TooLarge),
        ([0, 0], [1, (1 << 64) - 1], TooLarge),
        (range(MAX_BLOCK_IDS + 1), [], TooLarge),
    ],
)
def test_wrong_runs_are_refused(starts, counts, error):
    with pytest.raises(error):
        from_runs(starts, counts)


def test_the_last_id_there_can_be_passes():
    assert from_runs([(1 << 63) - 2], [2]).tolist() == [(1 << 63) - 2, (1 << 63) - 1]


def test_a_refusal_of_many_blocks_makes_no_failure_before_it_is_looked_at():
    outcome = refused(2, as_ids(range(MAX_BLOCK_IDS)), GONE)
    assert isinstance(outcome.failures, AllFailed)
    assert (len(outcome.failures), outcome.is_done) == (MAX_BLOCK_IDS, False)
    assert TransferFailed(TransferResult(outcomes=(outcome,))).reasons == {"PEER_LOST"}


def test_failures_of_all_blocks_are_like_a_tuple_of_them():
    failure = Failure.of(GONE)
    lazy = AllFailed(as_ids([4, 9, 2]), failure)
    eager = tuple(BlockFailure(index=i, block=block, failure=failure) for i, block in enumerate([4, 9, 2]))
    assert lazy == eager
    assert eager == lazy
    assert hash(lazy) == hash(eager)
    assert (tuple(lazy), lazy[-1], lazy[1:], lazy[5:]) == (eager, eager[2], eager[1:], ())
    assert lazy == AllFailed(as_ids([4, 9, 2]), failure, as_ids([0, 1, 2]))
    assert lazy != AllFailed(as_ids([4, 9, 3]), failure)
    assert lazy != eager[:2]
    with pytest.raises(IndexError):
        lazy[3]
    placed = lazy.at(as_ids([10, 20, 30]))
    assert [(one.index, one.block) for one in placed] == [(10, 4), (20, 9), (30, 2)]
    outcome = refused(0, [4, 9, 2], GONE)
    assert TransferResult(outcomes=(outcome,)).failed_indices() == {0, 1, 2}
