"""Micro-batches of the dead, split among the living."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from coordinator_service.orphans import Grant, Taker, split_orphans


@st.composite
def some_ranges(draw, largest=12):
    edges = sorted(draw(st.sets(st.integers(0, largest), max_size=6)))
    return list(itertools.pairwise(edges))[:: draw(st.sampled_from([1, 2]))]


NO_LIMIT = st.just(-1)


@st.composite
def some_takers(draw, num=8, room=NO_LIMIT):
    parts = st.tuples(st.floats(0.01, 100), st.floats(0, 20), room)
    drawn = draw(st.lists(parts, min_size=1, max_size=num))
    return [Taker(worker_id=10 + i, speed=s, free_in=f, room=r) for i, (s, f, r) in enumerate(drawn)]


def all_of(ranges):
    return [m for start, stop in sorted(ranges) for m in range(start, stop)]


def counts(grants, takers):
    return {t.worker_id: sum(g.stop - g.start for g in grants if g.worker_id == t.worker_id) for t in takers}


def finish(counts, takers):
    """When the last one that gets something is done."""
    return max(
        (t.free_in + counts[t.worker_id] / t.speed for t in takers if counts[t.worker_id]),
        default=0.0,
    )


@given(ranges=some_ranges(60), takers=some_takers(room=st.integers(-1, 5)), draw=st.randoms(use_true_random=False))
def test_everything_is_granted_once_inside_its_range_whatever_the_order(ranges, takers, draw):
    grants = split_orphans(ranges, takers)
    assert [m for grant in grants for m in range(grant.start, grant.stop)] == all_of(ranges)
    for grant in grants:
        assert sum(start <= grant.start < grant.stop <= stop for start, stop in ranges) == 1
    assert len(grants) <= len(ranges) + len(takers)
    shuffled = (draw.sample(ranges, len(ranges)), draw.sample(takers, len(takers)))
    assert split_orphans(*shuffled) == grants


@given(ranges=some_ranges(60), takers=some_takers(room=st.integers(-1, 5)))
def test_room_is_respected_while_there_is_some(ranges, takers):
    got = counts(split_orphans(ranges, takers), takers)
    total = len(all_of(ranges))
    limits = {t.worker_id: total if t.room < 0 else t.room for t in takers}
    if sum(limits.values()) >= total:
        assert all(got[worker] <= limits[worker] for worker in limits)
    else:
        assert all(got[worker] >= limits[worker] for worker in limits)


@given(ranges=some_ranges(7), takers=some_takers(num=3))
def test_no_other_split_ends_earlier(ranges, takers):
    total, workers = len(all_of(ranges)), [t.worker_id for t in takers]
    others = itertools.product(range(total + 1), repeat=len(takers))
    best = min(finish(dict(zip(workers, o, strict=True)), takers) for o in others if sum(o) == total)
    assert finish(counts(split_orphans(ranges, takers), takers), takers) <= best * (1 + 1e-9)


@given(total=st.integers(1, 500), takers=some_takers())
def test_nobody_else_would_be_done_earlier_with_the_last_micro_batch_of_anybody(total, takers):
    got = counts(split_orphans([(0, total)], takers), takers)
    done = {t.worker_id: t.free_in + got[t.worker_id] / t.speed for t in takers if got[t.worker_id]}
    for taker in takers:
        with_one_more = taker.free_in + (got[taker.worker_id] + 1) / taker.speed
        assert all(with_one_more >= other * (1 - 1e-9) for other in done.values())


def test_the_fast_get_more_and_the_busy_less():
    fast, slow = Taker(worker_id=1, speed=4), Taker(worker_id=2, speed=1)
    assert split_orphans([(8, 18)], [slow, fast]) == [
        Grant(worker_id=1, start=8, stop=16),
        Grant(worker_id=2, start=16, stop=18),
    ]
    busy = Taker(worker_id=3, speed=4, free_in=100)
    assert counts(split_orphans([(0, 10)], [busy, slow]), [busy, slow]) == {2: 10, 3: 0}


def test_unknown_speeds_count_as_the_mean():
    takers = [Taker(worker_id=1, speed=3), Taker(worker_id=2, speed=0), Taker(worker_id=3, speed=1)]
    assert counts(split_orphans([(0, 6)], takers), takers) == {1: 3, 2: 2, 3: 1}
    unknown = [Taker(worker_id=1, speed=0), Taker(worker_id=2, speed=0)]
    assert counts(split_orphans([(0, 6)], unknown), unknown) == {1: 3, 2: 3}


def test_without_any_room_the_room_is_ignored():
    takers = [Taker(worker_id=1, speed=1, room=0), Taker(worker_id=2, speed=1, room=0)]
    assert counts(split_orphans([(0, 4)], takers), takers) == {1: 2, 2: 2}


def test_without_takers_nothing_is_granted():
    assert split_orphans([(0, 4)], []) == []
    assert split_orphans([], [Taker(worker_id=1, speed=1)]) == []
