"""Algebra of the reduction, from a worker's partial sums to the mean, and of the wire types.

Legend: M micro-batches, N elements.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ayni import tensors
from ayni.buckets import FLAT
from ayni.errors import BadChunk, NonFinite, StaleStep
from ayni.reduce.reduction import Round
from ayni.step_values import MicrobatchStats
from ayni.tensors import TensorSpec
from coordinator_service.leases import Key, Lease, Moment
from coordinator_service.steps import Step
from worker_agent.training.partial_sums import PartialSums

UNIT_ROUNDOFF = 2.0**-24

briefly = settings(max_examples=25)
"""The whole ring has seconds; test_reduction.py looks longer at the bytes."""


@dataclass(frozen=True)
class Sums:
    """Sum-loss gradients of a step's micro-batches, shape [M, N], and their weights."""

    gradients: np.ndarray
    weights: tuple[int, ...]

    @property
    def num_microbatches(self) -> int:
        return len(self.weights)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(dtype="float32", num_elements=self.gradients.shape[1])

    def scaled(self, factor: float) -> "Sums":
        return Sums(self.gradients * np.float32(factor), self.weights)

    def parts(self, start: int, stop: int) -> list[np.ndarray | None]:
        """What a worker sends for a shard."""
        sums = PartialSums(self.gradients.shape[1])
        sums.begin(start, stop, self.num_microbatches)
        for microbatch in range(start, stop):
            if self.weights[microbatch]:
                sums.leaf()[...] = self.gradients[microbatch]
                sums.push()
            else:
                sums.push_absent()
        return sums.parts()


@st.composite
def steps(draw, weights=(0, 1, 3, 40), most=12) -> Sums:
    num = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = 10.0 ** rng.integers(-3, 4, size=(num, 1))
    gradients = rng.standard_normal((num, draw(st.integers(1, 20)))) * spread
    drawn = draw(st.lists(st.sampled_from(weights), min_size=num, max_size=num))
    assume(any(drawn))
    return Sums(gradients.astype(np.float32), tuple(drawn))


@st.composite
def steps_and_cuts(draw) -> tuple[Sums, list[int]]:
    sums, workers = draw(steps()), draw(st.integers(1, 5))
    return sums, draw_cuts(draw, sums, workers)


def draw_cuts(draw, sums: Sums, workers: int) -> list[int]:
    inner = st.lists(st.integers(0, sums.num_microbatches), min_size=workers - 1, max_size=workers - 1)
    return [0, *sorted(draw(inner)), sums.num_microbatches]


def reduce_round(
    sums: Sums, cuts: Sequence[int], *, ids: Sequence[int] = (), chunk: int = 7, order: random.Random | None = None
) -> np.ndarray:
    """The mean for workers `ids`, worker i with the micro-batches between two cuts; frames come in a random order."""
    order, ids = order or random.Random(0), ids or range(len(cuts) - 1)
    round_ = Round(
        label="step 0, flat", spec=sums.spec, num_microbatches=sums.num_microbatches, chunk_elements=chunk, expected=ids
    )
    shards = dict(zip(ids, pairwise(cuts), strict=True))
    emitted, waiting = [], {}
    for worker in order.sample(list(ids), len(ids)):
        start, stop = shards[worker]
        emitted += round_.begin(worker, f"w{worker}", sums.spec, {m: sums.weights[m] for m in range(start, stop)})
        waiting[worker] = [
            (part, offset, values[offset : offset + chunk].copy())
            for offset in range(0, sums.spec.num_elements, chunk)
            for part, values in enumerate(sums.parts(start, stop))
            if values is not None
        ]
    while any(waiting.values()):
        worker = order.choice([worker for worker, frames in waiting.items() if frames])
        emitted += round_.contribute(worker, *waiting[worker].pop(0))
    assert round_.complete
    return np.concatenate([reduced.values_C for reduced in sorted(emitted, key=lambda reduced: reduced.offset)])


def one_worker(sums: Sums) -> np.ndarray:
    return reduce_round(sums, [0, sums.num_microbatches])


@briefly
@given(steps())
def test_mean_is_the_master_equation(sums):
    terms = sums.gradients.astype(np.float64)[np.array(sums.weights) > 0]
    bound = (math.log2(max(2, sums.num_microbatches)) + 2) * UNIT_ROUNDOFF * np.abs(terms).sum(0) / sum(sums.weights)
    assert np.all(np.abs(one_worker(sums) - terms.sum(0) / sum(sums.weights)) <= bound)


@briefly
@given(steps_and_cuts(), st.randoms(use_true_random=False))
def test_permuting_workers_changes_no_byte(drawn, order):
    sums, cuts = drawn
    ids = order.sample(range(100), len(cuts) - 1)
    permuted = reduce_round(sums, cuts, ids=ids, order=order)
    assert permuted.tobytes() == reduce_round(sums, cuts).tobytes() == one_worker(sums).tobytes()


