"""Bookkeeping of the simple calls."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ayni.buckets import FLAT, Bucket
from worker_agent.seed_step import SeedStep, block_bucket, non_block_bucket
from worker_agent.session import MicrobatchStats, ShardAssignment

LEASE = ShardAssignment(
    step=4,
    attempt=0,
    epoch=1,
    kind="train",
    lease_id=9,
    microbatch_start=1,
    microbatch_stop=2,
    num_microbatches=3,
    position=100,
    num_samples=10,
    shard_start=103,
    shard_end=106,
    rank=1,
    world_size=3,
    update="device",
)
BLOCK = Bucket("block", 0)
HEAD = Bucket("non_block", 0)


def seed_step(**changes: Any) -> SeedStep[str]:
    return SeedStep(replace(LEASE, **changes))


def test_a_sum_is_said_with_the_weight_that_it_is_over():
    step = seed_step()
    assert step.send(4, FLAT, 3) == MicrobatchStats(microbatch=1, weight=3)
    assert step.finish(4, 0.5, 2, 3) == MicrobatchStats(
        microbatch=1, weight=3, loss_sum=1.5, num_correct=2, num_predictions=3
    )


def test_without_a_total_the_shards_samples_count():
    step = seed_step()
    assert step.send(4, BLOCK, None).weight == 3
    assert step.finish(4, None, 0, None).loss_sum is None


def test_later_buckets_repeat_the_first_ones_weight():
    step = seed_step()
    assert step.send(4, BLOCK, 5).weight == 5
    assert step.send(4, HEAD, None).weight == 5
    with pytest.raises(ValueError, match=r"total is 6; the step's other buckets were sent with 5"):
        step.send(4, Bucket("block", 1), 6)


@pytest.mark.parametrize(("start", "stop", "count"), [(0, 4, 4), (2, 2, 0)])
def test_a_shard_of_several_microbatches_is_refused_with_the_way_out(start, stop, count):
    with pytest.raises(ValueError, match=rf"{count} micro-batches.*batch.microbatches: 0"):
        seed_step(microbatch_start=start, microbatch_stop=stop)


def test_another_step_is_refused():
    with pytest.raises(ValueError, match="in progress is step 4, not step 5"):
        seed_step().send(5, FLAT, 3)


def test_an_evaluation_takes_no_gradients_but_a_result():
    step = seed_step(kind="evaluate")
    with pytest.raises(ValueError, match="takes no gradients"):
        step.send(4, FLAT, 3)
    assert step.finish(4, 2.0, 3, 3).loss_sum == 6.0


@pytest.mark.parametrize("buckets", [(FLAT, FLAT), (BLOCK, BLOCK), (FLAT, BLOCK), (BLOCK, FLAT)])
def test_a_bucket_is_sent_once_and_the_flat_vector_alone(buckets):
    step = seed_step()
    step.send(4, buckets[0], 3)
    with pytest.raises(ValueError, match=f"{buckets[1]} can't be sent after {buckets[0]}"):
        step.send(4, buckets[1], 3)


def test_a_finished_step_takes_nothing_more():
    step = seed_step()
    step.send(4, BLOCK, 3)
    step.finish(4, 1.0, 0, None)
    with pytest.raises(ValueError, match="step 4 is finished"):
        step.send(4, HEAD, 3)
    with pytest.raises(ValueError, match="step 4 is finished"):
        step.finish(4, 1.0, 0, None)


@pytest.mark.parametrize(("correct", "total"), [(-1, 3), (4, 3), (0, -1)])
def test_counts_out_of_range_are_refused(correct, total):
    with pytest.raises(ValueError, match="it must be"):
        seed_step().finish(4, 1.0, correct, total)


@pytest.mark.parametrize("total", [True, 4.5, 4.0, "4", np.float32(4), -4, 2**63])
def test_a_total_that_is_no_count_is_refused_and_leaves_no_trace(total):
    step = seed_step()
    for call in (lambda: step.send(4, FLAT, total), lambda: step.finish(4, 1.0, 0, total)):
        with pytest.raises(ValueError, match=r"^total is "):
            call()
    three: Any = np.int64(3)
    assert step.send(4, FLAT, three).weight == 3


@pytest.mark.parametrize("correct", [True, 2.5, None, -1, 4])
def test_a_correct_that_is_no_count_of_the_shard_is_refused_and_leaves_no_trace(correct):
    step = seed_step()
    with pytest.raises(ValueError, match=r"^correct is "):
        step.finish(4, 1.0, correct, 3)
    assert step.finish(4, 1.0, 2, 2).num_correct == 2


@pytest.mark.parametrize("loss", ["x", "1.0", True, math.nan, math.inf, -math.inf, 1e308, 10**400])
def test_a_loss_that_is_no_finite_number_is_refused_and_leaves_no_trace(loss):
    step = seed_step()
    with pytest.raises(ValueError, match=r"^loss is "):
        step.finish(4, loss, 0, 3)
    half: Any = np.float32(0.5)
    assert step.finish(4, half, 0, 3).loss_sum == 1.5


@pytest.mark.parametrize("step", [True, 4.0, "4", None])
def test_a_step_that_is_no_int_is_refused(step):
    with pytest.raises(ValueError, match=r"^step is .*; it must be an int"):
        seed_step().send(step, FLAT, 3)


def test_results_come_in_the_order_of_sending_for_each_kind():
    step = seed_step()
    for bucket in (Bucket("block", 1), HEAD, BLOCK):
        step.send(4, bucket, 3)
        step.expect(bucket, f"mean of {bucket}")
    assert step.take("block") == (Bucket("block", 1), "mean of block 1")
    assert step.take("non_block") == (HEAD, "mean of lm_head")
    with pytest.raises(RuntimeError, match="averages of block 0 were never received"):
        step.check_received()
    assert step.take("block") == (BLOCK, "mean of block 0")
    step.check_received()
    with pytest.raises(RuntimeError, match="no result of kind 'block' is on its way"):
        step.take("block")


def test_a_block_has_nine_components_that_add_up():
    sizes = [4, 2, 2, 4, 0, 0, 0, 1, 1]
    assert block_bucket(3, 12, 14, sizes) == Bucket("block", 3)
    for index, blocks, elements, given, words in (
        (12, 12, 14, sizes, r"must be in \[0, 12\)"),
        (-1, 12, 14, sizes, r"must be in \[0, 12\)"),
        (0, 12, 14, sizes[:8], "has 8 entries; a block has 9: q, k, v, o"),
        (0, 12, 15, sizes, "add up to 14; gradients has 15"),
        (0, 12, 14, [-4, 10, *sizes[2:]], "component_sizes"),
    ):
        with pytest.raises(ValueError, match=words):
            block_bucket(index, blocks, elements, given)


def test_components_outside_the_blocks_have_the_seeds_numbers():
    assert [str(non_block_bucket(number)) for number in range(3)] == ["lm_head", "final_norm", "embedding"]
    with pytest.raises(ValueError, match="one of 0 lm_head, 1 final_norm, 2 embedding"):
        non_block_bucket(3)
