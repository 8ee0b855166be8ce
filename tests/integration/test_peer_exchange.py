"""Workers that reduce slices for one another, over real streams and without a coordinator."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from ayni import frames, tensors
from ayni.buckets import FLAT, Bucket
from ayni.channels import open_channel
from ayni.endpoints import ServerTls
from ayni.errors import BadRequest, NonFinite, RoundRestarted, SpecMismatch, StaleEpoch, TokenRefused
from ayni.reduce.digest import SEGMENT, join_digests
from ayni.reduce.reduction import Round
from ayni.rpc import error_from
from ayni.step_values import ExchangeGroup, GroupMember, MicrobatchStats
from ayni.tensors import TensorSpec
from ayni.tree import cover
from ayni.v1 import peer_pb2
from worker_agent import peer_exchange
from worker_agent.contributions import Offer
from worker_agent.exchange import Outcome, Traffic
from worker_agent.faults import TransportBroken
from worker_agent.group_exchange import Brought
from worker_agent.peer_exchange import METHOD, ShardedExchange
from worker_agent.peer_service import listening
from worker_agent.session import ShardAssignment, Vector
from worker_agent.slice_offers import GROUP_HEADER, Moment, Terms
from worker_agent.slice_rounds import SliceRounds
from worker_agent.slice_work import SliceWork

TOKEN = "a-token-for-tests-only"
SECRET = "0123456789abcdef"
CHUNK_BYTES = 1 << 16
SIZES = {FLAT: 5 * SEGMENT + 77, Bucket("block", 0): 1000, Bucket("block", 1): 2 * SEGMENT}
NUM_MICROBATCHES = 6


@dataclass
class Node:
    """One worker's part."""

    number: int
    rounds: SliceRounds
    exchange: ShardedExchange
    address: str
    lost: list[int]
    traffic: Traffic = field(default_factory=Traffic)


@asynccontextmanager
async def nodes(count: int, wait_s: float = 10.0) -> AsyncIterator[list[Node]]:
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(node(number, wait_s)) for number in range(count)]
        yield made


@asynccontextmanager
async def node(number: int, wait_s: float) -> AsyncIterator[Node]:
    rounds, traffic, lost = SliceRounds(wait_s=wait_s), Traffic(), list[int]()
    async with listening(rounds, "127.0.0.1:0", TOKEN, ServerTls(), insecure=False) as address:
        exchange = ShardedExchange(
            rounds, partial(open_channel, token=TOKEN), traffic, lambda _, members: lost.extend(members)
        )
        try:
            yield Node(number, rounds, exchange, address, lost, traffic)
        finally:
            await exchange.close()


def terms(
    made: Sequence[Node], number: int, dtype: str = "float32", generation: int = 1, owners: Sequence[int] | None = None
) -> Terms:
    members = tuple(
        GroupMember(
            worker_id=one.number,
            worker_name=f"w{one.number}",
            address=one.address,
            is_owner=owners is None or one.number in owners,
        )
        for one in made
    )
    group = ExchangeGroup(
        generation=generation, topology="sharded", members=members, secret=SECRET, chunk_bytes=CHUNK_BYTES
    )
    return Terms(
        moment=Moment(generation=generation, epoch=1, step=0, attempt=0),
        group=group,
        worker_id=number,
        wire_type=dtype,
        num_microbatches=NUM_MICROBATCHES,
    )


def leaves(bucket: Bucket) -> list[np.ndarray]:
    rng = np.random.default_rng(bucket.index + len(bucket.kind))
    return [rng.standard_normal(SIZES[bucket]).astype(np.float32) for _ in range(NUM_MICROBATCHES)]


def parts(bucket: Bucket, share: range) -> list[Vector]:
    """Sums along the tree over the nodes of a share's cover; all nodes here have one or two leaves, or all four."""
    gradients = leaves(bucket)

    def value(start: int, stop: int) -> np.ndarray:
        if stop - start == 1:
            return gradients[start]
        middle = start + (1 << ((stop - start - 1).bit_length() - 1))
        return value(start, middle) + value(middle, stop)

    return [value(one.start, one.stop) for one in cover(share.start, share.stop, NUM_MICROBATCHES)]


