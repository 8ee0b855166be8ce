"""Samples are counted from the ledger, stalls from the times of commits."""

from dataclasses import replace

import pytest

from coordinator_service.store_records import CommitRecord, Contribution
from scripts.chaos_job import default_job
from scripts.chaos_result import (
    Happened,
    count_samples,
    median_step,
    rounding,
    steps_per_second,
    worst_return,
    worst_stalls,
)
from scripts.chaos_schedule import Event


def commit(step: int, spans: list[tuple[int, int]], skipped: tuple[int, ...] = ()) -> CommitRecord:
    return CommitRecord(
        kind="train",
        step=step,
        attempt=0,
        epoch=1,
        position=step * 10,
        num_samples=10,
        num_microbatches=4,
        total_weight=10,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=0.1,
        clip_factor=1.0,
        best=False,
        num_correct=0,
        num_predictions=10,
        seed=0,
        gradient_hash="",
        parameters_sha256="",
        contributions=tuple(Contribution(worker_name="ant", start=a, stop=b, weight=1) for a, b in spans),
        skipped=skipped,
        left_behind=(),
        unix_time=float(step),
    )


WHOLE = [commit(0, [(0, 4)]), commit(1, [(0, 1), (1, 4)])]


def test_every_sample_once():
    assert (count_samples(WHOLE, 2, 10).missing, count_samples(WHOLE, 2, 10).duplicated) == (0, 0)


@pytest.mark.parametrize(
    ("commits", "missing", "duplicated"),
    [
        (WHOLE[:1], 10, 0),
        ([WHOLE[0], commit(1, [(1, 4)])], 2, 0),
        ([WHOLE[0], commit(1, [(0, 2), (1, 4)])], 0, 3),
        ([*WHOLE, WHOLE[1]], 0, 10),
        ([WHOLE[0], replace(WHOLE[1], position=5)], 5, 5),
        ([*WHOLE, commit(2, [(0, 4)])], 0, 10),
        ([], 20, 0),
    ],
    ids=["no step", "no micro-batch", "two shares overlap", "twice", "wrong position", "one step too many", "nothing"],
)
def test_what_is_missing_and_what_was_used_twice(commits, missing, duplicated):
    samples = count_samples(commits, 2, 10)
    assert (samples.missing, samples.duplicated) == (missing, duplicated)


def test_skipped_micro_batches_are_used_whether_or_not_somebody_contributed_them():
    assert count_samples([WHOLE[0], commit(1, [(1, 4)], (0,))], 2, 10).missing == 0
    assert count_samples([WHOLE[0], commit(1, [(0, 4)], (0,))], 2, 10).duplicated == 0


def test_evaluations_use_no_training_samples():
    evaluation = replace(WHOLE[0], kind="evaluate")
    assert count_samples([*WHOLE, evaluation], 2, 10).duplicated == 0


def test_rate_and_usual_step():
    assert steps_per_second([1.0, 1.5, 2.0, 5.0]) == pytest.approx(0.75)
    assert median_step([1.0, 1.5, 2.0, 5.0]) == pytest.approx(0.5)
    assert (steps_per_second([1.0]), median_step([1.0])) == (0.0, 0.0)


def happened(kind: str, moment: float) -> Happened:
    return Happened(event=Event(step=1, kind=kind, target="ant"), step=1, unix_time=moment)


def test_stall_is_the_longest_gap_from_the_event_to_the_next_one_less_a_usual_step():
    times = [0.0, 1.0, 2.0, 5.0, 6.0, 8.0, 9.0]
    assert worst_stalls(times, [happened("kill", 2.1)], 1.0) == {"kill": 2.0}
    assert worst_stalls(times, [happened("kill", 5.5)], 1.0) == {"kill": 1.0}
    assert worst_stalls(times, [happened("kill", 2.1), happened("stop", 6.5)], 1.0) == {"kill": 2.0, "stop": 1.0}


def test_gap_belongs_to_what_came_about_in_it_and_not_to_what_was_before():
    times = [0.0, 1.0, 2.0, 3.0, 9.0, 10.0]
    assert worst_stalls(times, [happened("kill", 1.1), happened("coordinator", 3.1)], 1.0) == {
        "kill": 0.0,
        "coordinator": 5.0,
    }
    assert worst_stalls(times, [happened("kill", 3.1), happened("stop", 3.2)], 1.0) == {"kill": 5.0, "stop": 5.0}


def test_worst_of_each_kind_and_spoilt_samples_have_no_part_in_what_comes_later():
    times = [0.0, 1.0, 3.0, 4.0, 8.0]
    assert worst_stalls(times, [happened("kill", 1.5), happened("kill", 3.5)], 1.0) == {"kill": 3.0}
    assert worst_stalls(times, [happened("stop", 0.5), happened("nan", 1.5)], 1.0) == {"stop": 3.0, "nan": 1.0}


def test_return_of_the_coordinator_is_from_its_first_breath_to_the_next_commit():
    assert worst_return([1.0, 2.0, 5.0, 6.0], [3.5, 5.5]) == 1.5
    assert worst_return([1.0, 2.0], []) is None
    assert worst_return([1.0, 2.0], [9.0]) is None


@pytest.mark.parametrize(("wire", "words"), [("float32", ""), ("bfloat16", "who computed what"), ("int8", "kept back")])
def test_with_a_wire_type_that_rounds_parameters_are_not_compared_with_one_workers(wire, words):
    job = default_job(20, 3, 10.0, with_nan=False, store_every=0)
    assert job.wire_type == "float32"
    assert job.with_wire(wire).wire_type == wire
    assert (job.with_wire(wire).key() == job.with_wire("float32").key()) == (wire == "float32")
    assert bool(rounding(wire)) == bool(words)
    assert words in rounding(wire)
