"""Local updates: inner steps that are each worker's own, and an outer step that is everybody's."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from ayni import order
from ayni.run_config import BatchConfig, EvaluationConfig, LocalUpdateConfig, OptimizerConfig, RunConfig, TaskConfig
from tests.support.local_session import Faults, LocalRun, LocalSession, LocalSource
from tests.support.toy_task import ToyTask, toy_task
from worker_agent.training import rng
from worker_agent.training.events import StepEvent, TrainResult
from worker_agent.training.following import State
from worker_agent.training.loop import Trainer, TrainingConfig, train
from worker_agent.training.optimizer import Nesterov
from worker_agent.training.task import LossSums
from worker_agent.training.update import make_update

SEED = 3
SGD = OptimizerConfig(name="sgd", learning_rate=0.05, clip_norm=0.0, schedule="constant")
ADAMW = OptimizerConfig(learning_rate=0.01, weight_decay=0.01, clip_norm=0.5, schedule="constant")
PLAIN = LocalUpdateConfig(enabled=True, outer_learning_rate=1.0, outer_momentum=0.0)


def config(microbatches: int = 8, **changes: object) -> RunConfig:
    values: dict[str, object] = {
        "seed": SEED,
        "num_steps": 6,
        "task": TaskConfig(name="toy"),
        "batch": BatchConfig(samples=16, microbatches=microbatches, evaluation_samples=5),
        "optimizer": SGD,
        "local_update": PLAIN,
    }
    return RunConfig(**(values | changes))  # type: ignore[arg-type]


def flat(task: ToyTask) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).float() for _, parameter in task.trainable()])


def run(run_config: RunConfig, shares: list[int], **options: Any) -> tuple[LocalRun, list[ToyTask], list[TrainResult]]:
    tasks = [toy_task(SEED, **({"buckets": 2} | options)) for _ in shares]
    local = LocalRun(run_config, 12, shares)
    results = local.run(lambda session: train(session, tasks[session.worker_id], run_config))
    return local, tasks, [result for result in results if isinstance(result, TrainResult)]


def test_one_inner_step_of_descent_and_a_plain_outer_step_are_synchronous_descent() -> None:
    """Each of three workers makes one inner step, on micro-batches of unequal weight."""
    _, local, results = run(config(3), [1, 1, 1])
    synchronous = config(3, local_update=LocalUpdateConfig())
    _, (expected, *_), _ = run(synchronous, [1, 1, 1])
    assert len({result.parameters_sha256 for result in results}) == 1
    torch.testing.assert_close(flat(local[0]), flat(expected), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(flat(local[0]), flat(toy_task(SEED, buckets=2)), atol=1e-3)


@pytest.mark.parametrize("inner_steps", [1, 2, 5, 8])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_one_worker_with_a_plain_outer_step_is_the_inner_optimizer_alone(
    inner_steps: int, optimizer: OptimizerConfig
) -> None:
    run_config = config(inner_steps, optimizer=optimizer)
    _, (trained,), _ = run(run_config, [inner_steps], dropout=0.2)
    alone = toy_task(SEED, buckets=2, dropout=0.2)
    update = make_update("host", optimizer, alone.trainable(), alone.buckets)
    alone.model.train()
    named = dict(alone.trainable())
    for step in range(run_config.num_steps):
        for microbatch in range(inner_steps):
            rng.seed_microbatch(SEED, step, microbatch)
            start, stop = order.microbatch_positions(step * 16, 16, inner_steps, microbatch)
            sums = alone.loss(alone.batch(order.samples_at(SEED, start, stop, 40).tolist(), "train"))
            (sums.loss_sum / sums.weight).backward()
            gradients = {
                spec.bucket: torch.cat([named[name].grad.reshape(-1) for name in spec.names]).numpy()  # type: ignore[union-attr]
                for spec in alone.buckets
            }
            norm = math.sqrt(sum(float((values**2).sum()) for values in gradients.values()))
            clip = min(1.0, optimizer.clip_norm / norm) if optimizer.clip_norm else 1.0
            update.step(gradients, learning_rate=optimizer.learning_rate, clip_factor=clip)
            alone.model.zero_grad()
    torch.testing.assert_close(flat(trained), flat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_step_is_torchs_nesterov_with_the_distance_as_gradient(momentum: float) -> None:
    generator = np.random.default_rng(2)
    values = generator.standard_normal(40_000).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    outer = Nesterov(0.7, momentum, [values])
    for _ in range(5):
        distance = generator.standard_normal(values.size).astype(np.float32)
        outer.step([distance])
        parameter.grad = torch.from_numpy(distance.copy())
        reference.step()
    np.testing.assert_allclose(values, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_the_merge_is_weighted_by_what_each_worker_used() -> None:
    """What each worker's inner steps lead to, weighted by targets, is where the first outer step goes."""
    run_config = config(8, num_steps=1)
    local, tasks, _ = run(run_config, [3, 5])
    owns, weights = [], []
    for microbatches in (range(3), range(3, 8)):
        task = toy_task(SEED, buckets=2)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=SGD.learning_rate)
        weight = 0
        for microbatch in microbatches:
            start, stop = order.microbatch_positions(0, 16, 8, microbatch)
            sums = task.loss(task.batch(order.samples_at(SEED, start, stop, 40).tolist(), "train"))
            optimizer.zero_grad()
            (sums.loss_sum / sums.weight).backward()
            optimizer.step()
            weight += sums.weight
        owns.append(flat(task))
        weights.append(weight)
    merged = sum(own * weight for own, weight in zip(owns, weights, strict=True)) / sum(weights)
    torch.testing.assert_close(flat(tasks[0]), merged, rtol=1e-5, atol=1e-6)
    plain = (owns[0] + owns[1]) / 2
    assert not torch.allclose(flat(tasks[0]), plain, rtol=1e-5, atol=1e-5)
    assert local.commits[0].total_weight == sum(weights)


