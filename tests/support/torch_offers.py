"""What leases bring to the buckets of a torch group."""

from collections.abc import Sequence

import numpy as np

from ayni.buckets import FLAT, Bucket
from worker_agent.contributions import Offer
from worker_agent.session import MicrobatchStats, ShardAssignment, Vector

SIZE = 100_003


def offer(
    start: int,
    stop: int,
    of: int,
    *,
    bucket: Bucket = FLAT,
    size: int = SIZE,
    step: int = 0,
    attempt: int = 0,
    weight: int = 1,
    extra: bool = False,
    parts: Sequence[Vector | None] | None = None,
) -> Offer:
    """What a lease on micro-batches [start, stop) of `of` brings: one part, micro-batch + 1 in all elements."""
    lease = ShardAssignment(
        step=step,
        attempt=attempt,
        epoch=1,
        kind="train",
        lease_id=1 + start * 1000 + stop,
        microbatch_start=start,
        microbatch_stop=stop,
        num_microbatches=of,
        position=0,
        num_samples=of,
        shard_start=start,
        shard_end=stop,
        rank=0,
        world_size=2,
        update="device",
        extra=extra,
    )
    if parts is None:
        parts = [np.full(size, m + 1, np.float32) if weight else None for m in range(start, stop)]
    stats = tuple(MicrobatchStats(microbatch=m, weight=weight) for m in range(start, stop))
    return Offer(
        assignment=lease, bucket=bucket, parts=parts, microbatches=stats, out=np.full(size, np.nan, np.float32)
    )