def brought(
    number: int, share: range, bucket: Bucket, *, extra: bool = False, has_mean: bool = False, lease: int | None = None
) -> Brought:
    assignment = ShardAssignment(
        step=0,
        attempt=0,
        epoch=1,
        kind="train",
        lease_id=100 + number if lease is None else lease,
        microbatch_start=share.start,
        microbatch_stop=share.stop,
        num_microbatches=NUM_MICROBATCHES,
        position=0,
        num_samples=NUM_MICROBATCHES,
        shard_start=share.start,
        shard_end=share.stop,
        rank=number,
        world_size=3,
        update="host",
        extra=extra,
    )
    offer = Offer(
        assignment=assignment,
        bucket=bucket,
        parts=tuple(parts(bucket, share)),
        microbatches=tuple(MicrobatchStats(microbatch=m, weight=m + 1, loss_sum=1.5) for m in share),
        out=np.full(SIZES[bucket], np.nan, np.float32),
    )
    return Brought(offer=offer, has_mean=has_mean, on_sent=lambda: None)


SHARES = {1: [range(6)], 2: [range(4), range(4, 6)], 3: [range(2), range(2, 4), range(4, 6)]}


def reference(bucket: Bucket, dtype: str = "float32", shares: Sequence[range] = SHARES[2]) -> tuple[bytes, str]:
    """The mean as it travels, and its hash, when one reducer has all of the bucket."""
    spec = TensorSpec(dtype=dtype, num_elements=SIZES[bucket])
    whole = Round(label="", spec=spec, num_microbatches=NUM_MICROBATCHES, chunk_elements=SIZES[bucket], expected=())
    reduced = []
    for lease, share in enumerate(shares):
        whole.begin(lease, "", spec, {m: m + 1 for m in share})
    for lease, share in enumerate(shares):
        for part, values in enumerate(parts(bucket, share)):
            reduced += whole.contribute(lease, part, 0, tensors.decode(tensors.encode(values, dtype), dtype))
    travels = tensors.mean_dtype(dtype)
    return tensors.decode(tensors.encode(reduced[0].values_C, travels), travels).tobytes(), whole.digest


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(bounded())


@pytest.mark.parametrize("way", ["_call", "_at_home"])
def test_work_that_nobody_wants_ends_although_its_cancellation_gets_lost(way, monkeypatch):
    begun, calls = asyncio.Event(), list[str]()

    async def fails_when_it_is_cancelled(*_: object) -> None:
        calls.append(way)
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RoundRestarted("a failure of the same moment", bucket=FLAT, detail="a failure") from None

    async def scenario() -> None:
        monkeypatch.setattr(*LOSSES[way], fails_when_it_is_cancelled)
        async with nodes(2) as made:
            wanted = [True]
            made[0].exchange.regroup(terms(made, 0, owners=[0 if way == "_at_home" else 1]))
            what = replace(brought(0, range(4), FLAT), is_wanted=lambda: wanted[0])
            work = asyncio.create_task(made[0].exchange.reduce(what))
            await begun.wait()
            wanted[0] = False
            work.cancel()
            with pytest.raises(StaleEpoch, match="is over"):
                await work
            assert calls == [way]

    run(scenario())


def test_a_slice_that_fails_ends_the_others_although_a_cancellation_gets_lost(monkeypatch):
    both, calls = asyncio.Event(), list[int]()

    async def fails(_: ShardedExchange, __: Terms, work: SliceWork) -> Outcome:
        calls.append(work.owner.worker_id)
        if len(calls) == 2:
            both.set()
        await both.wait()
        if work.owner.worker_id == 1:
            raise NonFinite("not a number", worker="w0", bucket=FLAT, element=0, value="nan")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RoundRestarted("a failure of the same moment", bucket=FLAT, detail="a failure") from None
        raise AssertionError("nothing else ends it")

    async def scenario() -> None:
        monkeypatch.setattr(ShardedExchange, "_call", fails)
        async with nodes(3) as made:
            made[0].exchange.regroup(terms(made, 0, owners=[1, 2]))
            with pytest.raises(NonFinite, match="not a number"):
                await made[0].exchange.reduce(brought(0, range(2), FLAT))
            assert sorted(calls) == [1, 2]

    run(scenario())


