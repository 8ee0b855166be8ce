"""One attempt of one step: leases, rounds and commits, and when it is committed.  [core]

Theory of operation. A step is opened with one lease for each worker of the epoch; the leases cover its micro-batches.
It is *open* until every worker has committed, then it has an outcome. A worker commits when it holds every bucket, so
by then every round is complete. What a worker says of a micro-batch (weight, loss) is taken down once; saying
something else later is refused.

A step that can't be finished is dropped by the shell and opened again with the next attempt; nothing here is undone.

Knows no stream, no clock and no store.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ayni.buckets import Bucket
from ayni.errors import Diverged, NonFinite, NotLeased, SpecMismatch, StaleEpoch, StaleStep, WeightMismatch
from ayni.step_values import MicrobatchStats
from ayni.tensors import TensorSpec
from coordinator_service.reduction import Reduced, Round

LARGEST_COUNT = 1 << 44
"""Most samples or tokens of one micro-batch: sums over 65,536 micro-batches stay exact in 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Micro-batches [start, stop) that one worker computes in one attempt of a step."""

    lease_id: int
    worker_id: int
    worker_name: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One attempt of one step, under one membership."""

    epoch: int
    step: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Which lease a worker speaks of."""

    moment: Moment
    lease_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over the micro-batches of a step.

    Attributes:
        total_weight: what the gradient sums are divided by.
        global_loss: sum of losses over total_weight; None unless all losses are known; 0 without weight.
    """

    total_weight: int
    global_loss: float | None
    num_correct: int
    num_predictions: int


