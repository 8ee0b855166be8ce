"""What every BlockWorker must do, near or far, one or many: transfers of its own, and how they end.

Inherit from the classes here and in `block_conformance_remote` in a file of tests, and give them the fixture
`block_group`: a function that opens a `BlockGroup`, for a test of its own each time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.transfers import TransferFailed, TransferOptions, TransferResult
from ayni.blocks.worker import Notification
from tests.support.block_groups import BlockGroup, Contents, OpenGroup, soon

DEVICE, HOST = LocalLayout(tier=Tier.DEVICE), LocalLayout(tier=Tier.HOST)
OBJECTS, NOWHERE = LocalLayout(tier=Tier.OBJECT), LocalLayout(tier=Tier.HOST, resource_id=7)
WHOLE_TEST_S = 60.0
SHORT = TransferOptions(timeout_s=1.5, drain_s=0.25)
"""Of transfers that are to run out of time."""


def conforms(test: Callable[[Any, BlockGroup], Awaitable[None]]) -> Callable[[Any, OpenGroup], None]:
    """Makes a test of a coroutine function that takes an open group."""

    def run(self: Any, block_group: OpenGroup) -> None:
        async def opened() -> None:
            async with block_group() as group:
                await test(self, group)

        asyncio.run(asyncio.wait_for(opened(), WHOLE_TEST_S))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def refused(notification: Notification, group: BlockGroup, reason: str) -> TransferResult:
    """Awaits a transfer that every rank must refuse for this reason, and returns its result."""
    with pytest.raises(TransferFailed) as caught:
        await soon(notification, "a refusal")
    result = caught.value.result
    assert caught.value.reasons == {reason}, str(caught.value)
    assert [outcome.rank for outcome in result.outcomes] == list(range(group.num_ranks))
    assert all(outcome.refusal and outcome.num_done == 0 for outcome in result.outcomes)
    assert result.quiesced
    await soon(notification.quiesced(), "the end of a refused transfer", 1.0)
    return result


async def done(notification: Notification, group: BlockGroup, num_blocks: int, block_bytes: int) -> None:
    """Awaits a transfer that must succeed on every rank."""
    result: TransferResult = await soon(notification, "a transfer")
    assert result.is_done
    assert [outcome.rank for outcome in result.outcomes] == list(range(group.num_ranks))
    assert {outcome.num_done for outcome in result.outcomes} == {num_blocks}
    assert result.transferred_bytes == num_blocks * block_bytes * group.num_ranks
    assert result.quiesced


class LocalConformance:
    """Transfers between a worker's own layouts."""

    @conforms
    async def test_answers_come_from_every_rank_in_order(self, group: BlockGroup) -> None:
        assert group.worker.worker_count == group.num_ranks
        metadata = await soon(group.worker.export_metadata(), "an export")
        assert [one.rank for one in metadata] == list(range(group.num_ranks))
        assert {(one.instance_id, one.epoch) for one in metadata} == {(group.config.instance_id, group.config.epoch)}
        for one in metadata:
            assert [layout.place for layout in one.layouts] == group.places
            assert {layout.handle.owner_id for layout in one.layouts} == {one.owner_id}

    @conforms
    async def test_a_configuration_may_be_repeated_but_not_changed_within_its_epoch(self, group: BlockGroup) -> None:
        first = await soon(group.worker.export_metadata(), "an export")
        again = await soon(group.worker.configure_layouts(group.config), "the same configuration")
        assert [one.layouts for one in again.metadata] == [one.layouts for one in first]

    @pytest.mark.fact("T93")
    @conforms
    async def test_a_copy_writes_the_named_blocks_and_no_other(self, group: BlockGroup) -> None:
        contents = await Contents(group, 1).fill()
        sources, destinations = [9, 0, 1, 2, 14, 9], [3, 4, 5, 1, 0, 15]
        for source, destination in permutations(group.places, 2):
            copy = group.worker.execute_local_transfer(source, destination, sources, destinations)
            await done(copy, group, len(sources), group.shape.block_bytes)
            contents.copied(contents, (source.tier, destination.tier), sources, destinations)
            await contents.check()

    @conforms
    async def test_a_copy_within_one_layout(self, group: BlockGroup) -> None:
        contents = await Contents(group, 2).fill()
        copy = group.worker.execute_local_transfer(HOST, HOST, range(4), range(8, 12))
        await done(copy, group, 4, group.shape.block_bytes)
        contents.copied(contents, (Tier.HOST, Tier.HOST), range(4), range(8, 12))
        await contents.check()

    @pytest.mark.fact("T97")
    @conforms
    async def test_options_are_empty_and_layers_can_be_chosen(self, group: BlockGroup) -> None:
        plain = TransferOptions()
        assert (plain.layers, plain.bounce, plain.write_notification, plain.engine) == (None, None, None, "")
        layers = replace(plain, layers=(1, 2))
        assert layers.write_notification is None
        assert replace(plain, write_notification=3).layers is None
        contents = await Contents(group, 3).fill()
        copy = group.worker.execute_local_transfer(DEVICE, HOST, [2, 3], [8, 6], layers)
        await done(copy, group, 2, group.shape.block_bytes // group.shape.num_layers)
        contents.copied(contents, (Tier.DEVICE, Tier.HOST), [2, 3], [8, 6], layers=(1, 2))
        await contents.check()

    @pytest.mark.parametrize(
        ("source", "destination", "sources", "destinations", "reason"),
        [
            (DEVICE, HOST, [0, 1000], [0, 1], "UNKNOWN_BLOCK"),
            (DEVICE, HOST, [0, 1], [0, 1000], "UNKNOWN_BLOCK"),
            (DEVICE, HOST, [0, 1, 2], [4, 5, 4], "BAD_REQUEST"),
            (DEVICE, HOST, [0, 1, 2], [4, 5], "BAD_REQUEST"),
            (HOST, HOST, [0, 1, 2], [2, 3, 4], "BAD_REQUEST"),
            (NOWHERE, HOST, [0], [1], "UNKNOWN_LAYOUT"),
            (DEVICE, NOWHERE, [0], [1], "UNKNOWN_LAYOUT"),
            (OBJECTS, HOST, [0], [1], "BAD_REQUEST"),
            (HOST, OBJECTS, [0], [1], "BAD_REQUEST"),
        ],
    )
    def test_what_is_not_possible_is_refused_before_a_byte_moves(
        self,
        block_group: OpenGroup,
        source: LocalLayout,
        destination: LocalLayout,
        sources: Sequence[int],
        destinations: Sequence[int],
        reason: str,
    ) -> None:
        @conforms
        async def test(_: object, group: BlockGroup) -> None:
            contents = await Contents(group, 4).fill()
            copy = group.worker.execute_local_transfer(source, destination, sources, destinations)
            result = await refused(copy, group, reason)
            assert result.failed_indices() == set(range(len(destinations)))
            await contents.check()

        test(self, block_group)

    @conforms
    async def test_no_blocks_are_a_success(self, group: BlockGroup) -> None:
        await done(group.worker.execute_local_transfer(DEVICE, HOST, [], []), group, 0, 0)


class EndConformance:
    """How transfers end when something stands in their way."""

    @conforms
    async def test_many_may_wait_for_one_end(self, group: BlockGroup) -> None:
        await Contents(group, 5).fill()
        with group.stalled():
            copy = group.worker.execute_local_transfer(DEVICE, HOST, [0], [1])
            assert copy.could_yield()
            waiting = [asyncio.ensure_future(copy.result()) for _ in range(3)]
            impatient = asyncio.ensure_future(copy.result())
            await asyncio.sleep(0)
            impatient.cancel()
        results = await soon(asyncio.gather(*waiting), "three waits for one transfer")
        assert all(result.is_done and result is results[0] for result in results)
        assert not copy.could_yield()
        assert await soon(copy, "a transfer that has ended", 1.0) is results[0]
        copy.cancel()
        assert (await copy.result()).is_done

    @conforms
    async def test_a_block_that_is_being_written_is_busy(self, group: BlockGroup) -> None:
        contents = await Contents(group, 6).fill()
        with group.stalled():
            first = group.worker.execute_local_transfer(DEVICE, HOST, [0, 1], [4, 5])
            second = group.worker.execute_local_transfer(DEVICE, HOST, [2, 3], [5, 6])
            await refused(second, group, "BLOCK_BUSY")
        await done(first, group, 2, group.shape.block_bytes)
        contents.copied(contents, (Tier.DEVICE, Tier.HOST), [0, 1], [4, 5])
        await contents.check()
        await _moves(group, contents, [2, 3], [5, 6])

    @conforms
    async def test_a_cancelled_transfer_ends_and_says_which_blocks_are_not_done(self, group: BlockGroup) -> None:
        contents = await Contents(group, 7).fill()
        options = replace(SHORT, timeout_s=2.0)
        with group.stalled():
            copy = group.worker.execute_local_transfer(DEVICE, HOST, range(10), range(3, 13), options)
            await asyncio.sleep(0)
            copy.cancel()
            copy.cancel()
        result = await soon(copy.result(), "a cancelled transfer", options.timeout_s + 1.0)
        for outcome in result.outcomes:
            assert outcome.num_done + len(outcome.failures) == 10
            # Copies in hand may have ended well.
            assert {f.failure.reason for f in outcome.failures} <= {"CANCELLED"}
        if not result.is_done:
            with pytest.raises(TransferFailed):
                await soon(copy, "a cancelled transfer", 1.0)
        await _is_free_again(group, copy, contents, range(3, 13))

    @conforms
    async def test_a_transfer_ends_by_its_deadline(self, group: BlockGroup) -> None:
        contents = await Contents(group, 8).fill()
        began = asyncio.get_running_loop().time()
        with group.stalled():
            copy = group.worker.execute_local_transfer(DEVICE, HOST, range(10), range(3, 13), SHORT)
            result = await soon(copy.result(), "a transfer without time", SHORT.timeout_s + 1.0)
            assert asyncio.get_running_loop().time() - began < SHORT.timeout_s + 1.0
        assert [outcome.rank for outcome in result.outcomes] == list(range(group.num_ranks))
        for outcome in result.outcomes:
            assert outcome.num_done + len(outcome.failures) == 10
            assert {f.failure.reason for f in outcome.failures} == {"DEADLINE"}
        await _is_free_again(group, copy, contents, range(3, 13))


async def _moves(group: BlockGroup, contents: Contents, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copies blocks and checks all others."""
    copy = group.worker.execute_local_transfer(DEVICE, HOST, sources, destinations)
    await done(copy, group, len(sources), group.shape.block_bytes)
    contents.copied(contents, (Tier.DEVICE, Tier.HOST), sources, destinations)
    await contents.check()


async def _is_free_again(group: BlockGroup, copy: Notification, contents: Contents, blocks: range) -> None:
    """Waits until no byte of a failed transfer can land; then its blocks can be written."""
    await soon(copy.quiesced(), "the last byte of a failed transfer", 6.0)
    contents.undefined(Tier.HOST, blocks)
    await contents.check()
    again = group.worker.execute_local_transfer(DEVICE, HOST, blocks, blocks)
    await done(again, group, len(blocks), group.shape.block_bytes)
