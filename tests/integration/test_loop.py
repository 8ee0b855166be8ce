"""The training loop, against sessions that reduce inside this process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ayni import order
from ayni.errors import Halted
from ayni.run_config import BatchConfig, EvaluationConfig, OptimizerConfig, RunConfig, TaskConfig
from tests.support.local_session import LocalRun, LocalSession
from tests.support.toy_task import ToyTask, toy_task
from worker_agent.session import ShardAssignment
from worker_agent.training.events import StepEvent, TrainResult
from worker_agent.training.loop import Trainer, TrainingConfig, train
from worker_agent.training.task import LossSums

SEED = 3


def config(**changes: object) -> RunConfig:
    values: dict[str, object] = {
        "seed": SEED,
        "num_steps": 6,
        "task": TaskConfig(name="toy"),
        "batch": BatchConfig(samples=13, microbatches=8, evaluation_samples=5),
        "optimizer": OptimizerConfig(learning_rate=0.05, weight_decay=0.01, clip_norm=0.5),
    }
    return RunConfig(**(values | changes))  # type: ignore[arg-type]


def train_all(local: LocalRun, **task_options: Any) -> list[TrainResult]:
    """Runs one worker for each rank; tasks are built first, since building draws from the process's generator."""
    tasks = [toy_task(SEED, **({"buckets": 2} | task_options)) for _ in range(local.world_size)]
    results = local.run(lambda session: train(session, tasks[session.worker_id], local.config))
    return [result for result in results if isinstance(result, TrainResult)]


def run_with(shares: list[int], run_config: RunConfig, **task_options: Any) -> tuple[LocalRun, list[TrainResult]]:
    local = LocalRun(run_config, 12, shares)
    return local, train_all(local, **task_options)


SHARES = [[8], [4, 4], [3, 5], [1, 2, 5], [0, 8, 0], [2, 1, 3, 1, 1]]


def test_runs_are_byte_identical_for_every_cut_of_the_steps() -> None:
    """Dropout is on: its draws may not depend on who computes a micro-batch."""
    outcomes = set()
    for shares in SHARES:
        local, results = run_with(shares, config(), dropout=0.2)
        hashes = {result.parameters_sha256 for result in results}
        assert len(hashes) == 1
        assert len(results) == len(shares)
        for per_rank in local.parameter_hashes:
            assert len(set(per_rank.values())) == 1
            assert "" not in per_rank.values()
        reduced = tuple(tuple(sorted((str(k), v) for k, v in step.items())) for step in local.gradient_hashes)
        outcomes.add((reduced, hashes.pop()))
    assert len(outcomes) == 1


def test_the_mean_is_that_of_one_batch_in_float64() -> None:
    """A plain torch computation of the same global batches, with no code of the reduction."""
    run_config = config(num_steps=1)
    local, _ = run_with([3, 5], run_config)
    task = toy_task(SEED, buckets=2)
    task.model.double()
    x, y, targets = task.batch(order.samples_at(SEED, 0, 13, task.num_samples).tolist(), "train")
    sums = task.loss((x.double(), y.double(), targets))
    (sums.loss_sum / sums.weight).backward()
    named = dict(task.trainable())
    for spec in task.buckets:
        expected = np.concatenate([named[name].grad.reshape(-1).numpy() for name in spec.names])  # type: ignore[union-attr]
        np.testing.assert_allclose(local.means[0][spec.bucket], expected, rtol=2e-6, atol=1e-7)
    assert local.commits[0].total_weight == sums.weight
    assert local.commits[0].global_loss == pytest.approx(float(sums.loss_sum.detach()) / sums.weight, rel=1e-6)


def test_an_unweighted_mean_of_shards_would_be_another_run() -> None:
    """The counter-example: shares of unequal weight, averaged without it."""
    local, _ = run_with([3, 5], config(num_steps=1))
    weights = [sum(local.stats[0][m].weight for m in shard) for shard in (range(3), range(3, 8))]
    losses = [sum(local.stats[0][m].loss_sum or 0 for m in shard) for shard in (range(3), range(3, 8))]
    naive = sum(loss / weight for loss, weight in zip(losses, weights, strict=True)) / 2
    assert local.commits[0].global_loss == pytest.approx(sum(losses) / sum(weights), rel=1e-12)
    assert abs(naive - local.commits[0].global_loss) > 1e-3


def test_a_step_is_only_applied_once_all_is_reduced() -> None:
    """No worker may step on its own gradient: parameters at each commit are those after the last one."""
    local, results = run_with([4, 4], config())
    hashes = [next(iter(step.values())) for step in local.parameter_hashes]
    assert len(set(hashes)) == 6
    assert results[0].parameters_sha256 not in hashes


