"""The ledger's checks find what is wrong, count it to the sample, and find nothing where nothing is."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni import order
from ayni.run_config import BatchConfig, RunConfig, StateConfig
from ayni.settings import SettingsError, to_mapping
from coordinator_service.ledger import Data, check, data_from
from coordinator_service.store_records import Contribution
from tests.support.commits import commit, shared

DATA = Data(seed=5, batch_samples=8, num_samples=20)


def run(steps: int = 6, **changes):
    return [commit(step, **changes) for step in range(steps)]


def names(checked) -> list[str]:
    return [problem.name for problem in checked.problems]


def test_a_whole_run_has_no_problems():
    records = [*run(), commit(6, kind="evaluate")]
    checked = check(records, DATA)
    assert checked.problems == ()
    assert (checked.steps, checked.evaluations, checked.passes, checked.samples) == (6, 1, 2, 48)
    assert (checked.samples_missing, checked.samples_duplicated, checked.samples_skipped) == (0, 0, 0)


def test_no_commits_is_no_problem():
    checked = check([], DATA)
    assert (checked.steps, checked.passes, checked.samples, checked.problems) == (0, 0, 0, ())


def test_a_run_that_went_on_from_a_stored_state_begins_there():
    checked = check(run(8)[3:], replace(DATA, first_step=3))
    assert (checked.problems, checked.samples, checked.samples_missing) == ((), 40, 0)
    assert checked.passes == 1, "positions 24 to 63 hold the whole pass 40 to 59"


def test_a_missing_step_is_named_and_its_samples_counted():
    records = run()
    del records[2]
    checked = check(records, DATA)
    assert names(checked) == ["step"]
    assert checked.problems[0].sentence == "step 3 is where step 2 was due"
    assert (checked.samples_missing, checked.samples_duplicated) == (8, 0)


def test_a_missing_first_step_is_named():
    assert names(check(run()[1:], DATA)) == ["step"]


def test_a_step_that_is_there_twice_is_named_and_its_samples_counted():
    records = run()
    checked = check([*records[:3], records[2], *records[3:]], DATA)
    assert names(checked) == ["step"]
    assert (checked.samples_missing, checked.samples_duplicated) == (0, 8)


def test_a_micro_batch_that_nobody_contributed():
    lost = shared(4, 8, cuts=(1, 2))
    records = run()
    records[1] = replace(records[1], contributions=(lost[0], lost[2]), total_weight=6)
    checked = check(records, DATA)
    assert [p.sentence for p in checked.problems] == ["step 1 lacks micro-batches [1, 2)"]
    assert (checked.samples_missing, checked.samples_duplicated) == (2, 0)


def test_a_micro_batch_that_two_contributed():
    both = (
        Contribution(worker_name="ant", start=0, stop=3, weight=6),
        Contribution(worker_name="bee", start=2, stop=4, weight=4),
    )
    records = run()
    records[4] = replace(records[4], contributions=both, total_weight=10)
    checked = check(records, DATA)
    assert [p.sentence for p in checked.problems] == ["step 4 has micro-batches [2, 3) twice or out of order"]
    assert (checked.samples_missing, checked.samples_duplicated) == (0, 2)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"total_weight": 9}, "weight"),
        ({"position": 25}, "position"),
        ({"seed": 6}, "seed"),
        ({"num_samples": 7}, "samples"),
        ({"epoch": 0}, "epoch"),
        ({"skipped": (4,)}, "skipped"),
        ({"contributions": shared(3, 8), "total_weight": 8}, "cover"),
        ({"contributions": shared(5, 8), "total_weight": 8}, "cover"),
        ({"contributions": tuple(reversed(shared(4, 8))), "total_weight": 8}, "cover"),
        ({"num_microbatches": 0}, "cover"),
        ({"position": -8}, "position"),
    ],
)
def test_each_damage_is_named(changes, name):
    records = run()
    records[3] = replace(records[3], **changes)
    checked = check(records, DATA)
    assert name in names(checked)
    assert {problem.step for problem in checked.problems} == {3}


def test_an_evaluation_must_stand_where_it_was_made():
    assert names(check([*run(2), commit(3, kind="evaluate")], DATA)) == ["step"]


def test_an_evaluation_uses_no_training_samples():
    checked = check([commit(0), commit(1, kind="evaluate"), commit(1)], DATA)
    assert (checked.problems, checked.samples) == ((), 16)


def test_skipped_micro_batches_are_counted_apart():
    records = run()
    records[2] = replace(records[2], skipped=(1, 3), total_weight=8)
    checked = check(records, DATA)
    assert (checked.problems, checked.samples_skipped, checked.samples_missing) == ((), 4, 0)


def test_without_the_number_of_samples_positions_are_counted():
    data = replace(DATA, num_samples=0)
    assert check(run(), data).samples == 48
    records = run()
    del records[2]
    assert check(records, data).samples_missing == 8


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 40), st.integers(1, 12), st.data())
def test_samples_are_counted_as_if_one_by_one(steps, batch, num_samples, microbatches, draw):
    """Against the plain way: a list of all uses of all samples."""
    microbatches = min(microbatches, batch)
    records = [commit(step, batch=batch, microbatches=microbatches) for step in range(steps)]
    chosen = draw.draw(st.lists(st.sampled_from(records), min_size=1))
    checked = check(chosen, Data(seed=5, batch_samples=batch, num_samples=num_samples))
    uses: dict[tuple[int, int], int] = {}
    for record in chosen:
        for position in range(record.position, record.position + record.num_samples):
            dataset_pass = position // num_samples
            sample = int(order.samples_at(5, position, position + 1, num_samples)[0])
            uses[dataset_pass, sample] = uses.get((dataset_pass, sample), 0) + 1
    due = (max(record.step for record in chosen) + 1) * batch
    assert checked.samples == sum(uses.values())
    assert checked.samples_missing == due - len(uses)
    assert checked.samples_duplicated == sum(uses.values()) - len(uses)


def test_facts_say_what_the_samples_are():
    config = RunConfig(seed=5, batch=BatchConfig(samples=8), num_steps=9, state=StateConfig(resume_step=3))
    facts = {"config": json.dumps(to_mapping(config)), "num_training_samples": "20"}
    assert data_from(facts) == Data(seed=5, batch_samples=8, first_step=3, num_samples=20)


def test_facts_without_settings_are_refused():
    with pytest.raises(SettingsError, match="settings are not kept"):
        data_from({})
