"""Where means are put together: as they travel, in memory that workers of this host may read."""

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ayni import tensors
from ayni.buckets import FLAT
from ayni.frames import CHUNK_FIELD, ChunkView, SharedRange, decode_frame, encode_shared_chunk
from ayni.shm.regions import Region, Regions
from ayni.step_values import MicrobatchStats
from ayni.tensors import TensorSpec
from coordinator_service.leases import Lease, Moment
from coordinator_service.rounds import Exchange, Flow, LiveRound
from coordinator_service.same_host import AttemptPlaces, SameHost
from coordinator_service.signals import Signal
from coordinator_service.steps import Step

SIZE, CHUNK = 1000, 256


class Shared:
    """Regions that worker 1 reads, and worker 2 does not."""

    def __init__(self) -> None:
        self.ours, self.has_workers = Regions(), True

        self.lent_region: Region | None = None

    def is_connected(self, worker_id: int) -> bool:
        return worker_id == 1

    def lent(self, worker_id: int, region_id: int) -> Region | None:
        return self.lent_region


def shared() -> Any:
    return Shared()


@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
def test_a_place_is_as_long_as_the_mean_that_travels_and_is_used_again(dtype):
    same_host = SameHost(shared())
    spec = TensorSpec(dtype=dtype, num_elements=SIZE)
    first, second = AttemptPlaces(same_host), AttemptPlaces(same_host)
    place = first.take(spec)
    assert place.wire is not None
    assert place.wire.size == SIZE * tensors.itemsize(tensors.mean_dtype(dtype))
    assert (place.mean_N is not None) == (dtype == "float32")
    assert place.mean_N is None or np.shares_memory(place.mean_N, place.wire)
    first.close()
    again = second.take(spec).wire
    assert again is not None
    assert np.shares_memory(again, place.wire)
    assert same_host._find(again) == (same_host._find(place.wire) or (None, 0))


def step(dtype: str, same_host: SameHost) -> tuple[Step, LiveRound]:
    leases = [Lease(lease_id=n, worker_id=n, worker_name=f"w{n}", start=n - 1, stop=n) for n in (1, 2)]
    made = Step(
        moment=Moment(epoch=1, step=0, attempt=0),
        kind="train",
        num_microbatches=2,
        leases=leases,
        chunk_elements=CHUNK,
        places=AttemptPlaces(same_host),
    )
    for lease in leases:
        stats = [MicrobatchStats(microbatch=lease.start, weight=1, loss_sum=1.0)]
        made.begin(lease, FLAT, TensorSpec(dtype=dtype, num_elements=SIZE), stats)
    return made, LiveRound(FLAT, made, same_host, Signal())


@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
def test_frames_carry_the_bytes_that_lie_in_memory(dtype):
    """The worker that reads them there and the one that doesn't get the same."""
    values = [np.random.default_rng(n).normal(size=SIZE).astype(np.float32) for n in (1, 2)]
    received = asyncio.run(means(dtype, values))
    assert received[True] == received[False]
    sent = [over(values_N, dtype) for values_N in values]
    expected = tensors.encode((sent[0] + sent[1]) / np.float32(2), tensors.mean_dtype(dtype))
    assert received[True] == bytes(expected)


async def means(dtype: str, values: list[np.ndarray]) -> dict[bool, bytes]:
    """The bytes of the mean, by whether they were read in memory."""
    same_host = SameHost(shared())
    made, live = step(dtype, same_host)
    exchanges = [Exchange(live, lease, Flow(32), 8) for lease in made.leases.values()]
    received = {True: b"", False: b""}
    for start in range(0, SIZE, CHUNK):
        for lease, values_N in zip((1, 2), values, strict=True):
            piece = over(values_N[start : start + CHUNK], dtype)
            live.publish(made.rounds[FLAT].contribute(lease, 0, start, piece))
        for exchange in exchanges:
            frame = await exchange.next_frame()
            assert frame is not None
            _, chunk = decode_frame(frame)
            assert isinstance(chunk, ChunkView)
            assert chunk.offset_bytes == len(received[exchange.takes_shared])
            received[exchange.takes_shared] += data_of(same_host, chunk)
    return received


def over(values_C: np.ndarray, dtype: str) -> np.ndarray:
    return tensors.decode(bytes(tensors.encode(values_C, dtype)), dtype)


def data_of(same_host: SameHost, chunk: ChunkView) -> bytes:
    if chunk.shared is None:
        return bytes(chunk.data)
    assert same_host._shared is not None
    region = same_host._shared.ours.get(chunk.shared.region)
    assert region is not None
    assert region.generation == chunk.shared.generation
    return region.bytes[chunk.shared.offset_bytes :][: chunk.shared.length_bytes].tobytes()


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1 << 20), ("bfloat16", 1 << 19), ("int8", 1 << 19)])
def test_others_have_a_turn_while_a_long_contribution_is_added(dtype, most):
    """Values that have to be decoded take longer, so fewer of them are added at a time."""
    assert asyncio.run(elements_of_turns(dtype)) == [most] * ((1 << 21) // most) + [5]


async def elements_of_turns(dtype: str) -> list[int]:
    """How many elements of a contribution in shared memory are added in each turn."""
    num_elements, chunk_elements = (1 << 21) + 5, 1 << 18
    same_host = SameHost(shared())
    lease = Lease(lease_id=1, worker_id=1, worker_name="ant", start=0, stop=1)
    moment = Moment(epoch=1, step=0, attempt=0)
    made = Step(moment=moment, kind="train", num_microbatches=1, leases=[lease], chunk_elements=chunk_elements)
    stats = [MicrobatchStats(microbatch=0, weight=1, loss_sum=1.0)]
    made.begin(lease, FLAT, TensorSpec(dtype=dtype, num_elements=num_elements), stats)
    exchange = Exchange(LiveRound(FLAT, made, same_host, Signal()), lease, Flow(32), 8)
    assert same_host._shared is not None
    region = same_host._shared.ours.allocate(tensors.payload_bytes(num_elements, dtype))
    same_host._shared.lent_region = region  # type: ignore[attr-defined]
    work = exchange.contribute(encode_shared_chunk(CHUNK_FIELD, 0, 0, SharedRange(region.id, 0, region.size, 0)))
    added = [0]
    while True:
        try:
            work.send(None)
        except StopIteration:
            break
        finally:
            contribution = made.rounds[FLAT]._contributions[1]
            added.append(contribution.next_offsets[0])
    return [after - before for before, after in pairwise(added)]