def test_loss_falls_and_events_tell_the_story() -> None:
    run_config = config(num_steps=40, evaluation=EvaluationConfig(every_steps=10))
    local, events = LocalRun(run_config, 12), list[StepEvent]()
    result = train(local.session(0), toy_task(SEED), run_config, on_event=events.append)
    trained = [event for event in events if event.kind == "train"]
    assert [event.step for event in trained] == list(range(40))
    assert trained[-1].loss < 0.9 * trained[0].loss
    assert [event.step for event in events if event.kind == "evaluate"] == [10, 20, 30, 40]
    assert result.completed_steps == 40
    assert result.evaluation == events[-1]
    assert result.best is not None
    assert all(event.times.compute > 0 and event.wall_s >= event.times.compute for event in events)
    assert trained[0].learning_rate == 0.05
    assert trained[0].total_samples == 13
    assert events[-1].total_weight == sum(index % 3 + 1 for index in range(40, 52))


def test_evaluation_does_not_depend_on_the_cut_and_changes_nothing() -> None:
    run_config = config(num_steps=2, evaluation=EvaluationConfig(every_steps=1))
    one, (result,) = run_with([8], run_config, dropout=0.5)
    two, results = run_with([3, 5], run_config, dropout=0.5)
    assert [e.global_loss for e in one.evaluations] == [e.global_loss for e in two.evaluations]
    _without, (plain,) = run_with([8], config(num_steps=2), dropout=0.5)
    assert plain.parameters_sha256 == result.parameters_sha256 == results[0].parameters_sha256


@pytest.mark.parametrize("voided", [[(2, 0)], [(0, 0), (2, 0), (2, 1), (5, 0)]])
def test_voided_attempts_leave_no_trace(voided: list[tuple[int, int]]) -> None:
    run_config = config()
    _, (expected,) = run_with([8], run_config, dropout=0.2)
    local = LocalRun(run_config, 12, [3, 5], voided=voided)
    for result in train_all(local, dropout=0.2):
        assert result.parameters_sha256 == expected.parameters_sha256
        assert result.voided_steps == len(voided)


class CountingTask(ToyTask):
    """Counts the losses that it computes for training."""

    num_losses = 0

    def loss(self, batch: Any) -> LossSums:
        self.num_losses += self.model.training
        return super().loss(batch)


@pytest.mark.parametrize(("again", "expected"), [([3, 5], 6 * 8), ([5, 3], 6 * 8 + 8)])
def test_a_voided_attempt_is_computed_again_only_if_its_cut_changes(again: list[int], expected: int) -> None:
    local = LocalRun(config(), 12, [3, 5], voided=[(2, 0)], shares_of=lambda _, attempt: again if attempt else [3, 5])
    tasks = [toy_task(SEED, buckets=2) for _ in range(2)]
    for task in tasks:
        task.__class__ = CountingTask
    local.run(lambda session: train(session, tasks[session.worker_id], local.config))
    assert sum(task.num_losses for task in tasks if isinstance(task, CountingTask)) == expected


def test_samples_without_weight_skip_the_update_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    run_config = config(num_steps=2)
    events = list[StepEvent]()
    local = LocalRun(run_config, 12, [8])
    task = toy_task(SEED, zero_weight_from=0)
    before = Trainer(toy_task(SEED, zero_weight_from=0), run_config).parameters_sha256()
    result = train(local.session(0), task, run_config, on_event=events.append)
    assert result.skipped_steps == 2
    assert result.completed_steps == 2
    assert result.parameters_sha256 == before
    assert "no sample of the step has any weight" in events[0].note
    assert "step 0 changed nothing" in caplog.text


class NeverEmptyTask(ToyTask):
    """Can't make a batch of nothing."""

    def batch(self, indices: Any, split: str) -> Any:
        assert len(indices) > 0, f"asked for a batch of nothing ({split})"
        return super().batch(indices, split)


@pytest.mark.parametrize("shares", [[8], [1, 7], [3, 3, 2]])
def test_a_microbatch_without_samples_never_reaches_the_task(shares: list[int]) -> None:
    run_config = config(num_steps=2, batch=BatchConfig(samples=3, microbatches=0, evaluation_samples=2))
    local = LocalRun(run_config, 2, shares)
    local.num_microbatches = 8
    tasks = [toy_task(SEED, buckets=2) for _ in shares]
    for task in tasks:
        task.__class__ = NeverEmptyTask
    results = local.run(lambda session: train(session, tasks[session.worker_id], run_config))
    assert len({result.parameters_sha256 for result in results if isinstance(result, TrainResult)}) == 1
    empty = [stats for stats in local.stats[0].values() if not stats.weight]
    assert len(empty) == 5
    assert {(stats.loss_sum, stats.num_correct, stats.num_predictions) for stats in empty} == {(0.0, 0, 0)}


