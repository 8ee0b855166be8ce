"""One attempt of one step: leases, rounds and commits, and when it is committed.  [core]

Theory of operation. A step is opened with one *primary* lease for each worker of the epoch; together they cover its
micro-batches. It is *open* until every lease that is still in force has committed and nothing is missing, then it has
an outcome. A worker commits when it holds every bucket, so by then every round is complete. What a worker says of a
micro-batch (weight, loss) is taken down once; saying something else later is refused.

A lease may end before that (`end`): its worker is gone, or too late. What it has contributed to a bucket whole stays;
what came in part makes that bucket's round start again. Micro-batches that some bucket lacks and nobody has a lease on
are *orphans*, for which the shell gives *extra* leases (`add`). An extra lease may also be a *rival* to one that is
late: whoever begins first counts, and the other lease ends.

A step that can't be finished is dropped by the shell and opened again with the next attempt.

Knows no stream, no clock and no store.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from ayni.buckets import Bucket
from ayni.errors import BadRequest, LeaseRevoked, NotLeased, SpecMismatch, StaleEpoch, StaleStep
from ayni.reduce.places import Places
from ayni.reduce.reduction import Fate, Round
from ayni.step_values import MicrobatchStats, Report
from ayni.tensors import TensorSpec
from coordinator_service.leases import Change, Key, Lease, Moment, Totals
from coordinator_service.stats_book import StatsBook


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
        places: Places | None = None,
    ) -> None:
        """Opens the attempt.

        Args:
            moment: which attempt of which step; an evaluation's step is the number of committed steps.
            kind: "train" or "evaluate".
            num_microbatches: micro-batches of the whole step.
            leases: one for each worker of the epoch, together covering all micro-batches.
            chunk_elements: elements of a chunk.
            places: where means are put together; None for anywhere.
        """
        self._places = places or Places()
        self.step = moment.step
        self.attempt = moment.attempt
        self.epoch = moment.epoch
        self.kind = kind
        self.num_microbatches = num_microbatches
        self.leases = {lease.lease_id: lease for lease in leases}
        self._live: list[Lease] | None = None
        self._has_rivals = False
        self.rounds: dict[Bucket, Round] = {}
        self.committed: set[int] = set()
        """Leases that are done."""
        self.hashes: dict[int, str] = {}
        """Parameter hash that each worker gave."""
        self.ended: dict[int, str] = {}
        """Leases that ended before they were done, and why."""
        self._chunk_elements = chunk_elements
        self._book = StatsBook(self.label, self.step)
        self._num_buckets: int | None = None
        self._num_buckets_of = ""
        """Worker that said it first."""

    @property
    def label(self) -> str:
        """Text for people, such as "step 3" or "evaluation after 20 steps"."""
        return f"step {self.step}" if self.kind == "train" else f"evaluation after {self.step} steps"

    @property
    def live(self) -> list[Lease]:
        """Leases that are in force or done."""
        if self._live is None:
            self._live = [lease for lease in self.leases.values() if lease.lease_id not in self.ended]
        return self._live

    @property
    def done(self) -> bool:
        """Whether every lease in force is done, and nothing is missing."""
        live = self.live
        is_committed = len(self.committed) >= len(live) > 0 and all(lease.lease_id in self.committed for lease in live)
        return is_committed and not self.orphans()

    @property
    def uncommitted(self) -> list[Lease]:
        """Leases in force that are not done."""
        return [lease for lease in self.live if lease.lease_id not in self.committed]

    @property
    def held_bytes(self) -> int:
        """Bytes that wait to be added, over all rounds."""
        return sum(round_.held_bytes for round_ in self.rounds.values())

    @property
    def gradient_hash(self) -> str:
        """XXH3-128 in hex over all buckets' names and means, in the order of the buckets; empty without buckets."""
        whole = xxhash.xxh3_128()
        for bucket in sorted(self.rounds):
            whole.update(f"{bucket} {self.rounds[bucket].digest}\n".encode())
        return whole.hexdigest() if self.rounds else ""

    def leases_of(self, worker_id: int) -> list[Lease]:
        """Returns a worker's leases that are in force or done."""
        return [lease for lease in self.live if lease.worker_id == worker_id]

    def has_committed(self, worker_id: int) -> bool:
        """Returns whether a worker has done all of its leases."""
        own = self.leases_of(worker_id)
        return bool(own) and all(lease.lease_id in self.committed for lease in own)

    def has_begun(self, lease: Lease) -> bool:
        """Returns whether a lease's work has begun to arrive."""
        return lease.lease_id in self.committed or any(r.has_begun(lease.lease_id) for r in self.rounds.values())

    def has_sent(self, lease: Lease) -> bool:
        """Returns whether all of a lease's work is here, or on its way: every bucket has begun."""
        if lease.lease_id in self.committed:
            return True
        if self.kind != "train" or self._num_buckets is None:
            return False
        return sum(r.has_begun(lease.lease_id) for r in self.rounds.values()) == self._num_buckets

    def lease(self, worker_id: int, key: Key) -> Lease:
        """Returns the worker's lease that `key` names, if it is in force.

        Raises:
            StaleEpoch: another epoch.
            StaleStep: another step or attempt.
            NotLeased: another worker's lease, or none.
            LeaseRevoked: it has ended.
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
        lease = self.leases.get(key.lease_id)
        if lease is None or lease.worker_id != worker_id:
            own = ", ".join(str(lease.lease_id) for lease in self.leases_of(worker_id))
            raise NotLeased(
                f"lease {key.lease_id} is not a lease of worker {worker_id} in {self.label}",
                lease=own or "none",
                contributed=key.lease_id,
            )
        if lease.lease_id in self.ended:
            raise self.revoked(lease)
        return lease

    def revoked(self, lease: Lease) -> LeaseRevoked:
        """Returns the refusal of what comes under a lease that has ended."""
        detail = self.ended[lease.lease_id]
        return LeaseRevoked(
            f"{self.label}: lease {lease.lease_id} of worker {lease.worker_name} on micro-batches [{lease.start}, "
            f"{lease.stop}) was taken back: {detail}",
            lease=lease.lease_id,
            detail=detail,
        )

    def add(self, lease: Lease) -> None:
        """Gives an extra lease."""
        self.leases[lease.lease_id] = lease
        self._live = None
        self._has_rivals = self._has_rivals or lease.rival_of is not None

    def begin(
        self, lease: Lease, bucket: Bucket, spec: TensorSpec, stats: Sequence[MicrobatchStats], num_buckets: int = 0
    ) -> Change:
        """Opens a lease's contribution to one bucket. Ends the leases that it was in a race with.

        Raises:
            NotLeased: other micro-batches than the lease's, or a bucket in a step that has none.
            SpecMismatch, WeightMismatch, Duplicate, NonFinite: see `Round.begin` and the class docstring.
        """
        if self.kind != "train":
            raise NotLeased(f"{self.label} has no gradients", lease="evaluate", contributed=bucket)
        self._book.take_down(lease, stats)
        if num_buckets:
            self._agree_on_buckets(lease, num_buckets)
        lost = self._win(lease)
        if bucket not in self.rounds:
            self.rounds[bucket] = self._open(bucket, spec)
        weights = {s.microbatch: s.weight for s in stats}
        reduced = self.rounds[bucket].begin(lease.lease_id, lease.worker_name, spec, weights)
        return Change(reduced=(*lost.reduced, (bucket, tuple(reduced))), restarted=lost.restarted, ended=lost.ended)

    def commit(self, lease: Lease, report: Report) -> Change:
        """Notes that a lease is done: its worker holds every bucket. A repeated commit changes nothing.

        Raises:
            NotLeased, WeightMismatch, NonFinite: as in `begin`.
            SpecMismatch: another number of buckets than the other workers, or than there are.
        """
        if lease.lease_id in self.committed:
            return Change()
        self._check_begun(lease, report.num_buckets)
        self._book.take_down(lease, report.microbatches)
        self._check_buckets(lease, report.num_buckets)
        self._num_buckets = report.num_buckets
        if report.parameters_sha256 and not report.following:
            self.hashes[lease.worker_id] = report.parameters_sha256
        self.committed.add(lease.lease_id)
        return self._win(lease)

    def end(self, leases: Iterable[Lease], reason: str) -> Change:
        """Ends leases. What they have contributed whole stays; see the module docstring."""
        ending = [lease for lease in leases if lease.lease_id not in self.ended]
        self.ended.update({lease.lease_id: reason for lease in ending})
        self._live = None
        reduced, partial = [], set()
        for bucket, round_ in self.rounds.items():
            for lease in ending:
                fate, chunks = round_.drop(lease.lease_id)
                reduced.append((bucket, tuple(chunks)))
                if fate is Fate.PARTIAL:
                    partial.add(bucket)
        for bucket in partial:
            self._restart(bucket)
        stray = [bucket for bucket, round_ in self.rounds.items() if round_.is_empty and bucket not in partial]
        for bucket in stray:
            del self.rounds[bucket]
        self._forget_stats()
        kept = tuple((bucket, chunks) for bucket, chunks in reduced if bucket not in partial)
        return Change(reduced=kept, restarted=tuple(sorted(partial)), ended=tuple(ending))

    def take_back(self, lease: Lease, bucket: Bucket) -> Change:
        """Drops a contribution whose stream broke; it may begin again under the same lease.

        When the mean is complete already, others have it and no sum can start again: then the worker's leases end.
        """
        round_ = self.rounds[bucket]
        if round_.complete:
            return self.end(self.leases_of(lease.worker_id), f"its stream for {round_.label} broke")
        fate, _ = round_.drop(lease.lease_id, is_over=False)
        if fate is not Fate.PARTIAL:
            return Change()
        self._restart(bucket)
        return Change(restarted=(bucket,))

    def orphans(self) -> list[tuple[int, int]]:
        """Returns ranges of micro-batches that some bucket lacks and that nobody has a lease on.

        Each lies within one lease that has ended, so that a bucket has all of a range or nothing of it.
        """
        if not self.ended:
            return []
        missing = ~self._complete()
        for lease in self.live:
            missing[lease.start : lease.stop] = False
        cuts = {edge for lease in self.leases.values() for edge in (lease.start, lease.stop)}
        return _ranges(missing, cuts)

    def restart(self, bucket: Bucket) -> Change:
        """Drops what was contributed to a bucket, because some of it can't be relied on."""
        self._restart(bucket)
        return Change(restarted=(bucket,))

    def totals(self) -> Totals:
        """Returns the sums over all micro-batches that were said so far."""
        return self._book.totals()

    def contributions(self) -> list[tuple[Lease, int]]:
        """Returns the leases whose work is in the step, by micro-batch, with what it weighs."""
        counted = [lease for lease in self.leases.values() if lease.start < lease.stop and self._counts(lease)]
        return [(lease, self._book.weight(lease)) for lease in sorted(counted, key=lambda lease: lease.start)]

    def gradient_norm(self) -> float:
        """Returns the Euclidean norm of the mean over all buckets."""
        return math.sqrt(math.fsum(round_.square_sum for round_ in self.rounds.values()))

    @property
    def _has_buckets(self) -> bool:
        return self.kind == "train" and self._num_buckets != 0

    def _open(self, bucket: Bucket, spec: TensorSpec) -> Round:
        return Round(
            label=f"{self.label}, {bucket}",
            spec=spec,
            num_microbatches=self.num_microbatches,
            chunk_elements=self._chunk_elements,
            expected=self._receivers(),
            place=self._places.take(spec),
        )

    def _receivers(self) -> list[int]:
        return [lease.lease_id for lease in self.live if not lease.is_extra]

    def _restart(self, bucket: Bucket) -> None:
        self.rounds[bucket].restart(self._receivers())

    def _win(self, lease: Lease) -> Change:
        """Ends the leases that compete with one that begins; without its primary lease a worker keeps no other."""
        if not self._has_rivals:
            return Change()
        losers = [
            other
            for other in self.live
            if (other.lease_id == lease.rival_of or other.rival_of == lease.lease_id) and not self.has_begun(other)
        ]
        losers += [x for loser in losers if not loser.is_extra for x in self.leases_of(loser.worker_id) if x.is_extra]
        return self.end(losers, f"worker {lease.worker_name} was quicker") if losers else Change()

    def _complete(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Returns for each micro-batch whether every bucket has it; shape [num_microbatches]."""
        complete = np.zeros(self.num_microbatches, np.bool_)
        if not self._has_buckets:
            for lease in (self.leases[lease_id] for lease_id in self.committed):
                complete[lease.start : lease.stop] = True
            return complete
        if len(self.rounds) != self._num_buckets:
            return complete
        complete[:] = True
        for round_ in self.rounds.values():
            declared = np.zeros_like(complete)
            for start, stop in round_.ranges:
                declared[start:stop] = True
            complete &= declared
        return complete

    def _counts(self, lease: Lease) -> bool:
        """Returns whether a lease's own contribution is in the last bucket, or in the evaluation."""
        if not self._has_buckets:
            return lease.lease_id in self.committed
        last = self.rounds[max(self.rounds)] if self.rounds else None
        return last is not None and last.has_begun(lease.lease_id) and not last.is_held(lease.lease_id)

    def _forget_stats(self) -> None:
        """Forgets what was said of micro-batches that no bucket has and nobody has a lease on."""
        if self._has_buckets:
            spoken = {m for r in self.rounds.values() for start, stop in r.ranges for m in range(start, stop)}
        else:
            spoken = {m for i in self.committed for m in range(self.leases[i].start, self.leases[i].stop)}
        spoken |= {m for lease in self.live for m in range(lease.start, lease.stop)}
        self._book.keep(spoken)

    def _check_begun(self, lease: Lease, num_buckets: int) -> None:
        """Refuses a worker that says something else than it has done."""
        begun = sum(round_.has_begun(lease.lease_id) for round_ in self.rounds.values())
        if begun != num_buckets:
            raise BadRequest(
                f"{self.label}: worker {lease.worker_name} commits lease {lease.lease_id} with {num_buckets} buckets, "
                f"and has contributed to {begun}",
                field="num_buckets",
            )

    def _agree_on_buckets(self, lease: Lease, num_buckets: int) -> None:
        if self._num_buckets not in (None, num_buckets):
            raise self._bucket_mismatch(lease, num_buckets, self._num_buckets or 0, [])
        self._num_buckets, self._num_buckets_of = num_buckets, self._num_buckets_of or lease.worker_name

    def _check_buckets(self, lease: Lease, num_buckets: int) -> None:
        incomplete = [str(bucket) for bucket, round_ in self.rounds.items() if not round_.complete]
        expected = len(self.rounds) if self._num_buckets is None else self._num_buckets
        if num_buckets != expected or incomplete:
            raise self._bucket_mismatch(lease, num_buckets, expected, incomplete)

    def _bucket_mismatch(self, lease: Lease, received: int, expected: int, incomplete: list[str]) -> SpecMismatch:
        return SpecMismatch(
            f"{self.label}: worker {lease.worker_name} commits {received} buckets; {expected} are expected"
            + (f" since worker {self._num_buckets_of} said so" if self._num_buckets_of else "")
            + (f", incomplete: {', '.join(incomplete)}" if incomplete else ""),
            field="num_buckets",
            expected=expected,
            received=received,
            bucket=", ".join(incomplete),
        )


def _ranges(flags: "np.ndarray[tuple[int], np.dtype[np.bool_]]", cuts: set[int]) -> list[tuple[int, int]]:
    """Returns the runs of true values as [start, stop), cut at the given places too."""
    found: list[tuple[int, int]] = []
    for index in np.flatnonzero(flags).tolist():
        if found and found[-1][1] == index and index not in cuts:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found