def test_equal_weights_give_the_plain_mean() -> None:
    class Even(ToyTask):
        def batch(self, indices: Any, split: str) -> Any:
            x, y, targets = super().batch(indices, split)
            return x, y, torch.ones_like(targets)

    tasks = [toy_task(SEED, buckets=2) for _ in range(2)]
    for task in tasks:
        task.__class__ = Even
    run_config = config(8, num_steps=1)
    local = LocalRun(run_config, 0, [4, 4])
    local.run(lambda session: train(session, tasks[session.worker_id], run_config))
    owns = []
    for first in (0, 4):
        alone = toy_task(SEED, buckets=2)
        alone.__class__ = Even
        one = config(4, num_steps=1, batch=BatchConfig(samples=8, microbatches=4, evaluation_samples=5))
        solo = LocalRun(one, 0)
        alone_batch = alone.batch

        def shifted(indices: Any, split: str, offset: int = first, batch: Any = alone_batch) -> Any:
            start = 2 * offset
            mine = order.samples_at(SEED, start, start + 8, 40).tolist()
            base = order.samples_at(SEED, 0, 8, 40).tolist()
            return batch([mine[base.index(index)] for index in indices], split)

        alone.batch = shifted  # type: ignore[method-assign]
        train(solo.session(0), alone, one)
        owns.append(flat(alone))
    torch.testing.assert_close(flat(tasks[0]), sum(owns) / 2, rtol=1e-5, atol=1e-6)


def test_all_weight_is_declared_on_the_first_micro_batch_that_counts() -> None:
    local, _, _ = run(config(8, num_steps=1), [3, 5], zero_weight_from=10**9)
    stats = local.stats[0]
    assert [microbatch for microbatch, each in sorted(stats.items()) if each.weight] == [0, 3]
    plain = LocalRun(config(8, num_steps=1, local_update=LocalUpdateConfig()), 0)
    train(plain.session(0), toy_task(SEED, buckets=2), plain.config)
    assert stats[0].weight == sum(plain.stats[0][index].weight for index in range(3))
    assert stats[3].num_predictions == sum(plain.stats[0][index].num_predictions for index in range(3, 8))
    assert local.commits[0].total_weight == plain.commits[0].total_weight


