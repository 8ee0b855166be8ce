"""One attempt of a step whose workers reduce among themselves: leases, commits, generations."""

import numpy as np
import pytest

from ayni.buckets import FLAT
from ayni.errors import BadRequest, LeaseRevoked, NotLeased, RoundRestarted, SpecMismatch, WeightMismatch
from ayni.tensors import TensorSpec
from coordinator_service.leases import Key, Lease, Moment
from coordinator_service.peer_steps import PeerStep
from tests.support.peer_groups import group, means, report, stats

MOMENT = Moment(epoch=2, step=5, attempt=1)
ANT = Lease(lease_id=11, worker_id=0, worker_name="ant", start=0, stop=2)
BEE = Lease(lease_id=12, worker_id=1, worker_name="bee", start=2, stop=3)
CAT = Lease(lease_id=13, worker_id=2, worker_name="cat", start=3, stop=3)
EXTRA = Lease(lease_id=14, worker_id=0, worker_name="ant", start=2, stop=3, is_extra=True)
MEANS = means(flat=3 * 65536, b0=100)
G1, G2 = group(1, (0, 1), others=(2,)), group(2, (0,), others=(2,))


@pytest.fixture
def step():
    return PeerStep(moment=MOMENT, num_microbatches=3, leases=[ANT, BEE, CAT], group=G1)


def commit(step, group, *leases):
    for lease in leases:
        step.commit(lease, report(group, lease, MEANS))


def test_it_is_done_when_all_have_committed_and_the_slices_make_up_every_bucket(step):
    commit(step, G1, ANT, CAT)
    assert not step.done
    assert step.uncommitted == [BEE]
    commit(step, G1, BEE, BEE)
    assert step.done
    assert (step.totals().total_weight, step.totals().global_loss) == (6, 0.5)
    norm = np.sqrt(sum(np.square(mean_N.astype(np.float64)).sum() for mean_N in MEANS.values()))
    assert step.gradient_norm() == pytest.approx(norm, rel=1e-12)
    assert len(step.gradient_hash) == 32
    assert [(lease.worker_name, weight) for lease, weight in step.contributions()] == [("ant", 4), ("bee", 2)]


def test_the_coordinator_reduces_nothing_of_it(step):
    with pytest.raises(NotLeased, match="the coordinator does not reduce flat, the workers of generation 1 do"):
        step.begin(ANT, FLAT, TensorSpec(dtype="float32", num_elements=2), stats(ANT))
    assert not step.rounds


def test_a_death_makes_all_commits_void_and_its_work_is_missing(step):
    commit(step, G1, ANT, BEE)
    change = step.end([BEE], "worker bee left: it died")
    step.regroup(G2)
    assert change.ended == (BEE,)
    assert step.orphans() == [(2, 3)]
    assert step.uncommitted == [ANT, CAT]
    step.add(EXTRA)
    assert step.orphans() == []
    commit(step, G2, ANT, EXTRA)
    assert not step.done
    commit(step, G2, CAT)
    assert step.done
    assert step.totals().total_weight == 6
    assert [lease.lease_id for lease, _ in step.contributions()] == [11, 14]


def test_what_the_dead_said_of_its_work_is_forgotten(step):
    commit(step, G1, ANT, BEE)
    step.end([BEE], "it died")
    step.regroup(G2)
    step.add(EXTRA)
    assert step.totals().total_weight == 4
    step.commit(EXTRA, report(G2, EXTRA, MEANS, microbatches=stats(EXTRA, weight=9)))
    assert step.totals().total_weight == 13


def test_what_the_living_said_of_theirs_is_not(step):
    commit(step, G1, ANT)
    step.regroup(G2)
    with pytest.raises(WeightMismatch):
        step.commit(ANT, report(G2, ANT, MEANS, microbatches=stats(ANT, weight=9)))


def test_a_commit_under_an_older_generation_is_refused(step):
    step.regroup(G2)
    with pytest.raises(RoundRestarted, match="generation 1 is over, 2 is in force"):
        commit(step, G1, ANT)
    assert not step.committed
    with pytest.raises(RoundRestarted):
        step.commit(ANT, report(G2, ANT, MEANS, generation=0, slices=()))
    commit(step, G2, ANT)
    with pytest.raises(RoundRestarted):
        commit(step, G1, ANT)
    with pytest.raises(BadRequest, match="there is no generation 3; 2 is the newest"):
        step.commit(ANT, report(G2, ANT, MEANS, generation=3))


def test_a_commit_under_a_lease_that_has_ended_is_refused(step):
    step.end([BEE], "it was late")
    with pytest.raises(LeaseRevoked, match="was taken back: it was late"):
        step.lease(1, Key(moment=MOMENT, lease_id=12))


def test_the_last_commit_finds_slices_that_are_missing(step):
    commit(step, G1, ANT, BEE)
    step.regroup(G2)
    step.end([BEE], "it died")
    step.add(EXTRA)
    commit(step, G2, CAT, EXTRA)
    with pytest.raises(SpecMismatch, match="num_buckets is 0; 2 is expected: slices of none were taken down"):
        step.commit(ANT, report(G2, ANT, MEANS, slices=()))
    assert not step.done


def test_workers_must_agree_on_the_number_of_buckets_within_a_generation(step):
    commit(step, G1, ANT)
    with pytest.raises(SpecMismatch, match="worker bee commits 3 buckets; 2 are expected since worker ant said so"):
        step.commit(BEE, report(G1, BEE, MEANS, num_buckets=3))
    step.regroup(G2)
    step.commit(BEE, report(G2, BEE, MEANS, num_buckets=3, slices=()))


def test_contributions_count_in_their_generation_and_show_for_ever_that_the_work_is_computed(step):
    assert step.note_contributed(0, [11, 12, 99])
    assert not step.note_contributed(0, [11])
    assert (step.has_sent(ANT), step.has_contributed(ANT), step.has_sent(BEE)) == (True, True, False)
    step.regroup(G2)
    assert (step.has_sent(ANT), step.has_contributed(ANT)) == (True, False)
    assert step.note_contributed(0, [11])


def test_nothing_is_done_without_anybody(step):
    step.end([ANT, BEE, CAT], "they died")
    assert not step.done
    assert step.orphans() == [(0, 2), (2, 3)]
