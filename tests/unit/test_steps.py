"""One attempt of a step: leases, buckets and commits."""

import math

import numpy as np
import pytest

from ayni.buckets import FLAT, Bucket
from ayni.errors import (
    BadRequest,
    Diverged,
    Duplicate,
    NonFinite,
    NotLeased,
    SpecMismatch,
    StaleEpoch,
    StaleStep,
    WeightMismatch,
)
from ayni.step_values import MicrobatchStats, Report
from ayni.tensors import TensorSpec
from coordinator_service.audit import compare_hashes
from coordinator_service.leases import Key, Lease, Moment
from coordinator_service.steps import Step

MOMENT = Moment(epoch=2, step=5, attempt=1)
ANT = Lease(lease_id=11, worker_id=0, worker_name="ant", start=0, stop=2)
BEE = Lease(lease_id=12, worker_id=1, worker_name="bee", start=2, stop=3)
SPEC = TensorSpec(dtype="float32", num_elements=2)


def stats(lease: Lease, weight: int = 4, loss: float | None = 2.0) -> list[MicrobatchStats]:
    return [
        MicrobatchStats(microbatch=m, weight=weight, loss_sum=loss, num_correct=3, num_predictions=4)
        for m in range(lease.start, lease.stop)
    ]


def report(num_buckets: int, microbatches: list[MicrobatchStats], sha256: str = "") -> Report:
    return Report(num_buckets=num_buckets, microbatches=microbatches, parameters_sha256=sha256)


@pytest.fixture
def step() -> Step:
    return Step(moment=MOMENT, kind="train", num_microbatches=3, leases=[ANT, BEE])


def contribute(step: Step, bucket: Bucket = FLAT) -> None:
    step.begin(ANT, bucket, SPEC, stats(ANT))
    step.begin(BEE, bucket, SPEC, stats(BEE))
    step.rounds[bucket].contribute(11, 0, 0, np.array([8, 8], np.float32))
    step.rounds[bucket].contribute(12, 0, 0, np.array([4, 4], np.float32))


@pytest.mark.parametrize(
    ("key", "error", "sentence"),
    [
        (Key(moment=Moment(epoch=1, step=5, attempt=1), lease_id=11), StaleEpoch, "epoch 1 is not in force, 2 is"),
        (Key(moment=Moment(epoch=2, step=4, attempt=1), lease_id=11), StaleStep, "step 4 attempt 1 is not open"),
        (Key(moment=Moment(epoch=2, step=5, attempt=0), lease_id=11), StaleStep, "step 5 attempt 0 is not open"),
        (Key(moment=MOMENT, lease_id=12), NotLeased, "lease 12 is not a lease of worker 0"),
    ],
)
def test_stale_or_foreign_lease_is_refused(step, key, error, sentence):
    with pytest.raises(error, match=sentence):
        step.lease(0, key)


def test_own_lease_is_found(step):
    assert step.lease(1, Key(moment=MOMENT, lease_id=12)) is BEE


def test_step_is_done_when_all_have_committed(step):
    contribute(step)
    assert step.rounds[FLAT].complete
    step.commit(ANT, report(1, stats(ANT), "aa"))
    assert not step.done
    assert step.uncommitted == [BEE]
    step.commit(ANT, report(1, stats(ANT), "aa"))
    step.commit(BEE, report(1, stats(BEE), "aa"))
    assert step.done
    totals = step.totals()
    assert (totals.total_weight, totals.global_loss) == (12, 6 / 12)
    assert (totals.num_correct, totals.num_predictions) == (9, 12)
    assert step.gradient_norm() == pytest.approx(math.sqrt(2))
    assert step.hashes == {0: "aa", 1: "aa"}


def test_norm_covers_all_buckets(step):
    contribute(step, Bucket("block", 0))
    contribute(step, Bucket("block", 1))
    assert step.gradient_norm() == pytest.approx(2)