@pytest.mark.parametrize("kind", ["host", "device"])
def test_training_goes_on_between_outer_steps_and_evaluates_the_outer_parameters(kind: str) -> None:
    local_update = LocalUpdateConfig(enabled=True)
    run_config = config(
        8, num_steps=20, optimizer=ADAMW, local_update=local_update, evaluation=EvaluationConfig(every_steps=5)
    )
    tasks = [toy_task(SEED, buckets=2, dropout=0.1) for _ in range(2)]
    local = LocalRun(run_config, 12, [3, 5], update=kind)
    results = local.run(lambda session: train(session, tasks[session.worker_id], run_config))
    assert len({result.parameters_sha256 for result in results if isinstance(result, TrainResult)}) == 1
    for hashes in local.parameter_hashes:
        assert len(set(hashes.values())) == 1
    assert local.commits[-1].global_loss < 0.7 * local.commits[0].global_loss
    with torch.no_grad():
        tasks[0].model.eval()
        sums = tasks[0].loss(tasks[0].batch(range(12), "evaluation"))
    assert local.evaluations[-1].global_loss == pytest.approx(float(sums.loss_sum) / sums.weight, rel=1e-5)
    whole, again = LocalRun(run_config, 12, [3, 5], update=kind), toy_task(SEED, buckets=2, dropout=0.1)
    others = [again, toy_task(SEED, buckets=2, dropout=0.1)]
    whole.run(lambda session: train(session, others[session.worker_id], run_config))
    assert torch.equal(flat(again), flat(tasks[0]))


def test_a_bfloat16_model_keeps_outer_parameters_of_its_own() -> None:
    run_config = config(4, num_steps=3, optimizer=ADAMW, local_update=LocalUpdateConfig(enabled=True))
    _, tasks, results = run(run_config, [2, 2], dtype="bfloat16")
    assert len({result.parameters_sha256 for result in results}) == 1
    trainer = Trainer(tasks[0], run_config)
    trainer.replica.prepare("host")
    tensors, _ = trainer.state()
    assert {"optimizer/outer/0.weight", "optimizer/outer_velocity/0.weight"} < tensors.keys()


