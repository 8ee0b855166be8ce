"""The training loop when other workers die, are late, or come back: the same bytes as if nothing had happened."""

import logging
from typing import Any

import pytest
import torch

from ayni.errors import LeaseRevoked, StepVoided
from ayni.run_config import EvaluationConfig
from tests.support.elastic_loops import (
    STEPS,
    config,
    counting,
    from_step,
    run_all,
    undisturbed,
)
from tests.support.local_session import Faults, LocalRun, LocalSession, LocalSource
from worker_agent.session import Commit, Report, ShardAssignment
from worker_agent.training.events import StepEvent, TrainResult
from worker_agent.training.following import State
from worker_agent.training.loop import Trainer, TrainingConfig, train


@pytest.mark.parametrize("largest_extra", [1000, 1, 2])
@pytest.mark.parametrize("shares", [[3, 2, 3], [1, 5, 2], [0, 8, 0]])
def test_micro_batches_of_a_dead_worker_are_done_by_the_others(shares: list[int], largest_extra: int) -> None:
    run_config = config(evaluation=EvaluationConfig(every_steps=3))
    whole, expected = undisturbed(run_config)
    faults = Faults(absent=from_step(2, 1), largest_extra=largest_extra)
    local, tasks = LocalRun(run_config, 12, shares, faults=faults), counting(3)
    first, dead, third = run_all(local, tasks)
    assert first.parameters_sha256 == third.parameters_sha256 == expected.parameters_sha256
    assert local.gradient_hashes == whole.gradient_hashes
    assert [e.global_loss for e in local.evaluations] == [e.global_loss for e in whole.evaluations]
    assert dead.completed_steps == 2
    assert sum(task.num_losses for task in tasks) == STEPS * 8


def test_events_count_what_was_taken_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_config = config()
    local, events = LocalRun(run_config, 0, [3, 5], faults=Faults(absent=from_step(4, 1))), list[StepEvent]()
    tasks = counting(2)

    def worker(session: LocalSession) -> TrainResult:
        note = events.append if session.worker_id == 0 else lambda event: None
        return train(session, tasks[session.worker_id], run_config, on_event=note)

    local.run(worker)
    assert [event.num_microbatches for event in events] == [3] * 4 + [8] * 4
    assert [event.num_samples for event in events][-1] == 13
    assert all(event.times.exchange >= 0 and event.times.compute > 0 for event in events)
    assert "step 4: taking on 5 more micro-batches, 3 to 7" in caplog.text


def test_an_additional_lease_that_is_taken_back_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_config = config()
    _, expected = undisturbed(run_config)
    revoked = {(step, extra) for step in range(2, STEPS) for extra in (0, 3)}
    faults = Faults(absent=from_step(2, 2), largest_extra=2, revoked=revoked)
    local = LocalRun(run_config, 12, [2, 1, 5], faults=faults)
    first, second, _ = run_all(local, counting(3))
    assert first.parameters_sha256 == second.parameters_sha256 == expected.parameters_sha256
    assert "step 2: an additional lease was taken back: lease" in caplog.text
    assert first.voided_steps == second.voided_steps == 0


def test_a_lease_that_is_taken_back_while_its_buckets_leave_is_put_down() -> None:
    """The refusal comes out of the middle of a backward."""
    run_config = config()
    _, expected = undisturbed(run_config)
    refused = list[int]()

    class Refusing(LocalSession):
        def contribute(self, assignment: ShardAssignment, *args: Any, **options: Any) -> Any:
            if assignment.extra and assignment.step == 3 and not refused:
                refused.append(assignment.lease_id)
                raise LeaseRevoked("others have its micro-batches")
            return super().contribute(assignment, *args, **options)

        def commit(self, assignment: ShardAssignment, report: Report) -> Commit | ShardAssignment:
            if refused and assignment.step == 3 and not assignment.extra:
                with self._run._condition:
                    attempt = self._run._attempt
                    assert attempt is not None
                    if attempt.num_extras == 1:
                        attempt.orphans[0].append((4, 8))
            return super().commit(assignment, report)

    local, tasks = LocalRun(run_config, 0, [4, 4], faults=Faults(absent=from_step(2, 1))), counting(2)
    results = local.run(lambda s: train(Refusing(local, s.worker_id), tasks[s.worker_id], run_config))
    assert refused
    assert isinstance(results[0], TrainResult)
    assert results[0].parameters_sha256 == expected.parameters_sha256


@pytest.mark.parametrize(("again", "recomputed"), [([3, 5], 0), ([4, 4], 8)])
def test_all_leases_of_a_voided_attempt_are_kept_by_their_micro_batches(again: list[int], recomputed: int) -> None:
    run_config = config()
    _, expected = undisturbed(run_config)
    faults = Faults(voided={(2, 0), (2, 1), (5, 0)}, absent=lambda step, attempt: (1,) if step >= 2 else ())
    shares_of = lambda step, attempt: again if (step, attempt) == (2, 1) else [3, 5]  # noqa: E731
    local, tasks = LocalRun(run_config, 0, [3, 5], shares_of=shares_of, faults=faults), counting(2)
    first, _ = run_all(local, tasks)
    assert first.parameters_sha256 == expected.parameters_sha256
    assert first.voided_steps == 3
    assert sum(task.num_losses for task in tasks) == STEPS * 8 + recomputed


