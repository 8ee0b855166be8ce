"""What one worker adds to the torch group in one attempt: the sums of its leases, bucket by bucket.  [core]

Legend: N elements in a bucket, C elements in a piece of it.

Theory of operation. A torch group adds one vector of each member. So before a bucket goes into it, everything that the
member brings to the bucket must be there, under every lease that it holds; what it holds is final when the leases of
all members together cover the step (`worker_agent.torch_store` counts them). The parts are added in the order of their
micro-batches, float32, left to right: the same leases give the same bytes, other leases may give others.

Knows no group, no thread and no time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ayni.buckets import Bucket
from ayni.errors import BadRequest, NonFinite, SpecMismatch
from ayni.reduce.digest import SEGMENT
from ayni.reduce.sums import is_finite
from ayni.tensors import first_non_finite
from worker_agent.contributions import Offer
from worker_agent.session import Vector

AttemptKey = tuple[int, int, int]
"""Epoch, step and attempt."""

_PIECE = 2 * SEGMENT
_WEIGHT_BITS = 40
MOST_MICROBATCHES = (1 << 62 - _WEIGHT_BITS) - 1
"""Most micro-batches of a step that are counted together with their weights in 63 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """Micro-batches that leases cover, and what they weigh."""

    count: int
    weight: int

    def packed(self) -> int:
        """Returns both as one number; sums of these are the numbers of the sums."""
        return self.count << _WEIGHT_BITS | self.weight


def unpacked(number: int) -> Tally:
    """Returns what `Tally.packed` made a number of."""
    return Tally(count=number >> _WEIGHT_BITS, weight=number & (1 << _WEIGHT_BITS) - 1)


def key_of(offer: Offer) -> AttemptKey:
    """Returns the attempt that an offer belongs to."""
    return offer.assignment.epoch, offer.assignment.step, offer.assignment.attempt


@dataclass(slots=True)
class Sums:
    """One attempt's leases and what they bring. Call from one thread at a time."""

    worker_name: str
    num_microbatches: int
    leases: set[int] = field(default_factory=set)
    """Leases that something was brought under."""
    _offers: dict[Bucket, dict[int, Offer]] = field(default_factory=dict)

    def add(self, offer: Offer) -> Tally | None:
        """Takes what a lease brings to one bucket. Its parts are kept, not copied.

        Returns:
            What is to be counted of the lease; None when it was counted with an earlier bucket.

        Raises:
            BadRequest: more micro-batches, or weight, than can be counted.
            SpecMismatch: the bucket has another length under another lease.
        """
        lease = offer.assignment.lease_id
        offers = self._offers.setdefault(offer.bucket, {})
        for other in offers.values():
            _check_length(offer, other.out.size, "another lease of this worker")
        tally = _tally(offer) if lease not in self.leases else None
        offers[lease] = offer
        self.leases.add(lease)
        return tally

    def is_whole(self, bucket: Bucket) -> bool:
        """Returns whether every lease has brought what it has to this bucket."""
        return self.leases == self._offers.get(bucket, {}).keys()

    def num_elements(self, bucket: Bucket) -> int:
        """Returns the bucket's length; something was brought to it."""
        return next(iter(self._offers[bucket].values())).out.size

    def check_length(self, bucket: Bucket, num_elements: int) -> None:
        """Confirms that a bucket is as long here as where the lowest rank is.

        Raises:
            SpecMismatch: it is not.
        """
        _check_length(next(iter(self._offers[bucket].values())), num_elements, "the worker of the lowest rank")

    def add_up(self, bucket: Bucket, total_N: Vector) -> None:
        """Writes the sum of everything that was brought to a bucket, shape [N]; zeros for nothing (one pass in all).

        Raises:
            NonFinite: it is not finite. Nobody else has seen it then.
        """
        ordered = sorted(self._offers[bucket].values(), key=lambda offer: offer.assignment.microbatch_start)
        parts = [part for offer in ordered for part in offer.parts if part is not None]
        for piece in pieces(total_N.size):
            total_C = total_N[piece]
            with np.errstate(over="ignore", invalid="ignore"):  # What overflows is found, and refused by name, below.
                np.copyto(total_C, parts[0][piece] if parts else np.float32(0))
                for part in parts[1:]:
                    np.add(total_C, part[piece], out=total_C)
            check_finite(ordered[0], self.worker_name, total_C, piece.start)


def pieces(num_elements: int) -> Iterator[slice]:
    """Cuts a vector into pieces, each of which stays in the processor's cache from one operation to the next."""
    return (slice(start, start + _PIECE) for start in range(0, num_elements, _PIECE))


def check_finite(offer: Offer, worker: str, values_C: Vector, start: int) -> None:
    """Confirms that a piece of a bucket, shape [C], is finite.

    Raises:
        NonFinite: it is not; names whose it is, and which element.
    """
    if is_finite(values_C):
        return
    bad = first_non_finite(values_C) or 0
    raise NonFinite(
        f"{offer.name}: worker {worker} contributes {values_C[bad]} at element {start + bad}",
        worker=worker,
        bucket=str(offer.bucket),
        element=start + bad,
        value=values_C[bad],
    )


def _tally(offer: Offer) -> Tally:
    tally = Tally(count=len(offer.microbatches), weight=sum(stats.weight for stats in offer.microbatches))
    most = (1 << _WEIGHT_BITS) // max(1, offer.assignment.num_microbatches)
    if offer.assignment.num_microbatches > MOST_MICROBATCHES or any(s.weight >= most for s in offer.microbatches):
        raise BadRequest(
            f"{offer.name}: with topology torch a step has at most {MOST_MICROBATCHES} micro-batches, of which each "
            f"weighs less than {most}; use smaller steps, or another topology",
            field="microbatches",
        )
    return tally


def _check_length(offer: Offer, expected: int, whose: str) -> None:
    if offer.out.size == expected:
        return
    raise SpecMismatch(
        f"{offer.name} has {offer.out.size} elements here and {expected} with {whose}; do all train the same model?",
        field="num_elements",
        expected=expected,
        received=offer.out.size,
        bucket=str(offer.bucket),
    )
