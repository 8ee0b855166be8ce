"""What owners take down of their slices: whether it makes up every bucket; norm and hash are those of a round."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ayni.buckets import FLAT, Bucket
from ayni.errors import BadRequest, NotLeased, SpecMismatch
from ayni.step_values import MicrobatchStats
from ayni.tensors import TensorSpec
from coordinator_service.leases import Lease, Moment
from coordinator_service.slices_book import SlicesBook
from coordinator_service.steps import Step
from tests.support.peer_groups import NAMES, group, means, slices_of, taken_down

SEGMENT = 65536
SIZES = {"flat": 3 * SEGMENT + 17, "b0": 5, "b1": SEGMENT, "b2": 9 * SEGMENT - 1}


def filled(owners, sizes=SIZES, topology="sharded"):
    """A book that has everything, and the means."""
    members = group(1, owners, topology=topology)
    book, values = SlicesBook("step 7", members), means(**sizes)
    for worker_id in owners:
        book.take_down(worker_id, slices_of(members, worker_id, values))
    return book, values


def reduced(values):
    """The step of a star in which one worker contributes the means with weight 1."""
    lease = Lease(lease_id=1, worker_id=0, worker_name="ant", start=0, stop=1)
    moment = Moment(epoch=1, step=7, attempt=0)
    step = Step(moment=moment, kind="train", num_microbatches=1, leases=[lease], chunk_elements=1 << 14)
    for bucket, mean_N in values.items():
        spec = TensorSpec(
            dtype="float32",
            num_elements=mean_N.size,
            component_sizes=(mean_N.size, *[0] * 8) if bucket.kind == "block" else (),
        )
        step.begin(lease, bucket, spec, [MicrobatchStats(microbatch=0, weight=1)])
        for start in range(0, mean_N.size, 1 << 14):
            step.rounds[bucket].contribute(1, 0, start, mean_N[start : start + (1 << 14)].copy())
    return step


@pytest.mark.parametrize("owners", [(0,), (0, 1), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3)])
def test_norm_and_hash_are_those_of_the_star_to_the_bit(owners):
    book, values = filled(owners)
    book.check_whole(len(values))
    star = reduced(values)
    assert book.gradient_norm() == star.gradient_norm()
    assert book.gradient_hash == star.gradient_hash
    assert book.num_elements == sum(mean_N.size for mean_N in values.values())


def test_norm_is_that_of_the_star_where_squares_cancel_in_rounding():
    big, small = np.float32(3e18), np.float32(1.7e-3)
    mean_N = np.full(4 * SEGMENT, small)
    mean_N[:: SEGMENT // 2] = big
    members = group(1, (0, 1, 2))
    book = SlicesBook("step 7", members)
    for worker_id in range(3):
        book.take_down(worker_id, slices_of(members, worker_id, {FLAT: mean_N}))
    assert book.gradient_norm() == reduced({FLAT: mean_N}).gradient_norm()


def test_the_first_of_a_torch_group_takes_down_whole_buckets():
    members = group(1, (1, 2), others=(0,), topology="torch")
    book, values = SlicesBook("step 7", members), means(**SIZES)
    book.take_down(0, slices_of(members, 0, values))
    book.check_whole(len(values))
    assert book.gradient_hash == reduced(values).gradient_hash


def test_a_step_without_buckets_is_whole():
    book, _ = filled((0, 1), {})
    book.check_whole(0)
    assert (book.gradient_norm(), book.gradient_hash) == (0.0, "")


def test_only_owners_have_slices():
    members = group(1, (0, 1), others=(2,))
    book, values = SlicesBook("step 7", members), means(flat=10)
    with pytest.raises(NotLeased, match="worker 2 reports slices and owns none; the owners are ant, bee"):
        book.take_down(2, [taken_down(values[FLAT], FLAT, 0, 10)])
    book.take_down(2, [])
    assert book.buckets == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"first_element": 5}, "from a multiple of 65536 on"),
        ({"first_element": 1 << 63}, "from a multiple of 65536 on"),
        ({"bucket_elements": 1 << 63}, "a slice has 1 to"),
        ({"num_elements": 0}, "a slice has 1 to"),
        ({"num_elements": SEGMENT + 1}, "16 bytes of digests, not 32"),
        ({"digests": b""}, "0 bytes of digests, not 16"),
        ({"squares": (1.0, math.nan)}, "finite floats"),
        ({"squares": (1.0,) * 65}, "at most 64"),
    ],
)
def test_an_impossible_slice_is_refused_and_nothing_of_it_counts(changes, sentence):
    book, values = SlicesBook("step 7", group(1, (0,))), means(b0=10, b1=10)
    good = taken_down(values[Bucket("block", 0)], Bucket("block", 0), 0, 10)
    bad = replace(taken_down(values[Bucket("block", 1)], Bucket("block", 1), 0, 10), **changes)
    with pytest.raises(BadRequest, match=sentence):
        book.take_down(0, [good, bad])
    assert book.buckets == []


def test_a_bucket_that_comes_twice_is_refused():
    book, values = SlicesBook("step 7", group(1, (0,))), means(flat=10)
    one = taken_down(values[FLAT], FLAT, 0, 10)
    with pytest.raises(BadRequest, match=r"slice \[0, 10\) of flat is refused: it comes twice"):
        book.take_down(0, [one, one])


def test_slices_that_do_not_make_up_every_bucket_are_found():
    members, values = group(1, (0, 1)), means(flat=4 * SEGMENT, b0=2 * SEGMENT)
    own = {worker: slices_of(members, worker, values) for worker in (0, 1)}
    for said, sentence in (
        ({0: own[0]}, "slices is"),
        ({0: own[0], 1: own[1][1:]}, "slices is"),
        ({1: own[1]}, "slices is"),
        ({0: own[0][:1], 1: own[1][:1]}, "num_buckets is 1; 2 is expected"),
    ):
        book = SlicesBook("step 7", members)
        for worker, slices in said.items():
            book.take_down(worker, slices)
        with pytest.raises(SpecMismatch, match=sentence):
            book.check_whole(2)


def test_a_slice_that_never_came_is_missed_wherever_it_lies():
    """Also where what came would make up a shorter bucket: the last slices are missed by the bucket's length alone."""
    names = [f"b{number}" for number in range(4)]
    for owners in ((0, 1), (0, 1, 2), (0, 1, 2, 3)):
        members, values = group(1, owners), means(**dict.fromkeys(names, len(owners) * SEGMENT - 7))
        for silent in owners:
            book = SlicesBook("step 7", members)
            for worker in owners:
                said = slices_of(members, worker, values)
                book.take_down(worker, said[1:] if worker == silent else said)
            with pytest.raises(SpecMismatch, match=f"of block 0 .*{NAMES[silent]} took down nothing"):
                book.check_whole(len(values))


