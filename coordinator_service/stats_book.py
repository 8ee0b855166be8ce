"""What the workers say of a step's micro-batches, each taken down once.  [core]"""

import math
from collections.abc import Container, Sequence

from ayni.errors import NonFinite, NotLeased, WeightMismatch
from ayni.step_values import MicrobatchStats
from coordinator_service.leases import Lease, Totals

LARGEST_COUNT = 1 << 44
"""Most samples or tokens of one micro-batch: sums over 65,536 micro-batches stay exact in 64 bits."""


class StatsBook:
    """Weights and losses of one attempt of a step."""

    def __init__(self, label: str, step: int) -> None:
        """Starts empty; `label` and `step` name the step in errors."""
        self._label = label
        self._step = step
        self._stats: dict[int, MicrobatchStats] = {}
        self._totals: Totals | None = None

    def take_down(self, lease: Lease, stats: Sequence[MicrobatchStats]) -> None:
        """Notes what is said under a lease; all of it, or nothing if it is refused.

        Raises:
            NotLeased: other micro-batches than the lease's.
            WeightMismatch: another weight than was said before, or one out of range.
            NonFinite: a loss is not finite.
        """
        if [s.microbatch for s in stats] != list(range(lease.start, lease.stop)):
            raise NotLeased(
                f"{self._label}: worker {lease.worker_name} contributes micro-batches {[s.microbatch for s in stats]}; "
                f"its lease is on [{lease.start}, {lease.stop})",
                lease=f"[{lease.start}, {lease.stop})",
                contributed=[s.microbatch for s in stats],
            )
        merged = [self._merge(lease, s) for s in stats]
        changed = {s.microbatch: s for s in merged if self._stats.get(s.microbatch) != s}
        if changed:
            self._stats.update(changed)
            self._totals = None

    def keep(self, spoken: Container[int]) -> None:
        """Forgets what was said of other micro-batches than these."""
        self._stats = {m: stats for m, stats in self._stats.items() if m in spoken}
        self._totals = None

    def weight(self, lease: Lease) -> int:
        """Returns what a lease's micro-batches weigh together."""
        return sum(self._stats[m].weight for m in range(lease.start, lease.stop))

    def totals(self) -> Totals:
        """Returns the sums over all micro-batches that were said so far; losses are added exactly, then rounded."""
        if self._totals is None:
            self._totals = self._sum()
        return self._totals

    def _sum(self) -> Totals:
        stats = [self._stats[m] for m in sorted(self._stats)]
        weight = sum(s.weight for s in stats)
        losses = [s.loss_sum for s in stats if s.loss_sum is not None]
        known = len(losses) == len(stats)
        return Totals(
            total_weight=weight,
            global_loss=(_exact_sum(losses) / weight if weight else 0.0) if known else None,
            num_correct=sum(s.num_correct for s in stats),
            num_predictions=sum(s.num_predictions for s in stats),
            skipped=tuple(s.microbatch for s in stats if s.non_finite),
        )

    def _merge(self, lease: Lease, new: MicrobatchStats) -> MicrobatchStats:
        for count in (new.weight, new.num_correct, new.num_predictions):
            if not 0 <= count <= LARGEST_COUNT:
                raise self._mismatch(lease, new.microbatch, f"0 to {LARGEST_COUNT}", count)
        if new.loss_sum is not None and not math.isfinite(new.loss_sum):
            raise NonFinite(
                f"{self._label}: worker {lease.worker_name} has loss {new.loss_sum} in micro-batch {new.microbatch}",
                worker=lease.worker_name,
                step=self._step,
                bucket="loss",
                element=new.microbatch,
                value=new.loss_sum,
            )
        old = self._stats.get(new.microbatch)
        if old is None:
            return new
        if old.weight != new.weight:
            raise self._mismatch(lease, new.microbatch, old.weight, new.weight)
        return old if new.loss_sum is None else new

    def _mismatch(self, lease: Lease, microbatch: int, expected: object, received: int) -> WeightMismatch:
        return WeightMismatch(
            f"{self._label}: worker {lease.worker_name} gives micro-batch {microbatch} weight or count {received}; "
            f"expected {expected}",
            microbatch=microbatch,
            expected=expected,
            received=received,
        )


def _exact_sum(losses: Sequence[float]) -> float:
    """Returns the sum of the losses, rounded once; infinite when it is beyond float64."""
    try:
        return math.fsum(losses)
    except OverflowError:
        return math.inf
