"""A worker of the churn bench that torchft keeps together: one replica group of one process. Runs in torchft's own
environment; with `--lighthouse` it serves the others instead.
"""

import sys
import threading
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from tests.bench.churn_line import BATCH, LEARNING_RATE, Lines, arguments, hash_of, loss_for, model


def main() -> None:
    parser = arguments()
    parser.add_argument("--lighthouse", default="", help="address; empty: serve one and print its address")
    parser.add_argument("--ddp", action="store_true", help="torchft's DDP wrapper instead of its all-reduce")
    given = parser.parse_args()
    if not given.lighthouse:
        return serve(given.tuned)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    network = model()
    inner = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    # By default 60 s; what fails with a peer that was killed fails at once all the same.
    timeout = timedelta(seconds=5 if given.tuned else 60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=lambda state: (network.load_state_dict(state["model"]), inner.load_state_dict(state["optim"])),
        state_dict=lambda: {"model": network.state_dict(), "optim": inner.state_dict()},
        min_replica_size=1,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=given.lighthouse,
        replica_id=given.name,
        hostname="127.0.0.1",
    )
    replicated = DistributedDataParallel(manager, network) if given.ddp else network
    optimizer = Optimizer(manager, inner)
    lines, share, number = Lines(given.output), BATCH // given.workers, int(given.name.rpartition("-")[2])
    while manager.current_step() < given.steps:
        step = manager.current_step()
        optimizer.zero_grad()
        loss_for(replicated, step * BATCH + number * share, share, given.device_ms).backward()
        if not given.ddp:
            average(manager, network)
        optimizer.step()
        committed = manager.current_step() > step
        lines.write(step=step, committed=committed, samples=share * manager.num_participants())
    lines.write(sha256=hash_of(network))
    manager.shutdown(wait=False)


def average(manager: Manager, network: torch.nn.Module) -> None:
    """Averages all gradients in one all-reduce, as torchft's own DDP would in one bucket."""
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def serve(tuned: bool) -> None:
    """Serves the lighthouse until the process is ended."""
    short = {"join_timeout_ms": 1000, "heartbeat_timeout_ms": 1000} if tuned else {}
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **short)
    print(lighthouse.address(), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
