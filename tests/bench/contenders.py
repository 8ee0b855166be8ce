"""What the all-reduce bench compares: our exchange, Gloo's, a copy and a bare socket, each over the same bytes.

Legend: N elements in the vector.

Each contender prepares, works and finishes; only the work is timed. All workers do the same one at the same time.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from ayni.buckets import FLAT
from worker_agent.client import WorkerClient
from worker_agent.session import MicrobatchStats, Report, ShardAssignment, Vector

DEADLINE = 300.0
"""Seconds that any wait of a bench may take."""
SEND_BYTES = 1 << 20
AT_LEAST_BYTES = 64 << 20
"""A copy or a socket moves the vector so often that at least this many bytes pass: shorter times are too uncertain."""


class Contender(Protocol):
    name: str
    server_pid: int
    """Process that takes part for all workers; 0 for none."""

    def prepare(self) -> None: ...

    def work(self) -> None: ...

    def finish(self) -> None: ...


@dataclass
class Ours:
    """`Session.contribute` of one micro-batch to the mean in this worker's buffer; then the commit, timed apart."""

    name = "ours"
    client: WorkerClient
    vector: Vector
    check: Callable[[Vector], None]
    server_pid: int

    def __post_init__(self) -> None:
        self.mean = np.empty_like(self.vector)
        # Where a training loop has its gradients: in shared memory, if gradients go through it.
        self.part = self.client.new_vector(self.vector.size)
        self.commit_seconds: list[float] = []

    def prepare(self) -> None:
        assignment = self.client.receive_shard()
        assert assignment is not None, "the run ended early"
        self.assignment: ShardAssignment = assignment
        self.mean.fill(np.nan)
        np.copyto(self.part, self.vector)

    def work(self) -> None:
        future = self.client.contribute(self.assignment, FLAT, [self.part], self._stats(), out=self.mean)
        future.result(DEADLINE)

    def finish(self) -> None:
        self.check(self.mean)
        dist.barrier()
        start = time.perf_counter()
        self.client.commit(self.assignment, Report(num_buckets=1, microbatches=self._stats()))
        self.commit_seconds.append(round(time.perf_counter() - start, 6))

    def _stats(self) -> list[MicrobatchStats]:
        return [MicrobatchStats(microbatch=self.assignment.microbatch_start, weight=1, loss_sum=1.0)]


@dataclass
class Gloo:
    """`torch.distributed.all_reduce`, as DDP calls it; the division by the number of workers is not timed."""

    name = "gloo"
    server_pid = 0
    vector: Vector
    check: Callable[[Vector], None]

    def __post_init__(self) -> None:
        self.sum = torch.empty(self.vector.size)

    def prepare(self) -> None:
        self.sum.copy_(torch.from_numpy(self.vector))

    def work(self) -> None:
        dist.all_reduce(self.sum)

    def finish(self) -> None:
        self.check((self.sum / dist.get_world_size()).numpy())


@dataclass
class Copy:
    """numpy's copy of the vector into a prepared one, on worker 0 while the others wait."""

    name = "copy"
    server_pid = 0
    vector: Vector

    def __post_init__(self) -> None:
        self.out = np.zeros_like(self.vector)
        self.repeats = repeats(self.vector)

    def prepare(self) -> None:
        """Nothing to do."""

    def work(self) -> None:
        if dist.get_rank() == 0:
            for _ in range(self.repeats):
                np.copyto(self.out, self.vector)

    def finish(self) -> None:
        """Nothing to do."""


@dataclass
class Socket:
    """The vector's bytes from worker 0 to worker 1 over one TCP connection."""

    name = "tcp"
    server_pid = 0
    vector: Vector
    host: str
    """This worker's own address."""

    def __post_init__(self) -> None:
        self.connection = _connect(self.host)
        self.outgoing = self.vector.view(np.uint8).data
        self.incoming = np.zeros_like(self.vector).view(np.uint8).data
        self.repeats = repeats(self.vector)

    def prepare(self) -> None:
        """Nothing to do."""

    def work(self) -> None:
        for _ in range(self.repeats):
            if self.connection and dist.get_rank() == 0:
                self._send(self.connection)
            elif self.connection:
                self._receive(self.connection)

    def finish(self) -> None:
        """Nothing to do."""

    def _send(self, connection: socket.socket) -> None:
        for start in range(0, len(self.outgoing), SEND_BYTES):
            connection.sendall(self.outgoing[start : start + SEND_BYTES])

    def _receive(self, connection: socket.socket) -> None:
        start = 0
        while start < len(self.incoming):
            received = connection.recv_into(self.incoming[start : start + SEND_BYTES])
            assert received, "worker 0 closed the connection"
            start += received


def repeats(vector: Vector) -> int:
    """How often a copy or a socket moves the vector."""
    return -(-AT_LEAST_BYTES // vector.nbytes)


def _connect(host: str) -> socket.socket | None:
    """Connects workers 0 and 1; the others have no part in it. Collective."""
    place = torch.zeros(5, dtype=torch.int64)
    with socket.create_server((host, 0)) as server:
        server.settimeout(DEADLINE)
        place.copy_(torch.tensor([*socket.inet_aton(host), server.getsockname()[1]]))
        dist.broadcast(place, src=0)
        if dist.get_rank() == 0:
            connection, _ = server.accept()
        elif dist.get_rank() == 1:
            *parts, port = place.tolist()
            connection = socket.create_connection((socket.inet_ntoa(bytes(parts)), port), DEADLINE)
        else:
            return None
    connection.settimeout(DEADLINE)
    return connection
