"""Workers of one host that reduce slices for one another, in one process and without a coordinator."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ayni import tensors
from ayni.buckets import FLAT
from ayni.channels import open_channel
from ayni.endpoints import ServerTls
from ayni.reduce.reduction import Round
from ayni.shm.host import SharedMemoryOffer
from ayni.step_values import ExchangeGroup, GroupMember, MicrobatchStats
from ayni.tensors import TensorSpec
from ayni.tree import cover
from worker_agent.contributions import Offer
from worker_agent.exchange import Outcome, Traffic
from worker_agent.group_exchange import Brought
from worker_agent.host_calls import HostPeers
from worker_agent.host_service import serving_host
from worker_agent.peer_exchange import ShardedExchange
from worker_agent.peer_regions import PeerRegions
from worker_agent.peer_service import listening
from worker_agent.same_host import SharedVectors
from worker_agent.session import ShardAssignment, Vector
from worker_agent.slice_offers import Moment, Terms
from worker_agent.slice_rounds import SliceRounds

TOKEN, SECRET = "a-token-for-tests-only", "0123456789abcdef"
CHUNK_BYTES = 1 << 20


@dataclass
class Node:
    """One worker's part."""

    number: int
    rounds: SliceRounds
    exchange: ShardedExchange
    address: str
    vectors: SharedVectors
    regions: PeerRegions
    offer: SharedMemoryOffer | None = None
    lost: list[int] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)


@asynccontextmanager
async def near_nodes(count: int, *, is_near: bool = True) -> AsyncIterator[list[Node]]:
    """Workers that share memory; not `is_near`: that send gradients over gRPC."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_node(number, is_near)) for number in range(count)]


@asynccontextmanager
async def _node(number: int, is_near: bool) -> AsyncIterator[Node]:
    rounds, traffic, vectors, regions = SliceRounds(wait_s=10), Traffic(), SharedVectors(), PeerRegions()
    lost = list[int]()
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(listening(rounds, "127.0.0.1:0", TOKEN, ServerTls(), insecure=False))
        offer = await stack.enter_async_context(serving_host(rounds, regions)) if is_near else None
        near = HostPeers(vectors, regions) if offer else None
        rounds.stores.regions = vectors.regions if offer else None
        exchange = ShardedExchange(
            rounds, partial(open_channel, token=TOKEN), traffic, lambda _, members: lost.extend(members), near
        )
        try:
            yield Node(number, rounds, exchange, address, vectors, regions, offer, lost, traffic)
        finally:
            await exchange.close()


def terms(
    made: Sequence[Node], number: int, num_microbatches: int, dtype: str = "float32", generation: int = 1
) -> Terms:
    """What a worker is told of a group of all."""
    members = tuple(
        GroupMember(
            worker_id=one.number,
            worker_name=f"w{one.number}",
            address=one.address,
            is_owner=True,
            shared_memory=one.offer,
        )
        for one in made
    )
    group = ExchangeGroup(
        generation=generation, topology="sharded", members=members, secret=SECRET, chunk_bytes=CHUNK_BYTES
    )
    moment = Moment(generation=generation, epoch=1, step=0, attempt=0)
    return Terms(moment=moment, group=group, worker_id=number, wire_type=dtype, num_microbatches=num_microbatches)


def gradient(microbatch: int, size: int) -> np.ndarray:
    """The gradient of one micro-batch."""
    return np.random.default_rng(microbatch).standard_normal(size).astype(np.float32)


def parts(share: range, size: int, num_microbatches: int) -> list[np.ndarray]:
    """Sums along the tree over the nodes of a share's cover."""

    def value(start: int, stop: int) -> np.ndarray:
        if stop - start == 1:
            return gradient(start, size)
        middle = start + (1 << ((stop - start - 1).bit_length() - 1))
        return value(start, middle) + value(middle, stop)

    return [value(one.start, one.stop) for one in cover(share.start, share.stop, num_microbatches)]


def brought(node: Node, share: range, size: int, num_microbatches: int, lease: int | None = None) -> Brought:
    """What a worker brings, in vectors that others can read in place."""
    vectors: list[Vector] = []
    for part in parts(share, size, num_microbatches):
        vectors.append(node.vectors.new(size))
        vectors[-1][:] = part
    assignment = ShardAssignment(
        step=0,
        attempt=0,
        epoch=1,
        kind="train",
        lease_id=100 + node.number if lease is None else lease,
        microbatch_start=share.start,
        microbatch_stop=share.stop,
        num_microbatches=num_microbatches,
        position=0,
        num_samples=num_microbatches,
        shard_start=share.start,
        shard_end=share.stop,
        rank=node.number,
        world_size=3,
        update="host",
    )
    offer = Offer(
        assignment=assignment,
        bucket=FLAT,
        parts=tuple(vectors),
        microbatches=tuple(MicrobatchStats(microbatch=m, weight=m + 1, loss_sum=1.5) for m in share),
        out=np.full(size, np.nan, np.float32),
    )
    return Brought(offer=offer, has_mean=False, on_sent=lambda: None)


def star(size: int, shares: Sequence[range], dtype: str = "float32") -> tuple[bytes, str, float]:
    """The mean as it travels, its hash and its sum of squares, when one reducer has all of the bucket."""
    num_microbatches = shares[-1].stop
    spec = TensorSpec(dtype=dtype, num_elements=size)
    whole = Round(label="", spec=spec, num_microbatches=num_microbatches, chunk_elements=size, expected=())
    reduced = []
    for lease, share in enumerate(shares):
        whole.begin(lease, "", spec, {m: m + 1 for m in share})
    for lease, share in enumerate(shares):
        for part, values in enumerate(parts(share, size, num_microbatches)):
            reduced += whole.contribute(lease, part, 0, tensors.decode(tensors.encode(values, dtype), dtype))
    travels = tensors.mean_dtype(dtype)
    mean = tensors.decode(tensors.encode(reduced[0].values_C, travels), travels).tobytes()
    return mean, whole.digest, whole.square_sum


async def reduce_all(offers: Sequence[tuple[Node, Brought]]) -> list[Outcome]:
    """Has everybody bring what is theirs."""
    return await asyncio.gather(*(one.exchange.reduce(what) for one, what in offers))
