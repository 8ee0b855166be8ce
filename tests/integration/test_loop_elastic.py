"""The training loop when other workers die, are late, or come back: the same bytes as if nothing had happened."""

import logging
import threading
from collections.abc import Collection
from typing import Any

import pytest
import torch

from ayni.errors import LeaseRevoked, StepVoided
from ayni.run_config import BatchConfig, EvaluationConfig, OptimizerConfig, RunConfig, TaskConfig
from ayni.step_values import Origin
from tests.support.local_session import Faults, LocalRun, LocalSession, LocalSource
from tests.support.toy_task import ToyTask, toy_task
from worker_agent.session import Commit, Report, ShardAssignment
from worker_agent.training.events import StepEvent, TrainResult
from worker_agent.training.following import State
from worker_agent.training.loop import Trainer, TrainingConfig, train
from worker_agent.training.task import LossSums

SEED = 3
STEPS = 8


def config(**changes: object) -> RunConfig:
    values: dict[str, object] = {
        "seed": SEED,
        "num_steps": STEPS,
        "task": TaskConfig(name="toy"),
        "batch": BatchConfig(samples=13, microbatches=8, evaluation_samples=5),
        "optimizer": OptimizerConfig(learning_rate=0.05, weight_decay=0.01, clip_norm=0.5),
    }
    return RunConfig(**(values | changes))  # type: ignore[arg-type]


class CountingTask(ToyTask):
    """Counts the losses that it computes for training."""

    num_losses = 0

    def loss(self, batch: Any) -> LossSums:
        self.num_losses += self.model.training
        return super().loss(batch)


def counting(count: int, **options: Any) -> list[CountingTask]:
    tasks = [toy_task(SEED, **({"buckets": 2, "dropout": 0.2} | options)) for _ in range(count)]
    for task in tasks:
        task.__class__ = CountingTask
    return tasks  # type: ignore[return-value]


def undisturbed(run_config: RunConfig, **options: Any) -> tuple[LocalRun, TrainResult]:
    local = LocalRun(run_config, 12)
    return local, train(local.session(0), counting(1, **options)[0], run_config)


def run_all(local: LocalRun, tasks: list[CountingTask]) -> list[TrainResult]:
    results = local.run(lambda session: train(session, tasks[session.worker_id], local.config))
    return [result for result in results if isinstance(result, TrainResult)]


def from_step(first: int, *ranks: int) -> Any:
    return lambda step, attempt: ranks if step >= first else ()


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


class Absent:
    """A worker that misses the steps [first, last), and comes back with old parameters."""

    def __init__(self, rank: int, first: int, last: int) -> None:
        self.rank, self.first, self.last = rank, first, last

    def __call__(self, step: int, attempt: int) -> Collection[int]:
        return (self.rank,) if self.first <= step < self.last else ()


def onboarded(
    local: LocalRun, published: int, delivered: int, source: LocalSource, **training: Any
) -> tuple[list[TrainResult], list[StepEvent]]:
    """Rank 1 gets the state that rank 0 had behind one step, when rank 0 has done another step."""
    tasks, events = counting(local.world_size), list[StepEvent]()
    states = list[State]()

    def worker(session: LocalSession) -> TrainResult:
        is_behind = session.worker_id == 1
        options = TrainingConfig(state_source=source, **training) if is_behind else TrainingConfig()
        trainer = Trainer(tasks[session.worker_id], local.config, options)

        def note(event: StepEvent) -> None:
            if is_behind:
                events.append(event)
            elif session.worker_id == 0 and event.kind == "train":
                if trainer.completed_steps == published:
                    tensors, facts = trainer.state()
                    states.append(State(tensors=tensors, facts=facts, completed_steps=published))
                if trainer.completed_steps == delivered:
                    source.deliver(states[0])

        return trainer.train(session, note)

    results = local.run(worker)
    return [result for result in results if isinstance(result, TrainResult)], events


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