def test_a_first_lease_that_is_taken_back_is_a_step_without_this_worker() -> None:
    """All that it had to do was done by others; here the coordinator asks it again."""
    run_config = config()
    _, expected = undisturbed(run_config)
    revoked = list[int]()

    class Late(LocalSession):
        def commit(self, assignment: ShardAssignment, report: Report) -> Commit | ShardAssignment:
            if assignment.step == 3 and not revoked:
                revoked.append(assignment.lease_id)
                with self._run._condition:
                    attempt = self._run._attempt
                    assert attempt is not None
                    raise attempt.revoke(assignment)
            return super().commit(assignment, report)

    local, tasks = LocalRun(run_config, 0), counting(1)
    result = train(Late(local, 0), tasks[0], run_config)
    assert result.parameters_sha256 == expected.parameters_sha256
    assert tasks[0].num_losses == STEPS * 8


def test_buffers_are_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run_config = config(num_steps=30)
    faults = Faults(absent=from_step(1, 1), largest_extra=2, voided={(20, 0)})
    local, tasks = LocalRun(run_config, 0, [3, 5], faults=faults), counting(2)
    sizes = list[int]()

    def worker(session: LocalSession) -> TrainResult:
        trainer = Trainer(tasks[session.worker_id], run_config)
        free = [bucket._free for bucket in trainer._gradients._buckets]

        def note(event: StepEvent) -> None:
            if session.worker_id == 0:
                sizes.append(sum(map(len, free)) + len(trainer._gradients._spare))

        return trainer.train(session, note)

    local.run(worker)
    # The first step with additional leases makes what is needed; nothing is lost or made after it.
    assert len(set(sizes[2:])) == 1
    assert sizes[2] > 0


def test_a_void_that_comes_out_of_a_backward_is_computed_again() -> None:
    run_config = config()
    _, expected = undisturbed(run_config)
    raised = list[object]()

    class Voiding(LocalSession):
        def contribute(self, assignment: ShardAssignment, bucket: Any, *args: Any, **options: Any) -> Any:
            future = super().contribute(assignment, bucket, *args, **options)
            if assignment.step == 2 and not raised:
                raised.append(bucket)
                with self._run._condition:
                    attempt = self._run._attempt
                    assert attempt is not None
                    attempt.void(StepVoided("a worker left"))
                    self._run._attempt = self._run._next(attempt)
                raise StepVoided("a worker left")
            return future

    result = train(Voiding(LocalRun(run_config, 0), 0), counting(1)[0], run_config)
    assert raised
    assert result.parameters_sha256 == expected.parameters_sha256
    assert result.voided_steps == 1


def test_what_is_sent_again_is_reported_with_the_time_that_it_took() -> None:
    """Else a worker would look endlessly fast after a voided attempt."""
    run_config = config()
    local = LocalRun(run_config, 0, voided=[(2, 0), (2, 1)])
    train(local.session(0), counting(1)[0], run_config)
    computed = [report.times.compute for ((_, report),) in local.train_reports]
    assert computed[2] > 0.2 * min(computed)


def test_gradients_of_parameters_that_differed_are_not_sent_again() -> None:
    """They were kept when the attempt was voided; the worker's next share has the same micro-batches."""
    run_config = config()
    _, expected = undisturbed(run_config)
    faults = Faults(diverged={(3, 1)}, voided={(3, 1), (3, 2)})
    local, tasks, source = LocalRun(run_config, 0, [4, 4], faults=faults), counting(2), LocalSource()
    states = list[State]()

    class Behind(LocalSession):
        def receive_shard(self) -> ShardAssignment | None:
            attempt = self._run._attempt
            if attempt is not None and (attempt.step, attempt.attempt) == (3, 2) and not local.caught_up[1:]:
                source.deliver(states[0])
            return super().receive_shard()

    def worker(session: LocalSession) -> TrainResult:
        options = TrainingConfig(state_source=source) if session.worker_id else TrainingConfig()
        trainer = Trainer(tasks[session.worker_id], run_config, options)
        if session.worker_id:
            source.session = session = Behind(local, 1)

        def note(event: StepEvent) -> None:
            if event.step == 2 and session.worker_id == 0:
                tensors, facts = trainer.state()
                states.append(State(tensors=tensors, facts=facts, completed_steps=3))
            elif event.step == 2:
                with torch.no_grad():
                    tasks[1].trainable()[0][1].add_(0.1)

        return trainer.train(session, note)

    results = [result for result in local.run(worker) if isinstance(result, TrainResult)]
    assert local.caught_up == [(1, 0), (1, 3)]
    assert [result.parameters_sha256 for result in results] == [expected.parameters_sha256] * 2
    assert {rank for rank, report in local.train_reports[3] if report.microbatches} == {0, 1}
