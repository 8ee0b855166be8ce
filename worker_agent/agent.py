"""Life of a worker: find out what the run is, get its files, build the task, join, train, leave.  [shell]

The only wiring: everything here constructs, connects, starts or stops. Torch is imported when the task is built, so
that a wrong address or token is told at once.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ayni.channels import open_channel
from ayni.errors import Deadline, StorageFailed, TooLarge
from ayni.logs import log_context
from ayni.process import DONE, FAILED, Stopped, TemporaryFailure, load_token, on_signal
from ayni.run_config import RunConfig
from ayni.settings import SettingsError, from_mapping
from worker_agent import bridge
from worker_agent.artifacts import ArtifactCache
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.config import WorkerConfig
from worker_agent.contact import first_contact
from worker_agent.coordinator import Coordinator
from worker_agent.faults import CoordinatorLost, CoordinatorUnreachable, Interrupted
from worker_agent.messages import Run
from worker_agent.progress import Reporter, make_reporter
from worker_agent.serving import ServiceConfig, serving
from worker_agent.train_state_format import MODEL

if TYPE_CHECKING:
    from worker_agent.backend import Backend
    from worker_agent.blocks.worker import LocalBlockWorker
    from worker_agent.train_state import TrainState
    from worker_agent.training.events import TrainResult
    from worker_agent.training.loop import Trainer
    from worker_agent.training.task import Task

_log = logging.getLogger(__name__)

Fill = Callable[["LocalBlockWorker", "TrainState"], None]
"""Brings the blocks of a train state into a worker's layout; called on the training thread."""

