"""Bookkeeping of one step that is driven by the simple calls: what was sent, what is still to be received.  [core]

A shard is one micro-batch here. `gradients` is the shard's mean and its weight is what it is a mean over, so weight
times mean travels; all buckets of a step say the same weight. The flat vector is a whole step; blocks and the
components outside them make one together. Results are taken in the order in which they were sent, for each kind apart.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from ayni.buckets import BLOCK_COMPONENTS, NON_BLOCK_COMPONENTS, Bucket
from worker_agent.seed_arguments import loss_sum, whole
from worker_agent.session import MicrobatchStats, ShardAssignment

R = TypeVar("R")


class SeedStep(Generic[R]):
    """One lease and what its worker has sent. R is whatever stands for a result that is on its way."""

    def __init__(self, assignment: ShardAssignment) -> None:
        """Starts with nothing sent.

        Raises:
            ValueError: the shard is not one micro-batch.
        """
        count = len(assignment.microbatches)
        if count != 1:
            raise ValueError(
                f"the shard of step {assignment.step} has {count} micro-batches, and this call sends one gradient for "
                "one; set batch.microbatches: 0 in the run file (one for each worker), or use contribute()"
            )
        self.assignment = assignment
        self.buckets: list[Bucket] = []
        self.finished = False
        """Whether no more may be sent."""
        self._weight: int | None = None
        self._results: defaultdict[str, deque[tuple[Bucket, R]]] = defaultdict(deque)

    def send(self, step: int, bucket: Bucket, weight: int | None) -> MicrobatchStats:
        """Notes that a bucket is being sent and returns what to say of the micro-batch.

        Args:
            step: the caller's idea of the step.
            bucket: what is sent.
            weight: what the gradient is a mean over; None for what was said before, or the shard's samples.

        Raises:
            ValueError: it does not fit the lease, or what was sent before.
        """
        self._check_open(step)
        if self.assignment.kind != "train":
            raise ValueError(f"step {step} is an evaluation and takes no gradients; give its result to finish_step()")
        if bucket in self.buckets or (self.buckets and "flat" in (bucket.kind, self.buckets[0].kind)):
            raise ValueError(f"{bucket} can't be sent after {', '.join(map(str, self.buckets))} in the same step")
        self._weight = self._agreed(weight)
        self.buckets.append(bucket)
        return MicrobatchStats(microbatch=self.assignment.microbatch_start, weight=self._weight)

    def finish(self, step: int, loss: float | None, correct: int, weight: int | None) -> MicrobatchStats:
        """Notes that nothing more is sent and returns what to say of the micro-batch.

        Raises:
            ValueError: it does not fit the lease, or what was sent before.
        """
        self._check_open(step)
        agreed = self._agreed(weight)
        num_correct = whole("correct", correct, agreed)
        summed = None if loss is None else loss_sum(loss, agreed)
        self._weight, self.finished = agreed, True
        return MicrobatchStats(
            microbatch=self.assignment.microbatch_start,
            weight=agreed,
            loss_sum=summed,
            num_correct=num_correct,
            num_predictions=agreed,
        )

    def expect(self, bucket: Bucket, result: R) -> None:
        """Keeps a result that is on its way."""
        self._results[bucket.kind].append((bucket, result))

    def take(self, kind: str) -> tuple[Bucket, R]:
        """Returns the oldest result of a kind that was not taken yet.

        Raises:
            RuntimeError: there is none.
        """
        if not self._results[kind]:
            raise RuntimeError(f"step {self.assignment.step}: no result of kind {kind!r} is on its way; send first")
        return self._results[kind].popleft()

    def check_received(self) -> None:
        """Confirms that every result was taken.

        Raises:
            RuntimeError: one was not; going on would let this worker's parameters drift from the others'.
        """
        left = [str(bucket) for results in self._results.values() for bucket, _ in results]
        if left:
            raise RuntimeError(f"step {self.assignment.step}: the averages of {', '.join(left)} were never received")

    def _check_open(self, step: int) -> None:
        if whole("step", step) != self.assignment.step:
            raise ValueError(f"the assignment in progress is step {self.assignment.step}, not step {step}")
        if self.finished:
            raise ValueError(f"step {step} is finished; nothing more can be sent in it")

    def _agreed(self, weight: int | None) -> int:
        default = self.assignment.shard_end - self.assignment.shard_start if self._weight is None else self._weight
        given = default if weight is None else whole("total", weight)
        if self._weight not in (None, given):
            raise ValueError(f"total is {given}; the step's other buckets were sent with {self._weight}")
        return given


def block_bucket(block_idx: int, num_blocks: int, num_elements: int, component_sizes: Sequence[int]) -> Bucket:
    """Returns the bucket of a block.

    Raises:
        ValueError: index, number of components or sizes do not fit.
    """
    if not 0 <= block_idx < num_blocks:
        raise ValueError(f"block_idx is {block_idx}; with {num_blocks} blocks it must be in [0, {num_blocks})")
    if len(component_sizes) != len(BLOCK_COMPONENTS):
        raise ValueError(
            f"component_sizes has {len(component_sizes)} entries; a block has {len(BLOCK_COMPONENTS)}: "
            f"{', '.join(BLOCK_COMPONENTS)} (0 where there is nothing to train)"
        )
    if min(component_sizes) < 0 or sum(component_sizes) != num_elements:
        raise ValueError(
            f"component_sizes {list(component_sizes)} add up to {sum(component_sizes)}; gradients has {num_elements}"
        )
    return Bucket("block", block_idx)


def non_block_bucket(component: int) -> Bucket:
    """Returns the bucket of a component outside the blocks.

    Raises:
        ValueError: there is no such component.
    """
    if not 0 <= component < len(NON_BLOCK_COMPONENTS):
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(NON_BLOCK_COMPONENTS))
        raise ValueError(f"component is {component}; it must be one of {listed}")
    return Bucket("non_block", component)
