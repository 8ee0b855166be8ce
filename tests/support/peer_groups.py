"""Exchange groups, and what owners take down, made without workers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ayni.buckets import FLAT, Bucket
from ayni.reduce.digest import MeanDigest
from ayni.slices import slice_bounds
from ayni.step_values import ExchangeGroup, GroupMember, MicrobatchStats, Report, SliceDigest
from coordinator_service.leases import Lease
from coordinator_service.membership import Applicant, Member

NAMES = ("ant", "bee", "cat", "dog")


def member(worker_id: int, *, following: bool = False, **changes: Any) -> Member:
    """A member that others can dial."""
    fields: dict[str, Any] = {
        "name": NAMES[worker_id],
        "nonce": NAMES[worker_id],
        "session": "session",
        "peer": "ipv4:127.0.0.1:1",
        "elastic": True,
        "peer_address": f"127.0.0.1:{7000 + worker_id}",
        "store_address": f"127.0.0.1:{8000 + worker_id}",
        "topologies": ("sharded", "torch"),
    }
    applicant = Applicant(**{**fields, **changes})
    return Member(worker_id=worker_id, applicant=applicant, last_seen=0.0, ready=True, following=following)


def group(
    generation: int, owners: Sequence[int], others: Sequence[int] = (), topology: str = "sharded"
) -> ExchangeGroup:
    """A group of workers by number."""
    members = tuple(
        GroupMember(worker_id=w, worker_name=NAMES[w], address=f"127.0.0.1:{7000 + w}", is_owner=w in owners)
        for w in sorted([*owners, *others])
    )
    return ExchangeGroup(
        generation=generation, topology=topology, members=members, secret="ab" * 16, chunk_bytes=1 << 20
    )


def taken_down(mean_N: np.ndarray, bucket: Bucket, first: int, stop: int) -> SliceDigest:
    """What an owner says of its slice of a mean."""
    digest = MeanDigest()
    digest.add(mean_N[first:stop])
    return SliceDigest(
        bucket=bucket,
        first_element=first,
        num_elements=stop - first,
        digests=b"".join(digest.digests()),
        squares=tuple(digest.square_expansion()),
        bucket_elements=mean_N.size,
    )


def slices_of(group: ExchangeGroup, worker_id: int, means: dict[Bucket, np.ndarray]) -> tuple[SliceDigest, ...]:
    """What a member says of its slices of all buckets; nothing if it owns none."""
    owners = group.owners if group.topology == "sharded" else group.members[:1]
    found = []
    for bucket, mean_N in means.items():
        bounds = slice_bounds(mean_N.size, len(owners), bucket)
        for owner, (first, stop) in zip(owners, bounds, strict=True):
            if owner.worker_id == worker_id and stop > first:
                found.append(taken_down(mean_N, bucket, first, stop))
    return tuple(found)


def stats(lease: Lease, weight: int = 2) -> list[MicrobatchStats]:
    return [MicrobatchStats(microbatch=m, weight=weight, loss_sum=1.0) for m in range(lease.start, lease.stop)]


def report(group: ExchangeGroup, lease: Lease, means: dict[Bucket, np.ndarray], **changes: Any) -> Report:
    """What a worker says when it has done a lease in a group."""
    fields: dict[str, Any] = {
        "num_buckets": len(means),
        "microbatches": stats(lease),
        "generation": group.generation,
        "slices": () if lease.is_extra else slices_of(group, lease.worker_id, means),
    }
    return Report(**{**fields, **changes})


def means(**sizes: int) -> dict[Bucket, np.ndarray]:
    """Means of some lengths: `flat`, or `b0`, `b1`, ... for blocks."""
    rng = np.random.default_rng(3)
    named = {name: FLAT if name == "flat" else Bucket("block", int(name[1:])) for name in sizes}
    return {named[name]: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
