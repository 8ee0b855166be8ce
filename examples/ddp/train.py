"""A DistributedDataParallel script as torch's tutorial writes it, on workers of a run: see the lines marked `ayni`.

AYNI_COORDINATOR=HOST:PORT AYNI_TOKEN_FILE=run.token torchrun --standalone --nproc-per-node=1 examples/ddp/train.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from worker_agent.integrations import ddp_hook, join  # ayni: 1


def digits() -> TensorDataset:
    """Returns 600 points in three clouds."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 3
    centres = torch.randn(3, 16, generator=generator) * 2
    return TensorDataset(centres[labels] + torch.randn(600, 16, generator=generator), labels)


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", default="")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3)))
    run = join(model)  # ayni: 2
    model.register_comm_hook(run, ddp_hook)  # ayni: 3

    dataset = digits()
    # ayni: 4, only where the process group has fewer processes than the run has workers.
    sampler = DistributedSampler(dataset, num_replicas=run.world_size, rank=run.rank)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        print(f"rank {run.rank} of {run.live_workers}: epoch {epoch}, loss {loss.item():.4f}", flush=True)
    if options.save:
        torch.save(model.module.state_dict(), options.save)
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