LOSSES: dict[str, tuple[Any, str]] = {"_call": (ShardedExchange, "_call"), "_at_home": (peer_exchange, "carry")}


async def reduce_all(made: Sequence[Node], offers: Sequence[tuple[Node, Brought]]) -> list[Outcome]:
    return await asyncio.gather(*(one.exchange.reduce(what) for one, what in offers))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_worker_has_the_bytes_of_one_reduction(count, dtype):
    async def scenario() -> None:
        async with nodes(count) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number, dtype))
            offers = [(one, brought(one.number, SHARES[count][one.number], bucket)) for bucket in SIZES for one in made]
            outcomes = await reduce_all(made, offers)
            taken = [digest for one in made for digest in one.exchange.slices(terms(made, 0).moment)]
            for (_, what), outcome in zip(offers, outcomes, strict=True):
                assert outcome.total_weight == 21
                assert outcome.global_loss == 6 * 1.5 / 21
                mean, _ = reference(what.offer.bucket, dtype, SHARES[count])
                assert what.offer.out.tobytes() == mean, what.offer.name
            for bucket in SIZES:
                own = sorted((d for d in taken if d.bucket == bucket), key=lambda digest: digest.first_element)
                pieces = [d.digests[i : i + 16] for d in own for i in range(0, len(d.digests), 16)]
                assert join_digests(pieces) == reference(bucket, dtype, SHARES[count])[1]
                assert sum(d.num_elements for d in own) == SIZES[bucket]

    run(scenario())


def test_who_owns_nothing_takes_all_and_extra_leases_take_nothing():
    async def scenario() -> None:
        async with nodes(3) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number, owners=[0, 2]))
            follower = brought(1, range(0), FLAT)
            extra = brought(0, range(2, 4), FLAT, extra=True, lease=7)
            offers = [
                (made[0], brought(0, range(2), FLAT)),
                (made[0], extra),
                (made[1], follower),
                (made[2], brought(2, range(4, 6), FLAT)),
            ]
            await reduce_all(made, offers)
            mean, _ = reference(FLAT)
            assert follower.offer.out.tobytes() == mean
            assert np.isnan(extra.offer.out).all()
            assert made[1].exchange.slices(terms(made, 1).moment) == ()

    run(scenario())


def test_who_has_the_mean_already_is_sent_none_and_its_vector_stays():
    async def scenario() -> None:
        async with nodes(2) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number))
            has = brought(1, range(4, 6), FLAT, has_mean=True)
            await reduce_all(made, [(made[0], brought(0, range(4), FLAT)), (made[1], has)])
            assert np.isnan(has.offer.out).all()

    run(scenario())


def test_a_worker_waits_for_an_owner_that_was_not_told_yet():
    async def scenario() -> None:
        async with nodes(2) as made:
            made[0].exchange.regroup(terms(made, 0))
            early = asyncio.create_task(made[0].exchange.reduce(brought(0, range(4), FLAT)))
            await asyncio.wait({early}, timeout=0.2)
            assert not early.done()
            made[1].exchange.regroup(terms(made, 1))
            late = brought(1, range(4, 6), FLAT)
            await asyncio.gather(early, made[1].exchange.reduce(late))
            assert late.offer.out.tobytes() == reference(FLAT)[0]

    run(scenario())


def test_all_begin_again_under_another_group_with_other_owners():
    async def scenario() -> None:
        async with nodes(3) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number))
            first = [asyncio.create_task(one.exchange.reduce(brought(one.number, range(0), FLAT))) for one in made]
            await asyncio.wait(first, timeout=0.2)
            left = made[:2]
            for task in first:
                task.cancel()
            for one in left:
                one.exchange.regroup(terms(left, one.number, generation=2))
            await asyncio.gather(*first, return_exceptions=True)
            offers = [(one, brought(one.number, SHARES[2][one.number], FLAT)) for one in left]
            await reduce_all(left, offers)
            mean, _ = reference(FLAT)
            assert [what.offer.out.tobytes() == mean for _, what in offers] == [True, True]
            assert {digest.first_element for one in left for digest in one.rounds.digests()} == {0, 3 * SEGMENT}

    run(scenario())


