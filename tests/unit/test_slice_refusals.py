"""What an owner of slices refuses, and what it never takes memory for."""

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ayni import frames, tensors
from ayni.buckets import Bucket
from ayni.errors import (
    AyniError,
    BadChunk,
    BadRequest,
    Duplicate,
    NonFinite,
    NotLeased,
    SpecMismatch,
    StaleEpoch,
    TokenRefused,
    TooLarge,
    WeightMismatch,
)
from ayni.reduce.digest import SEGMENT
from ayni.reduce.refusals import SUM_OF_ALL
from ayni.slices import slice_bounds
from ayni.step_values import MicrobatchStats
from ayni.tensors import TensorSpec
from ayni.v1 import coordinator_pb2 as pb
from tests.support.fuzz_peer_process import state_of
from tests.support.slice_rounds import (
    CHUNK_BYTES,
    MOMENT,
    NUM_ELEMENTS,
    SECRET,
    chunk_frame,
    gradients,
    offer,
    opened,
    parts_of,
    run,
    send,
    take,
    terms,
    whole_part,
)
from tests.unit.test_peer_messages import begin_of
from worker_agent.peer_messages import begin_frame, slice_offer_of
from worker_agent.slice_offers import SliceOffer, Terms
from worker_agent.slice_rounds import SliceRounds


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
