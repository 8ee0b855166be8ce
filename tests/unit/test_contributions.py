"""A contribution is checked against its lease before anything is sent."""

from dataclasses import replace

import numpy as np
import pytest

from ayni.buckets import Bucket
from worker_agent.contributions import Offer, check
from worker_agent.session import MicrobatchStats, ShardAssignment

LEASE = ShardAssignment(
    step=2,
    attempt=0,
    epoch=1,
    kind="train",
    lease_id=9,
    microbatch_start=2,
    microbatch_stop=5,
    num_microbatches=8,
    position=0,
    num_samples=16,
    shard_start=4,
    shard_end=10,
    rank=1,
    world_size=3,
    update="device",
)
"""Its tree nodes are [2, 4) and [4, 5)."""


def vector(size: int = 6) -> np.ndarray:
    return np.ones(size, np.float32)


def stats(*weights: int, first: int = 2) -> tuple[MicrobatchStats, ...]:
    return tuple(MicrobatchStats(microbatch=first + number, weight=weight) for number, weight in enumerate(weights))


OFFER = Offer(
    assignment=LEASE,
    bucket=Bucket("block", 1),
    parts=(vector(), vector()),
    microbatches=stats(1, 2, 1),
    out=vector(),
    component_sizes=(2, 4),
)


def test_what_fits_is_accepted():
    check(OFFER)
    check(replace(OFFER, microbatches=stats(0, 2, 0), parts=(vector(), None), component_sizes=()))


def test_a_shard_without_microbatches_has_no_parts():
    lease = replace(LEASE, microbatch_start=3, microbatch_stop=3)
    check(replace(OFFER, assignment=lease, parts=(), microbatches=()))


def frozen(values: np.ndarray) -> np.ndarray:
    values.setflags(write=False)
    return values


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parts": (vector(),)}, "has 1 parts; the shard has 2 tree nodes"),
        ({"parts": (vector(), None)}, "part 1 of block 1 of step 2 must be None exactly if"),
        ({"microbatches": stats(1, 2, 0)}, "part 1 of block 1 of step 2 must be None exactly if"),
        ({"microbatches": stats(1, 2, 1, first=1)}, r"micro-batches \[1, 2, 3\]; the lease is on \[2, 3, 4\]"),
        ({"microbatches": stats(1, 2)}, r"\[2, 3\]; the lease is on \[2, 3, 4\]"),
        ({"parts": (vector(), vector(5))}, "part 1 of block 1 of step 2 has 5 elements; expected 6"),
        ({"parts": (vector(), vector().astype(np.float64))}, "must be contiguous float32 .* not float64"),
        ({"parts": (vector(), vector(12)[::2])}, "must be contiguous float32"),
        ({"parts": (vector(), vector().reshape(2, 3))}, "of one dimension"),
        ({"out": vector(0), "component_sizes": ()}, "out of block 1 of step 2 has 0 elements"),
        ({"out": frozen(vector())}, "out of block 1 of step 2 is read-only"),
        ({"out": vector().astype(np.int32)}, "not int32"),
        ({"component_sizes": (2, 3)}, "add up to 5, not 6"),
        ({"component_sizes": (-2, 8)}, "add up to 6, not 6"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        check(replace(OFFER, **changes))
