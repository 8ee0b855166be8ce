"""What a replay begins with, what it makes, and what counts as a difference."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ayni.run_config import RunConfig
from ayni.settings import SettingsError, from_mapping, to_mapping
from coordinator_service.config import RunFile
from coordinator_service.replay import (
    FINAL_PARAMETERS,
    FINAL_STEPS,
    Difference,
    compare,
    final_equal,
    plan_replay,
)
from coordinator_service.store_records import CommitRecord
from coordinator_service.wire_types import WireTypes
from tests.support.commits import commit

CONFIG: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": 12,
    "min_workers": 3,
    "start_workers": 4,
    "audit_every": 5,
    "task": {"name": "own:Task", "options": {"width": 32}},
    "batch": {"samples": 8, "microbatches": 4},
    "optimizer": {"update": "host", "epsilon": 1e-8},
    "evaluation": {"every_steps": 2},
    "state": {"publish_every": 3, "store_every": 3, "block_bytes": 8192},
}
COMMITS = [commit(step) for step in range(10)]


def facts(stored: Sequence[int] = (), **changes: Any) -> dict[str, str]:
    values = {**CONFIG}
    for name, value in changes.items():
        values[name] = {**CONFIG.get(name, {}), **value} if isinstance(value, dict) else value
    config = to_mapping(from_mapping(RunConfig, values))
    states = json.dumps({str(steps): 7 for steps in stored})
    return {"config": json.dumps(config), "stored_states": states, "num_training_samples": "20"}


def plan(asked: range = range(4, 6), source: str = "stored", **changes: Any):
    return plan_replay(facts(**changes), COMMITS, asked, source)


def test_without_a_stored_state_it_begins_with_the_initial_weights():
    assert plan().first_step == 0
    assert plan().run["state"] == to_mapping(from_mapping(RunConfig, CONFIG).state) | {
        "publish_every": 0,
        "store_every": 0,
        "resume_step": 0,
    }


@pytest.mark.parametrize(
    ("steps", "theirs", "ours", "equal"),
    [
        ("10", "aa", "aa", True),
        ("10", "aa", "bb", False),
        ("10", "aa", "", None),
        ("10", "", "aa", None),
        # The run has grown since its workers left it, and nobody left it at its new end.
        ("6", "aa", "bb", None),
        ("", "aa", "bb", None),
    ],
)
def test_last_parameters_are_compared_with_those_of_the_same_step(steps, theirs, ours, equal):
    made = plan_replay(facts(num_steps=10), COMMITS, range(8, 10), "start")
    assert final_equal(made, {FINAL_PARAMETERS: theirs, FINAL_STEPS: steps}, ours) is equal
    longer = plan_replay(facts(), COMMITS, range(8, 10), "start")
    assert final_equal(longer, {FINAL_PARAMETERS: theirs, FINAL_STEPS: steps}, ours) is None


def test_it_makes_one_step_more_than_asked_where_there_is_one():
    assert plan(range(4, 6)).stop_step == 7
    assert plan(range(4, 10)).stop_step == 10
    assert not plan(range(4, 10)).is_to_the_end
    assert plan_replay(facts(num_steps=10), COMMITS, range(4, 10), "start").is_to_the_end


@pytest.mark.parametrize(
    ("stored", "first"), [((3,), 3), ((4,), 4), ((5,), 0), ((10, 3, 6), 3), ((2, 3, 4), 4), ((), 0)]
)
def test_it_begins_with_the_newest_stored_state_at_or_before_the_first_step(stored, first):
    made = plan(stored=stored)
    assert made.first_step == first
    assert made.run["state"]["resume_step"] == first
    assert made.run["state"]["resume_run_id"] == ("toy" if first else "")


def test_a_run_that_stored_nothing_may_say_nothing_of_it():
    known = facts()
    del known["stored_states"]
    assert plan_replay(known, COMMITS, range(4, 6), "stored").first_step == 0


def test_a_run_that_went_on_from_another_begins_there():
    state = {"resume_step": 2, "resume_run_id": "older"}
    for source in ("stored", "start"):
        made = plan_replay(facts(state=state), COMMITS[2:], range(4, 6), source)
        assert (made.first_step, made.run["state"]["resume_run_id"]) == (2, "older")
    assert plan_replay(facts(state=state), COMMITS[2:], range(0, 6), "start").asked == range(2, 6)


def test_where_it_begins_can_be_said():
    assert plan(source="start", stored=(3,)).first_step == 0
    assert plan(source="2").first_step == 2
    for source in ("5", "0", "-1", "newest"):
        with pytest.raises(SettingsError, match="--from"):
            plan(source=source)


def test_settings_that_decide_the_bytes_stay_and_the_run_file_is_valid():
    made = plan()
    run, config = from_mapping(RunFile, made.run), from_mapping(RunConfig, CONFIG)
    assert (run.num_steps, run.seed, run.task) == (config.num_steps, config.seed, config.task)
    assert (run.batch, run.optimizer) == (config.batch, config.optimizer)
    assert (run.run_id, run.num_starters, run.audit_every, run.num_training_samples) == ("replay-toy", 1, 1, 20)
    assert run.evaluation.every_steps == 0
    assert made.caveats == ()


def test_the_coordinator_reduces_whoever_did_it_then():
    made = plan(topology="sharded")
    assert (made.run["topology"], made.caveats) == ("star", ())


def test_a_long_run_id_stays_a_run_id():
    assert from_mapping(RunFile, plan(run_id="r" * 64).run).run_id == "replay-" + "r" * 57


def test_where_the_optimizer_ran_is_taken_from_the_facts():
    known = {**facts(optimizer={"update": "auto"}), "update": "host"}
    assert plan_replay(known, COMMITS, range(1, 2), "start").run["optimizer"]["update"] == "host"


def test_one_micro_batch_for_each_worker_stays_as_many():
    assert plan(batch={"microbatches": 0}).run["batch"]["microbatches"] == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wire_type": "bfloat16"}, "wire_type is bfloat16"),
        ({"precision": "bfloat16"}, "precision is bfloat16"),
        ({"local_update": {"enabled": True}}, "local_update is enabled"),
        ({"topology": "torch"}, "topology is torch"),
        ({"optimizer": {"update": "device"}}, "the optimizer ran on the workers' devices"),
    ],
)
def test_what_promises_no_equality_is_said(changes, words):
    (caveat,) = plan(**changes).caveats
    assert words in caveat


def in_wire_types(*types: str) -> list[CommitRecord]:
    return [replace(record, wire_type=wire) for record, wire in zip(COMMITS, types, strict=True)]


@pytest.mark.parametrize(
    ("asked", "source", "first", "changes", "words"),
    [
        (range(0, 10), "start", "float32", {"3": "bfloat16", "7": "int8"}, "float32, then bfloat16, then int8"),
        (range(4, 6), "4", "bfloat16", None, "wire_type is bfloat16:"),
        (range(5, 9), "4", "bfloat16", {"7": "int8"}, "bfloat16, then int8"),
        (range(8, 9), "8", "int8", None, "wire_type is int8:"),
    ],
)
def test_each_step_is_made_again_in_its_own_wire_type(asked, source, first, changes, words):
    commits = in_wire_types(*["float32"] * 3, *["bfloat16"] * 4, *["int8"] * 3)
    made = plan_replay(facts(), commits, asked, source)
    assert made.run["wire_type"] == first
    assert made.run.get("wire_changes") == changes
    assert words in made.caveats[0]
    file = from_mapping(RunFile, made.run)
    types = WireTypes(file.wire_type, file.wire_changes)
    steps = range(made.first_step, made.stop_step)
    assert [types.at(step) for step in steps] == [commits[step].wire_type for step in steps]


def test_records_that_do_not_say_a_wire_type_are_of_the_runs():
    made = plan_replay(facts(wire_type="bfloat16"), COMMITS, range(4, 6), "start")
    assert (made.run["wire_type"], "wire_changes" in made.run) == ("bfloat16", False)


def test_steps_that_promise_no_equality_are_said():
    commits = [*COMMITS[:3], replace(COMMITS[3], skipped=(1,)), replace(COMMITS[4], num_microbatches=3), *COMMITS[5:]]
    made = plan_replay(facts(batch={"microbatches": 0}), commits, range(4, 5), "start")
    assert ["number of workers changed" in made.caveats[0], "steps 3" in made.caveats[1]] == [True, True]
    assert made.run["batch"]["microbatches"] == 0


@pytest.mark.parametrize("asked", [range(4, 11), range(10, 12), range(4, 4)])
def test_steps_that_are_not_there_are_refused(asked):
    with pytest.raises(SettingsError, match="the run has committed steps 0:10"):
        plan(asked)


def test_an_open_end_is_the_last_commit():
    assert plan(range(4, 1 << 62)).asked == range(4, 10)


def test_a_run_without_a_task_is_refused():
    with pytest.raises(SettingsError, match="names no task"):
        plan(task={"name": "", "options": {}})


def test_a_run_without_settings_is_refused():
    with pytest.raises(SettingsError, match="settings are not kept"):
        plan_replay({}, COMMITS, range(0, 1), "start")


def test_the_same_steps_are_equal():
    compared = compare(plan(), COMMITS, COMMITS[:7])
    assert (compared.equal, compared.steps_compared, compared.first_difference) == (True, 2, None)
    assert compared.unknown == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", 0.5),
        ("total_weight", 9),
        ("gradient_norm", 0.25),
        ("gradient_hash", "other"),
        ("parameters_sha256", "other"),
        ("position", 1),
    ],
)
def test_each_difference_is_found_and_the_first_is_told(name, value):
    replayed = [*COMMITS[:4], *(replace(record, **{name: value}) for record in COMMITS[4:7])]
    compared = compare(plan(), COMMITS, replayed)
    assert not compared.equal
    assert compared.first_difference == Difference(step=4, values={name: (getattr(COMMITS[4], name), value)})


def test_a_difference_before_the_asked_steps_is_told():
    replayed = [COMMITS[0], replace(COMMITS[1], loss=0.5), *COMMITS[2:7]]
    compared = compare(plan(), COMMITS, replayed)
    assert compared.first_difference
    assert (compared.equal, compared.first_difference.step) == (False, 1)


def test_parameters_behind_the_last_step_are_those_that_the_next_begins_with():
    replayed = [*COMMITS[:6], replace(COMMITS[6], parameters_sha256="other", loss=0.5)]
    compared = compare(plan(), COMMITS, replayed)
    assert compared.first_difference
    assert (compared.equal, compared.first_difference.step) == (False, 5)
    assert list(compared.first_difference.values) == ["parameters_sha256_after"]


def test_an_unknown_gradient_is_not_equal_and_no_difference():
    ledger = [replace(record, gradient_hash="") for record in COMMITS]
    compared = compare(plan(), ledger, COMMITS[:7])
    assert (compared.equal, compared.first_difference, compared.unknown) == (False, None, {"gradient_hash": 2})


def test_steps_without_an_audit_say_nothing_of_parameters():
    ledger = [replace(record, parameters_sha256="", loss=None) for record in COMMITS]
    compared = compare(plan(), ledger, COMMITS[:7])
    assert (compared.equal, compared.unknown) == (True, {"loss": 2, "parameters_sha256": 2})


def test_a_step_that_was_not_made_is_not_equal():
    compared = compare(plan(), COMMITS, COMMITS[:5])
    assert (compared.equal, compared.steps_compared) == (False, 1)
