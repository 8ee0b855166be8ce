"""One worker process of the equality program: trains through `WorkerClient` and writes down what it saw.

A record is a JSON file, and an NPZ file with the first step's means and parameters.
"""

import hashlib
import json
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ayni import settings
from ayni.buckets import Bucket
from ayni.run_config import RunConfig
from ayni.step_values import Origin
from tests.support.equality_cases import Case, files_of
from tests.support.equality_places import Place, opened, own_terms
from worker_agent.session import Commit, MicrobatchStats, Report, Session, ShardAssignment, Vector
from worker_agent.training.events import StepEvent
from worker_agent.training.load import load_task
from worker_agent.training.loop import Trainer
from worker_agent.training.task import LossSums, Task

MEAN_TIMEOUT_S = 60.0
WAIT = timedelta(seconds=120)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJob:
    """What a worker process is told."""

    address: str
    token: str
    name: str
    case: Case
    place: Place
    extra_forwards: int
    record: Path
    """Path of the record without its suffix."""


@dataclass
class StepRecord:
    """One committed training step as one worker saw it."""

    step: int
    attempt: int
    rank: int
    world_size: int
    microbatches: tuple[int, int]
    weights: list[int]
    means: dict[str, str]
    """SHA-256 of each bucket's mean."""
    commit: dict[str, Any]
    parameters: str = ""
    """SHA-256 of the trainable parameters' bytes after the step."""


@dataclass
class Record:
    """Everything that one worker saw."""

    name: str
    steps: list[StepRecord] = field(default_factory=list)
    backend: str = ""
    device: str = ""
    """Where the model was, and the device's name for people."""
    fallbacks: int = 0
    """Operations that ran on the CPU because the device does not have them."""
    evaluation_loss: float | None = None
    arrays: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    def write(self, path: Path) -> None:
        np.savez(path.with_suffix(".npz"), **cast(dict[str, Any], self.arrays))
        content = {name: value for name, value in vars(self).items() if name != "arrays"}
        content["steps"] = [asdict(step) for step in self.steps]
        path.with_suffix(".json").write_text(json.dumps(content), encoding="utf-8")


class RecordingSession:
    """A session that hashes every mean before the training loop may use its buffer again."""

    def __init__(self, session: Session, record: Record) -> None:
        self._session, self._record = session, record
        self._means: list[tuple[Bucket, Future[Vector]]] = []

    @property
    def worker_id(self) -> int:
        return self._session.worker_id

    @property
    def total_workers(self) -> int:
        return self._session.total_workers

    @property
    def writes_checkpoints(self) -> bool:
        return self._session.writes_checkpoints

    def receive_shard(self) -> ShardAssignment | None:
        self._means.clear()
        return self._session.receive_shard()

    def wake(self) -> None:
        self._session.wake()

    def new_vector(self, num_elements: int) -> Vector:
        return self._session.new_vector(num_elements)

    def caught_up(self, completed_steps: int, origin: Origin | None = None) -> None:
        self._session.caught_up(completed_steps, origin)

    def contribute(
        self,
        assignment: ShardAssignment,
        bucket: Bucket,
        parts: Sequence[Vector | None],
        microbatches: Sequence[MicrobatchStats],
        *,
        out: Vector,
        component_sizes: Sequence[int] = (),
    ) -> "Future[Vector]":
        future = self._session.contribute(
            assignment, bucket, parts, microbatches, out=out, component_sizes=component_sizes
        )
        self._means.append((bucket, future))
        return future

    def commit(self, assignment: ShardAssignment, report: Report) -> Commit | ShardAssignment:
        commit = self._session.commit(assignment, report)
        assert isinstance(commit, Commit), "a worker that is not elastic was given an extra lease"
        if assignment.kind == "train":
            self._note(assignment, report.microbatches, commit)
        return commit

    def report(self, activity: str) -> None:
        self._session.report(activity)

    def _note(self, lease: ShardAssignment, stats: Sequence[MicrobatchStats], commit: Commit) -> None:
        means = {str(bucket): future.result(MEAN_TIMEOUT_S) for bucket, future in self._means}
        if lease.step == 0:
            self._record.arrays |= {f"mean/{bucket}": mean.copy() for bucket, mean in means.items()}
        self._record.steps.append(
            StepRecord(
                step=lease.step,
                attempt=lease.attempt,
                rank=lease.rank,
                world_size=lease.world_size,
                microbatches=(lease.microbatch_start, lease.microbatch_stop),
                weights=[item.weight for item in stats],
                means={bucket: hashlib.sha256(mean.tobytes()).hexdigest() for bucket, mean in means.items()},
                commit=asdict(commit),
            )
        )


class SlowTask:
    """A task on a slower machine: real forward passes whose results, and random draws, are thrown away."""

    def __init__(self, task: Task, extra_forwards: int) -> None:
        self._task, self._extra_forwards = task, extra_forwards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, batch: Any) -> LossSums:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for _ in range(self._extra_forwards):
                self._task.loss(batch)
        return self._task.loss(batch)


def main(job: WorkerJob) -> None:
    """Runs one worker to the end of the run; on failure its traceback is in the log beside the record."""
    try:
        torch.set_num_threads(1)
        work(job).write(job.record)
    except BaseException:
        job.record.with_suffix(".log").write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(1)


def work(job: WorkerJob) -> Record:
    """Asks what the run is, joins, trains, and returns what it saw."""
    # Inside the function, so that the process that is forked has not loaded gRPC.
    from tests.support.equality_client import connect, fetch_run

    config = settings.from_mapping(RunConfig, fetch_run(job))
    backend = opened(job.place)
    task = load_task(config.task, files_of(job.case), config.seed, backend.device)
    record = Record(name=job.name, backend=backend.name, device=f"{backend.device.type}: {backend.device_names[0]}")
    if backend.name != "cpu":
        with backend.context():
            record.arrays |= own_terms(job.case, task, config)
    task = cast(Task, SlowTask(task, job.extra_forwards))
    trainer = Trainer(task, config)
    client = connect(job, config.run_id, task, trainer.parameters_sha256())
    with client, backend.context():
        trainer.train(RecordingSession(client, record), lambda event: _note_event(event, task, record))
        client.close("done", trainer.parameters_sha256())
    record.fallbacks = backend.fallbacks()
    return record


def _note_event(event: StepEvent, task: Task, record: Record) -> None:
    if event.kind == "evaluate":
        record.evaluation_loss = event.loss
        return
    arrays = {name: parameter.detach().cpu().numpy() for name, parameter in task.trainable()}
    if event.step == 0:
        record.arrays |= {f"parameters/{name}": values.copy() for name, values in arrays.items()}
    digest = hashlib.sha256()
    for values in arrays.values():
        digest.update(np.ascontiguousarray(values).tobytes())
    record.steps[-1].parameters = digest.hexdigest()
