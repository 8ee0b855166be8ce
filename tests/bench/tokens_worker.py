"""A worker of `tokens.py`: trains the same model as a worker of ours and under DDP, in turn, and prints its times."""

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ayni import order
from ayni.kernels import loading
from ayni.rpc import tune_allocator
from ayni.run_config import RunConfig
from ayni.settings import from_mapping
from ayni.tensors import WIRE_DTYPES
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.training.events import StepEvent
from worker_agent.training.load import load_task
from worker_agent.training.loop import Trainer
from worker_agent.training.task import TRAIN, LossSums, Task

DEADLINE_S = 300.0


def main() -> None:
    tune_allocator()
    loading.choose("compiled")
    torch.set_num_threads(1)
    given = _arguments()
    config = from_mapping(RunConfig, json.loads(given.run))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{given.store}",
        rank=given.rank,
        world_size=given.workers,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    ours, ddp, ddp_float16 = [], [], []
    for address in given.coordinators.split(","):
        dist.barrier()
        ours.append(train_ours(given, config, address))
        dist.barrier()
        ddp.append(train_ddp(given, config))
        if given.wire != "float32":
            dist.barrier()
            ddp_float16.append(train_ddp(given, config, fp16_compress_hook))
    parameters = sum(parameter.numel() for _, parameter in make_task(given, config).trainable())
    print(json.dumps({"ours": ours, "ddp": ddp, "ddp_float16": ddp_float16, "parameters": parameters}))
    dist.destroy_process_group()


def make_task(given: argparse.Namespace, config: RunConfig) -> Task:
    return load_task(config.task, {"train.txt": given.text}, config.seed, "cpu")


def train_ours(given: argparse.Namespace, config: RunConfig, address: str) -> dict[str, float]:
    """Takes part in one run."""
    task = make_task(given, config)
    trainer = Trainer(task, config)
    client_config = ClientConfig(
        coordinator=address,
        token=os.environ["AYNI_TOKEN"],
        worker_name=f"worker-{given.rank}",
        elastic=True,
        insecure=given.insecure,
        num_training_samples=task.num_samples,
        num_blocks=1 + max(spec.bucket.index for spec in task.buckets if spec.bucket.kind == "block"),
        num_buckets=len(task.buckets),
        task_fingerprint=task.fingerprint(),
        parameters_sha256=trainer.parameters_sha256(),
        gradients="auto" if given.path == "shm" else "grpc",
        wire_types=WIRE_DTYPES,
        peer_listen=f"{given.host}:0" if given.topology == "sharded" else "",
        store_listen=given.host if given.topology == "torch" else "",
    )
    moments: list[float] = []
    events: list[StepEvent] = []

    def on_event(event: StepEvent) -> None:
        moments.append(time.perf_counter())
        events.append(event)

    with WorkerClient.connect(client_config, 0, "cpu") as client:
        trainer.train(client, on_event)
    trainer.close()
    counted = events[given.warm_up :]
    return {
        "seconds": moments[-1] - moments[given.warm_up - 1],
        "steps": len(counted),
        "tokens": sum(event.total_weight for event in counted),
        "loss": events[-1].loss,
    }


def train_ddp(given: argparse.Namespace, config: RunConfig, hook: Callable[..., Any] | None = None) -> dict[str, float]:
    """Trains alone with the other workers of the group, as torch's documentation does it; `hook` sends gradients."""
    task: Any = make_task(given, config)
    task.model = DistributedDataParallel(task.model)
    if hook:
        task.model.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(
        task.model.parameters(), lr=config.optimizer.learning_rate, weight_decay=config.optimizer.weight_decay
    )
    tokens, start, loss = 0, 0.0, 0.0
    for step in range(config.num_steps):
        if step == given.warm_up:
            start, tokens = time.perf_counter(), 0
        sums = _ddp_step(task, config, given, step)
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        tokens += sums[1] * given.workers
        loss = sums[0]
    seconds = time.perf_counter() - start
    total = torch.tensor([loss, tokens / (config.num_steps - given.warm_up)], dtype=torch.float64)
    mean = loss_of_all(total, given.workers)
    return {"seconds": seconds, "steps": config.num_steps - given.warm_up, "tokens": tokens, "loss": mean}


def loss_of_all(own: Tensor, workers: int) -> float:
    """The mean loss of the last step, from each worker's summed loss and the tokens of a step."""
    dist.all_reduce(own)
    return float(own[0] / (own[1] / workers))


def _ddp_step(task: Any, config: RunConfig, given: argparse.Namespace, step: int) -> tuple[float, int]:
    """Computes a step's gradients; returns the summed loss of this worker's share, and its tokens."""
    total, samples = config.batch.microbatches, config.batch.samples
    share = total // given.workers
    own = range(given.rank * share, (given.rank + 1) * share)
    loss, weight = 0.0, 0
    task.model.train()
    for number in own:
        first, last = order.microbatch_positions(step * samples, samples, total, number)
        batch = task.batch(order.samples_at(config.seed, first, last, task.num_samples).tolist(), TRAIN)
        with nullcontext() if number == own[-1] else task.model.no_sync():
            sums: LossSums = task.loss(batch)
            (sums.loss_sum / (sums.weight * share)).backward()
        loss += float(sums.loss_sum.detach())
        weight += sums.weight
    return loss, weight


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--coordinators", "--run", "--store", "--path", "--topology", "--wire", "--host"):
        parser.add_argument(name, required=True)
    parser.add_argument("--text", required=True, type=Path)
    for name in ("--rank", "--workers", "--warm-up"):
        parser.add_argument(name, required=True, type=int)
    parser.add_argument("--insecure", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
