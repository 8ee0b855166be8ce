"""A worker process of `memory.py`: begins each step when it is told to, and may stop itself halfway through one.

Reads one word a step from standard input: "go", or "halfway" to stop itself (SIGSTOP) when half of its bytes have left.
Fails when a mean is wrong.

Legend: N elements in the vector.
"""

import argparse
import os
import signal
import sys
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

import numpy as np

from ayni.buckets import FLAT
from ayni.rpc import tune_allocator
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.session import MicrobatchStats, Report, Vector

DEADLINE = 300.0
LOOK_SECONDS = 0.001


def main() -> None:
    tune_allocator()
    given = _arguments()
    config = ClientConfig(
        coordinator=given.coordinator,
        token=os.environ["AYNI_TOKEN"],
        worker_name=f"worker-{given.rank}",
        # Through shared memory nothing waits on its way, and no window is filled.
        gradients="grpc",
    )
    vector_N = np.full(given.numel, given.rank + 1, np.float32)
    mean_N = np.zeros_like(vector_N)
    with WorkerClient.connect(config, 0, "cpu") as client:
        for _ in range(given.steps):
            _step(client, vector_N, mean_N, (given.workers + 1) / 2)


def _step(client: WorkerClient, vector_N: Vector, mean_N: Vector, expected: float) -> None:
    assignment = client.receive_shard()
    assert assignment is not None, "the run ended early"
    stats = [MicrobatchStats(microbatch=assignment.microbatch_start, weight=1, loss_sum=1.0)]
    order = sys.stdin.readline().strip()
    if not order:
        raise SystemExit("nobody says when to begin: the bench is gone")
    already = client.traffic.sent_bytes
    future = client.contribute(assignment, FLAT, [vector_N], stats, out=mean_N)
    if order == "halfway":
        _stop_at(client, already + vector_N.nbytes // 2, future)
    future.result(DEADLINE)
    assert bool(np.all(mean_N == expected)), f"the mean is wrong: {mean_N[mean_N != expected][:3]} for {expected}"
    client.commit(assignment, Report(num_buckets=1, microbatches=stats))


def _stop_at(client: WorkerClient, sent_bytes: int, future: "Future[Vector]") -> None:
    while client.traffic.sent_bytes < sent_bytes:
        try:
            future.result(LOOK_SECONDS)
        except NotYet:
            continue
        raise SystemExit("the exchange was over before half of it was seen; take more elements")
    os.kill(os.getpid(), signal.SIGSTOP)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True)
    for name in ("--rank", "--workers", "--numel", "--steps"):
        parser.add_argument(name, required=True, type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
