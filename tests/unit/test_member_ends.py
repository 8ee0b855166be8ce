"""The end of a membership while a worker reduces with others."""

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

import pytest

from ayni.buckets import FLAT
from ayni.errors import StaleEpoch, StepVoided
from ayni.step_values import Origin
from tests.support.group_scene import FakeExchange, contribution, lease, run
from worker_agent.assignment_frames import Frame
from worker_agent.exchange import Outcome
from worker_agent.group_exchange import Brought
from worker_agent.member import Member
from worker_agent.messages import Membership
from worker_agent.session import ShardAssignment
from worker_agent.standing import Standing


class LosesCancellations(FakeExchange):
    """An exchange that tries again for as long as its group is in force.

    Its cancellations meet failures of the same moment, of which `asyncio.TaskGroup` raises the failure alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_lost = 0

    async def reduce(self, brought: Brought) -> Outcome:
        while self.terms:
            try:
                await super().reduce(brought)
            except asyncio.CancelledError:
                self.num_lost += 1
        raise StaleEpoch("the group is over", epoch=1, current_epoch=0)


class OneLease:
    """A coordinator that gives one lease and then says nothing."""

    address = "nowhere:1"

    def __init__(self, given: ShardAssignment) -> None:
        self.given = given
        self.is_closed = False

    async def assignments(self, steps: int, sha256: str, origin: Origin | None) -> AsyncGenerator[Frame]:
        yield self.given
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.is_closed = True


def member(coordinator: OneLease, standing: Standing) -> Member:
    membership = Membership(
        worker_id=0,
        session="s",
        total_workers=2,
        run_id="r",
        lease=timedelta(seconds=10),
        heartbeat_interval=timedelta(seconds=1),
        wire_type="float32",
    )
    known: Any = coordinator
    return Member(known, membership, timedelta(seconds=60), standing, lambda offer: None)


def test_a_membership_ends_although_a_cancellation_gets_lost():
    async def scenario() -> None:
        exchange, standing, coordinator = LosesCancellations(), Standing(), OneLease(lease())
        standing.peers.exchanges["sharded"] = exchange
        ending = member(coordinator, standing)
        ending.listen()
        taken = await ending.next_assignment()
        assert taken is not None
        work = asyncio.create_task(ending.contribute(taken, FLAT, contribution(taken)))
        await exchange.called.wait()
        await ending.abandon("the coordinator was lost")
        assert exchange.num_lost == 1
        assert coordinator.is_closed
        with pytest.raises(StepVoided, match="the coordinator was lost"):
            await work

    run(scenario())
