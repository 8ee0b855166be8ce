"""Hands over what leases ask for, and keeps it where an attempt is voided.  [shell]

What was computed for a lease stays valid until the step is committed: the session may have to send it again, and the
next attempt may lease the same micro-batches again. Leases are known by their span then, for their ids are new.

Where rounding on the wire is made up for (`error_feedback`), the first lease of an attempt brings the residual along,
and only that one. A lease that was kept may come back in the other part: one without the residual gets it now; one that
has it can't lose it again, so as an additional lease it is computed anew.
"""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from worker_agent.session import Session, Vector
from worker_agent.training.error_feedback import ROUNDED, ErrorFeedback
from worker_agent.training.gradients import Send, ShardGradients
from worker_agent.training.layout import BucketSpec
from worker_agent.training.shard import Shard, Span

_MOST_KEPT = 4
"""Computed leases that are kept over voided attempts; each takes the memory of at least one gradient."""


class Work(Protocol):
    """What turns a lease into parts to send."""

    def train(self, shard: Shard, send: Send) -> None:
        """Works on a lease: fills the shard's statistics and sums, and hands all buckets over."""


class Contributor:
    """The contributions of one replica."""

    def __init__(
        self,
        work: Work,
        gradients: ShardGradients,
        specs: Sequence[BucketSpec],
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """Makes the buffers that means arrive in; `feedback` is None where nothing is made up for."""
        self._work, self._gradients, self._specs = work, gradients, specs
        self.feedback = feedback
        """What makes up for rounding on the wire; None while nothing does."""
        self._kept: dict[Span, Shard] = {}
        self.means = {spec.bucket: np.zeros(spec.num_elements, np.float32) for spec in specs}

    def contribute(self, session: Session, shard: Shard) -> None:
        """Computes and hands over a lease, or hands over what a voided attempt left of it.

        Raises:
            StepVoided, LeaseRevoked: from the session.
        """

        def send(spec: BucketSpec, parts: list[Vector | None]) -> None:
            self._correct(shard, spec, parts)
            future = session.contribute(
                shard.assignment,
                spec.bucket,
                parts,
                tuple(shard.stats),
                out=self.means[spec.bucket],
                component_sizes=spec.component_sizes,
            )
            shard.add_future(future)

        kept = self._take_kept(shard)
        if kept is None:
            session.report("computing")
            self._work.train(shard, send)
        else:
            assert kept.sums is not None
            shard.stats, shard.sums, shard.is_whole = kept.stats, kept.sums, True
            shard.before, shard.computed = kept.computing_times(), time.perf_counter()
            shard.sums.send(send)
        session.report("exchanging")

    def square_sum(self, shard: Shard) -> float:
        """Returns the sum of the squares of what a lease sends; 0 where it is not finite."""
        total = shard.sums.square_sum() if shard.sums else 0.0
        return total if math.isfinite(total) else 0.0

    def keep(self, shards: Iterable[Shard]) -> None:
        """Keeps the whole ones among the leases of a voided attempt; the session must have let go of all of them."""
        for shard in shards:
            if shard.is_whole and shard.sums is not None and shard.assignment.microbatches:
                if before := self._kept.pop(shard.span, None):
                    self._release(before)
                self._kept[shard.span] = shard
            else:
                self._release(shard)
        while len(self._kept) > _MOST_KEPT:
            self._release(self._kept.pop(next(iter(self._kept))))

    def release(self, shards: Iterable[Shard]) -> None:
        """Takes all buffers back: those of a committed step's leases, and what was kept for it.

        What the leases sent counts now, so that the next residual follows from it.
        """
        shards = tuple(shards)
        for shard in shards:
            self._commit(shard)
        for shard in (*shards, *self._kept.values()):
            self._release(shard)
        self._kept.clear()

    def start_over(self) -> None:
        """Lets go of everything that belongs to parameters which are about to be replaced."""
        self.release(())
        if self.feedback:
            self.feedback.forget()

    def _take_kept(self, shard: Shard) -> Shard | None:
        """Returns what was kept of a lease's micro-batches, if that is what the lease has to send."""
        kept = self._kept.pop(shard.span, None)
        if kept is None or kept.sums is None or not (shard.assignment.extra and kept.sums.corrected):
            return kept
        self._release(kept)
        return None

    def _correct(self, shard: Shard, spec: BucketSpec, parts: list[Vector | None]) -> None:
        """Lets a bucket of an attempt's first lease bring the residual along, once."""
        rounds = shard.assignment.wire_type in ("", *ROUNDED)
        if self.feedback is None or shard.assignment.extra or not rounds:
            return
        assert shard.sums is not None
        if spec.bucket not in shard.sums.corrected:
            shard.sums.corrected.add(spec.bucket)
            self.feedback.correct(spec.bucket, parts)

    def _commit(self, shard: Shard) -> None:
        if self.feedback is not None and shard.sums is not None:
            for spec, sums in shard.sums.entries:
                if spec.bucket in shard.sums.corrected:
                    self.feedback.commit(spec.bucket, sums.parts())

    def _release(self, shard: Shard) -> None:
        if shard.sums is not None:
            self._gradients.release(shard.sums)
            shard.sums = None
