"""A worker of the all-reduce bench whose vectors torchft averages: one replica group of one process, over Gloo.

Runs in torchft's own environment; without `--address` it serves the lighthouse. A turn is what a step costs beside its
computing: the quorum and the vote (control), and the managed all-reduce (exchange).
"""

import sys
import threading
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from tests.bench.reduce_line import arguments, check, take_turns, timed, true_mean, vector


def main() -> None:
    given = arguments().parse_args()
    torch.set_num_threads(1)
    if not given.address:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=given.workers)
        print(lighthouse.address(), flush=True)
        threading.Event().wait()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=60)
    state = {"weight": torch.zeros(1)}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=lambda loaded: None,
        state_dict=lambda: state,
        min_replica_size=given.workers,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=given.address,
        replica_id=f"worker-{given.rank}",
        hostname="127.0.0.1",
    )
    own, mean = torch.from_numpy(vector(given.rank, given.numel)), torch.empty(given.numel)
    true = true_mean(given.workers, given.numel)

    def turn() -> dict[str, float]:
        mean.copy_(own)
        first = manager.current_step() == 0
        quorum_s = timed(lambda: (manager.start_quorum(), manager.wait_quorum()))
        exchange_s = timed(lambda: manager.allreduce(mean).wait())
        vote_s = timed(manager.should_commit)
        # In the first step all but one take the first one's state, and contribute nothing.
        error = 0.0 if first else check(mean.numpy(), true)
        return {"seconds": quorum_s + exchange_s + vote_s, "exchange_seconds": exchange_s, "error": error}

    take_turns(given.turns, turn)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
