"""The training loop of a worker whose state is missing or differs: it follows, and ends with the same bytes."""

import logging
import threading

import pytest

from ayni.run_config import EvaluationConfig
from ayni.step_values import Origin
from tests.support.elastic_loops import (
    SEED,
    Absent,
    config,
    counting,
    onboarded,
    undisturbed,
)
from tests.support.local_session import Faults, LocalRun, LocalSession, LocalSource
from tests.support.toy_task import toy_task
from worker_agent.session import ShardAssignment
from worker_agent.training.events import StepEvent, TrainResult
from worker_agent.training.following import State
from worker_agent.training.loop import Trainer, TrainingConfig, train


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_follower_whose_state_comes_three_steps_late_ends_with_the_same_bytes(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run_config = config(num_steps=14, evaluation=EvaluationConfig(every_steps=5))
    whole = LocalRun(run_config, 12, update=kind)
    expected = train(whole.session(0), counting(1)[0], run_config)
    local = LocalRun(run_config, 12, [3, 2, 3], update=kind, faults=Faults(absent=Absent(1, 2, 4)))
    source = LocalSource()
    results, events = onboarded(local, 5, 8, source)
    assert {result.parameters_sha256 for result in results} == {expected.parameters_sha256}
    assert {result.completed_steps for result in results} == {14}
    assert local.gradient_hashes == whole.gradient_hashes
    assert source.wanted == [4]
    assert source.rejected == []
    followed = [event.step for event in events if event.following and event.kind == "train"]
    assert followed[:4] == [4, 5, 6, 7]
    assert followed == list(range(4, 4 + len(followed)))
    assert len(followed) < 7
    assert all(event.num_microbatches == 0 for event in events if event.following)
    assert "this worker's parameters have had 2 updates, the run is at step 4: following until" in caplog.text
    assert "the state behind step 5, and the means of" in caplog.text
    assert [e.global_loss for e in local.evaluations] == [e.global_loss for e in whole.evaluations]


def test_a_follower_says_so_and_reports_nothing_of_its_parameters() -> None:
    run_config = config()
    local = LocalRun(run_config, 0, [4, 4], faults=Faults(absent=Absent(1, 2, 4)))
    onboarded(local, 5, 6, LocalSource())
    reports = {rank: report for rank, report in local.train_reports[4]}
    assert reports[1].following
    assert (reports[1].microbatches, reports[1].parameters_sha256, reports[1].square_sum) == ((), "", 0.0)
    assert reports[1].num_buckets == 2
    last = {rank: report for rank, report in local.train_reports[-1]}
    assert not last[1].following
    assert last[1].parameters_sha256 == last[0].parameters_sha256 != ""


def test_a_state_that_comes_while_no_step_is_open_is_taken_at_once() -> None:
    """The follower is woken in `receive_shard`, and takes a share of the next step."""
    run_config = config(num_steps=12)
    local = LocalRun(run_config, 0, [4, 4], faults=Faults(absent=Absent(1, 2, 4)))
    source = LocalSource()
    caught = threading.Event()

    class Waiting(LocalSession):
        def receive_shard(self) -> ShardAssignment | None:
            if self._run.completed[0] == 7:
                # Rank 0 waits until rank 1 has caught up: no step is open meanwhile.
                assert caught.wait(60)
            return super().receive_shard()

    class Behind(LocalSession):
        def caught_up(self, completed_steps: int, origin: Origin | None = None) -> None:
            super().caught_up(completed_steps, origin)
            caught.set()

    tasks, states = counting(2), list[State]()

    def worker(session: LocalSession) -> TrainResult:
        if session.worker_id == 1:
            behind = Behind(local, 1)
            source.session = behind
            return train(behind, tasks[1], run_config, TrainingConfig(state_source=source))
        trainer = Trainer(tasks[0], run_config)

        def note(event: StepEvent) -> None:
            if trainer.completed_steps == 5:
                tensors, facts = trainer.state()
                states.append(State(tensors=tensors, facts=facts, completed_steps=5))
            if trainer.completed_steps == 7:
                source.deliver(states[0])

        return trainer.train(Waiting(local, 0), note)

    first, second = local.run(worker)
    assert local.caught_up == [(1, 7)]
    assert isinstance(first, TrainResult)
    assert isinstance(second, TrainResult)
    assert first.parameters_sha256 == second.parameters_sha256
    assert {rank for rank, report in local.train_reports[8] if report.microbatches} == {0, 1}


def test_a_state_from_before_the_first_kept_mean_is_refused_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    local = LocalRun(config(), 0, [4, 4], faults=Faults(absent=Absent(1, 2, 5)))
    source = LocalSource()
    results, events = onboarded(local, 4, 6, source)
    assert source.rejected == ["the state behind step 4 is too old: means are kept from step 5 on"]
    assert all(event.following for event in events if event.step >= 5)
    assert results[1].completed_steps == 2
    assert results[1].parameters_sha256 == ""


def test_more_means_than_allowed_are_dropped_and_another_state_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    run_config = config(num_steps=12)
    local = LocalRun(run_config, 0, [4, 4], faults=Faults(absent=Absent(1, 2, 4)))
    source = LocalSource()
    one_step = sum(4 * spec.num_elements for spec in toy_task(SEED, buckets=2).buckets)
    results, _ = onboarded(local, 5, 9, source, follow_bytes=3 * one_step)
    assert source.wanted[:2] == [4, 7]
    assert "the means of 3 steps since step 4 take" in source.rejected[0]
    assert "is too old: means are kept from step" in source.rejected[1]
    assert results[1].parameters_sha256 == ""


def test_a_damaged_state_is_refused_and_a_good_one_is_taken() -> None:
    run_config = config(num_steps=12)
    local = LocalRun(run_config, 0, [4, 4], faults=Faults(absent=Absent(1, 2, 4)))
    tasks, source, states = counting(2), LocalSource(), list[State]()

    def worker(session: LocalSession) -> TrainResult:
        if session.worker_id == 1:
            return train(session, tasks[1], run_config, TrainingConfig(state_source=source))
        trainer = Trainer(tasks[0], run_config)

        def note(event: StepEvent) -> None:
            if trainer.completed_steps == 5:
                tensors, facts = trainer.state()
                states.append(State(tensors=tensors, facts=facts, completed_steps=5))
                damaged = tensors | {"parameter/0.bias": tensors["parameter/0.bias"] + 1}
                source.deliver(State(tensors=damaged, facts=facts, completed_steps=5))
            if trainer.completed_steps == 8:
                source.deliver(states[0])

        return trainer.train(session, note)

    first, second = local.run(worker)
    assert isinstance(first, TrainResult)
    assert isinstance(second, TrainResult)
    assert first.parameters_sha256 == second.parameters_sha256
    assert len(source.rejected) == 1
    assert "the state behind step 5 is damaged" in source.rejected[0]


def test_a_worker_whose_parameters_differ_follows_until_it_has_a_state(caplog: pytest.LogCaptureFixture) -> None:
    run_config = config(num_steps=12)
    _, expected = undisturbed(run_config)
    local = LocalRun(run_config, 0, [4, 4], faults=Faults(diverged={(3, 1)}))
    results, events = onboarded(local, 4, 6, LocalSource())
    assert [result.parameters_sha256 for result in results] == [expected.parameters_sha256] * 2
    followed = [event.step for event in events if event.following]
    assert followed[:3] == [3, 4, 5]
    assert local.caught_up == [(1, 0)]
    assert (
        "this worker's parameters are not the run's (they differ from the other workers'), the run is at step 3: "
        in (caplog.text)
    )


def test_a_voided_step_of_a_follower_is_followed_again() -> None:
    run_config = config(num_steps=12)
    _, expected = undisturbed(run_config)
    faults = Faults(absent=Absent(1, 2, 4), voided={(4, 0), (6, 0)})
    local = LocalRun(run_config, 0, [4, 4], faults=faults)
    source = LocalSource()
    results, _ = onboarded(local, 5, 8, source)
    assert [result.parameters_sha256 for result in results] == [expected.parameters_sha256] * 2
    assert source.rejected == []


def test_a_follower_is_not_given_micro_batches() -> None:
    class Careless(LocalSession):
        def receive_shard(self) -> ShardAssignment | None:
            self._run.completed[0] = 0
            return super().receive_shard()

    run_config = config()
    local, source = LocalRun(run_config, 0), LocalSource()
    trainer = Trainer(counting(1)[0], run_config, TrainingConfig(state_source=source))
    trainer.replica.completed_steps = 4
    with pytest.raises(RuntimeError, match="have had 4 updates, but the coordinator leased it step 0"):
        trainer.train(Careless(local, 0))
