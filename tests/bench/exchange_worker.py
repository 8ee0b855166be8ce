"""A worker process of `all_reduce.py` and `shaped.py`: takes part in all contenders' work in turn, prints its samples.

Legend: N elements in the vector.

Checks every mean against one in float64, and fails when it is wrong.
"""

import argparse
import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from ayni.kernels import loading
from ayni.rpc import tune_allocator
from ayni.tensors import WIRE_DTYPES
from tests.bench.bare_grpc import Bare
from tests.bench.contenders import DEADLINE, Contender, Copy, Gloo, Ours, Socket, repeats
from tests.bench.reduce_case import DOWN_BYTES, TOPOLOGIES, UP_BYTES
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.session import Vector

TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-9, "int8": 2**-6}
"""Largest error of a mean of values about 1, for each element type on the wire."""


def main() -> None:
    tune_allocator()
    loading.choose("compiled")
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
        coordinator=given.coordinator,
        token=os.environ["AYNI_TOKEN"],
        worker_name=f"worker-{given.rank}",
        gradients="auto" if given.path == "shm" else "grpc",
        wire_types=WIRE_DTYPES,
        insecure=given.insecure,
        num_buckets=1,
        # A worker that takes part in no exchange among workers is as simple as can be.
        elastic=given.topology != "star",
        peer_listen=f"{given.host}:0" if given.topology == "sharded" else "",
        store_listen=given.host if given.topology == "torch" else "",
    )
    with WorkerClient.connect(config, 0, "cpu") as client:
        print(json.dumps(_measure_all(given, client)))
    dist.destroy_process_group()


def _measure_all(given: argparse.Namespace, client: WorkerClient) -> dict:
    vector_N = vector(given.rank, given.numel)
    check = MeanCheck(given.workers, given.numel)
    ours = Ours(client, vector_N, lambda mean_N: check(mean_N, TOLERANCE[given.wire]), given.coordinator_pid)
    gloo = Gloo(vector_N, lambda mean_N: check(mean_N, TOLERANCE["float32"]))
    makers: dict[str, Callable[[], Contender]] = {
        "ours": lambda: ours,
        "gloo": lambda: gloo,
        "copy": lambda: Copy(vector_N),
        "tcp": lambda: Socket(vector_N, given.host),
    }
    contenders: list[Contender] = [*(makers[name]() for name in given.contenders.split(",")), *_bare(given, vector_N)]
    samples: dict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for repetition in range(-given.warm_up, given.repeat):
        first = repetition % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            sample = _measure(contender)
            for name, value in sample.items() if repetition >= 0 else ():
                samples[contender.name][name].append(round(value, 6))
    return {
        "samples": samples,
        "repeats": repeats(vector_N),
        "commit_seconds": ours.commit_seconds[given.warm_up :],
        "max_error": check.max_error,
        "mean_sha256": hashlib.sha256(ours.mean.tobytes()).hexdigest(),
        "traffic": asdict(client.traffic),
    }


def _bare(given: argparse.Namespace, vector_N: Vector) -> list[Bare]:
    """The bare servers that were named, as KIND=ADDRESS=PID."""
    servers = [server.split("=") for server in given.bare]
    # With int8 the two ways differ; what counts is their sum.
    num_bytes = int(vector_N.size * (UP_BYTES[given.wire] + DOWN_BYTES[given.wire]) / 2)
    return [Bare(kind, address, int(pid), vector_N, num_bytes) for kind, address, pid in servers]


def _measure(contender: Contender) -> dict[str, float]:
    contender.prepare()
    dist.barrier()
    server = contender.server_pid
    own_cpu, its_cpu, start = time.process_time(), _cpu_seconds(server), time.perf_counter()
    contender.work()
    seconds = time.perf_counter() - start
    dist.barrier()
    sample = {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - own_cpu,
        "server_cpu_seconds": _cpu_seconds(server) - its_cpu,
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
    """Processor time of another process, from its own clock (see clock_getcpuclockid); 0 for no process."""
    return time.clock_gettime(~pid << 3 | 2) if pid else 0.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--coordinator", "--store", "--wire"):
        parser.add_argument(name, required=True)
    for name in ("--coordinator-pid", "--rank", "--workers", "--numel", "--warm-up", "--repeat"):
        parser.add_argument(name, required=True, type=int)
    parser.add_argument("--path", choices=("shm", "grpc"), default="shm", help="how our gradients travel")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="star", help="who reduces")
    parser.add_argument("--contenders", default="ours,gloo,copy,tcp", help="with commas; all workers the same")
    parser.add_argument("--host", default="127.0.0.1", help="this worker's own address")
    parser.add_argument("--insecure", action="store_true", help="the coordinator is not on loopback, and has no TLS")
    parser.add_argument("--bare", nargs="*", default=[], metavar="KIND=ADDRESS=PID", help="bare gRPC servers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
