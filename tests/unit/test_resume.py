"""What may change between the stop of a run and its next start, and what may not."""

from typing import Any

import pytest

from ayni.run_config import RunConfig
from ayni.settings import from_mapping, leaves, to_mapping
from coordinator_service.resume import resumable

OLD: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": 20,
    "task": {"name": "own:Task", "options": {"width": 32}},
    "batch": {"samples": 16, "microbatches": 4},
    "optimizer": {"schedule": "constant"},
}


def config(**changes: Any) -> dict[str, object]:
    values = {**OLD}
    for name, value in changes.items():
        values[name] = {**OLD[name], **value} if isinstance(value, dict) and name in OLD else value
    return to_mapping(from_mapping(RunConfig, values))


def test_the_same_settings_can_go_on():
    assert resumable(config(), config()) == []


def test_a_difference_is_a_sentence():
    assert resumable(config(), config(batch={"samples": 32})) == ["batch.samples is 32, the run was started with 16"]


def test_every_difference_is_named():
    problems = resumable(config(), config(seed=1, optimizer={"learning_rate": 0.5, "name": "sgd"}))
    assert [problem.split()[0] for problem in problems] == ["optimizer.learning_rate", "optimizer.name", "seed"]


def test_options_of_the_task_are_compared_one_by_one():
    assert resumable(config(), config(task={"options": {"depth": 2}})) == [
        "task.options.depth is 2, the run was started without it",
        "task.options.width is not given, the run was started with 32",
    ]


@pytest.mark.parametrize(("old", "new"), [("star", "sharded"), ("sharded", "auto"), ("torch", "torch")])
def test_topologies_with_the_same_bytes_may_follow_one_another(old, new):
    assert resumable(config(topology=old), config(topology=new)) == []


def test_a_topology_with_other_bytes_may_not():
    assert resumable(config(topology="star"), config(topology="torch")) == [
        "topology is torch, the run was started with star, sharded or auto"
    ]


@pytest.mark.parametrize(
    ("steps", "schedule", "sentences"),
    [
        (30, "constant", []),
        (0, "constant", []),
        (10, "constant", ["num_steps is 10, the run was started with 20: it may only grow"]),
        (30, "cosine", ["num_steps is 30, the run was started with 20: the learning rate's schedule depends on it; it "
                        "may only grow, and only with a constant schedule"]),
    ],
)  # fmt: skip
def test_a_run_may_become_longer_only_where_its_learning_rates_stay(steps, schedule, sentences):
    old = config(optimizer={"schedule": schedule}, task={"name": ""})
    new = config(optimizer={"schedule": schedule}, task={"name": ""}, num_steps=steps)
    assert resumable(old, new) == sentences


def test_an_endless_run_does_not_get_an_end():
    old = config(task={"name": ""}, num_steps=0)
    assert len(resumable(old, config(task={"name": ""}, num_steps=20))) == 1


def test_a_setting_that_an_older_version_did_not_know_had_its_default():
    old = config()
    del old["local_update"]
    assert resumable(old, config()) == []
    assert resumable(old, config(local_update={"enabled": True})) == [
        "local_update.enabled is True, the run was started with False"
    ]


def test_every_setting_either_takes_part_in_the_bytes_or_may_change():
    """A new key of the run file must be put on one of the two sides."""
    may_change = {
        "min_workers",
        "start_workers",
        "max_workers",
        "audit_every",
        "non_finite",
        "quarantine_after",
        "evaluation.every_steps",
        *(f"state.{name}" for name in ("publish_every", "store_every", "keep")),
        *(f"state.store.{name}" for name in ("kind", "bucket", "prefix", "endpoint", "region", "path_style")),
    }
    old = to_mapping(RunConfig())
    for leaf in leaves(RunConfig):
        new = to_mapping(RunConfig())
        place: Any = new
        *sections, name = leaf.path.split(".")
        for section in sections:
            place = place[section]
        place[name] = {"other": 1} if isinstance(place[name], dict) else "other"
        if leaf.path != "num_steps":
            assert bool(resumable(old, new)) == (leaf.path not in may_change), leaf.path
