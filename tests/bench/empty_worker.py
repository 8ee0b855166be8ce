"""A worker of `empty_step.py`: contributes one element to each step, and prints the moments of its commits.

It computes nothing, so torch is not loaded. Moments are those of a clock that all processes of a machine share.
"""

import argparse
import json
import os
import time

import numpy as np

from ayni.buckets import FLAT
from ayni.kernels import loading
from ayni.rpc import tune_allocator
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.session import Commit, MicrobatchStats, Report

DEADLINE = 300.0


def main() -> None:
    tune_allocator()
    loading.choose("compiled")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--path", required=True, choices=("shm", "grpc"))
    given = parser.parse_args()
    config = ClientConfig(
        coordinator=given.coordinator,
        token=os.environ["AYNI_TOKEN"],
        worker_name=f"worker-{given.rank}",
        elastic=True,
        num_buckets=1,
        gradients="auto" if given.path == "shm" else "grpc",
    )
    with WorkerClient.connect(config, 0, "cpu") as client:
        print(json.dumps({"commits": steps(client)}))


def steps(client: WorkerClient) -> list[float]:
    """Goes through all steps of the run."""
    part, out, commits = client.new_vector(1), np.empty(1, np.float32), []
    part[0] = 1.0
    while (lease := client.receive_shard()) is not None:
        stats = [MicrobatchStats(microbatch=each, weight=1, loss_sum=1.0) for each in lease.microbatches]
        future = client.contribute(lease, FLAT, [part], stats, out=out)
        commit = client.commit(lease, Report(num_buckets=1, microbatches=stats))
        assert isinstance(commit, Commit), "there is one micro-batch for each worker, and none to take over"
        future.result(DEADLINE)
        assert out[0] == 1.0, f"the mean of ones is {out[0]}"
        commits.append(time.perf_counter())
    return commits


if __name__ == "__main__":
    main()
