"""How transfers of a group end: cancelled, late, waited for, cut short."""

import asyncio
import time

import pytest

from ayni.blocks.transfers import (
    TransferFailed,
    TransferOptions,
    TransferOutcome,
    TransferResult,
)
from tests.support.fake_ranks import DEVICE, HOST
from tests.support.group_pairs import joined, run


def test_cancel_reaches_every_rank_and_waiters_do_not_cancel():
    async def test():
        ours, _, group, _ = await joined(2, 2)
        gate = asyncio.Event()
        ours[0].gate = ours[1].gate = gate
        note = group.execute_local_transfer(HOST, DEVICE, [0, 1], [2, 3])
        waiter = asyncio.ensure_future(note.result())
        await ours[1].arrived.wait()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert note.could_yield()
        note.cancel()
        with pytest.raises(TransferFailed) as caught:
            await note
        assert caught.value.reasons == {"CANCELLED"}
        await note.quiesced()
        note.cancel()

    run(test())


@pytest.mark.fact("T125")
def test_rank_that_never_answers_is_late_and_its_blocks_stay_busy_until_it_does():
    async def test():
        ours, _, group, _ = await joined(2, 2)
        ours[1].gate, ours[1].is_frozen = asyncio.Event(), True
        start = time.monotonic()
        note = group.execute_local_transfer(HOST, DEVICE, [0], [2], TransferOptions(timeout_s=0.2, drain_s=0.1))
        with pytest.raises(TransferFailed, match=r"rank 1: 1 of 1 blocks, .*DEADLINE.*bytes may still land") as caught:
            await note
        assert 0.2 <= time.monotonic() - start < 1.2
        assert [(one.is_done, one.quiesced) for one in caught.value.result.outcomes] == [(True, True), (False, False)]
        quiesced = asyncio.ensure_future(note.quiesced())
        await asyncio.wait({quiesced}, timeout=0.01)
        assert not quiesced.done()
        ours[1].gate.set()
        await quiesced
        ours[1].gate = None
        await group.execute_local_transfer(HOST, DEVICE, [0], [2])

    run(test())


def test_failed_rank_is_waited_for_until_its_bytes_have_landed():
    async def test():
        ours, _, group, _ = await joined(2, 2)
        draining = _Draining()
        ours[1].execute_local_transfer = lambda *_: draining
        note = group.execute_local_transfer(HOST, DEVICE, [0], [2], TransferOptions(timeout_s=5, drain_s=2))
        await draining.asked.wait()
        assert note.could_yield()
        draining.landed.set()
        result = await note.result()
        assert result.quiesced
        assert not result.is_done

    run(test())


def test_closing_ends_what_is_under_way():
    async def test():
        ours, _, group, _ = await joined(2, 2)
        ours[0].gate, ours[0].is_frozen = asyncio.Event(), True
        note = group.execute_local_transfer(HOST, DEVICE, [0], [2])
        await ours[1].task
        await group.close()
        result = await note.result()
        assert [one.is_done for one in result.outcomes] == [False, True]
        assert "CANCELLED" in str(TransferFailed(result))
        ours[0].gate.set()
        await ours[0].task

    run(test())


class _Draining:
    """A transfer that failed at once, and whose last bytes land later."""

    def __init__(self) -> None:
        self.landed, self.asked = asyncio.Event(), asyncio.Event()

    async def result(self) -> TransferResult:
        failed = TransferOutcome(rank=1, num_done=0, failures=(), quiesced=False)
        return TransferResult(outcomes=(failed,))

    async def quiesced(self) -> None:
        self.asked.set()
        await self.landed.wait()

    def cancel(self) -> None:
        """Does nothing."""
