"""Shares in proportion to speed."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.tree import cover
from coordinator_service.alignment import align
from coordinator_service.plan import slowed, smoothed
from coordinator_service.shards import Bid, plan_shards

speeds = st.lists(st.floats(0.01, 1000), min_size=1, max_size=12)
bids = st.lists(
    st.builds(
        Bid, speed=st.one_of(st.just(0.0), st.floats(0.01, 1000)), cap=st.integers(0, 40), following=st.booleans()
    ),
    min_size=1,
    max_size=12,
)


def of_speeds(speeds):
    return [Bid(speed=speed) for speed in speeds]


def counts(shares):
    return [share.stop - share.start for share in shares]


def ranges(shares):
    return [(share.start, share.stop) for share in shares]


def finish(counts, speeds):
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def vectors(counts):
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [len(cover(start, start + count, sum(counts))) for start, count in zip(starts, counts, strict=True)]


@given(num=st.integers(0, 500), bids=bids, previous=bids)
def test_shares_are_disjoint_and_exhaustive_and_say_why(num, bids, previous):
    before = ranges(plan_shards(num, (previous * len(bids))[: len(bids)]))
    for shares in (plan_shards(num, bids), plan_shards(num, bids, before)):
        assert [m for start, stop in ranges(shares) for m in range(start, stop)] == list(range(num))
        assert all(share.reason for share in shares)


@given(num=st.integers(0, 500), speeds=speeds)
def test_shares_are_within_one_of_the_proportion(unaligned_plan, num, speeds):
    for count, speed in zip(unaligned_plan(num, of_speeds(speeds)), speeds, strict=True):
        assert abs(count - num * speed / sum(speeds)) < 1 + 1e-6


@pytest.fixture(scope="module")
def unaligned_plan():
    def plan(num, bids):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("coordinator_service.shards.align", lambda counts, most: list(counts))
            return counts(plan_shards(num, bids))

    return plan


@pytest.mark.parametrize(
    ("num", "speeds", "expected"),
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
def test_largest_remainder(unaligned_plan, num, speeds, expected):
    assert unaligned_plan(num, of_speeds(speeds)) == expected


@given(num=st.integers(0, 200), bids=bids)
def test_caps_hold_unless_everybody_is_at_theirs(num, bids):
    taking = [bid for bid in bids if not bid.following] or bids
    room = num if any(not bid.cap for bid in taking) else sum(bid.cap for bid in taking)
    for bid, count in zip(bids, counts(plan_shards(num, bids)), strict=True):
        if bid in taking and bid.cap:
            assert count <= bid.cap if room >= num else count >= bid.cap


@pytest.mark.parametrize(
    ("num", "bids", "expected"),
    [
        (16, [(1, 2), (1, 0), (1, 0)], [2, 7, 7]),
        (12, [(9, 4), (1, 0), (1, 5)], [4, 4, 4]),
        (12, [(2, 3), (1, 3)], [7, 5]),
        (12, [(2, 6), (1, 6)], [6, 6]),
        (4, [(5, 1), (0, 1), (5, 0)], [1, 1, 2]),
    ],
)
def test_what_a_cap_leaves_goes_to_the_others(unaligned_plan, num, bids, expected):
    assert unaligned_plan(num, [Bid(speed=speed, cap=cap) for speed, cap in bids]) == expected


def test_followers_get_nothing_unless_everybody_follows():
    follower, member = Bid(speed=9, following=True), Bid(speed=1)
    assert counts(plan_shards(8, [follower, member, follower])) == [0, 8, 0]
    assert counts(plan_shards(8, [follower, follower])) == [4, 4]
    assert counts(plan_shards(8, [Bid(speed=2), follower, Bid(speed=0), Bid(speed=2)])) == [3, 0, 3, 2]


def test_a_worker_that_is_four_times_slower_has_a_quarter_after_one_step():
    for num in (20, 64, 100, 1024):
        equal = ranges(plan_shards(num, of_speeds([0, 0])))
        fast, slow = counts(plan_shards(num, of_speeds([400, 100]), equal))
        assert fast / slow == pytest.approx(4, rel=0.1)


@given(num=st.integers(0, 300), speeds=speeds)
def test_alignment_costs_at_most_three_percent_of_the_step(unaligned_plan, num, speeds):
    planned, aligned = unaligned_plan(num, of_speeds(speeds)), counts(plan_shards(num, of_speeds(speeds)))
    assert finish(aligned, speeds) <= 1.03 * finish(planned, speeds) * (1 + 1e-9)
    assert [count > 0 for count in aligned] == [count > 0 for count in planned]


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=8), more=st.integers(0, 5))
def test_alignment_never_scatters_more_workers(counts, more):
    aligned = align(counts, [count + more for count in counts])
    assert sum(aligned) == sum(counts)
    assert all(new <= old + more for new, old in zip(aligned, counts, strict=True))
    assert sum(num > 1 for num in vectors(aligned)) <= sum(num > 1 for num in vectors(counts))


def test_more_workers_send_one_vector_with_alignment(unaligned_plan):
    draw = random.Random(7)
    without, along = [], []
    for _ in range(200):
        num, bids = draw.choice([16, 32, 64, 128]), of_speeds(draw.choices([1, 2, 3, 4, 5], k=draw.randint(2, 8)))
        without += [number <= 1 for number in vectors(unaligned_plan(num, bids))]
        along += [number <= 1 for number in vectors(counts(plan_shards(num, bids)))]
    assert sum(along) > 1.2 * sum(without)


def test_alignment_finds_the_shares_that_are_whole_nodes():
    assert counts(plan_shards(16, of_speeds([1, 1, 1]))) == [6, 6, 4]
    assert counts(plan_shards(256, of_speeds([65, 63, 128]))) == [64, 64, 128]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("true", [[4, 2, 1], [1, 1, 1, 1], [8, 3, 3, 1], [1, 1.7]])
def test_jitter_of_a_tenth_changes_nothing_in_50_steps(seed, true):
    draw = random.Random(seed)
    now, shares, seen = [0.0] * len(true), None, set()
    for step in range(52):
        now = [smoothed(old, 1000, 1000 / (new * draw.uniform(0.9, 1.1))) for old, new in zip(now, true, strict=True)]
        shares = ranges(plan_shards(8 * len(true), of_speeds(now), shares))
        seen |= {tuple(shares)} if step > 1 else set()
    assert len(seen) == 1


@pytest.mark.parametrize(("num", "factor"), [(8, 0.25), (8, 4), (32, 0.5), (32, 2), (32, 4), (100, 0.5), (100, 2)])
def test_a_real_change_of_speed_moves_shares_within_three_steps(num, factor):
    now, true = [1.0, 1.0], [1.0, factor]
    start = shares = ranges(plan_shards(num, of_speeds(now)))
    for _ in range(3):
        now = [smoothed(old, 1000, 1000 / new) for old, new in zip(now, true, strict=True)]
        shares = ranges(plan_shards(num, of_speeds(now), shares))
    assert shares != start


@given(num=st.integers(8, 300), factor=st.floats(2, 100))
def test_a_known_change_of_speed_moves_shares_at_once(num, factor):
    equal = ranges(plan_shards(num, of_speeds([1, 1])))
    assert counts(plan_shards(num, of_speeds([1, factor]), equal))[1] > num / 2


@given(num=st.integers(1, 300), speeds=speeds, draw=st.randoms(use_true_random=False))
def test_kept_shares_are_at_most_an_eighth_and_a_rounding_worse(num, speeds, draw):
    before = ranges(plan_shards(num, of_speeds([speed * draw.uniform(0.5, 2) for speed in speeds])))
    exact = [num * speed / sum(speeds) for speed in speeds]
    now = counts(plan_shards(num, of_speeds(speeds), before))
    in_time = finish(now, speeds) <= 1.125 * finish(counts(plan_shards(num, of_speeds(speeds))), speeds) * (1 + 1e-9)
    assert in_time or all(count <= 1.125 * share + 0.75 for count, share in zip(now, exact, strict=True))


def test_shares_of_the_step_before_are_not_kept_where_they_are_not_allowed():
    before = [(0, 8), (8, 16)]
    assert counts(plan_shards(16, [Bid(speed=1, following=True), Bid(speed=1)], before)) == [0, 16]
    assert counts(plan_shards(16, [Bid(speed=1, cap=7), Bid(speed=1)], before)) == [7, 9]
    assert counts(plan_shards(16, of_speeds([9, 1]), [(0, 16), (16, 16)]))[1] > 0
    assert counts(plan_shards(8, of_speeds([1, 1]), before)) == [4, 4]
    assert counts(plan_shards(16, of_speeds([1, 1, 2]), before)) == [4, 4, 8]


def test_reasons_are_sentences_for_people():
    def reasons(num, bids, previous=None):
        return [share.reason for share in plan_shards(num, bids, previous)]

    assert reasons(16, of_speeds([410, 136]))[0] == "12 of 16 micro-batches: 410 samples/s of 546"
    assert reasons(16, [Bid(speed=9, cap=4), Bid(speed=1)])[0] == "capped at 4 micro-batches by its memory"
    assert reasons(16, [Bid(speed=3), Bid(speed=0), Bid(speed=1, following=True)])[1:] == [
        "8 of 16 micro-batches: no speed known yet: counted as the mean of the others",
        "none: its parameters lag behind",
    ]
    assert reasons(2, of_speeds([5, 5, 1]))[2] == "none: 1 samples/s of 11 are too few for one of 2 micro-batches"
    assert reasons(6, [Bid(speed=1, cap=2), Bid(speed=1, cap=2)])[0] == (
        "3 of 6 micro-batches: 1 samples/s of 2, above its cap of 2 because nobody has room"
    )
    assert reasons(64, of_speeds([105, 100]), [(0, 32), (32, 64)])[0] == (
        "32 of 64 micro-batches: 105 samples/s of 205, kept: new shares would hardly be faster"
    )
    assert reasons(16, of_speeds([1, 1, 1]))[2] == (
        "4 of 16 micro-batches: 1 samples/s of 3, chosen so that fewer vectors are sent"
    )


@pytest.mark.parametrize(
    ("speed", "samples", "seconds", "expected"),
    [
        (0.0, 16, 4.0, 2.0),  # Not known yet: it could not do 16 samples in 4 s.
        (100.0, 16, 4.0, 50.0),  # Late once: half as fast, not a fiftieth.
        (3.0, 16, 4.0, 2.0),
        (1.0, 16, 4.0, 1.0),  # Slower already than what it has shown.
        (5.0, 0, 4.0, 5.0),
    ],
)
def test_worker_that_was_left_behind_counts_as_slower(speed, samples, seconds, expected):
    assert slowed(speed, samples, seconds) == expected


def test_slow_newcomer_gets_a_share_that_it_can_do_within_a_few_steps():
    """It does 1 sample/s, the others 100 each, and the deadline is 2 s: it may not be left behind for ever."""
    speed, samples = 0.0, 96
    for _ in range(12):
        shares = plan_shards(48, [Bid(speed=100.0), Bid(speed=100.0), Bid(speed=speed)])
        own = (shares[2].stop - shares[2].start) * samples // 48
        if own <= 2:
            return
        speed = slowed(speed, own, 2.0)
    raise AssertionError(f"it still gets {own} samples")
