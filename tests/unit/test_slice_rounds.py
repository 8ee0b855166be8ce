"""The slices that an owner reduces: bytes, back-pressure, streams that begin again, groups that change."""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ayni import frames, tensors
from ayni.buckets import FLAT, Bucket
from ayni.errors import (
    AyniError,
    BadChunk,
    BadRequest,
    Deadline,
    Duplicate,
    NonFinite,
    NotLeased,
    RoundRestarted,
    SpecMismatch,
    StaleEpoch,
    TokenRefused,
    TooLarge,
    WeightMismatch,
)
from ayni.reduce.digest import SEGMENT, join_digests
from ayni.reduce.reduction import Round
from ayni.reduce.refusals import SUM_OF_ALL
from ayni.slices import slice_bounds
from ayni.step_values import ExchangeGroup, GroupMember, MicrobatchStats
from ayni.tensors import TensorSpec
from ayni.tree import cover
from ayni.v1 import coordinator_pb2 as pb
from tests.support.fuzz_peer_process import state_of
from tests.unit.test_peer_messages import begin_of
from worker_agent.peer_messages import begin_frame, slice_offer_of
from worker_agent.slice_contribution import WINDOW_CHUNKS, SliceContribution
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_slices_are_the_bytes_hash_and_norm_of_one_reduction(dtype):
    async def reduce(owner: int) -> tuple[np.ndarray, Any]:
        own = terms(owner, dtype=dtype)
        rounds = SliceRounds()
        rounds.open(own)
        shares = [range(2), range(2, 3), range(3, 4)]
        contributions = [rounds.begin(offer(worker, share, own)) for worker, share in enumerate(shares)]
        async with asyncio.TaskGroup() as group:
            taking = [group.create_task(take(one)) for one in contributions]
            for one, share in zip(contributions, shares, strict=True):
                group.create_task(send(one, parts_of(share, gradients())))
        means = [task.result().tobytes() for task in taking]
        assert len(set(means)) == 1
        (digest,) = rounds.digests()
        return taking[0].result(), digest

    results = [run(reduce(owner)) for owner in range(2)]
    mean, whole = reference(dtype)
    assert np.concatenate([values for values, _ in results]).tobytes() == mean.tobytes()
    digests = [digest for _, digest in results]
    pieces = [d.digests[i : i + 16] for d in digests for i in range(0, len(d.digests), 16)]
    assert join_digests(pieces) == whole.digest
    assert [(d.first_element, d.num_elements) for d in digests] == [(0, 2 * SEGMENT), (2 * SEGMENT, 1000)]


def whole_part() -> list[np.ndarray]:
    leaves = gradients()
    return [(leaves[0] + leaves[1]) + (leaves[2] + leaves[3])]


def opened(own: Terms | None = None) -> SliceRounds:
    rounds = SliceRounds(wait_s=0.05)
    rounds.open(own or terms())
    return rounds


def test_who_comes_late_reads_the_mean_from_its_beginning():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        first = rounds.begin(offer(0, range(4), own))
        await send(first, whole_part())
        early = await take(first)
        late = rounds.begin(offer(1, range(0), own))
        assert (await take(late)).tobytes() == early.tobytes()
        assert early.size == 2 * SEGMENT

    run(scenario())


