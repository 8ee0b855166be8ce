"""A worker process of `all_reduce.py`: takes part in each contender's work in turn, and prints its samples.

Legend: N elements in the vector.

Checks every mean against one in float64, and fails when it is wrong.
"""

import argparse
import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from ayni.rpc import tune_allocator
from tests.bench.contenders import DEADLINE, Contender, Copy, Gloo, Ours, Socket, repeats
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.session import Vector

TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-9}
"""Largest error of a mean of values about 1, for each element type on the wire."""


def main() -> None:
    tune_allocator()
    torch.set_num_threads(1)
    given = _arguments()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{given.store}",
        rank=given.rank,
        world_size=given.workers,
        timeout=timedelta(seconds=DEADLINE),
    )
    config = ClientConfig(
        coordinator=given.coordinator, token=os.environ["AYNI_TOKEN"], worker_name=f"worker-{given.rank}"
    )
    with WorkerClient.connect(config, 0, "cpu") as client:
        print(json.dumps(_measure_all(given, client)))
    dist.destroy_process_group()


def _measure_all(given: argparse.Namespace, client: WorkerClient) -> dict:
    vector_N = vector(given.rank, given.numel)
    check = MeanCheck(given.workers, given.numel)
    ours = Ours(client, vector_N, lambda mean_N: check(mean_N, TOLERANCE[given.wire]))
    gloo = Gloo(vector_N, lambda mean_N: check(mean_N, TOLERANCE["float32"]))
    contenders: Sequence[Contender] = (ours, gloo, Copy(vector_N), Socket(vector_N))
    samples: dict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for repetition in range(-given.warm_up, given.repeat):
        first = repetition % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            sample = _measure(contender, given.coordinator_pid)
            for name, value in sample.items() if repetition >= 0 else ():
                samples[contender.name][name].append(round(value, 6))
    return {
        "samples": samples,
        "repeats": repeats(vector_N),
        "commit_seconds": ours.commit_seconds[given.warm_up :],
        "max_error": check.max_error,
        "mean_sha256": hashlib.sha256(ours.mean.tobytes()).hexdigest(),
    }


def _measure(contender: Contender, coordinator: int) -> dict[str, float]:
    contender.prepare()
    dist.barrier()
    own_cpu, its_cpu, start = time.process_time(), _cpu_seconds(coordinator), time.perf_counter()
    contender.work()
    seconds = time.perf_counter() - start
    dist.barrier()
    sample = {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - own_cpu,
        "coordinator_cpu_seconds": _cpu_seconds(coordinator) - its_cpu,
    }
    contender.finish()
    return sample


class MeanCheck:
    """Compares means with the true one, and keeps the largest error seen."""

    def __init__(self, num_workers: int, num_elements: int) -> None:
        total_N = np.zeros(num_elements)
        for rank in range(num_workers):
            total_N += vector(rank, num_elements)
        self._true_N = (total_N / num_workers).astype(np.float32)
        self.max_error = 0.0

    def __call__(self, mean_N: Vector, tolerance: float) -> None:
        error = float(np.max(np.abs(mean_N - self._true_N)))
        # A NaN is larger than nothing, so the comparison is written to fail on it.
        if not error <= tolerance:
            raise AssertionError(f"the mean is off by {error:.3g}; at most {tolerance:.3g} is right")
        self.max_error = max(self.max_error, error)


def vector(rank: int, num_elements: int) -> Vector:
    """The gradient of one worker: numbers about 1, so that an error is a relative error."""
    return np.random.default_rng(rank).random(num_elements, np.float32) + np.float32(0.5)


def _cpu_seconds(pid: int) -> float:
    """Processor time of another process, from its own clock (see clock_getcpuclockid)."""
    return time.clock_gettime(~pid << 3 | 2)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--coordinator", "--store", "--wire"):
        parser.add_argument(name, required=True)
    for name in ("--coordinator-pid", "--rank", "--workers", "--numel", "--warm-up", "--repeat"):
        parser.add_argument(name, required=True, type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
