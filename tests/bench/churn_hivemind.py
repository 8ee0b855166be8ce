"""A worker of the churn bench that hivemind.Optimizer keeps together. Runs in Hivemind's own environment; with
`--peer` empty it is the swarm's first node, which only keeps the table of peers.
"""

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hivemind
import torch

from tests.bench.churn_line import BATCH, LEARNING_RATE, Lines, arguments, hash_of, loss_for, model

_HOST = ["/ip4/127.0.0.1/tcp/0"]


def main() -> None:
    parser = arguments()
    parser.add_argument("--peer", default="", help="address of the swarm's first node; empty: be it and print it")
    given = parser.parse_args()
    if not given.peer:
        first = hivemind.DHT(host_maddrs=_HOST, start=True, use_ipfs=False)
        print(first.get_visible_maddrs()[0], flush=True)
        threading.Event().wait()
    dht = hivemind.DHT(initial_peers=[given.peer], host_maddrs=_HOST, start=True, use_ipfs=False)
    network = model()
    short = {
        "matchmaking_time": 0.5,
        "averaging_timeout": 5.0,
        "allreduce_timeout": 3.0,
        "load_state_timeout": 20.0,
        "tracker_opts": {"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 0.5},
        "averager_opts": {"request_timeout": 0.3},
    }
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="churn",
        params=network.parameters(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        target_batch_size=BATCH,
        batch_size_per_step=1,
        **(short if given.tuned else {}),
    )
    lines, number, sample = Lines(given.output), int(given.name.rpartition("-")[2]), 0
    optimizer.load_state_from_peers()
    while optimizer.local_epoch < given.steps:
        epoch = optimizer.local_epoch
        loss_for(network, epoch * BATCH + number * 8 + sample % 8, 1, given.device_ms).backward()
        optimizer.step()
        optimizer.zero_grad()
        sample += 1
        if optimizer.local_epoch > epoch:
            lines.write(step=optimizer.local_epoch - 1, committed=True, samples=BATCH)
    optimizer.state_averager.step(wait_for_delayed_updates=True)
    lines.write(sha256=hash_of(network))
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
