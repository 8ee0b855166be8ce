"""What a follower keeps, which states it takes, and what it says of the others."""

import logging

import numpy as np
import pytest

from ayni.buckets import FLAT
from ayni.run_config import BatchConfig, OptimizerConfig, RunConfig, TaskConfig
from tests.support.local_session import LocalRun, LocalSource
from tests.support.toy_task import toy_task
from worker_agent.session import Commit, ShardAssignment
from worker_agent.training.events import StepEvent
from worker_agent.training.following import Follower, State
from worker_agent.training.loop import Trainer, TrainingConfig

MEAN_BYTES = 40


def lease(step: int) -> ShardAssignment:
    return ShardAssignment(
        step=step, attempt=0, epoch=1, kind="train", lease_id=1, microbatch_start=0, microbatch_stop=0,
        num_microbatches=8, position=0, num_samples=8, shard_start=0, shard_end=0, rank=1, world_size=2, update="host",
    )  # fmt: skip


def commit(step: int) -> Commit:
    return Commit(
        step=step, attempt=0, total_weight=8, global_loss=1.0, gradient_norm=1.0, num_correct=0, num_predictions=0,
        learning_rate=0.1, clip_factor=1.0, best=False,
    )  # fmt: skip


def state(steps: int) -> State:
    return State(tensors={}, facts={}, completed_steps=steps)


def keeping(steps: range, limit_bytes: int = 10**6) -> tuple[Follower, LocalSource]:
    source = LocalSource()
    follower = Follower(source, limit_bytes)
    means = {FLAT: np.zeros(MEAN_BYTES // 4, np.float32)}
    for step in steps:
        follower.follow(step, "this worker's parameters have had 1 updates")
        means[FLAT][:] = step
        follower.keep(lease(step), commit(step), means)
    return follower, source


def kept_steps(follower: Follower, since: int = 0) -> list[int]:
    return [kept.lease.step for kept in follower.steps_from(since)]


def test_means_are_copies_and_go_on_from_the_state() -> None:
    follower, source = keeping(range(4, 9))
    source.deliver(state(6))
    follower.follow(9, "")
    found = follower.take_state(9)
    assert found is not None
    assert kept_steps(follower, found.completed_steps) == [6, 7, 8]
    assert [float(kept.means[FLAT][0]) for kept in follower.steps_from(6)] == [6.0, 7.0, 8.0]
    assert source.wanted == [4]
    assert follower.take_state(9) is None


@pytest.mark.parametrize(("steps", "taken"), [(3, False), (4, True), (9, True), (10, False)])
def test_a_state_fits_from_the_first_kept_mean_to_the_open_step(steps: int, taken: bool) -> None:
    follower, source = keeping(range(4, 9))
    source.deliver(state(steps))
    assert (follower.take_state(9) is not None) == taken
    assert len(source.rejected) == (not taken)


def test_a_state_that_is_ahead_is_taken_where_no_step_is_open() -> None:
    follower, source = keeping(range(4, 9))
    source.deliver(state(12))
    found = follower.take_state()
    assert found is not None
    assert kept_steps(follower, 12) == []


def test_a_worker_that_does_not_know_that_it_lags_takes_what_it_is_offered() -> None:
    source = LocalSource()
    follower = Follower(source, 100)
    source.deliver(state(7))
    found = follower.take_state()
    assert found is not None
    follower.caught_up(found, 7)
    assert not follower.is_active


def test_a_gap_or_a_run_that_went_back_starts_the_means_afresh(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    follower, source = keeping(range(4, 9))
    follower.follow(20, "")
    assert kept_steps(follower) == []
    follower.keep(lease(20), commit(20), {})
    follower.follow(3, "")
    assert kept_steps(follower) == []
    assert source.wanted == [4, 20, 3]
    assert "the run goes on with step 20: the means of 5 steps are dropped" in caplog.text
    assert caplog.text.count("following until a state arrives") == 1


def test_a_voided_step_is_no_gap() -> None:
    follower, source = keeping(range(4, 6))
    for _ in range(3):
        follower.follow(6, "")
    assert kept_steps(follower) == [4, 5]
    assert source.wanted == [4]


@pytest.mark.parametrize("limit", [1, MEAN_BYTES, 3 * MEAN_BYTES, 3 * MEAN_BYTES + 1])
def test_memory_for_means_is_bounded_and_one_step_always_fits(limit: int) -> None:
    most = max(1, limit // MEAN_BYTES)
    follower, source = keeping(range(4, 4 + most), limit)
    assert source.rejected == []
    step = 4 + most
    follower.follow(step, "")
    follower.keep(lease(step), commit(step), {FLAT: np.zeros(MEAN_BYTES // 4, np.float32)})
    assert kept_steps(follower) == [step]
    assert len(source.rejected) == 1
    assert f"follow_bytes allows {limit}" in source.rejected[0]
    assert source.wanted[-1] == step


def test_following_and_catching_up_are_each_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    follower, source = keeping(range(4, 9))
    source.deliver(state(6))
    found = follower.take_state(9)
    assert found is not None
    follower.caught_up(found, 9)
    texts = [record.getMessage() for record in caplog.records]
    assert (
        texts[0] == "this worker's parameters have had 1 updates, the run is at step 4: following until a state arrives"
    )
    assert texts[1].startswith("caught up with the run after 0.")
    assert texts[1].endswith("s: the state behind step 6, and the means of 3 steps since")
    assert kept_steps(follower) == []


def test_a_run_that_goes_back_to_a_stored_state_takes_a_worker_back_with_it() -> None:
    """The worker is ahead; what it is given while no step is open is older than what it has."""
    config = RunConfig(
        seed=3, num_steps=6, task=TaskConfig(name="toy"), batch=BatchConfig(samples=8, microbatches=4),
        optimizer=OptimizerConfig(learning_rate=0.05),
    )  # fmt: skip
    source, states = LocalSource(), list[State]()
    trainer = Trainer(toy_task(buckets=2), config, TrainingConfig(state_source=source))

    def note(event: StepEvent) -> None:
        if trainer.completed_steps == 3:
            tensors, facts = trainer.state()
            states.append(State(tensors=tensors, facts=facts, completed_steps=3))

    expected = trainer.train(LocalRun(config).session(0), note)
    assert states[0].facts.items() >= {"completed_steps": "3", "epoch": "1", "attempt": "0"}.items()
    again = LocalRun(config)
    again._plan = again._plan[2:]
    again._attempt = again._next(None)
    source.session = again.session(0)
    source.deliver(states[0])
    result = trainer.train(again.session(0))
    assert again.caught_up == [(0, 3)]
    assert [commit.step for commit in again.commits] == [3, 4, 5]
    assert result.parameters_sha256 == expected.parameters_sha256
