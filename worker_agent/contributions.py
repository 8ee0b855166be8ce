"""What a worker brings to one reduction, checked against its lease before anything is sent.  [core]

Legend: N elements in the bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ayni import tree
from ayni.buckets import Bucket
from worker_agent.session import BucketExchange, ExchangeTimes, MicrobatchStats, ShardAssignment, Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One bucket's contribution; see `Session.contribute`."""

    assignment: ShardAssignment
    bucket: Bucket
    parts: Sequence[Vector | None]
    microbatches: Sequence[MicrobatchStats]
    out: Vector
    component_sizes: tuple[int, ...] = ()
    num_blocks: int = 0
    """Transformer blocks of the model, with a block's bucket; 0 for not said."""
    num_buckets: int = 0
    """Buckets that the worker contributes to in this step; 0 for not said."""

    @property
    def name(self) -> str:
        """Names it in errors."""
        return f"{self.bucket} of step {self.assignment.step}"


def exchange_of(offer: Offer, handed_over: float, times: ExchangeTimes) -> BucketExchange:
    """Returns what became of an offer that was made at one moment."""
    return BucketExchange(
        assignment=offer.assignment,
        bucket=offer.bucket,
        num_elements=offer.out.size,
        handed_over=handed_over,
        times=times,
    )


def check(offer: Offer) -> None:
    """Checks that an offer fits its lease.

    Raises:
        ValueError: something does not fit; the sentence says what.
    """
    _check_vector(f"out of {offer.name}", offer.out, offer.out.size)
    if not offer.out.flags.writeable:
        raise ValueError(f"out of {offer.name} is read-only")
    sizes = offer.component_sizes
    if sizes and (sum(sizes) != offer.out.size or min(sizes) < 0):
        raise ValueError(f"component_sizes of {offer.name} add up to {sum(sizes)}, not {offer.out.size}")
    declared, leased = [stats.microbatch for stats in offer.microbatches], list(offer.assignment.microbatches)
    if declared != leased:
        raise ValueError(f"{offer.name} has statistics of micro-batches {declared}; the lease is on {leased}")
    _check_parts(offer)


def _check_parts(offer: Offer) -> None:
    lease = offer.assignment
    nodes = tree.cover(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches)
    if len(offer.parts) != len(nodes):
        raise ValueError(f"{offer.name} has {len(offer.parts)} parts; the shard has {len(nodes)} tree nodes")
    weights = {stats.microbatch: stats.weight for stats in offer.microbatches}
    for index, (node, part) in enumerate(zip(nodes, offer.parts, strict=True)):
        has_weight = any(weights[microbatch] for microbatch in range(node.start, node.stop))
        if has_weight != (part is not None):
            raise ValueError(f"part {index} of {offer.name} must be None exactly if its micro-batches weigh nothing")
        if part is not None:
            _check_vector(f"part {index} of {offer.name}", part, offer.out.size)


def _check_vector(name: str, vector: Vector, num_elements: int) -> None:
    if vector.dtype != np.float32 or vector.ndim != 1 or not vector.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous float32 of one dimension, not {vector.dtype} {vector.shape}")
    if vector.size != num_elements or not vector.size:
        raise ValueError(f"{name} has {vector.size} elements; expected {num_elements or 'at least 1'}")
