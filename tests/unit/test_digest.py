"""What is taken down of a mean: the same for every length of chunks, and for slices put together."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ayni.reduce.digest import DIGEST_BYTES, SEGMENT, MeanDigest, expansion, join_digests
from ayni.reduce.sums import SQUARES

RNG = np.random.default_rng(11)
MEAN = (RNG.standard_normal(3 * SEGMENT + 12345) * 10.0 ** RNG.integers(-12, 12, 3 * SEGMENT + 12345)).astype(
    np.float32
)


def taken(values: np.ndarray, chunk: int) -> MeanDigest:
    digest = MeanDigest()
    for start in range(0, values.size, chunk):
        digest.add(values[start : start + chunk])
    return digest


def test_the_hash_is_that_of_the_digests_of_segments():
    raw = MEAN.astype("<f4").tobytes()
    pieces = [raw[start : start + 4 * SEGMENT] for start in range(0, len(raw), 4 * SEGMENT)]
    digests = [xxhash.xxh3_128(piece).digest() for piece in pieces]
    digest = taken(MEAN, MEAN.size)
    assert digest.digests() == digests
    assert digest.hexdigest() == xxhash.xxh3_128(b"".join(digests)).hexdigest()
    assert {len(one) for one in digests} == {DIGEST_BYTES}


@pytest.mark.parametrize("chunk", [777, SQUARES, SQUARES + 1, SEGMENT, SEGMENT + 4096])
def test_the_length_of_chunks_does_not_show(chunk):
    whole, cut = taken(MEAN, MEAN.size), taken(MEAN, chunk)
    assert (cut.hexdigest(), cut.square_sum()) == (whole.hexdigest(), whole.square_sum())
    assert cut.square_expansion() == whole.square_expansion()


def test_one_other_bit_shows():
    other = MEAN.copy()
    other[2 * SEGMENT + 5] = np.nextafter(other[2 * SEGMENT + 5], np.float32(np.inf))
    assert taken(other, 9999).hexdigest() != taken(MEAN, 9999).hexdigest()


@pytest.mark.parametrize("cuts", [[SEGMENT], [SEGMENT, 3 * SEGMENT], [2 * SEGMENT]])
def test_slices_that_begin_at_segments_put_together_are_the_whole(cuts):
    bounds = zip([0, *cuts], [*cuts, MEAN.size], strict=True)
    parts = [taken(MEAN[start:stop], 10_000) for start, stop in bounds]
    whole = taken(MEAN, 65_536)
    assert join_digests(one for part in parts for one in part.digests()) == whole.hexdigest()
    assert math.fsum(one for part in parts for one in part.square_expansion()) == whole.square_sum()


def test_a_sum_of_rounded_slices_would_not_be_enough():
    """The reason for expansions: with these numbers a sum of rounded sums is another one."""
    numbers = [1.0, 2.0**-53, 2.0**-53, 2.0**-53]
    halves = numbers[:2], numbers[2:]
    assert math.fsum(math.fsum(half) for half in halves) != math.fsum(numbers)
    assert math.fsum(part for half in halves for part in expansion(half)) == math.fsum(numbers)


@given(st.lists(st.floats(0, 1e60), max_size=40), st.randoms())
def test_an_expansion_has_exactly_the_sum(numbers, order: random.Random):
    parts = expansion(numbers)
    assert sum(map(Fraction, parts)) == sum(map(Fraction, numbers))
    assert parts == sorted(parts, key=abs, reverse=True)
    order.shuffle(numbers)
    assert expansion(numbers) == parts


def test_nothing_has_an_empty_expansion():
    assert (expansion([]), expansion([0.0, 0.0]), MeanDigest().digests()) == ([], [], [])
