"""What a training loop sees of the run: assignments in, contributions out, commits back.  [core]

`worker_agent.client.WorkerClient` implements `Session`; the training loop is given one and knows no network.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ayni import order
from ayni.buckets import Bucket
from ayni.step_values import Commit, ExchangeGroup, MicrobatchStats, Origin, Report, StepTimes

__all__ = [
    "BucketExchange",
    "Commit",
    "ExchangeTimes",
    "MicrobatchStats",
    "OnExchange",
    "Report",
    "Session",
    "ShardAssignment",
    "StepTimes",
    "Vector",
    "Woken",
]

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardAssignment:
    """A lease on the micro-batches [microbatch_start, microbatch_stop) of one attempt of one step."""

    step: int
    attempt: int
    epoch: int
    kind: str
    """"train" or "evaluate"."""
    lease_id: int
    microbatch_start: int
    microbatch_stop: int
    num_microbatches: int
    """Micro-batches of the whole step, over all workers."""
    position: int
    """First sample position of the whole step."""
    num_samples: int
    """Samples of the whole step, over all workers."""
    shard_start: int
    """First sample position of this worker's shard."""
    shard_end: int
    """One past the last sample position of this worker's shard."""
    rank: int
    world_size: int
    update: str
    """"host" or "device": where the optimizer step runs."""
    extra: bool = False
    """Whether this is a lease in addition to one of the same attempt: no mean comes for it."""
    publish_state: bool = False
    """Whether another worker lacks the state that this one has after the step: publish it after the update."""
    discard_state: bool = False
    """Whether the parameters were found to differ from the other workers': follow until there is another state."""
    group: ExchangeGroup | None = None
    """Who reduces this attempt's gradients among themselves, when the lease was given; None: the coordinator does."""
    wire_type: str = ""
    """Element type that contributions to the step travel in; empty for not said: the run's."""
    traceparent: str = ""
    """Trace context of the attempt in W3C form; empty where the coordinator does not trace."""

    @property
    def origin(self) -> Origin:
        """Where the update of this attempt comes from, if it is committed."""
        return Origin(epoch=self.epoch, attempt=self.attempt)

    @property
    def microbatches(self) -> range:
        """Indices of the leased micro-batches."""
        return range(self.microbatch_start, self.microbatch_stop)

    def positions(self, microbatch: int) -> tuple[int, int]:
        """Returns the sample positions [start, stop) of a micro-batch."""
        return order.microbatch_positions(self.position, self.num_samples, self.num_microbatches, microbatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeTimes:
    """Moments of one bucket's exchange, those of `time.perf_counter`; 0 for what did not happen."""

    begun: float = 0.0
    """The first byte left, which says what is contributed."""
    accepted: float = 0.0
    """The coordinator gave leave to send the gradient."""
    sent: float = 0.0
    """The last byte left."""
    first: float = 0.0
    """The first byte of the mean came."""
    last: float = 0.0
    """The last byte of the mean came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketExchange:
    """One bucket's exchange under one lease, when it is over."""

    assignment: ShardAssignment
    bucket: Bucket
    num_elements: int
    handed_over: float
    """Moment when `contribute` was called."""
    times: ExchangeTimes


OnExchange = Callable[[BucketExchange], None]


class Woken(Exception):
    """`receive_shard` was woken by `wake` before there was a lease."""


class Session(Protocol):
    """Membership in a run, as a training loop uses it. Thread-safe."""

    @property
    def worker_id(self) -> int:
        """Number of this worker in the run."""

    @property
    def total_workers(self) -> int:
        """Workers in the current epoch; before the first, workers that the run waits for."""

    @property
    def writes_checkpoints(self) -> bool:
        """Whether this worker writes the run's checkpoints, as the last commit said, or the end of the run."""

    def receive_shard(self) -> ShardAssignment | None:
        """Waits for the next lease; None when the run is over.

        Raises:
            Woken: `wake` was called.
            AyniError: the coordinator refused (`Halted`, `Diverged`, ...).
        """

    def wake(self) -> None:
        """Makes a `receive_shard` that waits, or the next one, raise `Woken` once."""

    def new_vector(self, num_elements: int) -> Vector:
        """Returns a vector, shape [num_elements], float32, for parts; a coordinator that can read it there does."""

    def caught_up(self, completed_steps: int, origin: Origin | None = None) -> None:
        """Tells the coordinator that the parameters have had so many updates now, after they lagged behind.

        Args:
            completed_steps: how many.
            origin: where the last one came from; None for not known.
        """

    def contribute(
        self,
        assignment: ShardAssignment,
        bucket: Bucket,
        parts: Sequence[Vector | None],
        microbatches: Sequence[MicrobatchStats],
        *,
        out: Vector,
        component_sizes: Sequence[int] = (),
    ) -> "Future[Vector]":
        """Starts one bucket's reduction and returns at once.

        Args:
            assignment: the lease.
            bucket: which reduction of the step.
            parts: one summed gradient per node of `ayni.tree.cover(microbatch_start, microbatch_stop,
                num_microbatches)`, each shape [N], float32; None for a node of weight 0. Kept, not copied: the caller
                must not change them before the future is done.
            microbatches: the leased micro-batches, in order.
            out: shape [N], float32; receives the weighted mean.
            component_sizes: elements of each component; empty for one component.

        Returns:
            A future of `out`. It fails with `StepVoided` when the attempt is given up.
        """

    def commit(self, assignment: ShardAssignment, report: Report) -> "Commit | ShardAssignment":
        """Says that the lease is done and waits for the step's commit.

        Returns:
            The commit; or a lease on more micro-batches of the same attempt (`extra`), which is to be worked on and
            committed too. The commit is the same for all leases of the attempt.

        Raises:
            StepVoided: the attempt was given up; drop its results and call `receive_shard`.
            LeaseRevoked: an extra lease was taken back; commit the first one again to go on waiting.
            AyniError: the coordinator refused.
        """

    def report(self, activity: str) -> None:
        """Says what the worker is doing, one word for status: loading, computing, exchanging, updating, waiting."""