class Step:
    """One attempt of one step."""

    def __init__(
        self,
        *,
        moment: Moment,
        kind: str,
        num_microbatches: int,
        leases: Iterable[Lease],
        chunk_elements: int = 1 << 18,
    ) -> None:
        """Opens the attempt.

        Args:
            moment: which attempt of which step; an evaluation's step is the number of committed steps.
            kind: "train" or "evaluate".
            num_microbatches: micro-batches of the whole step.
            leases: one for each worker of the epoch, together covering all micro-batches.
            chunk_elements: elements of a chunk.
        """
        self.step = moment.step
        self.attempt = moment.attempt
        self.epoch = moment.epoch
        self.kind = kind
        self.num_microbatches = num_microbatches
        self.leases = {lease.worker_id: lease for lease in leases}
        self.rounds: dict[Bucket, Round] = {}
        self.committed: set[int] = set()
        self.hashes: dict[int, str] = {}
        self._chunk_elements = chunk_elements
        self._stats: dict[int, MicrobatchStats] = {}
        self._num_buckets: int | None = None

    @property
    def label(self) -> str:
        """Text for people, such as "step 3" or "evaluation after 20 steps"."""
        return f"step {self.step}" if self.kind == "train" else f"evaluation after {self.step} steps"

    @property
    def done(self) -> bool:
        """Whether every worker has committed."""
        return self.committed == self.leases.keys()

    @property
    def uncommitted(self) -> list[Lease]:
        """Leases whose workers have not committed."""
        return [lease for worker, lease in self.leases.items() if worker not in self.committed]

    @property
    def held_bytes(self) -> int:
        """Bytes that wait to be added, over all rounds."""
        return sum(round_.held_bytes for round_ in self.rounds.values())

    def lease(self, worker_id: int, key: Key) -> Lease:
        """Returns the worker's lease if `key` names it.

        Raises:
            StaleEpoch: another epoch.
            StaleStep: another step or attempt.
            NotLeased: another lease.
        """
        said = key.moment
        if said.epoch != self.epoch:
            raise StaleEpoch(
                f"epoch {said.epoch} is not in force, {self.epoch} is; wait for the next assignment",
                epoch=said.epoch,
                current_epoch=self.epoch,
            )
        if (said.step, said.attempt) != (self.step, self.attempt):
            raise StaleStep(
                f"step {said.step} attempt {said.attempt} is not open; {self.label} attempt {self.attempt} is",
                step=said.step,
                attempt=said.attempt,
                current_step=self.step,
                current_attempt=self.attempt,
            )
        lease = self.leases.get(worker_id)
        if lease is None or lease.lease_id != key.lease_id:
            raise NotLeased(
                f"lease {key.lease_id} is not the lease of worker {worker_id} in {self.label}",
                lease=lease.lease_id if lease else "none",
                contributed=key.lease_id,
            )
        return lease

    def begin(self, lease: Lease, bucket: Bucket, spec: TensorSpec, stats: Sequence[MicrobatchStats]) -> list[Reduced]:
        """Opens a worker's contribution to one bucket.

        Raises:
            NotLeased: other micro-batches than the lease's, or a bucket in a step that has none.
            SpecMismatch, WeightMismatch, Duplicate, NonFinite: see `Round.begin` and the class docstring.
        """
        if self.kind != "train":
            raise NotLeased(f"{self.label} has no gradients", lease="evaluate", contributed=bucket)
        self._take_down(lease, stats)
        if bucket not in self.rounds:
            self.rounds[bucket] = self._open(bucket, spec)
        weights = {s.microbatch: s.weight for s in stats}
        return self.rounds[bucket].begin(lease.worker_id, lease.worker_name, spec, weights)

    def commit(self, lease: Lease, num_buckets: int, stats: Sequence[MicrobatchStats], parameters_sha256: str) -> None:
        """Notes that a worker holds every bucket. A repeated commit changes nothing.

        Raises:
            NotLeased, WeightMismatch, NonFinite: as in `begin`.
            SpecMismatch: another number of buckets than the other workers, or than there are.
        """
        if lease.worker_id in self.committed:
            return
        self._take_down(lease, stats)
        self._check_buckets(lease, num_buckets)
        self._num_buckets = num_buckets
        self.hashes[lease.worker_id] = parameters_sha256
        self.committed.add(lease.worker_id)

    def totals(self) -> Totals:
        """Returns the sums over all micro-batches that were said so far; losses are added exactly, then rounded."""
        stats = [self._stats[m] for m in sorted(self._stats)]
        weight = sum(s.weight for s in stats)
        losses = [s.loss_sum for s in stats if s.loss_sum is not None]
        known = len(losses) == len(stats)
        return Totals(
            total_weight=weight,
            global_loss=(_exact_sum(losses) / weight if weight else 0.0) if known else None,
            num_correct=sum(s.num_correct for s in stats),
            num_predictions=sum(s.num_predictions for s in stats),
        )

    def gradient_norm(self) -> float:
        """Returns the Euclidean norm of the mean over all buckets."""
        return math.sqrt(math.fsum(round_.square_sum for round_ in self.rounds.values()))

    def check_hashes(self) -> None:
        """Compares the parameter hashes that the workers gave.

        Raises:
            Diverged: two differ.
        """
        compare_hashes(self.label, {self.leases[w].worker_name: h for w, h in self.hashes.items()})

    def _open(self, bucket: Bucket, spec: TensorSpec) -> Round:
        return Round(
            label=f"{self.label}, {bucket}",
            spec=spec,
            num_microbatches=self.num_microbatches,
            chunk_elements=self._chunk_elements,
            expected=self.leases,
        )

    def _take_down(self, lease: Lease, stats: Sequence[MicrobatchStats]) -> None:
        if [s.microbatch for s in stats] != list(range(lease.start, lease.stop)):
            raise NotLeased(
                f"{self.label}: worker {lease.worker_name} contributes micro-batches {[s.microbatch for s in stats]}; "
                f"its lease is on [{lease.start}, {lease.stop})",
                lease=f"[{lease.start}, {lease.stop})",
                contributed=[s.microbatch for s in stats],
            )
        merged = [self._merge(lease, s) for s in stats]
        self._stats.update({s.microbatch: s for s in merged})

    def _merge(self, lease: Lease, new: MicrobatchStats) -> MicrobatchStats:
        for count in (new.weight, new.num_correct, new.num_predictions):
            if not 0 <= count <= LARGEST_COUNT:
                raise _weight_mismatch(self.label, lease, new.microbatch, f"0 to {LARGEST_COUNT}", count)
        if new.loss_sum is not None and not math.isfinite(new.loss_sum):
            raise NonFinite(
                f"{self.label}: worker {lease.worker_name} has loss {new.loss_sum} in micro-batch {new.microbatch}",
                worker=lease.worker_name,
                step=self.step,
                bucket="loss",
                element=new.microbatch,
                value=new.loss_sum,
            )
        old = self._stats.get(new.microbatch)
        if old is None:
            return new
        if old.weight != new.weight:
            raise _weight_mismatch(self.label, lease, new.microbatch, old.weight, new.weight)
        return old if new.loss_sum is None else new

    def _check_buckets(self, lease: Lease, num_buckets: int) -> None:
        incomplete = [str(bucket) for bucket, round_ in self.rounds.items() if not round_.complete]
        expected = len(self.rounds) if self._num_buckets is None else self._num_buckets
        if num_buckets != expected or incomplete:
            raise SpecMismatch(
                f"{self.label}: worker {lease.worker_name} commits {num_buckets} buckets; {expected} are expected"
                + (f", incomplete: {', '.join(incomplete)}" if incomplete else ""),
                field="num_buckets",
                expected=expected,
                received=num_buckets,
                bucket=", ".join(incomplete),
            )


def _exact_sum(losses: Sequence[float]) -> float:
    """Returns the sum of the losses, rounded once; infinite when it is beyond float64."""
    try:
        return math.fsum(losses)
    except OverflowError:
        return math.inf


def compare_hashes(label: str, hashes: dict[str, str]) -> None:
    """Checks that all workers that gave a hash gave the same one.

    Args:
        label: which moment this is, for the error.
        hashes: hash for each worker name; empty text means not said.

    Raises:
        Diverged: two differ; names who holds which.
    """
    said = {name: value for name, value in hashes.items() if value}
    if len(set(said.values())) > 1:
        listed = ", ".join(f"{name} has {value[:16]}" for name, value in sorted(said.items()))
        raise Diverged(f"{label}: the workers' parameters differ: {listed}", step=label, **_hash_metadata(said))


def _hash_metadata(said: dict[str, str]) -> dict[str, str]:
    return {f"parameters_{name}": value for name, value in sorted(said.items())}


def _weight_mismatch(label: str, lease: Lease, microbatch: int, expected: object, received: int) -> WeightMismatch:
    return WeightMismatch(
        f"{label}: worker {lease.worker_name} gives micro-batch {microbatch} weight or count {received}; "
        f"expected {expected}",
        microbatch=microbatch,
        expected=expected,
        received=received,
    )
