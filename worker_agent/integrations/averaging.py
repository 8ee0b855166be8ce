"""Weighted means over the workers of a run, one step after another, for programs that choose their own data.  [shell]

A step is one vector for each bucket from every worker, with one weight. What a worker has brought is kept until the
step is committed: when another one is lost, the attempt is void, and the same vectors are brought again to the next
one, in which the lost worker has no part. So a death costs the others no computation; the mean is over those who are
left.

Legend: N elements in a bucket.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np

from ayni.buckets import Bucket
from ayni.errors import PeerLost, RunEnded, RunStarted, StepVoided
from worker_agent.session import Commit, MicrobatchStats, Report, Session, ShardAssignment, Vector
from worker_agent.training.layout import BucketSpec

_log = logging.getLogger(__name__)

_SETTLE_S = 60.0
"""Longest wait for exchanges to let go of their vectors, once a step is committed or void."""

_MOST_WEIGHT = (1 << 31) - 1
"""Samples or tokens of one worker in one step."""

CONTINUE, RAISE = "continue", "raise"

Weigh = Callable[[ShardAssignment], int]
"""Says what a worker's vectors weigh under a lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A worker's place among the others."""

    rank: int
    world_size: int


class Averaging:
    """The exchange of one worker. Belongs to one thread at a time."""

    def __init__(self, session: Session, specs: Sequence[BucketSpec], on_loss: str = CONTINUE) -> None:
        """Makes a vector for what is sent and one for what comes back, for each bucket.

        Args:
            session: the membership.
            specs: the buckets; the same on all workers.
            on_loss: what a lost worker means: "continue" with those who are left, or "raise" `PeerLost` on all.
        """
        if on_loss not in (CONTINUE, RAISE):
            raise ValueError(f'on_loss is {on_loss!r}; it must be "{CONTINUE}" or "{RAISE}"')
        self._session, self._on_loss = session, on_loss
        self._specs = {spec.bucket: spec for spec in specs}
        self.sent: dict[Bucket, Vector] = {spec.bucket: session.new_vector(spec.num_elements) for spec in specs}
        """What this worker brings: the gradients times their weight. Change nothing between `put` and `finish`."""
        self.means: dict[Bucket, Vector] = {spec.bucket: np.zeros(spec.num_elements, np.float32) for spec in specs}
        self._lease: ShardAssignment | None = None
        self._world_size = 0
        self._weigh: Weigh | None = None
        self._futures: dict[Bucket, Future[Vector]] = {}

    @property
    def is_open(self) -> bool:
        """Whether a step was begun and not finished."""
        return self._weigh is not None

    def place(self) -> Place:
        """Returns this worker's place; waits until the run has its workers.

        Raises:
            RunEnded, AyniError: as `begin`.
        """
        lease = self._current()
        return Place(rank=lease.rank, world_size=lease.world_size)

    def begin(self, weigh: Weigh) -> None:
        """Begins a step.

        Raises:
            RunEnded: the run makes no more steps.
            RunStarted: the others began without this worker.
            PeerLost: a worker was lost, and `on_loss` is "raise".
            ValueError: the run file gives workers other than one micro-batch each.
            AyniError: the coordinator refused.
        """
        assert not self.is_open
        self._current()
        self._weigh, self._futures = weigh, {}

    def put(self, bucket: Bucket) -> None:
        """Sends a bucket, which `sent` holds now; returns at once."""
        lease, stats = self._stats()
        self._futures[bucket] = self._session.contribute(
            lease,
            bucket,
            [self.sent[bucket] if stats.weight else None],
            (stats,),
            out=self.means[bucket],
            component_sizes=self._specs[bucket].component_sizes,
        )

    def finish(self) -> Commit:
        """Sends what was not sent yet, and waits for all means and the commit.

        Raises:
            RunEnded, PeerLost, ValueError, AyniError: as `begin`.
        """
        try:
            while True:
                for bucket in [bucket for bucket in self._specs if bucket not in self._futures]:
                    self.put(bucket)
                try:
                    return self._commit()
                except StepVoided as error:
                    self._void(error)
        finally:
            self._weigh = None

    def give_up(self) -> None:
        """Forgets a step that was begun, after an error."""
        self._weigh = None

    def _commit(self) -> Commit:
        lease, stats = self._stats()
        commit = self._session.commit(lease, Report(num_buckets=len(self._specs), microbatches=[stats]))
        assert isinstance(commit, Commit)
        for future in self._futures.values():
            future.result(_SETTLE_S)
        self._lease = None
        return commit

    def _void(self, error: StepVoided) -> None:
        """Takes the next lease for the same step; what was sent is sent again under it."""
        _log.info("step %s is made again with the same gradients: %s", error.metadata.get("step", "?"), error.message)
        wait(self._futures.values(), _SETTLE_S)
        self._futures, self._lease = {}, None
        self._current()

    def _current(self) -> ShardAssignment:
        if self._lease is None:
            self._lease = self._next()
        return self._lease

    def _next(self) -> ShardAssignment:
        while True:
            try:
                lease = self._session.receive_shard()
                break
            except StepVoided:
                continue
        if lease is None and getattr(self._session, "drained", False):
            raise RunEnded(
                "the operator drained this worker: it has no part in the run any more, and the others go on",
                state="running",
                detail="drained",
            )
        if lease is None:
            raise RunEnded(
                "the run is over, and this program has another step to make: give the run as many steps (num_steps; 0 "
                "is without end), one more than the program makes where first weights are shared",
                state="finished",
                detail="",
            )
        if not self._world_size and lease.step:
            raise RunStarted(
                f"the run has made {lease.step} steps, and nobody can hand this program their state: start "
                "all programs of a run together, a new run with another run_id or --fresh",
                committed_step=lease.step - 1,
            )
        if len(lease.microbatches) != 1:
            raise ValueError(
                f"rank {lease.rank} of {lease.world_size} was leased {len(lease.microbatches)} of "
                f"{lease.num_microbatches} micro-batches; a program with data of its own needs one for each worker: "
                "batch.microbatches: 0 in the run file, and batch.samples at least as many as workers"
            )
        self._note_size(lease)
        return lease

    def _note_size(self, lease: ShardAssignment) -> None:
        before, self._world_size = self._world_size, lease.world_size
        if lease.world_size >= before:
            return
        lost = before - lease.world_size
        sentence = f"{lost} of {before} workers left or died before step {lease.step} was committed"
        if self._on_loss == RAISE:
            raise PeerLost(f'{sentence}; this program stops because of on_loss="raise"', peer="", detail=sentence)
        _log.warning("%s; means are over the %d that are left", sentence, lease.world_size)

    def _stats(self) -> tuple[ShardAssignment, MicrobatchStats]:
        lease = self._current()
        assert self._weigh
        return lease, MicrobatchStats(microbatch=lease.microbatch_start, weight=self._weigh(lease))


def constant(weight: int) -> Weigh:
    """Returns a weight that is the same under every lease.

    Raises:
        ValueError: it is no count.
    """
    if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= _MOST_WEIGHT:
        raise ValueError(f"weight is {weight!r}; it must be a whole number, 0 to {_MOST_WEIGHT}: samples, or tokens")
    return lambda _: weight


def only_first(lease: ShardAssignment) -> int:
    """Weighs rank 0 alone, so that the mean is what rank 0 has."""
    return int(lease.rank == 0)
