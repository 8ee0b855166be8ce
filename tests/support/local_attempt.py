"""One attempt of a step inside this process: its leases, what came for them, and their exact mean.

The reduction is written down again here, recursively, so that it shares no code with the coordinator's.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from ayni import tree
from ayni.buckets import Bucket
from ayni.errors import LeaseRevoked
from ayni.step_values import Report
from ayni.tree import Node
from worker_agent.session import Commit, MicrobatchStats, ShardAssignment, Vector

Range = tuple[int, int]


@dataclass
class Contribution:
    """One lease's part in one bucket."""

    lease: ShardAssignment
    parts: dict[Node, Vector | None]
    out: Vector
    component_sizes: tuple[int, ...]
    future: "Future[Vector]" = field(default_factory=Future)
    sent: dict[Node, bytes | None] = field(default_factory=dict)
    """What the parts were when they came."""

    def __post_init__(self) -> None:
        self.sent = {node: None if part is None else part.tobytes() for node, part in self.parts.items()}

    def check_unchanged(self) -> None:
        for node, part in self.parts.items():
            assert self.sent[node] == (None if part is None else part.tobytes()), f"{node} changed after it was sent"


@dataclass
class Attempt:
    """Ranks take turns; orphans are micro-batches that the primary leases do not cover."""

    kind: str
    step: int
    attempt: int
    shares: Sequence[int]
    ranks: Sequence[int]
    """Those that take part, in the order of their turns."""
    following: frozenset[int]
    orphans: dict[int, list[Range]]
    """What each rank is given on top, when it has done what it had."""
    turn: int = 0
    contributions: dict[Bucket, dict[int, Contribution]] = field(default_factory=dict)
    reports: dict[int, tuple[int, Report]] = field(default_factory=dict)
    """Rank and report of each lease that is done."""
    stats: dict[int, MicrobatchStats] = field(default_factory=dict)
    num_extras: int = 0
    outcome: Commit | Exception | None = None

    @property
    def num_microbatches(self) -> int:
        return sum(self.shares)

    @property
    def hashes(self) -> dict[int, str]:
        return {rank: report.parameters_sha256 for rank, report in self.reports.values() if report.parameters_sha256}

    def range_of(self, rank: int) -> Range:
        start = sum(self.shares[:rank])
        return (start, start + self.shares[rank]) if self.counts(rank) else (start, start)

    def counts(self, rank: int) -> bool:
        return rank in self.ranks and rank not in self.following

    def contribute(self, entry: Contribution, bucket: Bucket, stats: Sequence[MicrobatchStats]) -> None:
        lease = entry.lease
        assert [item.microbatch for item in stats] == list(lease.microbatches), "stats must list the micro-batches"
        weights = {item.microbatch: item.weight for item in stats}
        for node, part in entry.parts.items():
            weight = sum(weights[microbatch] for microbatch in range(node.start, node.stop))
            assert (part is None) == (weight == 0), f"{node} has weight {weight}"
            assert part is None or (part.dtype == np.float32 and part.shape == entry.out.shape)
        leases = self.contributions.setdefault(bucket, {})
        assert lease.lease_id not in leases, f"lease {lease.lease_id} contributed {bucket} twice"
        leases[lease.lease_id] = entry

    def commit(self, rank: int, lease: ShardAssignment, report: Report) -> None:
        contributed = sum(lease.lease_id in leases for leases in self.contributions.values())
        assert report.num_buckets == contributed, f"lease {lease.lease_id}: {contributed} buckets"
        assert not report.following or not report.microbatches, "a follower has no micro-batches"
        said = (rank, report)
        assert self.reports.setdefault(lease.lease_id, said) == said, "a report that is given again must be the same"
        self.stats |= {item.microbatch: item for item in report.microbatches}

    def revoke(self, lease: ShardAssignment) -> LeaseRevoked:
        """Drops what came for a lease."""
        error = LeaseRevoked(f"lease {lease.lease_id} was taken back: others have its micro-batches")
        for leases in self.contributions.values():
            leases.pop(lease.lease_id).future.set_exception(error)
        return error

    def void(self, error: Exception) -> None:
        self.outcome = error
        for entry in self._entries():
            entry.check_unchanged()
            entry.future.set_exception(error)

    def finish(self, commit: Commit) -> None:
        self.outcome = commit
        for entry in self._entries():
            entry.check_unchanged()
            entry.future.set_result(entry.out)

    def reduce(self, weight: int) -> dict[Bucket, Vector]:
        """Gives the weighted mean of each bucket to everybody's first lease."""
        return {bucket: self._mean(list(leases.values()), weight) for bucket, leases in self.contributions.items()}

    def _mean(self, entries: list[Contribution], weight: int) -> Vector:
        firsts = [entry for entry in entries if not entry.lease.extra]
        assert sorted(entry.lease.rank for entry in firsts) == sorted(self.ranks), "a rank did not contribute"
        assert len({(entry.out.shape, entry.component_sizes) for entry in entries}) == 1
        given = {node: part for entry in entries for node, part in entry.parts.items()}

        def total(start: int, stop: int) -> Vector | None:
            if (node := Node(start=start, stop=stop)) in given:
                return given[node]
            half = 1 << ((stop - start - 1).bit_length() - 1)
            left, right = total(start, start + half), total(start + half, stop)
            return left + right if left is not None and right is not None else (right if left is None else left)

        root = total(0, self.num_microbatches)
        mean = np.zeros_like(firsts[0].out) if root is None else root / np.float32(weight)
        for entry in firsts:
            entry.out[...] = mean
        return mean

    def _entries(self) -> list[Contribution]:
        return [entry for leases in self.contributions.values() for entry in leases.values()]


def cover(lease: ShardAssignment) -> list[Node]:
    return tree.cover(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches)
