"""The simple calls, for a training loop of your own: send what you computed, receive the average.  [shell]

    while (shard := client.receive_shard()) is not None:
        gradients, loss, correct, total = my_gradients(shard)
        client.send_gradients(shard.step, gradients, loss, correct, total)
        apply(client.receive_averaged().gradients)

One shard is one micro-batch (`batch.microbatches: 0` in the run file). `receive_averaged` returns when the step is
committed, so what it returns may be applied. A model that is sent block by block is committed by `finish_step`; wait
with `commit_step` before applying anything. `StepVoided` means that a worker was lost: drop what the step gave and
call `receive_shard` again.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ayni.buckets import FLAT, Bucket
from ayni.errors import StepVoided
from worker_agent.contributions import Offer
from worker_agent.seed_arguments import check_result, whole
from worker_agent.seed_step import SeedStep, block_bucket, non_block_bucket
from worker_agent.session import Commit, MicrobatchStats, Report, ShardAssignment, Vector
from worker_agent.vectors import Restore, to_vector


@dataclass(frozen=True, kw_only=True, slots=True)
class AveragedResult:
    """The weighted mean of the flat gradient vector."""

    step: int
    gradients: Any
    """Shape [N], float32, of the kind that was sent."""
    global_loss: float
    """Weighted mean over all workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AveragedBlockResult:
    """The weighted mean of one block's gradient."""

    step: int
    block_idx: int
    gradients: Any
    component_sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AveragedNonBlockResult:
    """The weighted mean of the gradient of one component outside the blocks."""

    step: int
    component: int
    gradients: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class _OnItsWay:
    future: Future[Vector]
    restore: Restore
    component_sizes: tuple[int, ...]