@briefly
@given(steps_and_cuts(), st.data())
def test_splitting_a_worker_in_two_changes_no_byte(drawn, data):
    sums, cuts = drawn
    cut = data.draw(st.integers(0, sums.num_microbatches))
    assert reduce_round(sums, sorted([*cuts, cut])).tobytes() == reduce_round(sums, cuts).tobytes()


@briefly
@given(steps_and_cuts(), st.data())
def test_worker_without_microbatches_changes_no_byte(drawn, data):
    sums, cuts = drawn
    with_idle = sorted([*cuts, data.draw(st.sampled_from(cuts))])
    assert reduce_round(sums, with_idle).tobytes() == reduce_round(sums, cuts).tobytes()


@briefly
@given(steps_and_cuts(), st.integers(1, 9))
def test_worker_whose_samples_weigh_nothing_changes_no_byte(drawn, extra):
    sums, cuts = drawn
    nothing = np.full((extra, sums.spec.num_elements), np.nan, np.float32)
    more = Sums(np.concatenate([sums.gradients, nothing]), (*sums.weights, *[0] * extra))
    assert reduce_round(more, [*cuts, more.num_microbatches]).tobytes() == reduce_round(sums, cuts).tobytes()


@briefly
@given(steps_and_cuts(), st.integers(1, 30), st.randoms(use_true_random=False))
def test_chunks_and_arrival_change_no_byte(drawn, chunk, order):
    sums, cuts = drawn
    assert reduce_round(sums, cuts, chunk=chunk, order=order).tobytes() == one_worker(sums).tobytes()


@briefly
@given(steps_and_cuts(), st.integers(-20, 20))
def test_scaling_by_a_power_of_two_is_exact(drawn, exponent):
    sums, cuts = drawn
    factor = np.float32(2.0**exponent)
    assert reduce_round(sums.scaled(factor), cuts).tobytes() == (reduce_round(sums, cuts) * factor).tobytes()


@briefly
@given(steps_and_cuts(), st.floats(1e-3, 1e3))
def test_scaling_scales_the_mean(drawn, factor):
    sums, cuts = drawn
    scaled, mean = reduce_round(sums.scaled(factor), cuts), reduce_round(sums, cuts)
    factor = float(np.float32(factor))
    size = np.abs(sums.gradients[np.array(sums.weights) > 0].astype(np.float64)).sum(0) / sum(sums.weights)
    assert np.all(np.abs(scaled - mean.astype(np.float64) * factor) <= 16 * UNIT_ROUNDOFF * factor * size)


@briefly
@given(steps_and_cuts(), st.integers(-(2**12), 2**12))
def test_identical_gradients_are_their_own_mean(drawn, value):
    drawn_sums, cuts = drawn
    weights = np.array(drawn_sums.weights, np.float32)[:, None]
    sums = Sums(weights * np.full((1, 5), value, np.float32), drawn_sums.weights)
    # Small whole numbers, so that no sum is rounded.
    assert reduce_round(sums, cuts).tolist() == [value] * 5


@briefly
@given(steps(weights=(1, 3)), st.integers(1, 7))
def test_chunk_that_comes_twice_is_refused_and_leaves_no_trace(sums, chunk):
    size = sums.spec.num_elements
    round_ = Round(
        label="step 0", spec=sums.spec, num_microbatches=sums.num_microbatches, chunk_elements=chunk, expected=[0]
    )
    round_.begin(0, "ant", sums.spec, dict(enumerate(sums.weights)))
    [values] = sums.parts(0, sums.num_microbatches)
    assert values is not None
    means = []
    for offset in range(0, size, chunk):
        means += round_.contribute(0, 0, offset, values[offset : offset + chunk].copy())
        with pytest.raises(BadChunk):
            round_.contribute(0, 0, offset, values[offset : offset + chunk].copy())
    assert np.concatenate([mean.values_C for mean in means]).tobytes() == one_worker(sums).tobytes()


@briefly
@given(steps(most=6), steps(most=6), st.randoms(use_true_random=False))
def test_two_steps_in_flight_never_mix(first, second, order):
    opened = [open_step(number, sums) for number, sums in enumerate((first, second))]
    waiting = [(number, m) for number, (step, _) in enumerate(opened) for m in range(step.num_microbatches)]
    for number, microbatch in order.sample(waiting, len(waiting)):
        step, sums = opened[number]
        other = opened[1 - number][0]
        with pytest.raises(StaleStep):
            other.lease(microbatch, key_of(step, microbatch))
        contribute(step, sums, microbatch)
    for step, sums in opened:
        round_ = step.rounds[FLAT]
        assert round_.complete
        assert round_.total_weight == sum(sums.weights)
        assert round_.square_sum == pytest.approx(float(np.sum(one_worker(sums).astype(np.float64) ** 2)), rel=1e-12)


