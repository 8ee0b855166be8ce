"""What a worker says when it contributes to a slice, checked by the slice's owner before memory is taken.  [core]

An owner knows what the coordinator told it of its group and of the attempt (`Terms`), and not who has which lease: two
leases on one micro-batch are found by the reduction, all of them missing by nobody but the coordinator.
"""

import hmac
import math
from dataclasses import dataclass

from ayni.buckets import Bucket
from ayni.errors import BadRequest, Duplicate, NonFinite, NotLeased, SpecMismatch, StaleEpoch, TokenRefused, TooLarge
from ayni.slices import slice_bounds
from ayni.step_values import ExchangeGroup, GroupMember, MicrobatchStats
from ayni.tensors import TensorSpec, position_bytes

GROUP_HEADER = "ayni-group"
"""Metadata of a call that carries the secret of its group."""

_LARGEST_COUNT = 1 << 44

_NEAR_ELEMENTS = 1 << 16
"""Elements of a chunk where all of a group share memory: nothing is sent, and so many stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Moment:
    """One attempt under one generation of its group. What comes later is larger."""

    generation: int
    epoch: int
    step: int
    attempt: int

    def __str__(self) -> str:
        """Text for people."""
        return f"step {self.step} attempt {self.attempt} (generation {self.generation})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a member was told of its group and of the attempt."""

    moment: Moment
    group: ExchangeGroup
    worker_id: int
    """The member's own number."""
    wire_type: str
    num_microbatches: int
    """Of the whole step."""

    def bounds(self, spec: TensorSpec, bucket: Bucket) -> tuple[int, int]:
        """Returns the member's own slice [start, stop) of a bucket; empty for none."""
        owners = [owner.worker_id for owner in self.group.owners]
        if self.worker_id not in owners:
            return 0, 0
        return slice_bounds(spec.num_elements, len(owners), bucket)[owners.index(self.worker_id)]

    def is_near(self, member: GroupMember) -> bool:
        """Returns whether another member can share memory with this one: both say so, and are on one host."""
        own = self.group.member(self.worker_id)
        ours, theirs = own.shared_memory if own else None, member.shared_memory
        return ours is not None and theirs is not None and ours.host == theirs.host

    @property
    def chunk_elements(self) -> int:
        """Elements of every chunk but a slice's last one; every member knows this of every owner."""
        most = self.group.chunk_bytes // position_bytes(self.wire_type)
        return min(most, _NEAR_ELEMENTS) if all(self.is_near(member) for member in self.group.members) else most

    def name_of(self, worker_id: int) -> str:
        """Returns a member's name, for people."""
        member = self.group.member(worker_id)
        return member.worker_name if member else f"(number {worker_id})"


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceOffer:
    """The first frame of a contribution to a slice."""

    worker_id: int
    lease_id: int
    moment: Moment
    bucket: Bucket
    spec: TensorSpec
    """Of the whole bucket."""
    start: int
    """First element of the slice."""
    stop: int
    takes_mean: bool
    stats: tuple[MicrobatchStats, ...]
    """The leased micro-batches."""

    @property
    def name(self) -> str:
        """Names it in errors."""
        return f"elements {self.start} to {self.stop - 1} of {self.bucket} of step {self.moment.step}"

    @property
    def weights(self) -> dict[int, int]:
        """Weight of each leased micro-batch."""
        return {stats.microbatch: stats.weight for stats in self.stats}


def check(offer: SliceOffer, terms: Terms) -> None:
    """Confirms that a contribution fits what the owner knows.

    Raises:
        StaleEpoch: it belongs to an attempt, or a group, that is over.
        NotLeased: the worker is no member, it is another owner's slice, or the micro-batches are impossible.
        SpecMismatch: another element type than the run's.
        TooLarge: the bucket is too long.
    """
    if offer.moment != terms.moment:
        raise StaleEpoch(
            f"{offer.name}: {offer.moment} is over, {terms.moment} is in force; wait for the coordinator's word",
            epoch=offer.moment.generation,
            current_epoch=terms.moment.generation,
        )
    if terms.group.member(offer.worker_id) is None:
        members = ", ".join(str(member.worker_id) for member in terms.group.members)
        raise _not_leased(offer, f"worker {offer.worker_id} is not a member of the group", members, offer.worker_id)
    if offer.spec.dtype != terms.wire_type:
        raise mismatch(offer, "dtype", terms.wire_type, offer.spec.dtype)
    check_length(offer.name, offer.spec.num_bytes, terms.group)
    own = terms.bounds(offer.spec, offer.bucket)
    if (offer.start, offer.stop) != own or offer.stop <= offer.start:
        sentence = f"this worker owns elements [{own[0]}, {own[1]}) of {offer.bucket}"
        raise _not_leased(offer, sentence, own, (offer.start, offer.stop))
    _check_stats(offer, terms.num_microbatches)


def check_length(name: str, num_bytes: int, group: ExchangeGroup) -> None:
    """Confirms that a bucket is not longer than the run takes.

    Raises:
        TooLarge: it is, or it is empty.
    """
    limit = group.max_bucket_bytes
    if not 0 < num_bytes <= limit:
        raise TooLarge(
            f"{name}: a bucket of {num_bytes} bytes; 1 to {limit} are taken (max_bucket_bytes)",
            field="num_elements",
            limit=limit,
            received=num_bytes,
        )


def check_secret(secret: str, terms: Terms) -> None:
    """Confirms that a caller was told of the group.

    Raises:
        TokenRefused: it shows another secret.
    """
    if not hmac.compare_digest(secret.encode("utf-8", "replace"), terms.group.secret.encode()):
        raise TokenRefused("this worker is in another exchange group: its address is not that of who was meant")


def mismatch(offer: SliceOffer, field: str, expected: object, received: object) -> SpecMismatch:
    """Returns the refusal of a tensor that differs from the others'."""
    return SpecMismatch(
        f"{offer.name}: {field} is {received}; expected {expected}; do all workers train the same model?",
        field=field,
        expected=expected,
        received=received,
        bucket=offer.bucket,
    )


def duplicate(offer: SliceOffer, detail: str) -> Duplicate:
    """Returns the refusal of a lease that another worker has contributed under."""
    return Duplicate(f"{offer.name}: {detail}", bucket=offer.bucket, contributed=offer.lease_id)


def _check_stats(offer: SliceOffer, num_microbatches: int) -> None:
    """Confirms that the micro-batches are a run of the step's."""
    said = [stats.microbatch for stats in offer.stats]
    if said and (said != list(range(said[0], said[0] + len(said))) or said[-1] >= num_microbatches):
        sentence = f"micro-batches {said[:8]} are no run of those of a step of {num_microbatches}"
        raise _not_leased(offer, sentence, f"[0, {num_microbatches})", said[:8])
    counts = ((one.weight, one.num_correct, one.num_predictions) for one in offer.stats)
    if any(not 0 <= count <= _LARGEST_COUNT for three in counts for count in three):
        raise BadRequest(f"{offer.name}: a weight or a count is not 0 to {_LARGEST_COUNT}", field="weight")
    if any(one.loss_sum is not None and not math.isfinite(one.loss_sum) for one in offer.stats):
        raise NonFinite(
            f"{offer.name}: worker {offer.worker_id} has a loss that is not finite",
            worker=offer.worker_id,
            bucket="loss",
        )


def _not_leased(offer: SliceOffer, sentence: str, expected: object, received: object) -> NotLeased:
    return NotLeased(f"{offer.name}: {sentence}", lease=expected, contributed=received)