def test_loss_is_weighted_not_a_mean_of_means():
    step = Step(moment=MOMENT, kind="evaluate", num_microbatches=3, leases=[ANT, BEE])
    step.commit(ANT, report(0, stats(ANT, weight=0, loss=0.0)[:1] + stats(ANT, weight=1, loss=1.0)[1:], ""))
    step.commit(BEE, report(0, stats(BEE, weight=3, loss=6.0), ""))
    assert step.totals().global_loss == 1.75


def test_loss_that_comes_later_is_added(step):
    step.begin(ANT, FLAT, SPEC, stats(ANT, loss=None))
    assert step.totals().global_loss is None
    contribution = stats(ANT)
    step.rounds[FLAT].begin(12, "bee", SPEC, {2: 4})
    step.rounds[FLAT].contribute(11, 0, 0, np.array([8, 8], np.float32))
    step.rounds[FLAT].contribute(12, 0, 0, np.array([8, 8], np.float32))
    step.commit(ANT, report(1, contribution, ""))
    assert step.totals().global_loss == 4 / 8


def test_no_weight_at_all_is_no_division(step):
    for lease in (ANT, BEE):
        step.begin(lease, FLAT, SPEC, stats(lease, weight=0, loss=0.0))
    for lease in (ANT, BEE):
        step.commit(lease, report(1, stats(lease, weight=0, loss=0.0), ""))
    assert step.done
    assert (step.totals().total_weight, step.totals().global_loss, step.gradient_norm()) == (0, 0.0, 0.0)


def test_other_microbatches_than_leased_are_refused(step):
    with pytest.raises(NotLeased, match=r"worker ant contributes micro-batches \[2\]; its lease is on \[0, 2\)"):
        step.begin(ANT, FLAT, SPEC, stats(BEE))
    assert not step.rounds


def test_weight_must_be_the_same_in_all_buckets(step):
    step.begin(ANT, Bucket("block", 0), SPEC, stats(ANT))
    with pytest.raises(WeightMismatch, match="gives micro-batch 0 weight or count 5; expected 4"):
        step.begin(ANT, Bucket("block", 1), SPEC, stats(ANT, weight=5))


def test_negative_weight_is_refused(step):
    with pytest.raises(WeightMismatch, match="weight or count -1; expected 0 to"):
        step.begin(ANT, FLAT, SPEC, stats(ANT, weight=-1))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_non_finite_loss_is_refused_by_name(step, loss):
    with pytest.raises(NonFinite, match="worker bee has loss") as caught:
        step.begin(BEE, FLAT, SPEC, stats(BEE, loss=loss))
    assert caught.value.metadata["bucket"] == "loss"


def test_commit_without_all_buckets_is_refused(step):
    step.begin(ANT, FLAT, SPEC, stats(ANT))
    with pytest.raises(SpecMismatch, match="incomplete: flat"):
        step.commit(ANT, report(1, stats(ANT), ""))


def test_workers_with_other_numbers_of_buckets_are_told(step):
    contribute(step)
    step.commit(ANT, report(1, stats(ANT), ""))
    with pytest.raises(BadRequest, match="worker bee commits lease 12 with 2 buckets, and has contributed to 1"):
        step.commit(BEE, report(2, stats(BEE), ""))


def test_second_contribution_is_refused(step):
    step.begin(ANT, FLAT, SPEC, stats(ANT))
    with pytest.raises(Duplicate):
        step.begin(ANT, FLAT, SPEC, stats(ANT))


def test_divergence_names_both():
    with pytest.raises(Diverged, match="ant has aaaa, bee has bbbb"):
        compare_hashes("step 5", {"ant": "aaaa", "bee": "bbbb", "cat": ""})


def test_evaluation_takes_no_gradients():
    step = Step(moment=MOMENT, kind="evaluate", num_microbatches=3, leases=[ANT, BEE])
    with pytest.raises(NotLeased, match="has no gradients"):
        step.begin(ANT, FLAT, SPEC, stats(ANT))
