"""Who may store a key: one at a time, and nobody for ever."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.blocks.objects.claims import Claim, Claimant, decode, successor

NOW, VALIDITY = 1_000_000.0, 300.0
MINE = Claimant(owner="mine", instance_id="group a")
HELD = Claim(owner="theirs", instance_id="group b", acquired_at=NOW - 10, deadline=NOW + 290, fence=4)
TIMES = st.floats(-1e9, 1e12)


def changed(**values: object) -> bytes:
    return json.dumps(asdict(HELD) | values).encode()


@given(st.text(max_size=9), st.text(max_size=9), TIMES, TIMES, st.integers(1, 10**9))
def test_claims_are_read_as_they_were_written(owner, instance_id, acquired_at, deadline, fence):
    claim = Claim(owner=owner, instance_id=instance_id, acquired_at=acquired_at, deadline=deadline, fence=fence)
    assert decode(claim.encode()) == claim


def test_golden():
    # Frozen: groups of several versions share a store.
    assert HELD.encode() == (
        b'{"owner": "theirs", "instance_id": "group b", "acquired_at": 999990.0, "deadline": 1000290.0, "fence": 4}'
    )


def test_what_a_later_version_adds_is_passed_over():
    assert decode(changed(color="blue")) == HELD


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"{}",
        b"x" * 5000,
        b"[" * 4000,
        changed(owner=7),
        changed(instance_id=None),
        changed(deadline="tomorrow"),
        changed(deadline=True),
        changed(deadline=float("nan")),
        changed(deadline=float("inf")),
        changed(acquired_at=10**300),
        changed(fence=1.5),
        changed(fence=False),
        json.dumps({k: v for k, v in asdict(HELD).items() if k != "deadline"}).encode(),
    ],
)
def test_malformed_lock_is_nobodys_claim_and_is_taken(data):
    assert decode(data) is None
    assert successor(decode(data), MINE, NOW, VALIDITY) == MINE.claim(NOW, VALIDITY)


@pytest.mark.fact("T107")
def test_others_claim_is_respected_while_it_holds():
    assert successor(HELD, MINE, NOW, VALIDITY) is None


@pytest.mark.fact("T106")
def test_owner_gets_its_claim_again_with_a_later_deadline():
    mine = MINE.claim(NOW - 200, VALIDITY, fence=4)
    assert successor(mine, MINE, NOW, VALIDITY) == replace(mine, acquired_at=NOW, deadline=NOW + VALIDITY)
    late = successor(mine, MINE, NOW + 10**6, VALIDITY)
    assert late is not None
    assert late.fence == 4, "nobody took it over meanwhile"


@pytest.mark.fact("T108")
def test_expired_claim_is_taken_over_and_the_fence_counts():
    taken = successor(HELD, MINE, HELD.deadline, VALIDITY)
    assert taken == MINE.claim(HELD.deadline, VALIDITY, fence=5)


def test_claim_is_respected_no_longer_than_the_asker_wants():
    long = replace(HELD, deadline=NOW + 10**6)
    assert successor(long, MINE, NOW, VALIDITY) is None
    assert successor(long, MINE, long.acquired_at + VALIDITY, VALIDITY) is not None


def test_claim_from_a_clock_far_ahead_blocks_nobody():
    ahead = replace(HELD, acquired_at=NOW + 10**6, deadline=NOW + 2 * 10**6)
    assert successor(ahead, MINE, NOW, VALIDITY) is not None


@pytest.mark.parametrize("skew", [-VALIDITY - 1, -VALIDITY, -1, 0, 1, VALIDITY - 1, VALIDITY])
def test_whose_clock_is_off_takes_a_fresh_claim_only_by_the_validity_or_more(skew):
    fresh = replace(HELD, acquired_at=NOW, deadline=NOW + VALIDITY)
    is_taken = successor(fresh, MINE, NOW + skew, VALIDITY) is not None
    assert is_taken == (skew >= VALIDITY or skew < -VALIDITY)


def test_same_group_but_another_process_is_another_owner():
    assert successor(replace(HELD, instance_id=MINE.instance_id), MINE, NOW, VALIDITY) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100)), min_size=1, max_size=30))
def test_fence_never_falls_and_owners_never_overlap(events):
    """Three claimants ask at times that only grow; a claim changes hands only after its deadline."""
    now, held = 0.0, None
    for owner, wait in events:
        now += wait
        following = successor(held, Claimant(owner=owner, instance_id=""), now, 50.0) if held else None
        if held and following and following.owner != held.owner:
            assert now >= held.deadline
            assert following.fence == held.fence + 1
        elif held and following:
            assert (following.fence, following.deadline) == (held.fence, now + 50.0)
        held = following or held or Claimant(owner=owner, instance_id="").claim(now, 50.0)
