"""What rounding keeps back is sent later, once, and belongs to steps that were committed.

Legend: N elements in a bucket, P parts.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ayni import tensors
from ayni.buckets import FLAT, Bucket
from worker_agent.training.error_feedback import ErrorFeedback

N = 700
briefly = settings(max_examples=25)

seeds = st.integers(0, 2**32)
scales = st.lists(st.integers(-20, 20), min_size=1, max_size=8)


def gradient(rng: np.random.Generator, exponent: int = 0, size: int = N) -> np.ndarray:
    return np.ldexp(rng.standard_normal(size), exponent).astype(np.float32)


def over_the_wire(values_N: np.ndarray) -> np.ndarray:
    return tensors.decode(tensors.encode(values_N, "int8"), "int8")


def step(feedback: ErrorFeedback, parts: Sequence[np.ndarray | None]) -> np.ndarray:
    """Sends and commits a bucket's parts; returns the sum of what was received, float64."""
    feedback.correct(FLAT, parts)
    sent = sum((over_the_wire(part).astype(np.float64) for part in parts if part is not None), np.zeros(N))
    feedback.commit(FLAT, parts)
    return np.asarray(sent)


@briefly
@given(seed=seeds, exponents=scales, num_parts=st.integers(1, 3))
def test_what_was_sent_and_the_residual_are_what_was_true(seed: int, exponents: list[int], num_parts: int) -> None:
    rng, feedback = np.random.default_rng(seed), ErrorFeedback("int8", {FLAT: N})
    true, sent, magnitude = np.zeros(N), np.zeros(N), np.zeros(N)
    for exponent in exponents:
        parts = [gradient(rng, exponent) for _ in range(num_parts)]
        true += np.sum(parts, axis=0, dtype=np.float64)
        magnitude += np.sum(np.abs(parts), axis=0) + np.abs(feedback.residuals[FLAT])
        sent += step(feedback, list(parts))
    difference = np.abs(sent + feedback.residuals[FLAT] - true)
    # Each addition of a residual, and each sum of several parts' roundings, is one float32 operation.
    assert (difference <= 2.0**-24 * (2 + num_parts) * magnitude).all()


@briefly
@given(seed=seeds, exponents=scales, num_parts=st.integers(1, 3))
def test_who_leaves_takes_along_one_rounding_of_its_last_step(seed: int, exponents: list[int], num_parts: int) -> None:
    """However long it was there: at most half a scale of each part that it sent last."""
    rng, feedback = np.random.default_rng(seed), ErrorFeedback("int8", {FLAT: N})
    for exponent in exponents:
        parts = [gradient(rng, exponent) for _ in range(num_parts)]
        step(feedback, list(parts))
    half_scales = sum(half_scales_of(part) for part in parts)
    assert (np.abs(feedback.residuals[FLAT]) <= half_scales * (1 + 1e-5)).all()


def half_scales_of(part_N: np.ndarray) -> np.ndarray:
    """Half of each element's scale; shape [N], float64."""
    blocks = [np.full(min(256, N - at), np.abs(part_N[at : at + 256]).max() / 254.0) for at in range(0, N, 256)]
    return np.concatenate(blocks)


def test_without_feedback_every_step_takes_as_much_along() -> None:
    """What the bound above is worth: a value that is always rounded the same way."""
    part = np.full(N, 0.001, np.float32)
    part[::256] = 1.0
    feedback, steps = ErrorFeedback("int8", {FLAT: N}), 100
    sent = sum(step(feedback, [part.copy()]) for _ in range(steps))
    plain = steps * over_the_wire(part).astype(np.float64)
    true = steps * part.astype(np.float64)
    bound = half_scales_of(part).max() * 1.01
    assert np.abs(true - sent).max() <= bound
    assert np.abs(true - plain).max() > 20 * bound


@briefly
@given(seeds)
def test_the_residual_of_one_part_is_exact(seed: int) -> None:
    feedback = ErrorFeedback("int8", {FLAT: N})
    part = gradient(np.random.default_rng(seed))
    feedback.correct(FLAT, [part])
    feedback.commit(FLAT, [part])
    assert (feedback.residuals[FLAT].astype(np.float64) + over_the_wire(part) == part).all()


