"""What workers bring to the owner of a slice, without a wire."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np

from ayni import frames, tensors
from ayni.buckets import FLAT
from ayni.reduce.digest import SEGMENT
from ayni.reduce.reduction import Round
from ayni.slices import slice_bounds
from ayni.step_values import ExchangeGroup, GroupMember, MicrobatchStats
from ayni.tensors import TensorSpec
from ayni.tree import cover
from worker_agent.slice_contribution import SliceContribution
from worker_agent.slice_offers import Moment, SliceOffer, Terms
from worker_agent.slice_rounds import SliceRounds

CHUNK_BYTES = 1 << 16


SECRET = "0123456789abcdef"


NUM_ELEMENTS = 2 * SEGMENT + 1000


MOMENT = Moment(generation=7, epoch=2, step=3, attempt=0)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await work

    return asyncio.run(bounded())


def terms(worker_id: int = 0, num_owners: int = 2, dtype: str = "float32", moment: Moment = MOMENT) -> Terms:
    members = tuple(
        GroupMember(worker_id=number, worker_name=f"w{number}", is_owner=number < num_owners) for number in range(3)
    )
    group = ExchangeGroup(
        generation=moment.generation, topology="sharded", members=members, secret=SECRET, chunk_bytes=CHUNK_BYTES
    )
    return Terms(moment=moment, group=group, worker_id=worker_id, wire_type=dtype, num_microbatches=4)


def offer(worker_id: int, microbatches: range, own: Terms, **changes: Any) -> SliceOffer:
    spec = TensorSpec(dtype=own.wire_type, num_elements=NUM_ELEMENTS)
    start, stop = slice_bounds(NUM_ELEMENTS, len(own.group.owners), FLAT)[own.worker_id]
    said = SliceOffer(
        worker_id=worker_id,
        lease_id=100 + worker_id,
        moment=own.moment,
        bucket=FLAT,
        spec=spec,
        start=start,
        stop=stop,
        takes_mean=True,
        stats=tuple(MicrobatchStats(microbatch=m, weight=m + 1, loss_sum=float(m)) for m in microbatches),
    )
    return replace(said, **changes)


def gradients(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(NUM_ELEMENTS).astype(np.float32) for _ in range(4)]


def parts_of(microbatches: range, leaves: list[np.ndarray]) -> list[np.ndarray]:
    """One vector for each node of the cover; no node here is larger than two leaves."""
    nodes = cover(microbatches.start, microbatches.stop, 4)
    return [leaves[n.start] if n.stop - n.start == 1 else leaves[n.start] + leaves[n.start + 1] for n in nodes]


def chunk_frame(values: np.ndarray, part: int, offset: int, dtype: str) -> bytes:
    payload = tensors.encode(values, dtype)
    return frames.encode_chunk(frames.CHUNK_FIELD, offset * tensors.position_bytes(dtype), part, payload)


async def send(contribution: SliceContribution, parts: list[np.ndarray], limit: int | None = None) -> None:
    """Sends parts of the whole bucket: its slice, frame by frame, as far as `limit` chunks."""
    said, size = contribution.offer, contribution.live.chunk_elements
    for start in list(range(0, said.stop - said.start, size))[:limit]:
        for part, values in enumerate(parts):
            await contribution.room()
            if contribution.failed:
                return
            piece = values[said.start : said.stop][start : start + size]
            contribution.arrive(chunk_frame(piece, part, start, said.spec.dtype))


async def take(contribution: SliceContribution) -> np.ndarray:
    """Receives the mean as it travels."""
    live, dtype = contribution.live, tensors.mean_dtype(contribution.offer.spec.dtype)
    received = []
    while (chunk := await contribution.next_chunk()) is not None:
        _, view = frames.decode_frame(live.frame(*chunk))
        assert isinstance(view, frames.ChunkView)
        assert view.offset_bytes == chunk[0] * tensors.itemsize(dtype)
        received.append(tensors.decode(view.data, dtype))
    return np.concatenate(received) if received else np.empty(0, np.float32)


def reference(dtype: str) -> tuple[np.ndarray, Round]:
    """The whole bucket in one round, as the coordinator reduces it."""
    spec = TensorSpec(dtype=dtype, num_elements=NUM_ELEMENTS)
    whole = Round(label="whole", spec=spec, num_microbatches=4, chunk_elements=NUM_ELEMENTS, expected=())
    shares = [range(2), range(2, 3), range(3, 4)]
    for lease, share in enumerate(shares):
        whole.begin(lease, f"w{lease}", spec, {m: m + 1 for m in share})
    reduced = []
    for lease, share in enumerate(shares):
        for part, values in enumerate(parts_of(share, gradients())):
            reduced += whole.contribute(lease, part, 0, tensors.decode(tensors.encode(values, dtype), dtype))
    mean_dtype = tensors.mean_dtype(dtype)
    return tensors.decode(tensors.encode(reduced[0].values_C, mean_dtype), mean_dtype), whole


def whole_part() -> list[np.ndarray]:
    leaves = gradients()
    return [(leaves[0] + leaves[1]) + (leaves[2] + leaves[3])]


def opened(own: Terms | None = None) -> SliceRounds:
    rounds = SliceRounds(wait_s=0.05)
    rounds.open(own or terms())
    return rounds
