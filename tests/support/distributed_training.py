"""Trains with DistributedDataParallel and FSDP2 on the CPU; saves what came of it. Arguments: backend, folder."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def batches(rank: int, world_size: int):
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    for start in range(0, 64, 8 * world_size):
        rows = slice(start + 8 * rank, start + 8 * rank + 8)
        yield inputs[rows], labels[rows]


def full(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor().detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, labels in batches(dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def main(backend: str, folder: str) -> None:
    if backend == "ayni":
        import worker_agent.integrations.c10d  # noqa: F401
    dist.init_process_group(backend)  # Ranks come from torchrun's variables.
    torch.manual_seed(dist.get_rank())  # DistributedDataParallel gives all ranks the weights and buffers of rank 0.
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3))
    with_buffers = DistributedDataParallel(model, bucket_cap_mb=0.001)
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        for module in model:
            if isinstance(module, nn.Linear | nn.BatchNorm1d):
                module.reset_parameters()
    with_buffers = DistributedDataParallel(model, bucket_cap_mb=0.001)
    train(with_buffers, torch.optim.SGD(with_buffers.parameters(), lr=0.1))
    ends = {f"ddp {name}": value for name, value in with_buffers.module.state_dict().items() if "running" not in name}

    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 3))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(sharded)
    train(sharded, torch.optim.AdamW(sharded.parameters(), lr=0.1))
    ends |= {f"fsdp2 {name}": full(p) for name, p in sharded.named_parameters()}

    # What a subgroup and objects need.
    found: list[object] = [None, None]
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    assert found == [{"rank": 0}, {"rank": 1}]
    pair = dist.new_group([0, 1])
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=pair)
    assert tensor.item() == 3
    torch.save(ends, Path(folder) / f"{backend}-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