def test_work_whose_cancellation_got_lost_ends_with_its_group(monkeypatch):
    """A group of tasks that is cancelled while one of them fails raises the failure, and no cancellation."""

    async def stubborn(*_: object) -> Outcome:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise TransportBroken("the stream broke at the same moment") from None
        raise AssertionError("nothing happens here")

    async def scenario() -> None:
        async with nodes(2) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number))
            work = asyncio.create_task(made[0].exchange.reduce(brought(0, range(4), FLAT)))
            await asyncio.wait({work}, timeout=0.1)
            made[0].exchange.regroup(terms(made, 0, generation=2))
            work.cancel()
            done, _ = await asyncio.wait({work}, timeout=5)
            assert done, "it goes on under a group that is over"

    monkeypatch.setattr("worker_agent.peer_exchange.exchange", stubborn)
    run(scenario())


@pytest.mark.parametrize("obstacle", ["nobody listens", "another group"])
def test_an_owner_that_can_not_be_reached_is_told(obstacle):
    async def scenario() -> None:
        async with nodes(2) as made:
            there = made[1].address if obstacle == "another group" else "127.0.0.1:1"
            strange = [made[0], replace(made[1], address=there)]
            made[0].exchange.regroup(terms(strange, 0))
            other = terms(strange, 1)
            made[1].exchange.regroup(replace(other, group=replace(other.group, secret="f" * 16)))
            work = asyncio.create_task(made[0].exchange.reduce(brought(0, range(6), FLAT)))
            while not made[0].lost:
                await asyncio.wait({work}, timeout=0.05)
                assert not work.done()
            assert set(made[0].lost) == {1}
            work.cancel()
            await asyncio.wait({work})

    run(scenario())


def test_a_refusal_ends_what_is_wrong():
    async def scenario() -> None:
        async with nodes(2) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number))
            made[0].exchange.regroup(replace(terms(made, 0), wire_type="bfloat16"))
            with pytest.raises(SpecMismatch):
                await made[0].exchange.reduce(brought(0, range(4), Bucket("block", 1)))

    run(scenario())


def test_a_value_that_is_not_finite_is_refused_by_name():
    async def scenario() -> None:
        async with nodes(2) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number))
            bad = brought(0, range(4), FLAT)
            part = bad.offer.parts[0]
            assert part is not None
            part[4 * SEGMENT] = np.inf
            with pytest.raises(NonFinite, match="w0"):
                await made[0].exchange.reduce(bad)

    run(scenario())


GARBAGE = {
    "no message": b"\xff\xff\xff",
    "nothing": b"",
    "a chunk": frames.encode_chunk(frames.CHUNK_FIELD, 0, 0, b"1234"),
    "a begin that makes no sense": b"\x0a\x02\x0a\x09",
    "a begin of nothing": peer_pb2.ReduceSliceRequest(begin=peer_pb2.SliceBegin()).SerializeToString(),
}


@pytest.mark.parametrize("first", GARBAGE)
def test_a_stream_that_begins_with_something_else_is_refused(first):
    async def scenario() -> None:
        async with nodes(1) as made, open_channel(made[0].address, TOKEN) as channel:
            made[0].exchange.regroup(terms(made, 0))
            call = channel.stream_stream(METHOD)(metadata=((GROUP_HEADER, SECRET),))
            await call.write(GARBAGE[first])
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert isinstance(error_from(refused.value), BadRequest)
            own = brought(0, range(6), FLAT)
            await made[0].exchange.reduce(own)
            assert own.offer.out.tobytes() == reference(FLAT)[0]

    run(scenario())


def test_a_call_without_the_secret_of_a_group_is_refused():
    async def scenario() -> None:
        async with nodes(1) as made, open_channel(made[0].address, TOKEN) as channel:
            made[0].exchange.regroup(terms(made, 0))
            call = channel.stream_stream(METHOD)()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            refusal = error_from(refused.value)
            assert isinstance(refusal, TokenRefused)
            assert GROUP_HEADER in refusal.message

    run(scenario())