@settings(max_examples=8)
@given(seed=seeds, rounds=st.integers(10, 40))
def test_the_residual_of_a_constant_gradient_is_bounded_and_the_mean_of_what_is_sent_is_right(
    seed: int, rounds: int
) -> None:
    constant, feedback = gradient(np.random.default_rng(seed)), ErrorFeedback("int8", {FLAT: N})
    sent = np.zeros(N)
    for _ in range(rounds):
        sent += step(feedback, [constant.copy()])
        largest = np.abs(constant).max() + np.abs(feedback.residuals[FLAT]).max()
        assert np.abs(feedback.residuals[FLAT]).max() <= largest / 127 / 2 * 1.001
    without = np.abs(over_the_wire(constant) - constant).max()
    assert np.abs(sent / rounds - constant).max() <= 1.1 * without * 127 / 126 / rounds + 1e-6


def test_without_feedback_the_same_error_is_made_every_time() -> None:
    """What the residual is for: the number above is missed without it."""
    constant = gradient(np.random.default_rng(3))
    sent = sum(over_the_wire(constant).astype(np.float64) for _ in range(40))
    assert np.abs(sent / 40 - constant).max() > 0.9 * np.abs(over_the_wire(constant) - constant).max() > 1e-3


def test_the_first_part_that_has_weight_brings_the_residual() -> None:
    feedback = ErrorFeedback("int8", {FLAT: N})
    feedback.restore({FLAT: np.full(N, 0.5, np.float32)})
    first, second = np.ones(N, np.float32), np.ones(N, np.float32)
    feedback.correct(FLAT, [None, first, second])
    assert set(first) == {1.5}
    assert set(second) == {1.0}


def test_the_rounding_of_every_part_is_kept() -> None:
    rng, feedback = np.random.default_rng(5), ErrorFeedback("int8", {FLAT: N})
    first, last = gradient(rng), gradient(rng, -3)
    feedback.correct(FLAT, [first, None, last])
    feedback.commit(FLAT, [first, None, last])
    expected = (first - over_the_wire(first)) + (last - over_the_wire(last))
    assert feedback.residuals[FLAT].tobytes() == expected.tobytes()


def test_a_residual_changes_with_a_commit_only() -> None:
    rng, feedback = np.random.default_rng(6), ErrorFeedback("int8", {FLAT: N})
    step(feedback, [gradient(rng)])
    before = feedback.copies()[FLAT]
    for _ in range(3):
        feedback.correct(FLAT, [gradient(rng)])
        assert feedback.residuals[FLAT].tobytes() == before.tobytes()


@pytest.mark.parametrize("parts", [[], [None], [None, None]])
def test_a_step_without_weight_leaves_the_residual_for_the_next(parts: list[None]) -> None:
    feedback = ErrorFeedback("int8", {FLAT: N})
    step(feedback, [gradient(np.random.default_rng(7))])
    before = feedback.copies()[FLAT]
    assert before.any()
    assert not step(feedback, parts).any()
    assert feedback.residuals[FLAT].tobytes() == before.tobytes()


def test_a_long_bucket_is_rounded_in_the_blocks_that_travel() -> None:
    size = 3 * 32 * 1024 + 1234
    feedback, part = ErrorFeedback("int8", {FLAT: size}), gradient(np.random.default_rng(8), size=size)
    feedback.commit(FLAT, [part])
    chunks = [over_the_wire(part[start : start + 16384]) for start in range(0, size, 16384)]
    assert feedback.residuals[FLAT].tobytes() == (part - np.concatenate(chunks)).tobytes()


def test_buckets_have_residuals_of_their_own_and_all_can_be_forgotten() -> None:
    block = Bucket("block", 3)
    feedback = ErrorFeedback("int8", {FLAT: N, block: 5})
    step(feedback, [gradient(np.random.default_rng(9))])
    assert feedback.residuals[FLAT].any()
    assert not feedback.residuals[block].any()
    feedback.forget()
    assert not feedback.residuals[FLAT].any()


def test_copies_stay_as_they_are() -> None:
    feedback = ErrorFeedback("int8", {FLAT: N})
    step(feedback, [gradient(np.random.default_rng(10))])
    copies = feedback.copies()
    other = ErrorFeedback("int8", {FLAT: N})
    other.restore(copies)
    feedback.forget()
    assert copies[FLAT].any()
    assert other.residuals[FLAT].tobytes() == copies[FLAT].tobytes()
