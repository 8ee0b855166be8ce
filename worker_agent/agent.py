"""Life of a worker: find out what the run is, get its files, build the task, join, train, leave.  [shell]

The only wiring: everything here constructs, connects, starts or stops. Torch is imported when the task is built, so
that a wrong address or token is told at once.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ayni.channels import open_channel
from ayni.endpoints import Address, parse_address
from ayni.logs import log_context
from ayni.process import DONE, FAILED, Stopped, TemporaryFailure, load_token, on_signal
from ayni.run_config import RunConfig
from ayni.servers import TokenInterceptor, add_health_and_reflection, bind, make_server
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
from worker_agent.service import SERVICE, WorkerServicer

if TYPE_CHECKING:
    from grpc import aio

    from worker_agent.backend import Backend
    from worker_agent.training.events import TrainResult
    from worker_agent.training.loop import Trainer
    from worker_agent.training.task import Task

_log = logging.getLogger(__name__)

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
    folder: Path


class Agent:
    """One worker process."""

    def __init__(self, config: WorkerConfig) -> None:
        """Takes the configuration; `run` does the rest."""
        self._config = config
        self._name = config.name or f"{socket.gethostname()}-{os.getpid()}"
        self._network = bridge.shared()
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
        return DONE if client.finished else FAILED

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
        seconds = time.monotonic() - began
        _log.info("loaded in %.1f s on %s: %s; %s", seconds, resolved.name, task.summary(), task.dataset_summary())
        return _Job(run=run, config=run_config, backend=resolved, task=task, trainer=trainer, folder=folder)

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

        try:
            return job.trainer.train(client, on_event)
        finally:
            metrics.close()
            job.trainer.close()

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

        async def start() -> tuple["aio.Server", str]:
            server = make_server(TokenInterceptor(token))
            WorkerServicer().add_to(server)
            await add_health_and_reflection(server, [SERVICE.full_name])
            address = bind(server, config.listen, config.server_tls, config.insecure)
            await server.start()
            return server, address

        server, address = self._network.wait(start(), _START_SECONDS, f"a server at {config.listen}")
        print(f"listening on {address}", flush=True)
        try:
            yield _dialable(address)
        finally:
            self._network.wait(server.stop(grace=None), _STOP_SECONDS, "the end of the server")

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


def _dialable(address: str) -> str:
    """Returns the address that others may dial: a wildcard means this host."""
    parsed = parse_address(address)
    if parsed.host in ("0.0.0.0", "::"):
        return str(Address(host=socket.gethostname(), port=parsed.port))
    return address


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
