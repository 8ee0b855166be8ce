"""A worker of the all-reduce bench whose vectors Hivemind averages. Runs in Hivemind's own environment; without
`--address` it is the swarm's first node, which only keeps the table of peers.

Groups are found before a turn begins, as Hivemind does behind the computing of a step: a turn is the all-reduce alone.
"""

import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hivemind
import torch
from hivemind.averaging.control import AveragingStage, StepControl

from tests.bench.reduce_line import arguments, check, take_turns, timed, true_mean, vector

_HOST = ["/ip4/127.0.0.1/tcp/0"]
_MATCHING_S, _LIMIT_S = 2.0, 60.0


def main() -> None:
    given = arguments().parse_args()
    torch.set_num_threads(1)
    if not given.address:
        first = hivemind.DHT(host_maddrs=_HOST, start=True, use_ipfs=False)
        print(first.get_visible_maddrs()[0], flush=True)
        threading.Event().wait()
    dht = hivemind.DHT(initial_peers=[given.address], host_maddrs=_HOST, start=True, use_ipfs=False)
    own, true = torch.from_numpy(vector(given.rank, given.numel)), true_mean(given.workers, given.numel)
    averager = hivemind.DecentralizedAverager(
        [own.clone()],
        dht,
        start=True,
        prefix="bench",
        target_group_size=given.workers,
        min_group_size=given.workers,
        min_matchmaking_time=_MATCHING_S,
        request_timeout=_MATCHING_S / 2,
        allreduce_timeout=_LIMIT_S,
    )
    waiting = [match(averager, own)]

    def turn() -> dict[str, float]:
        control = waiting.pop()

        def work() -> None:
            control.allow_allreduce()
            assert control.result(timeout=_LIMIT_S), "the group fell apart"

        seconds = timed(work)
        with averager.get_tensors() as tensors:
            error = check(tensors[0].numpy(), true)
        waiting.append(match(averager, own))
        return {"seconds": seconds, "error": error}

    take_turns(given.turns, turn)
    waiting.pop().cancel()
    averager.shutdown()
    dht.shutdown()


def match(averager: hivemind.DecentralizedAverager, own: torch.Tensor) -> StepControl:
    """Puts a worker's own vector into place and waits until its group is found."""
    with averager.get_tensors() as tensors:
        tensors[0].copy_(own)
    control = averager.step(wait=False, require_trigger=True, timeout=_LIMIT_S)
    deadline = time.monotonic() + _LIMIT_S
    while control.stage != AveragingStage.AWAITING_TRIGGER:
        assert time.monotonic() < deadline, "no group was found"
        assert not control.done(), "the search for a group failed"
        # The stage is a byte of memory that another process writes; there is nothing to wait on.
        time.sleep(0.005)
    return control


if __name__ == "__main__":
    main()
