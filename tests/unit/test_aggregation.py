"""Joining the ranks' answers: no failure is lost, none is put on another block or key."""

from dataclasses import replace

import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.metadata import ParallelismMode
from ayni.blocks.objects import KeyOutcome, KeyReport, OutcomeState, Presence, PresenceReport, PresenceState
from ayni.blocks.transfers import AllFailed, BlockFailure, Failure, TransferOutcome, TransferResult, describe
from ayni.errors import Deadline, Fault, PeerLost, StorageFailed, UnknownLayout
from coordinator_service.aggregation import (
    Asked,
    divide,
    join_keys,
    join_presences,
    joined_error,
    outcome_of,
    refusal_of,
    undone,
)

TENSOR, REPLICATED = ParallelismMode.TENSOR_PARALLEL, ParallelismMode.REPLICATED_DATA
FULL = StorageFailed("the disk is full", place="/data", detail="ENOSPC")
ASKED = Asked(rank=2, destination_blocks=as_ids([7, 8, 9]))
DONE, FAILED = OutcomeState.DONE, OutcomeState.FAILED


def told(num_done: int, *failed: int, **changes) -> TransferResult:
    failures = tuple(BlockFailure(index=i, block=7 + i, failure=Failure.of(FULL)) for i in failed)
    outcome = TransferOutcome(rank=0, num_done=num_done, failures=failures)
    return TransferResult(outcomes=(replace(outcome, **changes),))


def outcomes(*states: OutcomeState, size_bytes: int = 0) -> KeyReport:
    failure = Failure.of(FULL)
    return KeyReport(
        outcomes=tuple(
            KeyOutcome(state=s, size_bytes=size_bytes, failure=failure if s is FAILED else None) for s in states
        )
    )


def test_outcome_has_the_groups_rank_and_keeps_what_failed():
    outcome = outcome_of(ASKED, told(2, 1, transferred_bytes=20, engines=("shm",)))
    assert (outcome.rank, outcome.num_done, outcome.transferred_bytes) == (2, 2, 20)
    assert [(f.index, f.block, f.failure.reason) for f in outcome.failures] == [(1, 8, "STORAGE_FAILED")]


def test_outcome_of_a_share_names_the_places_of_the_whole_request():
    asked = Asked(rank=1, destination_blocks=as_ids([7, 8, 9]), places=as_ids([1, 4, 7]))
    assert [f.index for f in outcome_of(asked, told(1, 0, 2)).failures] == [1, 7]
    assert [f.index for f in undone(asked, FULL).failures] == [1, 4, 7]


def test_outcome_of_a_share_of_which_nothing_is_done_costs_one_failure():
    asked = Asked(rank=1, destination_blocks=as_ids(range(1 << 20)), places=as_ids(range(1, 1 << 21, 2)))
    outcome = undone(asked, FULL)
    assert isinstance(outcome.failures, AllFailed)
    last = outcome.failures[-1]
    assert (last.index, last.block, outcome.failures[0].index) == ((1 << 21) - 1, (1 << 20) - 1, 1)


@pytest.mark.parametrize(
    "result", [told(2), told(3, 1), told(0), TransferResult(), TransferResult(outcomes=told(3).outcomes * 2)]
)
def test_answer_that_does_not_account_for_every_block_is_a_fault_of_all(result):
    outcome = outcome_of(ASKED, result)
    assert (outcome.num_done, [f.block for f in outcome.failures]) == (0, [7, 8, 9])
    assert {f.failure.reason for f in outcome.failures} == {"FAULT"}


def test_miscounted_answer_keeps_whether_bytes_may_land():
    assert not outcome_of(ASKED, told(2, quiesced=False)).quiesced


def test_rank_that_failed_without_blocks_is_not_done():
    nothing = Asked(rank=0, destination_blocks=as_ids([]))
    assert not undone(nothing, FULL).is_done
    assert outcome_of(nothing, told(0)).is_done


@pytest.mark.fact("T121", "T122")
def test_every_rank_that_failed_is_in_the_text():
    refused = undone(
        Asked(rank=0, destination_blocks=as_ids([7])), UnknownLayout("no disk layout", layout="disk"), is_refusal=True
    )
    failed = outcome_of(ASKED, told(2, 1))
    done = outcome_of(Asked(rank=1, destination_blocks=ASKED.destination_blocks), told(3))
    text = describe(TransferResult(outcomes=(refused, done, failed)), "remote onboard")
    assert "rank 0 refused: UNKNOWN_LAYOUT: no disk layout" in text
    assert "rank 2: 1 of 3 blocks, first block 8: STORAGE_FAILED: the disk is full" in text
    assert "rank 1" not in text