class SeedCalls(ABC):
    """The simple calls, on top of contributions and commits. Thread-safe."""

    def __init__(self) -> None:
        """Starts without a lease."""
        self._lock = threading.Lock()
        self._lease: ShardAssignment | None = None
        self._step: SeedStep[_OnItsWay] | None = None
        self._commit_future: Future[Commit | ShardAssignment] | None = None
        self._worked_on: ShardAssignment | None = None
        """Lease that `contribute` or `commit` was called for last."""
        self._closed = False

    def receive_shard(self) -> ShardAssignment | None:
        """Waits for the next lease; None when the run is over. Commits the step before it, if that is still owed.

        Raises:
            AyniError: the coordinator refused (`Halted`, `Diverged`, ...), or gave the last step up (`StepVoided`).
            CoordinatorLost: the coordinator is gone.
            RuntimeError: an average was sent for but never received, or nothing was done for the lease before.
        """
        self._check_usable()
        self._check_worked_on()
        if self._step:
            self._step.check_received()
            self.commit_step()
        lease = self._next_shard()
        with self._lock:
            self._lease, self._step, self._commit_future = lease, None, None
        return lease

    def send_gradients(self, step: int, gradients: Any, loss: float, correct: int, total: int) -> None:
        """Sends the shard's mean gradient as one flat vector, and returns at once.

        Args:
            step: step of the assignment.
            gradients: shape [N], torch tensor or numpy array: LoRA parameters, then the head.
            loss: mean loss of the shard.
            correct: correct predictions in the shard.
            total: samples in the shard; what gradient and loss are means over.

        Raises:
            ValueError: an argument does not fit the lease.
        """
        with self._lock:
            self._open_step()
            check_result(loss, correct, total)
            seed_step = self._send(step, FLAT, gradients, total)
            self._finish(seed_step, seed_step.finish(step, loss, correct, total))

    def receive_averaged(self) -> AveragedResult:
        """Waits for the weighted mean of the flat vector, and for the step's commit.

        Raises:
            StepVoided: the attempt was given up; call `receive_shard` again.
            AyniError, ConnectionError: as `receive_shard`.
        """
        _, gradients, lease, _ = self._receive("flat")
        return AveragedResult(step=lease.step, gradients=gradients, global_loss=self.commit_step().global_loss)

    def send_block_gradient(
        self,
        step: int,
        block_idx: int,
        num_blocks: int,
        gradients: Any,
        component_sizes: Sequence[int],
        total: int | None = None,
    ) -> None:
        """Sends the shard's mean gradient of one transformer block, and returns at once.

        Args:
            step: step of the assignment.
            block_idx: counted from 0.
            num_blocks: blocks of the model.
            gradients: shape [N], the nine components one after the other.
            component_sizes: elements of each component, adding up to N.
            total: what the gradient is a mean over; None for the shard's samples.

        Raises:
            ValueError: an argument does not fit the lease.
        """
        sizes = tuple(whole("component_sizes", size) for size in component_sizes)
        bucket = block_bucket(block_idx, num_blocks, len(gradients), sizes)
        with self._lock:
            self._send(step, bucket, gradients, total, sizes, num_blocks)

    def receive_averaged_block(self) -> AveragedBlockResult:
        """Waits for the weighted mean of the block that was sent first and not received yet; see `receive_averaged`."""
        bucket, gradients, lease, sizes = self._receive("block")
        return AveragedBlockResult(step=lease.step, block_idx=bucket.index, gradients=gradients, component_sizes=sizes)

    def send_non_block_gradient(self, step: int, component: int, gradients: Any, total: int | None = None) -> None:
        """Sends the shard's mean gradient of a component outside the blocks, and returns at once.

        Args:
            step: step of the assignment.
            component: 0 lm_head, 1 final_norm, 2 embedding.
            gradients: shape [N].
            total: what the gradient is a mean over; None for the shard's samples.

        Raises:
            ValueError: an argument does not fit the lease.
        """
        with self._lock:
            self._send(step, non_block_bucket(component), gradients, total)

    def receive_averaged_non_block(self) -> AveragedNonBlockResult:
        """Waits for the component that was sent first and not received yet; see `receive_averaged`."""
        bucket, gradients, lease, _ = self._receive("non_block")
        return AveragedNonBlockResult(step=lease.step, component=bucket.index, gradients=gradients)

    def finish_step(self, loss: float | None, correct: int = 0, total: int | None = None) -> None:
        """Says that all buckets of the step were sent, and returns at once; the commit is on its way then.

        Args:
            loss: mean loss of the shard; None for unknown.
            correct: correct predictions in the shard.
            total: what loss and gradients are means over; None for what the buckets said.

        Raises:
            ValueError: an argument does not fit the lease.
        """
        with self._lock:
            seed_step = self._open_step()
            self._finish(seed_step, seed_step.finish(seed_step.assignment.step, loss, correct, total))

    def commit_step(self) -> Commit:
        """Waits until the step is committed: from then on its averages may be applied.

        Raises:
            StepVoided: the attempt was given up; call `receive_shard` again.
            AyniError, ConnectionError: as `receive_shard`.
        """
        with self._lock:
            seed_step = self._open_step()
            if self._commit_future is None:
                self._finish(seed_step, seed_step.finish(seed_step.assignment.step, None, 0, None))
            future = self._commit_future
        assert future
        commit: Commit = self._result(future, f"the commit of step {seed_step.assignment.step}")
        return commit

    @abstractmethod
    def _next_shard(self) -> ShardAssignment | None:
        """Waits for the next lease."""

    @abstractmethod
    def _contribute(self, offer: Offer) -> Future[Vector]:
        """Starts one bucket's reduction."""

    @abstractmethod
    def _start_commit(self, assignment: ShardAssignment, report: Report) -> "Future[Commit | ShardAssignment]":
        """Starts the commit, which waits for the contributions."""

    @property
    @abstractmethod
    def _is_elastic(self) -> bool:
        """Whether extra leases may come, which the simple calls can't take."""

    @abstractmethod
    def _wait(self, future: "Future[Any]", what: str) -> Any:
        """Waits for a future, with a deadline."""

    @abstractmethod
    def _has_news(self) -> bool:
        """Returns whether the coordinator has said what comes after the lease that was handed out last."""

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("this client is closed: it has left the run; join again with WorkerClient.connect()")

    def _check_worked_on(self) -> None:
        """Confirms that asking for a lease can have an answer: the step of the last one goes on without one else."""
        lease = self._lease
        # An elastic worker's lease may end without its knowing.
        if lease is None or self._step or self._worked_on == lease or self._is_elastic or self._has_news():
            return
        first = "contribute to it" if lease.kind == "train" else "it is an evaluation: give its result to finish_step()"
        raise RuntimeError(
            f"step {lease.step} is still leased to this worker and nothing was sent for it; {first} "
            "(or call commit_step() or finish_step()) before the next receive_shard()"
        )

    def _open_step(self) -> SeedStep[_OnItsWay]:
        self._check_usable()
        if self._is_elastic:
            raise RuntimeError(
                "an elastic client is given more micro-batches in the middle of a step, which the simple calls can't "
                "take; use contribute() and commit(), or join with ClientConfig(elastic=False)"
            )
        if self._lease is None:
            raise RuntimeError("there is no assignment in progress; call receive_shard() first")
        if self._step is None:
            self._step = SeedStep(self._lease)
        return self._step

    def _send(
        self, step: int, bucket: Bucket, gradients: Any, total: int | None, sizes: tuple[int, ...] = (), blocks: int = 0
    ) -> SeedStep[_OnItsWay]:
        seed_step = self._open_step()
        mean_N, restore = to_vector("gradients", gradients)
        stats = seed_step.send(step, bucket, total)
        # A new array: the caller may change its gradients as soon as this returns.
        sum_N = mean_N * np.float32(stats.weight) if stats.weight else None
        offer = Offer(
            assignment=seed_step.assignment,
            bucket=bucket,
            parts=(sum_N,),
            microbatches=(stats,),
            out=np.empty_like(mean_N),
            component_sizes=sizes,
            num_blocks=blocks,
        )
        seed_step.expect(bucket, _OnItsWay(future=self._contribute(offer), restore=restore, component_sizes=sizes))
        return seed_step

    def _finish(self, seed_step: SeedStep[_OnItsWay], stats: MicrobatchStats) -> None:
        report = Report(num_buckets=len(seed_step.buckets), microbatches=[stats])
        self._commit_future = self._start_commit(seed_step.assignment, report)

    def _receive(self, kind: str) -> tuple[Bucket, Any, ShardAssignment, tuple[int, ...]]:
        with self._lock:
            seed_step = self._open_step()
            bucket, coming = seed_step.take(kind)
        lease = seed_step.assignment
        vector = self._result(coming.future, f"the mean of {bucket} of step {lease.step}")
        return bucket, coming.restore(vector), lease, coming.component_sizes

    def _result(self, future: "Future[Any]", what: str) -> Any:
        try:
            return self._wait(future, what)
        except StepVoided:
            # Said once; the next receive_shard() goes on.
            with self._lock:
                self._step = self._commit_future = self._lease = None
            raise
