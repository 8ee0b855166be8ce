"""The networked part of an equality worker: what the run is, and joining it."""

import json
from typing import Any

from ayni.channels import open_channel
from tests.support.equality_worker import WAIT, WorkerJob
from worker_agent import bridge
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.coordinator import Coordinator
from worker_agent.training.task import Task


def fetch_run(job: WorkerJob) -> dict[str, Any]:
    """Returns the run's configuration as the coordinator tells it."""

    async def ask() -> str:
        async with open_channel(job.address, job.token) as channel:
            return (await Coordinator(channel, job.address).get_run("", WAIT)).config_json

    config: dict[str, Any] = json.loads(bridge.shared().wait(ask(), WAIT.total_seconds(), "the run's configuration"))
    return config


def connect(job: WorkerJob, run_id: str, task: Task, parameters_sha256: str) -> WorkerClient:
    """Joins the run."""
    config = ClientConfig(
        coordinator=job.address,
        token=job.token,
        run_id=run_id,
        worker_name=job.name,
        exchange_timeout=WAIT,
        shard_timeout=WAIT,
        task_fingerprint=task.fingerprint(),
        task_summary=task.summary(),
        dataset_fingerprint=task.dataset_fingerprint(),
        dataset_summary=task.dataset_summary(),
        num_training_samples=task.num_samples,
        num_evaluation_samples=task.num_evaluation_samples,
        num_blocks=1 + max((spec.bucket.index for spec in task.buckets if spec.bucket.kind == "block"), default=-1),
        parameters_sha256=parameters_sha256,
        max_microbatches=job.place.max_microbatches,
    )
    return WorkerClient.connect(config, 0, job.place.backend)