_START_SECONDS = 15.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Everything that was built before joining."""

    run: Run
    config: RunConfig
    backend: "Backend"
    task: "Task"
    trainer: "Trainer"
    state: "TrainState"
    folder: Path


class Agent:
    """One worker process."""

    def __init__(self, config: WorkerConfig, fill: "Fill | None" = None) -> None:
        """Takes the configuration; `run` does the rest.

        Args:
            config: what the process was started with.
            fill: fills the state's layout where a run goes on from a state; None: loads it from the object store.
        """
        self._config = config
        self._fill = fill
        self._name = config.name or f"{socket.gethostname()}-{os.getpid()}"
        self._network = bridge.shared()
        self._blocks: LocalBlockWorker | None = None
        self._client: WorkerClient | None = None
        self._signal = ""

    def run(self) -> int:
        """Lives; returns the process's exit code.

        Raises:
            AyniError: the coordinator refused.
            OSError: a port, a file or the disk.
            SettingsError: wrong use.
            TemporaryFailure: the coordinator could not be reached, or was lost.
        """
        token = load_token(self._config.token_file)
        reporter = make_reporter(self._config.log_format)
        try:
            with self._context(worker=self._name), on_signal(self._stop), self._serving(token) as address:
                return self._live(token, address, reporter)
        except BaseException as error:
            return self._failed(error)
        finally:
            reporter.close()

    def _failed(self, error: BaseException) -> int:
        """Returns the exit code of a life that an error ended, or raises what says more."""
        # After a signal every error is its consequence: libraries turn what interrupts them into errors of their own.
        if self._signal or isinstance(error, KeyboardInterrupt | Interrupted):
            _log.debug("traceback", exc_info=error)
            _log.warning("interrupted (%s)", self._signal or "SIGINT")
            return FAILED
        if isinstance(error, CoordinatorUnreachable | CoordinatorLost):
            raise TemporaryFailure(str(error)) from error
        raise error

    def _live(self, token: str, address: str, reporter: Reporter) -> int:
        run, files = self._fetch(token, reporter)
        try:
            job = self._build(run, files)
        except Exception as error:
            self._check_signal()
            for problem in _problems(error):
                _log.error("run %s can't be trained here: %s", run.run_id, problem)
            _log.debug("traceback", exc_info=True)
            return FAILED
        self._check_signal()
        self._client = client = WorkerClient.connect(
            self._client_config(job, token, address), job.backend.gpu_count, job.backend.name
        )
        with self._leaving(client):
            result = self._train(job, client, reporter)
            client.close("the run is over", result.parameters_sha256)
        _log.info("%s", _farewell(result, client))
        self._linger()
        return DONE if client.finished else FAILED

    def _linger(self) -> None:
        """Goes on serving blocks after the run, for as long as the configuration says."""
        if seconds := self._config.serve_after.total_seconds():
            _log.info("serving blocks for up to %.0f s more", seconds)
            with contextlib.suppress(Stopped):
                threading.Event().wait(seconds)

    def _fetch(self, token: str, reporter: Reporter) -> tuple[Run, dict[str, Path]]:
        """Asks what the run is and gets its files."""
        config = self._config
        with self._coordinator(token) as coordinator:
            asking = first_contact(
                partial(coordinator.get_run, config.run_id), config.coordinator, config.connect_timeout
            )
            run = self._network.wait(asking, config.connect_timeout.total_seconds() + _START_SECONDS, "GetRun")
            _log.info("run %s: %d files", run.run_id, len(run.artifacts))
            cache = ArtifactCache(config.cache_dir.expanduser(), config.cache_timeout)
            files = cache.provide(
                run.artifacts,
                lambda artifact, offset: self._network.iterate(
                    coordinator.fetch(artifact.sha256, offset),
                    config.fetch_timeout.total_seconds(),
                    f"bytes of {artifact.name}",
                ),
                reporter.fetched,
            )
        return run, files

    def _build(self, run: Run, files: dict[str, Path]) -> _Job:
        """Builds the task and what trains it.

        Raises:
            Exception: it does not fit this machine, or the run's files, or the task has a bug.
        """
        run_config = from_mapping(RunConfig, json.loads(run.config_json))
        if not run_config.task.name:
            raise ValueError("its run file names no task, so its workers are scripts of their own (see WorkerClient)")
        _log.info("loading task %s", run_config.task.name)
        began = time.monotonic()
        import torch

        from worker_agent import backend
        from worker_agent.training.load import load_task
        from worker_agent.training.loop import Trainer, TrainingConfig

        torch.set_num_threads(self._config.threads)
        resolved = backend.resolve(self._config.backend)
        task = load_task(run_config.task, files, run_config.seed, resolved.device)
        folder = self._config.output_dir or Path("ayni-output") / run_config.run_id / self._name
        training = TrainingConfig(
            checkpoint_folder=folder / "checkpoints",
            checkpoint_every=self._config.checkpoint_every,
            means_timeout_s=self._config.exchange_timeout.total_seconds(),
        )
        trainer = Trainer(task, run_config, training)
        state = self._restored(run_config, trainer)
        seconds = time.monotonic() - began
        _log.info("loaded in %.1f s on %s: %s; %s", seconds, resolved.name, task.summary(), task.dataset_summary())
        return _Job(
            run=run, config=run_config, backend=resolved, task=task, trainer=trainer, state=state, folder=folder
        )

    def _client_config(self, job: _Job, token: str, address: str) -> ClientConfig:
        config, task = self._config, job.task
        return ClientConfig(
            coordinator=config.coordinator,
            token=token,
            run_id=job.run.run_id,
            worker_name=self._name,
            tls=config.tls,
            insecure=config.insecure,
            connect_timeout=config.connect_timeout,
            exchange_timeout=config.exchange_timeout,
            device_names=job.backend.device_names,
            worker_address=address,
            task_fingerprint=task.fingerprint(),
            task_summary=task.summary(),
            dataset_fingerprint=task.dataset_fingerprint(),
            dataset_summary=task.dataset_summary(),
            num_training_samples=task.num_samples,
            num_evaluation_samples=task.num_evaluation_samples,
            num_blocks=1 + max((s.bucket.index for s in task.buckets if s.bucket.kind == "block"), default=-1),
            completed_steps=job.trainer.completed_steps,
            parameters_sha256=job.trainer.parameters_sha256(),
        )

    def _train(self, job: _Job, client: WorkerClient, reporter: Reporter) -> "TrainResult":
        from worker_agent.training.events import StepEvent
        from worker_agent.training.metrics import Metrics

        metrics = Metrics(job.folder, tensorboard=self._config.tensorboard)

        def on_event(event: StepEvent) -> None:
            metrics.write(event)
            with self._context(rank=event.rank, epoch=event.epoch, step=event.step):
                reporter.stepped(event, job.config.num_steps)
            if event.kind == "train":
                self._publish(job, client)

        try:
            return job.trainer.train(client, on_event)
        finally:
            metrics.close()
            job.trainer.close()

    def _restored(self, config: RunConfig, trainer: "Trainer") -> "TrainState":
        """Returns the train state's place in the block half; where the run goes on, the trainer goes on with it."""
        from worker_agent.train_state import TrainState

        assert self._blocks
        state = TrainState(self._network, self._blocks, config.state, config.run_id)
        if config.state.resume_step:
            if self._fill:
                self._fill(self._blocks, state)
            else:
                state.load()
            trainer.restore("the train state", *state.unpack(config.state.resume_step))
            _log.info("going on from the state behind step %d", trainer.completed_steps)
        return state

    def _publish(self, job: _Job, client: WorkerClient) -> None:
        """Publishes the train state, if it is due, once the one before has been stored."""
        state, steps = job.state, job.trainer.completed_steps
        if not state.is_due(steps):
            return
        try:
            if state.is_awaiting_store:
                client.wait_settled(state.published_steps, self._config.exchange_timeout)
            state.publish(*job.trainer.state())
        except (Deadline, StorageFailed, TooLarge) as error:
            _log.warning("the state behind step %d is not published: %s", steps, error)
            return
        client.publish(steps)

    def _context(self, **fields: object) -> AbstractContextManager[None]:
        """Adds fields to log events for machines; people read them in the sentences."""
        return log_context(**fields) if self._config.log_format == "json" else nullcontext()

    @contextmanager
    def _leaving(self, client: WorkerClient) -> Iterator[None]:
        """Tells the coordinator why this worker goes, however it goes."""
        try:
            yield
        except (KeyboardInterrupt, Stopped, Interrupted):
            client.close(f"interrupted ({self._signal or 'SIGINT'})")
            raise
        except BaseException as error:
            client.close(f"failed: {type(error).__name__}: {error}")
            raise

    @contextmanager
    def _coordinator(self, token: str) -> Iterator[Coordinator]:
        """Opens a connection for the calls that come before Join."""
        config = self._config

        async def connect() -> Coordinator:
            return Coordinator(open_channel(config.coordinator, token, config.tls, config.insecure), config.coordinator)

        coordinator = self._network.wait(connect(), _START_SECONDS, "a channel")
        try:
            yield coordinator
        finally:
            self._network.wait(coordinator.close(), _STOP_SECONDS, "the end of a channel")

    @contextmanager
    def _serving(self, token: str) -> Iterator[str]:
        """Serves this worker's own service and yields where it can be dialled."""
        config = self._config
        service = serving(
            ServiceConfig(
                listen=config.listen,
                token=token,
                blocks=config.blocks,
                tls=config.tls,
                server_tls=config.server_tls,
                insecure=config.insecure,
                model=MODEL,
            )
        )
        self._blocks = self._network.wait(service.__aenter__(), _START_SECONDS, f"a server at {config.listen}")
        print(f"listening on {self._blocks.bound}", flush=True)
        try:
            yield self._blocks.address
        finally:
            self._network.wait(service.__aexit__(None, None, None), _STOP_SECONDS, "the end of the server")

    def _stop(self, name: str) -> None:
        """Handles the first signal: whatever the main thread does is over."""
        self._signal = name
        if self._client:
            # An exception that is raised inside a callback of the interpreter may be lost; this one is not.
            self._client.interrupt(name)
        raise Stopped(name)

    def _check_signal(self) -> None:
        """Stops, if a library has swallowed what the signal raised."""
        if self._signal:
            raise Stopped(self._signal)


def _problems(error: Exception) -> tuple[object, ...]:
    """Returns an error's sentences. Those that are not meant for users begin with the name of the class."""
    if isinstance(error, SettingsError):
        return error.problems
    if isinstance(error, ValueError | ImportError | OSError):
        return (error,)
    return (f"{type(error).__name__}: {error}",)


def _farewell(result: "TrainResult", client: WorkerClient) -> str:
    traffic = client.traffic
    return (
        f"left the run after {result.completed_steps} steps in {result.wall_s:.1f} s; sent "
        f"{traffic.sent_bytes / 1e6:.1f} MB and received {traffic.received_bytes / 1e6:.1f} MB; parameters "
        f"{result.parameters_sha256[:16]}"
    )
