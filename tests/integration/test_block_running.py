"""How a transfer tells of many blocks that failed for one reason, and of those that did not."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.transfers import AllFailed, BlockFailure, Failure, TransferOptions, TransferOutcome
from ayni.errors import BlockBusy, Fault, PeerLost
from worker_agent.blocks.engine import MoveResult, Ticket
from worker_agent.blocks.running import Job, Release, Transfers

LOST, FAULT = Failure.of(PeerLost("lost", peer="x", detail="x")), Failure.of(Fault("torn", detail="x"))
MANY = 1 << 18


def nothing() -> None:
    """Nothing is held."""


def run(
    results: Sequence[MoveResult | None], num_blocks: int = MANY, claim: Callable[[], Release] = lambda: nothing
) -> TransferOutcome:
    """Runs a job of one ticket for each result; None is a ticket that is late."""

    async def begin(_deadline: float) -> Sequence[Ticket]:
        tickets = [Ticket(nothing) for _ in results]
        for ticket, result in zip(tickets, results, strict=True):
            ticket.quiesced.set_result(None)
            if result:
                ticket.outcome.set_result(result)
        return tickets

    async def outcome() -> TransferOutcome:
        job = Job(
            what="copy",
            rank=1,
            destination_blocks=as_ids(range(100, 100 + num_blocks)),
            block_bytes=8,
            engines=("grpc",),
            route="",
            claim=claim,
            begin=begin,
        )
        notification = Transfers().start(job, TransferOptions(timeout_s=0.1, drain_s=0.01))
        return (await notification.result()).outcomes[0]

    return asyncio.run(outcome())


def busy() -> Release:
    raise BlockBusy("busy", layout="x", block=1)


@pytest.mark.parametrize(
    ("results", "reason", "claim"),
    [
        ([None], "DEADLINE", lambda: nothing),
        ([MoveResult(failures=tuple((index, LOST) for index in range(MANY)))], "PEER_LOST", lambda: nothing),
        ([], "BLOCK_BUSY", busy),
    ],
    ids=["late", "lost", "refused"],
)
def test_all_blocks_that_failed_for_one_reason_are_one_failure(results, reason, claim):
    outcome = run(results, claim=claim)
    assert isinstance(outcome.failures, AllFailed)
    last = outcome.failures[-1]
    assert (last.index, last.block, last.failure.reason) == (MANY - 1, MANY + 99, reason)
    assert (outcome.num_done, len(outcome.failures)) == (0, MANY)


def test_what_failed_before_the_rest_was_late_keeps_its_reason():
    outcome = run([MoveResult(failures=((1, LOST),)), None], num_blocks=3)
    assert [failure.failure.reason for failure in outcome.failures] == ["DEADLINE", "PEER_LOST", "DEADLINE"]


def test_failures_of_several_tickets_are_in_order_and_the_first_reason_counts():
    outcome = run([MoveResult(failures=((2, LOST),)), MoveResult(failures=((0, FAULT), (2, FAULT)))], num_blocks=3)
    assert outcome.failures == (
        BlockFailure(index=0, block=100, failure=FAULT),
        BlockFailure(index=2, block=102, failure=LOST),
    )
    assert outcome.num_done == 1