@briefly
@given(steps_and_cuts(), st.data())
def test_loss_does_not_depend_on_who_computed_it(drawn, data):
    sums, cuts = drawn
    losses = data.draw(st.lists(st.floats(-1e6, 1e6), min_size=len(sums.weights), max_size=len(sums.weights)))
    told = {global_loss(sums, losses, some) for some in (cuts, [0, sums.num_microbatches])}
    assert told == {math.fsum(losses) / sum(sums.weights)}


normal_floats = st.floats(2.0**-126, 2.0**127, width=32) | st.floats(-(2.0**127), -(2.0**-126), width=32)


def over_the_wire(values: Sequence[float], dtype: str) -> np.ndarray:
    return tensors.decode(bytes(tensors.encode(np.array(values, np.float32), dtype)), dtype)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2.0**-8), ("float32", 0.0)])
@briefly
@given(values=st.lists(normal_floats, min_size=1, max_size=20))
def test_wire_error_is_bounded(dtype, error, values):
    sent = np.array(values, np.float32).astype(np.float64)
    assert np.all(np.abs(over_the_wire(values, dtype) - sent) <= error * np.abs(sent))


@briefly
@given(st.lists(st.floats(2.0**-14, 65504, width=32), min_size=1, max_size=20))
def test_float16_error_is_bounded(values):
    sent = np.array(values, np.float32).astype(np.float64)
    assert np.all(np.abs(over_the_wire(values, "float16") - sent) <= 2.0**-11 * sent)


@briefly
@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=20))
def test_bfloat16_rounds_to_nearest_even(values):
    bits = np.array(values, np.float32).view(np.uint32).astype(np.uint64)
    # Adds half of the last kept place, and one less when that place is even, so that a tie goes to even.
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    assert over_the_wire(values, "bfloat16").view(np.uint32).tolist() == kept.tolist()


@pytest.mark.parametrize("dtype", tensors.MEAN_DTYPES)
@briefly
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_second_trip_over_the_wire_changes_nothing(dtype, values):
    once = over_the_wire(values, dtype)
    assert over_the_wire(once.tolist(), dtype).tolist() == pytest.approx(once.tolist(), rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("dtype", tensors.MEAN_DTYPES)
def test_special_values_survive_the_wire(dtype):
    sent = [math.inf, -math.inf, math.nan, 0.0, -0.0]
    received = over_the_wire(sent, dtype)
    assert received.tolist() == pytest.approx(sent, nan_ok=True)
    assert np.signbit(received).tolist()[3:] == [False, True]


@briefly
@given(st.floats(65520, 2.0**126, width=32))
def test_value_beyond_float16_is_refused_by_name(value):
    spec = TensorSpec(dtype="float16", num_elements=1)
    round_ = Round(label="step 0, flat", spec=spec, num_microbatches=1, chunk_elements=4, expected=[0])
    round_.begin(0, "ant", spec, {0: 1})
    with pytest.raises(NonFinite, match="worker ant contributes inf at element 0"):
        round_.contribute(0, 0, 0, over_the_wire([value], "float16"))


def open_step(number: int, sums: Sums) -> tuple[Step, Sums]:
    """A step in which worker m has micro-batch m."""
    num = sums.num_microbatches
    leases = [Lease(lease_id=m, worker_id=m, worker_name=f"w{m}", start=m, stop=m + 1) for m in range(num)]
    moment = Moment(epoch=1, step=number, attempt=0)
    return Step(moment=moment, kind="train", num_microbatches=num, leases=leases, chunk_elements=64), sums


def key_of(step: Step, lease_id: int) -> Key:
    return Key(moment=Moment(epoch=step.epoch, step=step.step, attempt=step.attempt), lease_id=lease_id)


def contribute(step: Step, sums: Sums, microbatch: int) -> None:
    lease = step.lease(microbatch, key_of(step, microbatch))
    step.begin(lease, FLAT, sums.spec, [MicrobatchStats(microbatch=microbatch, weight=sums.weights[microbatch])])
    if sums.weights[microbatch]:
        step.rounds[FLAT].contribute(microbatch, 0, 0, sums.gradients[microbatch].copy())


def global_loss(sums: Sums, losses: Sequence[float], cuts: Sequence[int]) -> float | None:
    leases = [
        Lease(lease_id=w, worker_id=w, worker_name=f"w{w}", start=start, stop=stop)
        for w, (start, stop) in enumerate(pairwise(cuts))
    ]
    moment = Moment(epoch=1, step=0, attempt=0)
    step = Step(moment=moment, kind="train", num_microbatches=sums.num_microbatches, leases=leases)
    for lease in reversed(leases):
        leased = range(lease.start, lease.stop)
        stats = [MicrobatchStats(microbatch=m, weight=sums.weights[m], loss_sum=losses[m]) for m in leased]
        step.begin(lease, FLAT, sums.spec, stats)
    return step.totals().global_loss