def test_what_was_taken_down_of_a_slice_in_part_says_so():
    async def scenario() -> None:
        own, rounds = terms(num_owners=1), opened(terms(num_owners=1))
        contribution = rounds.begin(offer(0, range(4), own))
        assert [one.num_elements for one in rounds.digests()] == [0]
        await send(contribution, whole_part(), 3)
        (half,) = rounds.digests()
        assert (half.num_elements, half.bucket_elements) == (3 * CHUNK_BYTES // 4, NUM_ELEMENTS)

    run(scenario())


def test_a_reader_that_stops_holds_nobody_up():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        sender, slow = rounds.begin(offer(0, range(4), own)), rounds.begin(offer(1, range(0), own))
        first_chunk = asyncio.create_task(slow.next_chunk())
        await send(sender, whole_part())
        mean = await take(sender)
        assert await first_chunk == (0, CHUNK_BYTES // 4)
        rest = await take(slow)
        assert rest.tobytes() == mean[CHUNK_BYTES // 4 :].tobytes()

    run(scenario())


def test_an_extra_lease_is_sent_no_mean_and_ends_with_it():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        extra = rounds.begin(offer(0, range(4), own, takes_mean=False))
        await send(extra, whole_part())
        assert await extra.next_chunk() is None

    run(scenario())


def test_nothing_is_read_that_is_a_window_ahead():
    async def scenario() -> None:
        own, rounds = terms(num_owners=1), opened(terms(num_owners=1))
        ahead = rounds.begin(offer(0, range(2), own))
        leaves = gradients()
        sending = asyncio.create_task(send(ahead, [leaves[0] + leaves[1]]))
        await asyncio.sleep(0)
        assert ahead.backlog == WINDOW_CHUNKS
        assert NUM_ELEMENTS * 4 > WINDOW_CHUNKS * CHUNK_BYTES
        assert not sending.done()
        other = rounds.begin(offer(1, range(2, 4), own))
        await asyncio.gather(send(other, [leaves[2] + leaves[3]]), sending)
        assert ahead.backlog == 0

    run(scenario())


def test_a_stream_that_broke_in_its_middle_makes_all_begin_again():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        leaves = gradients()
        broken, other = rounds.begin(offer(0, range(2), own)), rounds.begin(offer(1, range(2, 4), own))
        await send(broken, [leaves[0] + leaves[1]], limit=1)
        broken.close()
        await send(other, [leaves[2] + leaves[3]])
        assert not other.failed
        again = rounds.begin(offer(0, range(2), own))
        assert isinstance(other.failure.result(), RoundRestarted)
        once_more = rounds.begin(offer(1, range(2, 4), own))
        await asyncio.gather(send(again, [leaves[0] + leaves[1]]), send(once_more, [leaves[2] + leaves[3]]))
        assert (await take(again)).tobytes() == reference("float32")[0][: 2 * SEGMENT].tobytes()

    run(scenario())


def test_a_stream_that_broke_after_its_last_byte_sends_nothing_again():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        leaves = gradients()
        broken, other = rounds.begin(offer(0, range(2), own)), rounds.begin(offer(1, range(2, 4), own))
        await send(broken, [leaves[0] + leaves[1]])
        broken.close()
        again = rounds.begin(offer(0, range(2), own))
        assert again.is_held
        assert isinstance(broken.failure.result(), RoundRestarted)
        await send(other, [leaves[2] + leaves[3]])
        assert not other.failed
        assert (await take(again)).tobytes() == (await take(other)).tobytes()

    run(scenario())


def test_a_stream_that_broke_after_the_mean_was_complete_has_it_again():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        broken = rounds.begin(offer(0, range(4), own))
        await send(broken, whole_part())
        await broken.next_chunk()
        broken.close()
        again = rounds.begin(offer(0, range(4), own))
        assert again.is_held
        assert (await take(again)).size == 2 * SEGMENT

    run(scenario())


def test_another_group_ends_everything_and_starts_from_nothing():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        old = rounds.begin(offer(0, range(4), own))
        waiting = asyncio.create_task(take(rounds.begin(offer(1, range(0), own))))
        await send(old, whole_part(), limit=1)
        newer = terms(moment=replace(MOMENT, generation=8))
        rounds.open(newer)
        assert isinstance(old.failure.result(), StaleEpoch)
        with pytest.raises(StaleEpoch):
            await waiting
        with pytest.raises(StaleEpoch, match="generation 8"):
            rounds.begin(offer(0, range(4), own))
        assert rounds.digests() == ()
        fresh = rounds.begin(offer(0, range(4), newer))
        await send(fresh, whole_part())
        assert (await take(fresh)).size == 2 * SEGMENT

    run(scenario())


@pytest.mark.parametrize(
    "later", [{"generation": 8}, {"generation": 8, "step": 0}, {"step": 4}, {"attempt": 1}, {"epoch": 3, "step": 0}]
)
def test_a_contribution_of_a_group_that_was_not_told_yet_waits(later):
    async def scenario() -> None:
        rounds = SliceRounds(wait_s=10)
        rounds.open(terms())
        newer = terms(moment=replace(MOMENT, **later))
        waiting = asyncio.create_task(rounds.admit(offer(1, range(4), newer), SECRET))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        rounds.open(newer)
        assert (await waiting).offer.moment == newer.moment

    run(scenario())


def test_the_wait_for_a_group_has_an_end():
    async def scenario() -> None:
        rounds = SliceRounds(wait_s=0.01)
        with pytest.raises(Deadline, match="generation 7"):
            await rounds.admit(offer(1, range(4), terms()), SECRET)

    run(scenario())


def test_who_does_not_know_the_secret_is_refused():
    async def scenario() -> None:
        with pytest.raises(TokenRefused):
            await opened().admit(offer(1, range(4), terms()), SECRET + "0")

    run(scenario())


REFUSED: list[tuple[dict[str, Any], type[AyniError]]] = [
    ({"moment": replace(MOMENT, generation=6)}, StaleEpoch),
    ({"moment": replace(MOMENT, step=2)}, StaleEpoch),
    ({"worker_id": 9}, NotLeased),
    ({"start": 2 * SEGMENT, "stop": NUM_ELEMENTS}, NotLeased),
    ({"start": 0, "stop": SEGMENT}, NotLeased),
    ({"start": 0, "stop": 0}, NotLeased),
    ({"spec": TensorSpec(dtype="bfloat16", num_elements=NUM_ELEMENTS)}, SpecMismatch),
    ({"spec": TensorSpec(dtype="float32", num_elements=1 << 50), "stop": 1 << 49}, TooLarge),
    ({"spec": TensorSpec(dtype="float32", num_elements=0)}, TooLarge),
    ({"stats": (MicrobatchStats(microbatch=0, weight=1), MicrobatchStats(microbatch=2, weight=1))}, NotLeased),
    ({"stats": (MicrobatchStats(microbatch=4, weight=1),)}, NotLeased),
    ({"stats": (MicrobatchStats(microbatch=0, weight=-1),)}, BadRequest),
    ({"stats": (MicrobatchStats(microbatch=0, weight=1, num_correct=1 << 62),)}, BadRequest),
    ({"stats": (MicrobatchStats(microbatch=0, weight=1, loss_sum=float("nan")),)}, NonFinite),
]


@pytest.mark.parametrize(("changes", "refusal"), REFUSED)
def test_what_does_not_fit_is_refused_before_memory_is_taken(changes, refusal):
    async def scenario() -> None:
        rounds = opened()
        with pytest.raises(refusal):
            rounds.begin(replace(offer(1, range(1), terms()), **changes))
        assert rounds.digests() == ()

    run(scenario())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_longest_bucket_is_what_the_group_was_told(dtype):
    async def scenario() -> None:
        own = terms(num_owners=1, dtype=dtype)
        longest = NUM_ELEMENTS * tensors.position_bytes(dtype)
        for limit, spec in ((longest - 1, offer(0, range(4), own).spec), (1 << 20, _huge(dtype))):
            rounds = opened(replace(own, group=replace(own.group, max_bucket_bytes=limit)))
            before = state_of(rounds)
            with pytest.raises(TooLarge, match=f"1 to {limit} are taken") as refused:
                rounds.begin(offer(0, range(4), own, spec=spec, stop=spec.num_elements))
            assert refused.value.metadata["limit"] == str(limit)
            assert state_of(rounds) == before
        opened(replace(own, group=replace(own.group, max_bucket_bytes=longest))).begin(offer(0, range(4), own))

    run(scenario())


def _huge(dtype: str) -> TensorSpec:
    return TensorSpec(dtype=dtype, num_elements=1 << 40)


def test_who_owns_nothing_reduces_nothing():
    async def scenario() -> None:
        follower = terms(worker_id=2)
        said = replace(offer(1, range(4), terms()), start=0, stop=2 * SEGMENT)
        with pytest.raises(NotLeased):
            opened(follower).begin(said)

    run(scenario())


def test_what_contradicts_others_is_refused_and_changes_nothing():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        first, second = rounds.begin(offer(0, range(2), own)), rounds.begin(offer(1, range(2, 3), own))
        await send(first, parts_of(range(2), gradients()))
        before = state_of(rounds)
        parts = TensorSpec(dtype="float32", num_elements=NUM_ELEMENTS, component_sizes=(1, NUM_ELEMENTS - 1))
        for refusal, match, said in (
            (WeightMismatch, "weight 9", offer(2, range(0), own, stats=(MicrobatchStats(microbatch=1, weight=9),))),
            (WeightMismatch, "another bucket said 3", offer(2, range(3, 4), own, stats=_weighing(3, 9, 4))),
            (Duplicate, "second time", offer(2, range(1, 3), own)),
            (Duplicate, "second time", offer(2, range(1, 4), own)),
            (Duplicate, "second time", offer(1, range(0, 4), own)),
            (Duplicate, "lease 100", offer(2, range(3, 4), own, lease_id=100)),
            (SpecMismatch, "component_sizes", offer(2, range(3, 4), own, spec=parts)),
        ):
            with pytest.raises(refusal, match=match):
                rounds.begin(said)
            assert state_of(rounds) == before
        assert not first.failed
        assert not second.failed

    run(scenario())


def _weighing(first: int, *weights: int) -> tuple[MicrobatchStats, ...]:
    """Micro-batches that end before `first` + 1, the last one with an own weight."""
    numbers = range(first - len(weights) + 1, first + 1)
    return tuple(MicrobatchStats(microbatch=m, weight=weight) for m, weight in zip(numbers, weights, strict=True))


def test_no_more_buckets_are_taken_than_there_can_be(monkeypatch):
    async def scenario() -> None:
        own, rounds = terms(), opened()
        for number in range(2):
            rounds.begin(_whole(own, number))
        before = state_of(rounds)
        with pytest.raises(TooLarge, match="2 buckets"):
            rounds.begin(_whole(own, 2))
        assert state_of(rounds) == before
        rounds.begin(replace(_whole(own, 1), worker_id=1, lease_id=101, stats=()))

    monkeypatch.setattr("worker_agent.slice_rounds._MOST_BUCKETS", 2)
    run(scenario())


def _whole(own: Terms, number: int) -> SliceOffer:
    bucket = Bucket("block", number)
    start, stop = slice_bounds(NUM_ELEMENTS, len(own.group.owners), bucket)[own.worker_id]
    return replace(offer(0, range(4), own), bucket=bucket, start=start, stop=stop)


def test_a_damaged_chunk_is_refused():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        contribution = rounds.begin(offer(0, range(4), own))
        for frame in (
            chunk_frame(np.zeros(5, np.float32), 0, 0, "float32"),
            chunk_frame(np.zeros(CHUNK_BYTES // 4, np.float32), 1, 0, "float32"),
            chunk_frame(np.zeros(CHUNK_BYTES // 4, np.float32), 0, CHUNK_BYTES // 4, "float32"),
            chunk_frame(np.zeros(CHUNK_BYTES, np.float32), 0, 0, "float32"),
            frames.encode_chunk(frames.CHUNK_FIELD, 2, 0, bytes(CHUNK_BYTES)),
            frames.encode_shared_chunk(frames.CHUNK_FIELD, 0, 0, frames.SharedRange(1, 0, CHUNK_BYTES, 1)),
        ):
            with pytest.raises(BadChunk):
                contribution.arrive(frame)
        await send(contribution, whole_part())
        assert (await take(contribution)).size == 2 * SEGMENT

    run(scenario())


def test_a_sum_beyond_float32_fails_everybody():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        one, other = rounds.begin(offer(0, range(2), own)), rounds.begin(offer(1, range(2, 4), own))
        huge = np.full(NUM_ELEMENTS, 3e38, np.float32)
        await send(one, [huge], limit=1)
        with pytest.raises(NonFinite):
            await send(other, [huge], limit=1)
        error = one.failure.result()
        assert isinstance(error, NonFinite)
        assert error.metadata["worker"] == SUM_OF_ALL

    run(scenario())


def test_where_nothing_weighs_anything_zeros_are_taken_down():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        light = tuple(MicrobatchStats(microbatch=m, weight=0, loss_sum=0.0) for m in range(4))
        contribution = rounds.begin(offer(0, range(4), own, stats=light))
        assert await contribution.next_chunk() is None
        (digest,) = rounds.digests()
        assert (len(digest.digests), digest.squares) == (2 * 16, ())
        assert contribution.live.totals() == (0.0, 0, 0)

    run(scenario())


LARGE = st.one_of(st.integers(0, 8), st.integers(0, (1 << 32) - 1))
STATS = st.builds(
    pb.MicrobatchStats,
    microbatch=st.integers(0, 6),
    weight=st.one_of(st.integers(0, 3), st.integers(-(1 << 63), (1 << 63) - 1)),
    loss_sum=st.floats(),
    num_correct=st.integers(-(1 << 63), (1 << 63) - 1),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_is_said_is_taken_or_refused_by_name(data):
    """Anything else would be taken for a broken transport."""
    begin = begin_of(begin_frame(offer(1, range(2), terms())))
    for name, values in (("worker_id", LARGE), ("lease_id", LARGE), ("step", st.integers(0, 6))):
        if data.draw(st.booleans()):
            setattr(begin.round, name, data.draw(values))
    for name in ("generation", "first_element", "num_elements"):
        if data.draw(st.integers(0, 3)) == 0:
            setattr(begin, name, data.draw(LARGE))
    if data.draw(st.booleans()):
        del begin.round.microbatches[:]
        begin.round.microbatches.extend(data.draw(st.lists(STATS, max_size=5)))
    frames_sent = data.draw(st.lists(st.binary(max_size=60), max_size=5))

    async def scenario() -> None:
        own, rounds = terms(), SliceRounds(wait_s=0.0)
        rounds.open(own)
        rounds.begin(offer(0, range(2, 4), own))
        with contextlib.suppress(AyniError):
            contribution = await rounds.admit(slice_offer_of(begin), SECRET)
            contribution.live.totals()
            for frame in frames_sent:
                contribution.arrive(frame)

    run(scenario())


def test_the_loss_of_all_is_known_when_each_is():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        contribution = rounds.begin(offer(0, range(4), own))
        assert contribution.live.totals() == (6.0 / 10, 0, 0)

    run(scenario())