def test_without_the_length_of_the_bucket_a_missing_last_slice_can_go_unseen():
    """What workers that do not say the length are still taken at: the reason for saying it."""
    members, values = group(1, (0, 1)), means(b0=2 * SEGMENT - 7)
    book = SlicesBook("step 7", members)
    book.take_down(0, [replace(one, bucket_elements=0) for one in slices_of(members, 0, values)])
    book.check_whole(1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"first_element": 3 * SEGMENT}, "of flat, which has 262144 elements, bee took it down"),
        (
            {"num_elements": SEGMENT, "digests": b"d" * 16},
            r"slice is \(131072, 196608\); \(131072, 262144\) is expected",
        ),
        ({"first_element": SEGMENT, "num_elements": 3 * SEGMENT, "digests": b"d" * 48}, r"slice is \(65536, 262144\)"),
        ({"bucket_elements": 4 * SEGMENT + 1}, "bucket_elements is 262145; 262144 is expected: ant and bee reduce"),
        ({"bucket_elements": 0, "first_element": 3 * SEGMENT}, ""),
    ],
)
def test_a_slice_that_is_short_or_overlaps_is_refused_by_name_at_once(changes, sentence):
    members, values = group(1, (0, 1)), means(flat=4 * SEGMENT)
    book = SlicesBook("step 7", members)
    book.take_down(0, slices_of(members, 0, values))
    (own,) = slices_of(members, 1, values)
    if sentence:
        with pytest.raises(SpecMismatch, match=sentence):
            book.take_down(1, [replace(own, **changes)])
        assert book.num_elements == 2 * SEGMENT
        book.take_down(1, [own])
        book.check_whole(1)
    else:
        book.take_down(1, [replace(own, **changes)])
        with pytest.raises(SpecMismatch, match="bee took down"):
            book.check_whole(1)
