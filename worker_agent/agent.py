"""Life of a worker: find out what the run is, get its files, build the task, join, train, leave.  [shell]

The only wiring, with `worker_agent.job`: everything here constructs, connects, starts or stops.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ayni.channels import open_channel
from ayni.endpoints import parse_address
from ayni.errors import RunEnded
from ayni.logs import log_context, set_fields
from ayni.process import DONE, FAILED, Stopped, TemporaryFailure, load_token, on_signal
from ayni.settings import SettingsError
from ayni.tracing import open_tracing
from worker_agent import bridge
from worker_agent.artifacts import ArtifactCache
from worker_agent.attachment import AttachConfig, Attachment, is_needed
from worker_agent.client import WorkerClient
from worker_agent.config import WorkerConfig
from worker_agent.contact import first_contact
from worker_agent.coordinator import Coordinator
from worker_agent.faults import CoordinatorLost, CoordinatorUnreachable, Interrupted, TransportBroken
from worker_agent.job import Builder, Fill, Job
from worker_agent.launchers import worker_name
from worker_agent.lost_device import noticed
from worker_agent.messages import Run
from worker_agent.progress import Reporter, make_reporter
from worker_agent.serving import BlockService, ServiceConfig, block_service
from worker_agent.session import BucketExchange
from worker_agent.step_spans import StepSpans
from worker_agent.train_state_format import MODEL

if TYPE_CHECKING:
    from worker_agent.training.events import TrainResult
    from worker_agent.training.metrics import Metrics
    from worker_agent.training.timeline import Timeline

_log = logging.getLogger(__name__)

_START_SECONDS = 15.0
_STOP_SECONDS = 10.0


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
        self._name = config.name or worker_name(config.launch, socket.gethostname(), os.getpid())
        self._network = bridge.shared()
        self._service: BlockService | None = None
        self._client: WorkerClient | None = None
        self._signal = ""

    def run(self) -> int:
        """Lives; returns the process's exit code.

        Raises:
            AyniError: the coordinator refused.
            OSError: a port, a file or the disk.
            SettingsError: wrong use.
            TemporaryFailure: the coordinator could not be reached, or was lost; or the device was (`DeviceLost`).
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
        if isinstance(error, RunEnded) and error.metadata.get("state") == "finished":
            _log.warning("the run is finished, and this worker was away at its end: it has no final parameters")
            return DONE
        if isinstance(error, CoordinatorUnreachable | CoordinatorLost | TransportBroken):
            raise TemporaryFailure(str(error)) from error
        raise error

    def _live(self, token: str, address: str, reporter: Reporter) -> int:
        run, files = self._fetch(token, reporter)
        assert self._service
        builder = Builder(self._config, self._name, self._service, self._network, self._membership)
        try:
            job = builder.build(run, files, self._fill)
        except Exception as error:
            self._check_signal()
            for problem in _problems(error):
                _log.error("run %s can't be trained here: %s", run.run_id, problem)
            _log.debug("traceback", exc_info=True)
            return FAILED
        self._check_signal()
        with contextlib.closing(self._metrics(job)) as metrics:
            code = self._take_part(token, address, reporter, job, metrics)
        self._linger()
        return code

    def _take_part(self, token: str, address: str, reporter: Reporter, job: Job, metrics: "Metrics") -> int:
        """Joins and trains; returns the process's exit code."""
        assert self._service
        join_config = replace(
            job.join_config(self._config, self._name, token, address),
            peer_address=self._peer_address(),
            store_listen=self._store_host(job.config.topology),
        )
        self._client = client = WorkerClient.connect(
            join_config, job.backend.gpu_count, job.backend.name, rounds=self._service.rounds
        )
        client.on_offer(job.offered.offered)
        client.count_fallbacks(job.backend.fallbacks)
        losing = noticed(job.backend.name, job.backend.device_names)
        with self._leaving(client), self._attached(client, token), losing:
            result = self._train(job, client, reporter, metrics)
            client.close("it was drained" if client.drained else "the run is over", result.parameters_sha256)
        _log.info("%s", _farewell(result, client))
        if fallbacks := job.backend.fallbacks():
            _log.warning("%d operations ran on the CPU because the GPU's engine does not have them", fallbacks)
        return DONE if client.finished or client.drained else FAILED

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
            set_fields(run=run.run_id, worker=self._name)
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

    def _metrics(self, job: Job) -> "Metrics":
        """Opens what numbers go to: before others wait for this worker."""
        from worker_agent.training.metrics import Metrics
        from worker_agent.training.trackers import Trackers

        names = self._config.trackers
        trackers = Trackers(names, job.config.run_id, job.folder.name) if names else None
        return Metrics(job.folder, tensorboard=self._config.tensorboard, trackers=trackers)

    def _train(self, job: Job, client: WorkerClient, reporter: Reporter, metrics: "Metrics") -> "TrainResult":
        from worker_agent.training.events import StepEvent

        watching = self._watching(job)

        def exchanged(exchange: BucketExchange) -> None:
            for one in watching:
                one.exchanged(exchange)

        if watching:
            client.on_exchange(exchanged)

        def on_event(event: StepEvent) -> None:
            metrics.write(event)
            for one in watching:
                one.write(event)
            with self._context(rank=event.rank, epoch=event.epoch, step=event.step):
                reporter.stepped(event, job.config.num_steps)
            if event.kind == "train" and not event.following:
                steps, is_asked = job.trainer.completed_steps, event.publish_state
                job.publisher.updated(client, steps, job.trainer.state, is_asked=is_asked)

        try:
            with job.backend.context():
                return job.trainer.train(client, on_event)
        finally:
            for one in watching:
                one.close()
            job.trainer.close()

    def _watching(self, job: Job) -> "list[Timeline | StepSpans]":
        """Returns what writes down the exchanges and moments of each step."""
        from worker_agent.training.timeline import Timeline

        found: list[Timeline | StepSpans] = [Timeline(job.folder)] if self._config.timeline else []
        about = {"ayni.run": job.config.run_id, "service.instance.id": self._name}
        if tracing := open_tracing(self._config.traces, "ayni-worker", about):
            found.append(StepSpans(tracing))
        return found

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
    def _attached(self, client: WorkerClient, token: str) -> Iterator[None]:
        """Lets the coordinator call this worker over a stream that it opens, where the configuration says so."""
        if not self._is_attached():
            yield
            return
        config = self._config
        assert self._service
        attaching = AttachConfig(coordinator=config.coordinator, token=token, tls=config.tls, insecure=config.insecure)
        attachment = Attachment(attaching, self._service.servicer)
        client.on_member(lambda member: attachment.follow(member.membership))
        try:
            yield
        finally:
            self._network.wait(attachment.close(), _STOP_SECONDS, "the end of the attachment")

    def _is_attached(self) -> bool:
        config = self._config
        return is_needed(config.attach, config.listen, config.coordinator)

    def _peer_address(self) -> str:
        """Returns where other workers dial this one; empty where that would lead them to themselves."""
        assert self._service
        is_hidden = is_needed("auto", self._config.listen, self._config.coordinator)
        return "" if is_hidden else self._service.worker.address

    def _store_host(self, topology: str) -> str:
        """Returns where to open a store for rendezvous; empty where none is needed, or nobody could dial it."""
        is_needed_here = topology == "torch" and self._peer_address()
        return parse_address(self._config.listen).host if is_needed_here else ""

    def _membership(self) -> WorkerClient:
        assert self._client
        return self._client

    @contextmanager
    def _serving(self, token: str) -> Iterator[str]:
        """Serves this worker's own service and yields where it can be dialled."""
        config = self._config
        service = block_service(
            ServiceConfig(
                listen=config.listen,
                token=token,
                blocks=config.blocks,
                tls=config.tls,
                server_tls=config.server_tls,
                insecure=config.insecure,
                limits=config.limits,
                model=MODEL,
            )
        )
        self._service = self._network.wait(service.__aenter__(), _START_SECONDS, f"a server at {config.listen}")
        worker = self._service.worker
        print(f"listening on {worker.bound}", flush=True)
        try:
            # Where calls must come back over this worker's own stream, its address would mislead.
            yield "" if config.attach == "auto" and self._is_attached() else worker.address
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