def test_some_samples_without_weight_do_not_count() -> None:
    _, (one,) = run_with([8], config(), zero_weight_from=20)
    _, two = run_with([1, 0, 7], config(), zero_weight_from=20)
    assert {result.parameters_sha256 for result in two} == {one.parameters_sha256}


def test_rank_zero_writes_the_best_and_the_last_checkpoint(tmp_path: Path) -> None:
    run_config = config(num_steps=20, evaluation=EvaluationConfig(every_steps=5))
    local = LocalRun(run_config, 12, [3, 5])

    def worker(session: LocalSession) -> TrainResult:
        training = TrainingConfig(checkpoint_folder=tmp_path / str(session.worker_id), checkpoint_every=7)
        return train(session, toy_task(SEED), run_config, training)

    first, _ = local.run(worker)
    assert isinstance(first, TrainResult)
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["best", "last"]
    assert not (tmp_path / "1").exists()
    trainer = Trainer(toy_task(1), run_config)
    trainer.load(tmp_path / "0" / "last", "host")
    assert trainer.completed_steps == 20
    assert trainer.parameters_sha256() == first.parameters_sha256
    trainer.load(tmp_path / "0" / "best", "host")
    assert trainer.completed_steps == first.best.step  # type: ignore[union-attr]


def test_a_run_that_continues_from_a_checkpoint_is_the_same_run(tmp_path: Path) -> None:
    run_config = config(num_steps=6)
    _, (whole,) = run_with([8], run_config, dropout=0.2)

    class Half(LocalSession):
        def receive_shard(self) -> ShardAssignment | None:
            lease = super().receive_shard()
            return None if lease is not None and lease.step == 3 and first else lease

    local, first = LocalRun(run_config, 0, [8]), True
    training = TrainingConfig(checkpoint_folder=tmp_path)
    train(Half(local, 0), toy_task(SEED, buckets=2, dropout=0.2), run_config, training)
    first = False
    trainer = Trainer(toy_task(99, buckets=2, dropout=0.2), run_config)
    trainer.load(tmp_path / "last", "host")
    result = trainer.train(Half(local, 0))
    assert result.completed_steps == 6
    assert result.parameters_sha256 == whole.parameters_sha256


def test_a_worker_that_is_behind_says_so() -> None:
    run_config = config()
    local = LocalRun(run_config, 0)
    trainer = Trainer(toy_task(SEED), run_config)
    trainer.replica.completed_steps = 4
    with pytest.raises(RuntimeError, match="have had 4 updates, but the coordinator leased it step 0"):
        trainer.train(local.session(0))


def test_a_refusal_of_the_coordinator_comes_through() -> None:
    class Halting(LocalSession):
        def receive_shard(self) -> ShardAssignment | None:
            raise Halted("worker 2 sent NaN in step 4")

    run_config = config()
    with pytest.raises(Halted, match="worker 2 sent NaN"):
        train(Halting(LocalRun(run_config), 0), toy_task(SEED), run_config)


def test_the_device_update_trains_too() -> None:
    run_config = config()
    local = LocalRun(run_config, 12, [3, 5], update="device")
    results = train_all(local)
    host, (expected,) = run_with([8], run_config)
    assert len({result.parameters_sha256 for result in results}) == 1
    assert local.commits[-1].global_loss == pytest.approx(host.commits[-1].global_loss, rel=1e-4)
    assert expected.completed_steps == 6


def test_bfloat16_is_refused_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_agent.training.precision._has_bfloat16", lambda device: False)
    with pytest.raises(ValueError, match="cpu device has no fast bfloat16; use precision float32"):
        Trainer(toy_task(SEED), config(precision="bfloat16"))
    with pytest.raises(ValueError, match="precision is 'float8'; it must be one of float32, bfloat16"):
        config(precision="float8")


def test_bfloat16_autocast_changes_the_numbers_and_keeps_float32_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_agent.training.precision._has_bfloat16", lambda device: True)
    losses = []
    for precision in ("float32", "bfloat16"):
        run_config = config(precision=precision)
        local = LocalRun(run_config, 12)
        train(local.session(0), toy_task(SEED), run_config)
        losses.append(local.commits[-1].global_loss)
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_the_model_is_left_without_hooks() -> None:
    task = toy_task(SEED)
    train(LocalRun(config(), 0).session(0), task, config())
    task.loss(task.batch([0], "train")).loss_sum.backward()
    assert all(isinstance(parameter.grad, torch.Tensor) for parameter in task.model.parameters())
