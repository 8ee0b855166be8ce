"""Everything that is built before a worker joins: the task, what trains it, and how its state travels.  [shell]

Torch is imported here when a job is built, so that a wrong address or token is told at once.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ayni.run_config import RunConfig
from ayni.settings import from_mapping
from ayni.tensors import WIRE_DTYPES
from worker_agent.bridge import Bridge
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.config import WorkerConfig
from worker_agent.messages import Run
from worker_agent.onboarding import Onboarding, RelayConfig
from worker_agent.serving import BlockService

if TYPE_CHECKING:
    from worker_agent.backend import Backend
    from worker_agent.blocks.worker import LocalBlockWorker
    from worker_agent.offered_states import OfferedStates
    from worker_agent.publishing import Publisher
    from worker_agent.train_state import TrainState
    from worker_agent.training.loop import Trainer
    from worker_agent.training.task import Task

_log = logging.getLogger(__name__)

Fill = Callable[["LocalBlockWorker", "TrainState"], None]
"""Brings the blocks of a train state into a worker's layout; called on the training thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker needs to take part in a run."""

    run: Run
    config: RunConfig
    backend: "Backend"
    task: "Task"
    trainer: "Trainer"
    publisher: "Publisher"
    offered: "OfferedStates"
    """States that others have, for a worker that lags behind."""
    folder: Path

    def join_config(self, config: WorkerConfig, name: str, token: str, address: str) -> ClientConfig:
        """Returns what the worker joins with."""
        task = self.task
        return ClientConfig(
            coordinator=config.coordinator,
            token=token,
            run_id=self.run.run_id,
            worker_name=name,
            tls=config.tls,
            insecure=config.insecure,
            connect_timeout=config.connect_timeout,
            exchange_timeout=config.exchange_timeout,
            rejoin_timeout=config.rejoin_timeout,
            device_names=self.backend.device_names,
            memory_bytes=self.backend.memory_bytes,
            max_microbatches=config.max_microbatches,
            gradients=config.gradients,
            wire_types=WIRE_DTYPES,
            elastic=True,
            worker_address=address,
            task_fingerprint=task.fingerprint(),
            task_summary=task.summary(),
            dataset_fingerprint=task.dataset_fingerprint(),
            dataset_summary=task.dataset_summary(),
            num_training_samples=task.num_samples,
            num_evaluation_samples=task.num_evaluation_samples,
            num_blocks=1 + max((s.bucket.index for s in task.buckets if s.bucket.kind == "block"), default=-1),
            num_buckets=len(task.buckets),
            completed_steps=self.trainer.completed_steps,
            origin=self.trainer.replica.origin,
            parameters_sha256=self.trainer.parameters_sha256(),
        )


class Builder:
    """Builds the job of one worker."""

    def __init__(
        self,
        config: WorkerConfig,
        name: str,
        service: BlockService,
        network: Bridge,
        membership: Callable[[], WorkerClient],
    ) -> None:
        """Takes what the worker has already.

        Args:
            config: what the process was started with.
            name: of the worker.
            service: its own service.
            network: where the network runs.
            membership: gives the present membership; called once there is one.
        """
        self._config = config
        self._name = name
        self._service = service
        self._network = network
        self._membership = membership

    def build(self, run: Run, files: dict[str, Path], fill: Fill | None) -> Job:
        """Builds the task and what trains it.

        Args:
            run: what GetRun said.
            files: of the run.
            fill: fills the state's layout where a run goes on from a state; None: loads it from the object store.

        Raises:
            Exception: it does not fit this machine, or the run's files, or the task has a bug.
        """
        run_config = from_mapping(RunConfig, json.loads(run.config_json))
        if not run_config.task.name:
            raise ValueError("its run file names no task, so its workers are scripts of their own (see WorkerClient)")
        _log.info("loading task %s", run_config.task.name)
        began = time.monotonic()
        if run_config.topology == "torch":
            # Of every peer that goes away c10d tells with pages of addresses; the exchange says it in a sentence.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        import torch

        from worker_agent.publishing import Publisher
        from worker_agent.train_state import TrainState
        from worker_agent.training.load import load_task
        from worker_agent.training.loop import Trainer, TrainingConfig

        torch.set_num_threads(self._config.threads)
        resolved = self._backend()
        task = load_task(run_config.task, files, run_config.seed, resolved.device)
        folder = self._config.output_dir or Path("ayni-output") / run_config.run_id / self._name
        state = TrainState(self._network, self._service.worker, run_config.state, run_config.run_id)
        offered = self._offered(state)
        training = TrainingConfig(
            checkpoint_folder=folder / "checkpoints",
            checkpoint_every=self._config.checkpoint_every,
            means_timeout_s=self._config.exchange_timeout.total_seconds(),
            state_source=offered,
            follow_bytes=self._config.follow_bytes,
        )
        trainer = Trainer(task, run_config, training)
        self._restore(run, run_config, trainer, state, fill)
        seconds = time.monotonic() - began
        place = f"{resolved.name}, {', '.join(resolved.device_names)}" if resolved.name == "wgpu" else resolved.name
        _log.info("loaded in %.1f s on %s: %s; %s", seconds, place, task.summary(), task.dataset_summary())
        return Job(
            run=run,
            config=run_config,
            backend=resolved,
            task=task,
            trainer=trainer,
            publisher=Publisher(state, self._config.exchange_timeout),
            offered=offered,
            folder=folder,
        )

    def _backend(self) -> "Backend":
        """Returns what this worker computes on."""
        from worker_agent import backend

        if self._config.backend != "cpu":
            _choose_accelerator(self._config.launch.local_rank)
        wishes = backend.PortableWishes(
            engine=self._config.wgpu_engine,
            allow_software=self._config.allow_software_gpu,
            min_flops=self._config.offload_min_flops,
        )
        return backend.resolve(self._config.backend, wishes)

    def _offered(self, state: "TrainState") -> "OfferedStates":
        from worker_agent.offered_states import Answers, OfferedStates

        relay = RelayConfig(
            coordinator=self._config.coordinator,
            relays=self._service.relays,
            session=lambda: self._membership().session,
        )
        answers = Answers(
            failed=lambda offer_id, reason, damaged: self._membership().fail_offer(
                offer_id, reason, is_damaged=damaged
            ),
            published=lambda steps: self._membership().publish(steps),
            arrived=lambda: self._membership().wake(),
        )
        return OfferedStates(Onboarding(self._network, state, relay, self._config.onboard_timeout), answers)

    def _restore(self, run: Run, config: RunConfig, trainer: "Trainer", state: "TrainState", fill: Fill | None) -> None:
        """Where the run goes on from a state, the trainer does too; unless the run has left that state behind."""
        resume_step = config.state.resume_step
        if not resume_step or run.committed_steps > resume_step:
            return
        if fill:
            fill(self._service.worker, state)
        else:
            state.load()
        trainer.restore("the train state", *state.unpack(resume_step))
        _log.info("going on from the state behind step %d", trainer.completed_steps)


def _choose_accelerator(local_rank: int | None) -> None:
    """Lets the workers that a launcher has started on one host use one accelerator each, in turn."""
    import torch

    if local_rank is not None and torch.cuda.is_available():
        # A launcher that shows each process only its own accelerator leaves a single one to choose from.
        index = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        _log.info("accelerator %d of %d, for local rank %d", index, torch.cuda.device_count(), local_rank)
