"""A plain training loop, on workers of a run: see the lines marked `ayni`.

AYNI_COORDINATOR=HOST:PORT AYNI_TOKEN_FILE=run.token python examples/own_loop/train.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from worker_agent.integrations import join  # ayni: 1


def line() -> TensorDataset:
    """Returns 240 points near a line."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(240, 3, generator=generator)
    noise = 0.01 * torch.randn(240, generator=generator)
    return TensorDataset(inputs, inputs @ torch.tensor([1.0, -2.0, 0.5]) + noise)


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", default="")
    options = parser.parse_args()

    model = nn.Linear(3, 1)
    run = join(model)  # ayni: 2
    optimizer = run.attach(torch.optim.SGD(model.parameters(), lr=0.1))  # ayni: 3
    for inputs, targets in DataLoader(run.shard(line()), batch_size=10):  # ayni: 4, each worker its own samples
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets)
        loss.backward()
        optimizer.step()
    print(f"rank {run.rank} of {run.world_size}: loss {loss.item():.4f}, {model.weight.tolist()}", flush=True)
    if options.save:
        torch.save(model.state_dict(), options.save)
    run.close()


if __name__ == "__main__":
    main()
