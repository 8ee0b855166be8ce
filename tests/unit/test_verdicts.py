"""Whose parameters differ, from the hashes that workers give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator_service.audit import Verdict, judge


@pytest.mark.parametrize(
    ("hashes", "verdict"),
    [
        ({}, Verdict(majority="")),
        ({0: "", 1: ""}, Verdict(majority="")),
        ({0: "aa"}, Verdict(majority="aa")),
        ({0: "aa", 1: "aa", 2: "aa"}, Verdict(majority="aa")),
        ({0: "aa", 1: "bb", 2: "aa"}, Verdict(majority="aa", divergent=(1,))),
        ({5: "bb", 1: "cc", 3: "aa", 2: "aa"}, Verdict(majority="aa", divergent=(1, 5))),
        ({0: "aa", 1: "bb"}, Verdict(majority="", tie=True)),
        ({0: "aa", 1: "aa", 2: "bb", 3: "bb", 4: "cc"}, Verdict(majority="", tie=True)),
        ({0: "aa", 1: "bb", 2: ""}, Verdict(majority="", tie=True)),
        ({0: "aa", 1: "", 2: "bb", 3: "aa"}, Verdict(majority="aa", divergent=(2,))),
    ],
)
def test_the_minority_is_named_and_nobody_when_it_is_a_tie(hashes, verdict):
    assert judge(hashes) == verdict


@given(st.dictionaries(st.integers(0, 20), st.sampled_from(["", "aa", "bb", "cc"])))
def test_verdict_does_not_depend_on_the_order(hashes):
    assert judge(dict(reversed(hashes.items()))) == judge(hashes)
    verdict = judge(hashes)
    assert not (verdict.tie and verdict.divergent)
    for worker in verdict.divergent:
        assert hashes[worker] not in ("", verdict.majority)