@pytest.mark.fact("T122")
def test_joined_error_names_every_rank_and_is_of_the_lowest_ones_kind():
    error = joined_error("connecting", {2: ConnectionError("gone"), 1: FULL})
    assert isinstance(error, StorageFailed)
    assert error.metadata == {"place": "/data", "detail": "ENOSPC", "rank": "1"}
    assert "connecting failed on 2 of the group's ranks: rank 1: StorageFailed: the disk is full; rank 2: " in str(
        error
    )
    assert isinstance(joined_error("x", {0: ConnectionError("gone"), 1: FULL}), ConnectionError)
    assert isinstance(joined_error("x", {0: KeyError("a")}), Fault)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(FULL, StorageFailed), (ConnectionResetError("x"), PeerLost), (TimeoutError(), Deadline), (KeyError("x"), Fault)],
)
def test_whatever_a_rank_raises_is_a_refusal(error, kind):
    refusal = refusal_of(error, "rank 3")
    assert type(refusal) is kind
    assert error is FULL or "rank 3" in refusal.message


@pytest.mark.fact("T123")
def test_key_fails_only_where_a_rank_failed_it_and_order_is_kept():
    answers = [outcomes(DONE, DONE, DONE, size_bytes=5), outcomes(DONE, FAILED, DONE, size_bytes=7)]
    report = join_keys(3, [range(3)] * 2, answers)
    assert [(o.state, o.size_bytes) for o in report.outcomes] == [(DONE, 12), (FAILED, 7), (DONE, 12)]
    failure = report.outcomes[1].failure
    assert failure is not None
    assert failure.message == "rank 1: the disk is full"
    assert report.by_rank == (answers[0].outcomes, answers[1].outcomes)


def test_key_is_already_present_only_when_it_is_on_every_rank():
    already = OutcomeState.ALREADY_PRESENT
    report = join_keys(2, [range(2)] * 2, [outcomes(already, already), outcomes(already, DONE)])
    assert [o.state for o in report.outcomes] == [already, DONE]


def test_first_failure_by_rank_wins():
    report = join_keys(1, [range(1)] * 3, [outcomes(DONE), outcomes(OutcomeState.ABSENT), outcomes(FAILED)])
    assert report.outcomes[0].state is OutcomeState.ABSENT
    assert not report.is_done


@pytest.mark.fact("T123")
def test_keys_divided_among_ranks_succeed_with_their_rank():
    shares = divide(5, 2, REPLICATED)
    assert [list(share) for share in shares] == [[0, 2, 4], [1, 3]]
    report = join_keys(5, shares, [outcomes(DONE, FAILED, DONE), outcomes(DONE, DONE)])
    assert [o.state for o in report.outcomes] == [DONE, DONE, FAILED, DONE, DONE]
    assert [outcome is None for outcome in report.by_rank[1]] == [True, False, True, False, True]
    assert divide(5, 2, TENSOR) == [range(5)] * 2


def test_rank_that_raised_or_miscounted_fails_its_keys_only():
    lost = PeerLost("rank 0 is gone", peer="rank 0", detail="")
    report = join_keys(4, divide(4, 2, REPLICATED), [lost, outcomes(DONE, DONE)])
    assert [o.state for o in report.outcomes] == [FAILED, DONE, FAILED, DONE]
    report = join_keys(2, [range(2)] * 2, [outcomes(DONE, DONE), outcomes(DONE)])
    assert {o.failure.reason for o in report.outcomes if o.failure} == {"FAULT"}
    assert not any(outcome.is_success for outcome in report.outcomes)


@pytest.mark.fact("T124")
def test_presence_is_rank_0s_with_disagreements_beside_it():
    present, absent = Presence(state=PresenceState.PRESENT, size_bytes=4), Presence(state=PresenceState.ABSENT)
    first, second = (
        PresenceReport(presences=(present, absent, present)),
        PresenceReport(presences=(present, present, absent)),
    )
    report = join_presences(3, [first, second])
    assert report.presences == first.presences
    assert report.disagreements == (1, 2)
    assert report.by_rank == (first.presences, second.presences)


def test_rank_that_could_not_be_asked_is_unknown_never_absent():
    lost = PeerLost("gone", peer="", detail="")
    report = join_presences(2, [lost, PresenceReport(presences=())])
    assert {one.state for rank in report.by_rank for one in rank} == {PresenceState.UNKNOWN}
    assert report.presences[0].failure == Failure.of(lost)


def test_group_of_nobody_has_nothing_and_stores_nothing():
    assert [one.state for one in join_presences(2, []).presences] == [PresenceState.ABSENT] * 2
    report = join_keys(2, [], [])
    assert [one.state for one in report.outcomes] == [FAILED] * 2
    assert join_keys(0, [range(0)], [KeyReport(outcomes=())]).outcomes == ()
