"""One attempt of a training step whose gradients the workers reduce among themselves.  [core]

Theory of operation. The attempt has leases, statistics and commits as every `Step`, and no rounds: what a worker says
when it commits stands for them. Everything that is said holds under one *generation* of the exchange group. A new group
(`regroup`) makes all commits void: everybody contributes to every bucket again, and commits again. Work is missing
where nobody has a lease on it, whatever the worker had sent that held the lease before. The attempt is done when every
lease in force is committed under the generation in force, nothing is missing, and the owners' slices make up every
bucket.

Does not know who is in a group and why (`exchange_groups`), nor what a slice's bytes are.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from ayni.buckets import Bucket
from ayni.errors import BadRequest, NotLeased, RoundRestarted
from ayni.step_values import ExchangeGroup, MicrobatchStats, Report
from ayni.tensors import TensorSpec
from coordinator_service.leases import Change, Lease, Moment
from coordinator_service.slices_book import SlicesBook
from coordinator_service.steps import Step


class PeerStep(Step):
    """One attempt of one step without rounds."""

    def __init__(self, *, moment: Moment, num_microbatches: int, leases: Iterable[Lease], group: ExchangeGroup) -> None:
        """Opens the attempt with its first group; see `Step`."""
        super().__init__(moment=moment, kind="train", num_microbatches=num_microbatches, leases=leases)
        self._computed: set[int] = set()
        """Leases whose contributions have left their worker whole, under any generation."""
        self.group = group
        self._open_group()

    @property
    def gradient_hash(self) -> str:
        """See `Step.gradient_hash`; the same bytes give the same hash."""
        return self.slices.gradient_hash

    def gradient_norm(self) -> float:
        """See `Step.gradient_norm`; the same bytes give the same norm."""
        return self.slices.gradient_norm()

    def regroup(self, group: ExchangeGroup) -> None:
        """Puts a new group in force: nobody has contributed or committed under it."""
        assert group.generation > self.group.generation
        self.group = group
        self._open_group()

    def has_begun(self, lease: Lease) -> bool:
        """Returns whether a lease's work was ever contributed."""
        return self.has_sent(lease)

    def has_sent(self, lease: Lease) -> bool:
        """Returns whether a lease's work was ever contributed: it is computed, and can be contributed again."""
        return lease.lease_id in self._computed or lease.lease_id in self.committed

    def has_contributed(self, lease: Lease) -> bool:
        """Returns whether a lease's work has left its worker under the generation in force."""
        return lease.lease_id in self._contributed or lease.lease_id in self.committed

    def note_contributed(self, worker_id: int, lease_ids: Iterable[int]) -> bool:
        """Notes which leases a worker has contributed under the generation in force; returns whether that is news."""
        own = {lease.lease_id for lease in self.leases_of(worker_id)}
        news = own.intersection(lease_ids) - self._contributed
        self._contributed |= news
        self._computed |= news
        return bool(news)

    def begin(
        self, lease: Lease, bucket: Bucket, spec: TensorSpec, stats: Sequence[MicrobatchStats], num_buckets: int = 0
    ) -> Change:
        """Refuses: the coordinator reduces nothing here."""
        raise NotLeased(
            f"{self.label}: the coordinator does not reduce {bucket}, the workers of generation "
            f"{self.group.generation} do (topology {self.group.topology})",
            lease=f"generation {self.group.generation}",
            contributed=bucket,
        )

    def check_generation(self, generation: int) -> None:
        """Refuses what was done in another group than the one in force.

        Raises:
            RoundRestarted: in an older one.
            BadRequest: in one that there is not.
        """
        ours = self.group.generation
        if generation > ours:
            raise BadRequest(
                f"{self.label}: there is no generation {generation}; {ours} is the newest", field="generation"
            )
        if generation < ours:
            detail = f"the exchange group of generation {generation} is over, {ours} is in force"
            raise RoundRestarted(f"{self.label}: {detail}; contribute again", bucket="all", detail=detail)

    def commit(self, lease: Lease, report: Report) -> Change:
        """Notes that a lease is done: its worker holds every mean. A repeated commit changes nothing.

        Raises:
            RoundRestarted, BadRequest: see `check_generation` and `SlicesBook.take_down`.
            NotLeased, WeightMismatch, NonFinite: as in `Step.commit`.
            SpecMismatch: another number of buckets than the other workers, or slices that do not make them up.
        """
        self.check_generation(report.generation)
        if lease.lease_id in self.committed:
            return Change()
        self._book.take_down(lease, report.microbatches)
        self._agree_on_buckets(lease, report.num_buckets)
        self.slices.take_down(lease.worker_id, report.slices)
        if self._is_last(lease):
            self.slices.check_whole(report.num_buckets)
        if report.parameters_sha256 and not report.following:
            self.hashes[lease.worker_id] = report.parameters_sha256
        self.committed.add(lease.lease_id)
        self._computed.add(lease.lease_id)
        return Change()

    def end(self, leases: Iterable[Lease], reason: str) -> Change:
        """Ends leases. What they have contributed is lost: a new group has to follow."""
        ending = list(leases)
        self.committed -= {lease.lease_id for lease in ending}
        return super().end(ending, reason)

    def _open_group(self) -> None:
        self.slices = SlicesBook(self.label, self.group)
        self.committed.clear()
        self._contributed: set[int] = set()
        self._num_buckets, self._num_buckets_of = None, ""

    def _is_last(self, lease: Lease) -> bool:
        return all(other is lease for other in self.uncommitted) and not self.orphans()

    def _complete(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Returns for each micro-batch whether it is there without a lease: none is; shape [num_microbatches]."""
        return np.zeros(self.num_microbatches, np.bool_)

    def _counts(self, lease: Lease) -> bool:
        return lease.lease_id in self.committed
