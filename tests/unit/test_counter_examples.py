"""Known mistakes: each naive formula gives something else than the single run, and ours does not."""

import pytest

from tests.support.equality_counter_examples import CounterExample, counter_examples


@pytest.mark.parametrize("example", counter_examples(), ids=lambda example: example.name)
def test_naive_formula_fails_and_ours_passes(example: CounterExample):
    assert not example.is_met_by(example.naive())
    assert example.is_met_by(example.ours())
