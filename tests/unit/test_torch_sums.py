"""What a member of a torch group adds, and what it counts."""

import numpy as np
import pytest

from ayni.buckets import FLAT, Bucket
from ayni.errors import BadRequest, NonFinite, SpecMismatch
from ayni.run_config import RunConfig
from tests.support.torch_offers import offer
from worker_agent.torch_sums import Sums, Tally, key_of, pieces, unpacked


def sums(of: int = 8) -> Sums:
    return Sums("ant", of)


def test_numbers_of_tallies_add_up_to_the_number_of_their_sum():
    total = Tally(count=3, weight=1 << 30).packed() + Tally(count=5, weight=7).packed()
    assert unpacked(total) == Tally(count=8, weight=(1 << 30) + 7)


def test_a_lease_is_counted_with_its_first_bucket_only():
    own = sums()
    assert own.add(offer(0, 3, 8, weight=2, size=4)) == Tally(count=3, weight=6)
    assert own.add(offer(0, 3, 8, weight=2, size=5, bucket=Bucket("block", 1))) is None
    assert own.add(offer(5, 6, 8, size=4)) == Tally(count=1, weight=1)


def test_a_bucket_is_whole_when_every_lease_has_brought_it():
    own, block = sums(), Bucket("block", 1)
    own.add(offer(0, 3, 8, size=4))
    assert own.is_whole(FLAT)
    assert not own.is_whole(block)
    own.add(offer(5, 6, 8, size=5, bucket=block))
    assert not own.is_whole(FLAT)
    own.add(offer(5, 6, 8, size=4))
    assert own.is_whole(FLAT)


def test_parts_are_added_in_the_order_of_their_micro_batches_whatever_comes_first():
    parts = {m: np.array([10.0**-m, 3.0 * m], np.float32) for m in range(8)}
    totals = []
    for order in ([0, 4, 6], [6, 0, 4]):
        own = sums()
        for start in order:
            own.add(offer(start, start + 2, 8, size=2, parts=[parts[start], parts[start + 1]]))
        total = np.empty(2, np.float32)
        own.add_up(FLAT, total)
        totals.append(total)
    expected = np.zeros(2, np.float32)
    for m in (0, 1, 4, 5, 6, 7):
        expected = expected + parts[m]
    assert [total.tobytes() for total in totals] == [expected.tobytes()] * 2


def test_who_has_nothing_adds_zeros():
    own = sums()
    own.add(offer(0, 0, 8, size=3))
    total = np.full(3, np.nan, np.float32)
    own.add_up(FLAT, total)
    assert total.tolist() == [0, 0, 0]


def test_parts_are_not_written_to():
    own, part = sums(), np.ones(3, np.float32)
    own.add(offer(0, 2, 8, size=3, parts=[part, part]))
    own.add_up(FLAT, np.empty(3, np.float32))
    assert part.tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name_before_anybody_adds_it(bad):
    own = sums()
    own.add(offer(0, 1, 8, size=3, parts=[np.array([0, bad, 0], np.float32)]))
    with pytest.raises(NonFinite, match=r"flat of step 0: worker ant contributes .* at element 1"):
        own.add_up(FLAT, np.empty(3, np.float32))


def test_what_is_not_finite_is_found_in_every_piece_and_named_by_its_place_in_the_bucket():
    own, size = sums(), 300_000
    part = np.ones(size, np.float32)
    part[size - 1] = np.inf
    own.add(offer(0, 1, 8, size=size, parts=[part]))
    with pytest.raises(NonFinite, match="contributes inf at element 299999"):
        own.add_up(FLAT, np.empty(size, np.float32))


def test_finite_sums_that_overflow_are_refused():
    own = sums()
    huge = np.full(3, np.finfo(np.float32).max, np.float32)
    own.add(offer(0, 2, 8, size=3, parts=[huge, huge]))
    with pytest.raises(NonFinite, match="contributes inf at element 0"):
        own.add_up(FLAT, np.empty(3, np.float32))


def test_pieces_make_up_the_vector():
    size = 300_001
    taken = np.concatenate([np.arange(size)[piece] for piece in pieces(size)])
    assert taken.tolist() == list(range(size))
    assert len(list(pieces(size))) > 1


def test_a_bucket_of_another_length_is_refused():
    own = sums()
    own.add(offer(0, 3, 8, size=4))
    with pytest.raises(SpecMismatch, match="has 5 elements here and 4 with another lease of this worker"):
        own.add(offer(5, 6, 8, size=5))
    own.check_length(FLAT, 4)
    with pytest.raises(SpecMismatch, match="has 4 elements here and 9 with the worker of the lowest rank"):
        own.check_length(FLAT, 9)


def test_a_step_that_can_not_be_counted_is_refused():
    with pytest.raises(BadRequest, match="weighs less than"):
        sums().add(offer(0, 1, 1 << 20, weight=1 << 21, size=1))
    assert sums().add(offer(0, 1, 1 << 20, weight=(1 << 20) - 1, size=1))


def test_the_attempt_of_an_offer():
    assert key_of(offer(0, 1, 8, step=4, attempt=2)) == (1, 4, 2)


@pytest.mark.parametrize("wire_type", ["bfloat16", "float16", "int8"])
def test_a_torch_group_adds_float32_and_no_other_type_is_promised(wire_type):
    assert RunConfig(topology="torch").wire_type == "float32"
    with pytest.raises(ValueError, match=f"wire_type is {wire_type}; with topology torch it must be float32"):
        RunConfig(topology="torch", wire_type=wire_type)
    assert RunConfig(topology="sharded", wire_type=wire_type)
