"""Training loops of several workers on threads of this process, some of which fail."""

from collections.abc import Collection
from typing import Any

from ayni.run_config import BatchConfig, OptimizerConfig, RunConfig, TaskConfig
from tests.support.local_session import LocalRun, LocalSession, LocalSource
from tests.support.toy_task import ToyTask, toy_task
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