@pytest.mark.parametrize("inner_state", ["keep", "reset"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_state_that_is_put_back_makes_the_same_next_rounds(inner_state: str, dtype: str, kind: str) -> None:
    """One worker, so that the inner state that is kept is the one that is stored."""
    local_update = LocalUpdateConfig(enabled=True, inner_state=inner_state)
    run_config = config(4, optimizer=ADAMW, local_update=local_update)
    whole = train(LocalRun(run_config, 0, update=kind).session(0), toy_task(SEED, buckets=2, dtype=dtype), run_config)

    class Half(LocalSession):
        def receive_shard(self) -> Any:
            lease = super().receive_shard()
            return None if lease is not None and lease.step == 3 and first else lease

    local, first = LocalRun(run_config, 0, update=kind), True
    trainer = Trainer(toy_task(SEED, buckets=2, dtype=dtype), run_config)
    trainer.train(Half(local, 0))
    tensors, facts = trainer.state()
    first = False
    other = Trainer(toy_task(99, buckets=2, dtype=dtype), run_config)
    other.restore("the state", tensors, facts)
    assert other.parameters_sha256() == trainer.parameters_sha256()
    result = other.train(Half(local, 0))
    assert result.completed_steps == 6
    assert result.parameters_sha256 == whole.parameters_sha256


def test_a_state_of_a_run_without_local_updates_is_refused() -> None:
    plain = Trainer(toy_task(SEED), config(local_update=LocalUpdateConfig()))
    plain.replica.prepare("host")
    with pytest.raises(ValueError, match="was written with local_update off, but this run has local_update keep"):
        Trainer(toy_task(SEED), config()).restore("the state", *plain.state())


@pytest.mark.parametrize(("first", "last"), [(2, 4), (0, 3)], ids=["missed", "late"])
def test_a_worker_that_missed_rounds_makes_the_same_next_round_as_one_that_never_left(first: int, last: int) -> None:
    """With inner_state "reset", nothing but the outer state is carried over."""
    local_update = LocalUpdateConfig(enabled=True, inner_state="reset")
    run_config = config(8, num_steps=10, optimizer=ADAMW, local_update=local_update)
    faults = Faults(absent=lambda step, attempt: (1,) if first <= step < last else ())
    tasks, source, states = [toy_task(SEED, buckets=2) for _ in range(2)], LocalSource(), list[State]()
    local = LocalRun(run_config, 0, [4, 4], faults=faults)

    def worker(session: LocalSession) -> TrainResult:
        options = TrainingConfig(state_source=source) if session.worker_id else TrainingConfig()
        trainer = Trainer(tasks[session.worker_id], run_config, options)

        def note(event: StepEvent) -> None:
            if session.worker_id == 0 and trainer.completed_steps == 5:
                tensors, facts = trainer.state()
                states.append(State(tensors=tensors, facts=facts, completed_steps=5))
            if session.worker_id == 0 and trainer.completed_steps == 7:
                source.deliver(states[0])

        return trainer.train(session, note)

    results = [result for result in local.run(worker) if isinstance(result, TrainResult)]
    # Leases of rank 1 are done by rank 0 while it is away, each as inner steps from the outer parameters.
    _, _, expected = run(run_config, [4, 4])
    assert {result.parameters_sha256 for result in results} == {expected[0].parameters_sha256}
    assert {result.completed_steps for result in results} == {10}


def test_a_voided_attempt_is_sent_again_without_new_inner_steps() -> None:
    run_config = config(8, optimizer=ADAMW)
    _, _, (expected, *_) = run(run_config, [3, 5])
    tasks = [toy_task(SEED, buckets=2) for _ in range(2)]
    local = LocalRun(run_config, 12, [3, 5], voided=[(2, 0), (4, 0), (4, 1)])
    results = local.run(lambda session: train(session, tasks[session.worker_id], run_config))
    assert {result.parameters_sha256 for result in results if isinstance(result, TrainResult)} == {
        expected.parameters_sha256
    }


class ExplodingTask(ToyTask):
    """The loss of some micro-batch is not a number."""

    num_losses = 0
    bad: frozenset[int] = frozenset()

    def loss(self, batch: Any) -> LossSums:
        sums = super().loss(batch)
        if self.model.training:
            self.num_losses += 1
            if self.num_losses in self.bad:
                return LossSums(loss_sum=sums.loss_sum * math.nan, weight=sums.weight)
        return sums


@pytest.mark.parametrize(("bad", "flagged"), [({1}, [0]), ({2, 4}, [1, 3]), ({1, 2, 3, 4}, [0, 1, 2, 3])])
def test_inner_steps_on_what_is_not_finite_are_left_out(bad: set[int], flagged: list[int]) -> None:
    run_config = config(4, num_steps=2, non_finite="skip")
    task = toy_task(SEED, buckets=2)
    task.__class__ = ExplodingTask
    assert isinstance(task, ExplodingTask)
    task.bad = frozenset(bad)
    local = LocalRun(run_config, 0)
    train(local.session(0), task, run_config)
    assert [index for index, stats in sorted(local.stats[0].items()) if stats.non_finite] == flagged
    assert bool(local.commits[0].total_weight) == (len(bad) < 4)
    assert torch.isfinite(flat(task)).all()


def test_a_lease_whose_parameters_explode_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    run_config = config(
        4, num_steps=1, non_finite="skip", optimizer=OptimizerConfig(name="sgd", learning_rate=3e38, clip_norm=0.0)
    )
    task = toy_task(SEED, buckets=2)
    local = LocalRun(run_config, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        train(local.session(0), task, run_config)
    assert local.commits[0].total_weight == 0
    assert all(stats.weight == 0 for stats in local.stats[0].values())
    assert any(stats.non_finite for stats in local.stats[0].values())
    assert torch.equal(flat(task), flat(toy_task(SEED, buckets=2)))
