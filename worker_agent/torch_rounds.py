"""One attempt of a step in one generation of a torch group: what is brought, whose turn it is, what came out.  [shell]

Legend: N elements in a bucket.

Theory of operation. The event loop brings offers; the group's thread takes turns, one for each bucket, in the order in
which the lowest rank heard of them: it says first which bucket is next, how long it is and what all of it weighs, and
then all add. So all members issue the same collectives in the same order, whatever comes first where. Before its first
turn the lowest rank waits until the leases that the members have begun cover the step; from then on nobody's can grow.
"""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ayni import failpoints
from ayni.buckets import Bucket
from ayni.errors import RoundRestarted
from worker_agent.contributions import Offer
from worker_agent.session import Vector
from worker_agent.torch_collectives import Collectives, Integers
from worker_agent.torch_group import TorchGroup
from worker_agent.torch_store import LeaseCount
from worker_agent.torch_sums import AttemptKey, Sums, Tally

_KINDS = ("flat", "block", "non_block")


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """What came out of one bucket's turn."""

    total_N: Vector  # noqa: N815
    """Sum of all members' vectors, shape [N]; it stays until the bucket's turn in the next attempt."""
    weight: int
    begun: float
    """Moment when all had come and the adding began."""
    ended: float


class Rounds:
    """The turns of one attempt."""

    def __init__(self, attempt: AttemptKey, sums: Sums, group: TorchGroup, leases: LeaseCount) -> None:
        """Opens the attempt.

        Args:
            attempt: which one.
            sums: what this worker brings; empty.
            group: takes the turns.
            leases: counts what the members have begun.
        """
        self.attempt = attempt
        self._sums = sums
        self._group = group
        self._leases = leases
        self._brought = threading.Condition()
        self._totals: dict[Bucket, Future[Total]] = {}
        self._weight: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether every turn that was asked for is over."""
        return all(total.done() for total in self._totals.values())

    def bring(self, offer: Offer) -> "tuple[Future[Total], Tally | None]":
        """Takes an offer. Does not block.

        Returns:
            The bucket's total, and what is to be counted of the offer's lease, if it was not counted before.

        Raises:
            BadRequest: it can't be counted.
            SpecMismatch: the bucket has another length under another lease.
        """
        with self._brought:
            tally = self._sums.add(offer)
            total = self._totals.get(offer.bucket)
            if total is None:
                total = self._totals[offer.bucket] = Future()
                self._group.submit(lambda collectives: self._turn(collectives, offer.bucket)).add_done_callback(
                    self._check_turn
                )
            self._brought.notify_all()
        return total, tally

    def count(self, tally: Tally) -> None:
        """Counts a lease that was begun. Blocks for as long as the store takes to answer."""
        self._leases.add(self.attempt, tally, self._sums.num_microbatches)

    def wake(self) -> None:
        """Wakes the group's thread after the group was given up."""
        with self._brought:
            self._brought.notify_all()

    def _turn(self, collectives: Collectives, bucket: Bucket) -> None:
        """Adds one bucket: the given one on the lowest rank, that one's on all others."""
        is_first = self._group.plan.rank == 0
        said = self._header(bucket) if is_first else np.zeros(7, np.int64)
        collectives.broadcast(said)
        if not is_first:
            bucket = self._checked(said)
        *_, num_elements, weight = said.tolist()
        self._wait_whole(bucket, num_elements)
        total_N = collectives.buffers.of(bucket, num_elements)
        self._sums.add_up(bucket, total_N)
        failpoints.hit("worker.contribution.half")
        begun = time.perf_counter()
        if weight:
            collectives.all_reduce(total_N)
        failpoints.hit("worker.contribution.sent")
        self._totals[bucket].set_result(Total(total_N=total_N, weight=weight, begun=begun, ended=time.perf_counter()))

    def _header(self, bucket: Bucket) -> Integers:
        if self._weight is None:
            self._weight = self._leases.total_weight(self.attempt, self._group.plan.reduce_s)
        size = self._sums.num_elements(bucket)
        said = [*self.attempt, _KINDS.index(bucket.kind), bucket.index, size, self._weight]
        return np.array(said, np.int64)

    def _checked(self, said: Integers) -> Bucket:
        """Returns the bucket that is next for all.

        Raises:
            RoundRestarted: the lowest rank is elsewhere.
        """
        *attempt, kind, index, _, weight = said.tolist()
        if tuple(attempt) != self.attempt or not 0 <= kind < len(_KINDS) or weight < 0:
            raise RoundRestarted(
                f"the lowest rank of generation {self._group.plan.generation} is at epoch, step and attempt {attempt}, "
                f"this worker at {list(self.attempt)}; the coordinator makes a new group"
            )
        return Bucket(_KINDS[kind], index)

    def _wait_whole(self, bucket: Bucket, num_elements: int) -> None:
        """Waits until everything is there that this worker brings to a bucket, and compares lengths."""
        deadline = time.monotonic() + self._group.plan.reduce_s
        with self._brought:
            while not self._sums.is_whole(bucket):
                self._group.check()
                if not self._brought.wait(deadline - time.monotonic()):
                    raise RoundRestarted(f"{bucket}: this worker did not bring it under every lease in time")
            self._sums.check_length(bucket, num_elements)

    def _check_turn(self, turn: "Future[None]") -> None:
        error = turn.exception()
        for total in list(self._totals.values()) if error else ():
            if not total.done():
                total.set_exception(error)
