"""Light workers: a linear model in numpy over `WorkerClient`, without torch, so that one machine can hold many.

Legend: N parameters.

As a program it runs some workers in the threads of one process, each to the end of the run, and prints what they ended
with. A light worker that joins late has nothing to be handed: `Task.fixed` makes gradients that do not depend on the
parameters, so such a worker may say at once that it is up to date.
"""

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np

from ayni.buckets import FLAT
from ayni.errors import LeaseRevoked, StepVoided
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.session import Commit, MicrobatchStats, Report, ShardAssignment, Vector
from worker_agent.training.partial_sums import PartialSums

SIZE = 512
_WAIT_S = 60.0


@dataclass
class Light:
    """One worker."""

    address: str
    token: str
    name: str
    fixed: bool = False
    """Whether gradients do not depend on the parameters."""
    completed_steps: int = 0
    """What the worker says when it joins."""
    parameters: Vector = field(default_factory=lambda: np.zeros(SIZE, np.float32))
    commits: list[Commit] = field(default_factory=list)
    contributed: int = 0
    """Micro-batches."""

    def work(self, enough: Callable[["Light"], bool] = lambda _: False) -> None:
        """Joins, trains until the run is over or it is enough, and leaves."""
        config = ClientConfig(
            coordinator=self.address,
            token=self.token,
            worker_name=self.name,
            elastic=True,
            num_buckets=1,
            completed_steps=self.completed_steps,
            exchange_timeout=timedelta(seconds=_WAIT_S),
            shard_timeout=timedelta(seconds=_WAIT_S),
        )
        with WorkerClient.connect(config, gpu_count=0, backend="cpu") as client:
            while not enough(self) and (lease := client.receive_shard()) is not None:
                if lease.kind == "train":
                    self._turn(client, lease)

    def _turn(self, client: WorkerClient, lease: ShardAssignment) -> None:
        mean_N = np.zeros(SIZE, np.float32)
        try:
            future, report = self._contribute(client, lease, mean_N)
            answer = client.commit(lease, report)
            while isinstance(answer, ShardAssignment):
                answer = self._extra(client, lease, report, answer)
            future.result(_WAIT_S)
        except StepVoided:
            return
        self.commits.append(answer)
        self.parameters -= np.float32(answer.learning_rate) * mean_N

    def _extra(
        self, client: WorkerClient, lease: ShardAssignment, report: Report, extra: ShardAssignment
    ) -> Commit | ShardAssignment:
        try:
            _, more = self._contribute(client, extra, np.zeros(SIZE, np.float32))
            return client.commit(extra, more)
        except LeaseRevoked:
            return client.commit(lease, report)

    def _contribute(self, client: WorkerClient, lease: ShardAssignment, out_N: Vector):
        stats, sums = [], PartialSums(SIZE)
        sums.begin(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches)
        for microbatch in lease.microbatches:
            start, stop = lease.positions(microbatch)
            gradient_N, loss = self._gradient(start, stop)
            sums.leaf()[:] = gradient_N
            sums.push()
            stats.append(MicrobatchStats(microbatch=microbatch, weight=stop - start, loss_sum=loss))
            self.contributed += 1
        future = client.contribute(lease, FLAT, sums.parts(), stats, out=out_N)
        sha256 = "" if self.fixed else self.sha256()
        return future, Report(num_buckets=1, microbatches=stats, parameters_sha256=sha256)

    def _gradient(self, start: int, stop: int) -> tuple[Vector, float]:
        """Least squares towards y = x @ ones, samples drawn by their positions."""
        x_BN = np.stack(
            [np.random.Generator(np.random.Philox(key=p)).standard_normal(SIZE, np.float32) for p in range(start, stop)]
        )
        if self.fixed:
            return x_BN.sum(0), 1.0
        error_B = x_BN @ (self.parameters - np.float32(1))
        return error_B @ x_BN / np.float32(SIZE), float(error_B @ error_B)

    def sha256(self) -> str:
        return hashlib.sha256(self.parameters.tobytes()).hexdigest()


def in_threads(workers: Sequence[Light], enough: Callable[[Light], bool] = lambda _: False) -> None:
    """Runs workers side by side; raises what one of them raised."""
    errors: list[BaseException] = []

    def work(worker: Light) -> None:
        try:
            worker.work(enough)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,), name=worker.name) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * _WAIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def main(address: str, token: str, first: int, count: int) -> None:
    workers = [Light(address, token, f"light-{first + number}") for number in range(count)]
    in_threads(workers)
    print(
        json.dumps(
            [
                {"name": w.name, "sha256": w.sha256(), "commits": len(w.commits), "contributed": w.contributed}
                for w in workers
            ]
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
