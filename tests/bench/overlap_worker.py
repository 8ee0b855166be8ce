"""A worker of `overlap.py`: trains layers that wait instead of computing, and keeps a timeline.

Legend: N elements in a layer.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ayni.buckets import BLOCK_COMPONENTS, Bucket
from ayni.kernels import loading
from ayni.rpc import tune_allocator
from ayni.run_config import RunConfig
from ayni.settings import from_mapping
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.training.events import StepEvent
from worker_agent.training.layout import BucketSpec
from worker_agent.training.loop import Trainer
from worker_agent.training.task import LossSums, TaskBase
from worker_agent.training.timeline import Timeline


class Wait(torch.autograd.Function):
    """A layer that takes as long as it is told; its gradient is there already."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight_N: Tensor, gradient_N: Tensor, seconds: tuple[float, float]) -> Tensor:
        context.gradient, context.seconds = gradient_N, seconds[1]
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        time.sleep(context.seconds)
        return gradients[0], context.gradient, None, None


class WaitingTask(TaskBase):
    """Equal layers, each a bucket."""

    def __init__(self, num_layers: int, num_elements: int, seconds: tuple[float, float]) -> None:
        self.num_samples = 1024
        self._seconds = seconds
        self._gradient_N = torch.full((num_elements,), 1e-3)
        self.model: nn.Module = nn.Module()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(num_elements)) for _ in range(num_layers))
        self.model.layers = self.layers

    @property
    def buckets(self) -> Sequence[BucketSpec]:
        """One for each layer, in backward order; each is the first component of a block."""
        return tuple(
            BucketSpec(
                bucket=Bucket("block", index),
                names=(f"layers.{index}",),
                sizes=(weight.numel(),),
                component_sizes=(weight.numel(), *[0] * (len(BLOCK_COMPONENTS) - 1)),
            )
            for index, weight in reversed(list(enumerate(self.layers)))
        )

    def batch(self, indices: Sequence[int], split: str) -> int:
        return len(indices)

    def loss(self, batch: int) -> LossSums:
        x = torch.zeros(1, requires_grad=True)
        for weight_N in self.layers:
            x = Wait.apply(x, weight_N, self._gradient_N, self._seconds)
        return LossSums(loss_sum=x.sum(), weight=batch)


def main() -> None:
    tune_allocator()
    loading.choose("compiled")
    torch.set_num_threads(1)
    given = _arguments()
    task = WaitingTask(given.layers, given.numel, (given.forward_s, given.backward_s))
    trainer = Trainer(task, from_mapping(RunConfig, json.loads(given.run)))
    config = ClientConfig(
        coordinator=given.coordinator,
        token=os.environ["AYNI_TOKEN"],
        worker_name=f"worker-{given.rank}",
        elastic=True,
        num_blocks=given.layers,
        num_buckets=given.layers,
        num_training_samples=task.num_samples,
        parameters_sha256=trainer.parameters_sha256(),
        gradients="auto" if given.path == "shm" else "grpc",
    )
    timeline = Timeline(given.output)

    def on_event(event: StepEvent) -> None:
        timeline.write(event)

    with WorkerClient.connect(config, 0, "cpu") as client:
        client.on_exchange(timeline.exchanged)
        trainer.train(client, on_event)
    trainer.close()
    timeline.close()
    print(json.dumps({"completed_steps": trainer.completed_steps}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--coordinator", "--run", "--path"):
        parser.add_argument(name, required=True)
    for name in ("--rank", "--numel", "--layers"):
        parser.add_argument(name, required=True, type=int)
    for name in ("--forward-s", "--backward-s"):
        parser.add_argument(name, required=True, type=float)
    parser.add_argument("--output", required=True, type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
