"""Streams to an owner of slices that break, and groups that end."""

import asyncio
from dataclasses import replace

import pytest

from ayni.errors import (
    Deadline,
    RoundRestarted,
    StaleEpoch,
)
from ayni.reduce.digest import SEGMENT
from tests.support.slice_rounds import (
    MOMENT,
    SECRET,
    gradients,
    offer,
    opened,
    reference,
    run,
    send,
    take,
    terms,
    whole_part,
)
from worker_agent.slice_rounds import SliceRounds


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
