"""Transfers of a group: all ranks at once, one end, every rank's outcome; bytes where they belong and nowhere else."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import AxisOrder, Tier
from ayni.blocks.transfers import (
    Bounce,
    ObjectKeys,
    RemoteBlocks,
    TransferFailed,
    TransferOptions,
    TransferOutcome,
    TransferResult,
)
from ayni.errors import UnknownLayout
from tests.support.fake_ranks import DEVICE, HOST
from tests.support.group_pairs import FULL, REPLICATED, A, B, check_moved, copies, ended, joined, leader, run, whole


@pytest.mark.fact("T98", "T101")
def test_pull_goes_from_there_to_here_on_every_rank():
    async def test():
        ours, theirs, group, _ = await joined(2, 2)
        for rank in theirs:
            rank.array(HOST)[[0, 1, 2, 3]] = 0xAA
        for rank in ours:
            rank.array(HOST)[[4, 5, 6, 7]] = 0xBB
        before = copies(theirs)
        await group.execute_remote_onboard_for_instance(B, Tier.HOST, range(4), HOST, range(4, 8))
        for rank in ours:
            assert (rank.array(HOST)[4:8] == 0xAA).all()
        assert all((rank.array(HOST) == old).all() for rank, old in zip(theirs, before, strict=True))

    run(test())


@pytest.mark.fact("T99", "T101")
def test_groups_pull_from_one_another():
    async def test():
        ours, theirs, group, other = await joined(2, 2)
        await other.connect_remote(A, await group.export_metadata())
        a, b = whole(ours).copy(), whole(theirs).copy()
        await group.execute_remote_onboard_for_instance(B, Tier.HOST, [3, 1], HOST, [8, 9])
        await other.execute_remote_onboard_for_instance(A, Tier.HOST, [2, 0, 5], HOST, [10, 12, 11])
        check_moved(whole(ours), a, b, [3, 1], [8, 9])
        check_moved(whole(theirs), b, a, [2, 0, 5], [10, 12, 11])

    run(test())


@pytest.mark.fact("T100", "T101")
def test_blocks_survive_a_round_trip_through_a_group_of_another_size():
    async def test():
        ours, theirs, group, other = await joined(2, 4)
        await other.connect_remote(A, await group.export_metadata())
        original, before = whole(theirs).copy(), whole(ours).copy()
        await group.execute_remote_onboard_for_instance(B, Tier.HOST, range(6), HOST, range(6, 12))
        check_moved(whole(ours), before, original, list(range(6)), list(range(6, 12)))
        for rank in theirs:
            rank.array(HOST)[:] = 0
        waves = [([6, 7, 8], [10, 11, 12]), ([11, 10, 9], [5, 4, 3])]
        await asyncio.gather(
            *(
                ended(other.execute_remote_onboard_for_instance(A, Tier.HOST, *wave[:1], HOST, wave[1]))
                for wave in waves
            )
        )
        check_moved(whole(theirs), np.zeros_like(original), original, [0, 1, 2, 5, 4, 3], [10, 11, 12, 5, 4, 3])

    run(test(), 60)


@pytest.mark.fact("T50", "T100", "T101")
@pytest.mark.parametrize(("here", "there"), [(1, 3), (3, 2), (2, 3), (4, 6), (6, 4), (12, 1)])
def test_any_two_sizes_that_divide_the_heads_exchange_blocks(here, there):
    async def test():
        ours, theirs, group, _ = await joined(here, there, 12, shape={"num_blocks": 8})
        before = whole(ours).copy()
        result = await group.execute_remote_onboard_for_instance(B, Tier.DEVICE, [7, 0, 7], HOST, [1, 2, 4])
        check_moved(whole(ours), before, whole(theirs, DEVICE), [7, 0, 7], [1, 2, 4])
        assert [(one.rank, one.num_done) for one in result.outcomes] == [(rank, 3) for rank in range(here)]

    run(test())


def test_ranks_that_hold_everything_pull_whole_blocks():
    async def test():
        ours, theirs, group, _ = await joined(3, 2, 4, mode=REPLICATED)
        before = copies(ours)
        await group.execute_remote_onboard_for_instance(B, Tier.HOST, [1], HOST, [2])
        for rank, old in zip(ours, before, strict=True):
            check_moved(rank.array(HOST), old, theirs[rank.metadata.rank % 2].array(HOST), [1], [2])

    run(test())


@pytest.mark.parametrize("there", [2, 4])
def test_every_option_reaches_every_rank(there):
    async def test():
        ours, theirs, group, _ = await joined(2, there)
        before, lent = whole(ours).copy(), ours[1].metadata.layouts[1].handle
        options = TransferOptions(
            layers=(1, 2),
            bounce=Bounce(layout=lent, blocks=as_ids([15])),
            source_axis_order=AxisOrder.NHD,
            destination_axis_order=AxisOrder.NHD,
            write_notification=7,
            engine="fake",
            checksum=True,
            route="r",
            timeout_s=9,
            drain_s=1,
        )
        await group.execute_remote_onboard_for_instance(B, Tier.HOST, [1, 2], HOST, [3, 4], options)
        now = whole(ours)
        check_moved(now[:, 1:], before[:, 1:], whole(theirs)[:, 1:], [1, 2], [3, 4])
        assert (now[:, 0] == before[:, 0]).all()
        for rank in ours:
            _, told = rank.named("execute_remote_pull")[0]
            assert told.bounce.layout == rank.metadata.layouts[1].handle
            assert replace(told, bounce=None) == replace(options, bounce=None)

    run(test())


def test_unknown_layout_to_bounce_through_is_refused_before_anybody_is_asked():
    async def test():
        ours, theirs, group, _ = await joined(2, 2)
        options = TransferOptions(bounce=Bounce(layout=theirs[0].metadata.layouts[0].handle, blocks=as_ids([1])))
        note = group.execute_local_transfer(HOST, DEVICE, [1], [2], options)
        with pytest.raises(TransferFailed) as caught:
            await note
        assert caught.value.reasons == {"UNSUPPORTED"}
        assert not any(rank.named("execute_local_transfer") for rank in ours)

    run(test())


def test_local_transfer_copies_the_same_blocks_on_every_rank():
    async def test():
        ours, _, group, _ = await joined(3, 3, 12)
        before = copies(ours, DEVICE)
        result = await group.execute_local_transfer(HOST, DEVICE, [0, 5], [9, 3])
        for rank, old in zip(ours, before, strict=True):
            check_moved(rank.array(DEVICE), old, rank.array(HOST), [0, 5], [9, 3])
        assert [one.rank for one in result.outcomes] == [0, 1, 2]
        assert result.transferred_bytes == 6

    run(test())


@pytest.mark.fact("T119")
def test_all_ranks_and_calls_copy_at_the_same_time():
    """Each of two calls waits inside its copy, on each of three ranks, until all six are there."""

    async def test():
        ours, _, group, _ = await joined(3, 3, 12)
        meeting = threading.Barrier(6, timeout=10)
        for rank in ours:
            rank.copying = meeting.wait
        notes = [group.execute_remote_onboard_for_instance(B, Tier.HOST, [i], HOST, [i + 4]) for i in range(2)]
        for note in notes:
            await note

    run(test())


@pytest.mark.fact("T121")
def test_group_ends_after_its_last_rank_when_an_earlier_one_failed():
    async def test():
        ours, _, group, _ = await joined(3, 3, 12)
        ours[1].fails = {0: FULL}
        ours[2].gate = asyncio.Event()
        note = group.execute_local_transfer(HOST, DEVICE, [0, 1], [2, 3])
        await ours[2].arrived.wait()
        await ours[0].task
        await ours[1].task
        assert note.could_yield()
        ours[2].gate.set()
        with pytest.raises(
            TransferFailed, match="local transfer failed: rank 1: 1 of 2 blocks, first block 2"
        ) as caught:
            await note
        assert [(one.rank, one.num_done) for one in caught.value.result.outcomes] == [(0, 2), (1, 1), (2, 2)]
        assert caught.value.result.failed_indices() == {0}

    run(test())


@pytest.mark.fact("T121", "T122")
def test_refusal_of_one_rank_skips_no_other_and_all_causes_are_in_the_text():
    async def test():
        ours, _, group, _ = await joined(4, 4)
        ours[0].raises["execute_local_transfer"] = UnknownLayout("no disk here", layout="disk")
        ours[1].raises["execute_local_transfer"] = ConnectionError("stub closed")
        ours[2].fails = {0: FULL}
        result = await group.execute_local_transfer(HOST, DEVICE, [0], [2]).result()
        assert [one.num_done for one in result.outcomes] == [0, 0, 0, 1]
        assert [len(rank.named("execute_local_transfer")) for rank in ours] == [1] * 4
        text = str(TransferFailed(result, "local transfer"))
        for part in (
            "rank 0 refused: UNKNOWN_LAYOUT: no disk here",
            "rank 1 refused: PEER_LOST: rank 1 can't be reached (ConnectionError: stub closed)",
            "rank 2: 1 of 1 blocks, first block 2: STORAGE_FAILED",
        ):
            assert part in text

    run(test())


def test_error_that_nobody_foresaw_is_that_ranks_outcome():
    async def test():
        ours, _, group, _ = await joined(2, 2)
        ours[0].raises["execute_local_transfer"] = KeyError("surprise")
        result = await group.execute_local_transfer(HOST, DEVICE, [0], [2]).result()
        assert [one.failures[0].failure.reason for one in result.outcomes if not one.is_done] == ["FAULT"]
        assert "KeyError: 'surprise'" in str(TransferFailed(result))

    run(test())


def test_rank_that_does_not_account_for_every_block_has_none_done():
    async def test():
        ours, _, group, _ = await joined(2, 2)
        ours[1].result = TransferResult(outcomes=(TransferOutcome(rank=1, num_done=1),))
        result = await group.execute_local_transfer(HOST, DEVICE, [0, 1], [2, 3]).result()
        assert result.failed_indices() == {0, 1}
        assert {f.failure.reason for f in result.outcomes[1].failures} == {"FAULT"}

    run(test())


@pytest.mark.parametrize(
    ("sources", "ids", "text"),
    [
        ([0, 1, 2], [4, 5], "3 source blocks and 2 destination blocks"),
        ([0, 1], [4, 4], "blocks 4 come more than once"),
        ([0], [-1], "block ids must be integers"),
    ],
)
def test_lists_are_checked_once_before_anybody_is_asked(sources, ids, text):
    async def test():
        ours, theirs, group, _ = await joined(2, 2)
        remote = RemoteBlocks(layout=theirs[0].metadata.layouts[1].handle, blocks=np.array(sources))
        notes = [
            group.execute_local_transfer(HOST, DEVICE, sources, ids),
            group.execute_remote_onboard(remote, HOST, ids),
            group.execute_remote_offload(HOST, sources, replace(remote, blocks=np.array(ids))),
            group.execute_remote_onboard_for_instance(B, Tier.HOST, sources, HOST, ids),
        ]
        for note in notes:
            assert not note.could_yield()
            result = await note.result()
            assert [str(one.refusal).partition(":")[0] for one in result.outcomes] == ["BAD_REQUEST"] * 2
            assert text in str(TransferFailed(result))
        assert not any(name.startswith("execute") for rank in ours for name, _ in rank.calls)

    run(test())


def test_key_can_be_stored_once_in_a_call():
    async def test():
        ours, _, group, _ = await joined(2, 2)
        result = await group.execute_remote_offload(HOST, [0, 1], ObjectKeys(keys=(b"a", b"a"))).result()
        assert "keys 61 come more than once" in str(TransferFailed(result))
        result = await group.execute_remote_offload(HOST, [0], ObjectKeys(keys=(b"a", b"b"))).result()
        assert "1 source blocks and 2 keys" in str(TransferFailed(result))
        assert not any(rank.named("execute_remote_offload") for rank in ours)

    run(test())


def test_group_without_workers_succeeds_and_nothing_to_do_asks_nobody():
    async def test():
        empty = leader([])
        assert (await empty.execute_local_transfer(HOST, DEVICE, [0], [1])).outcomes == ()
        ours, _, group, _ = await joined(2, 4)
        result = await group.execute_remote_onboard_for_instance(B, Tier.HOST, [], HOST, [])
        assert [one.num_done for one in result.outcomes] == [0, 0]
        assert not any(rank.named("execute_remote_pull") for rank in ours)

    run(test())


def test_pull_from_a_group_that_is_not_connected_is_refused():
    async def test():
        _, _, group, _ = await joined(2, 2)
        result = await group.execute_remote_onboard_for_instance("another", Tier.HOST, [0], HOST, [1]).result()
        assert {str(one.refusal).partition(":")[0] for one in result.outcomes} == {"UNKNOWN_PEER"}
        result = await group.execute_remote_onboard_for_instance(B, Tier.DISK, [0], HOST, [1]).result()
        assert "rank 0 of group b0000000-1111-4222-8333-444455556666 exported no disk layout" in str(
            TransferFailed(result)
        )

    run(test())


@pytest.mark.parametrize("how", ["connected", "imported"])
def test_named_remote_layout_stands_for_each_ranks_own(how):
    async def test():
        ours, theirs, group, other = await joined(2, 2)
        if how == "imported":
            await group.disconnect_remote(B)
            await group.import_metadata(await other.export_metadata())
        handle = theirs[1].metadata.layouts[1].handle
        a, b = whole(ours).copy(), whole(theirs).copy()
        await group.execute_remote_onboard(RemoteBlocks(layout=handle, blocks=as_ids([3, 4])), HOST, [1, 0])
        check_moved(whole(ours), a, b, [3, 4], [1, 0])
        await group.execute_remote_offload(HOST, [1], RemoteBlocks(layout=handle, blocks=as_ids([9])))
        check_moved(whole(theirs), b, whole(ours), [1], [9])

    run(test())


def test_named_remote_layout_without_counterparts_is_refused():
    async def test():
        ours, theirs, group, _ = await joined(2, 4)
        blocks = as_ids([0])
        known, unknown = theirs[0].metadata.layouts[1].handle, ours[0].metadata.layouts[1].handle
        for handle, reason in ((known, "UNSUPPORTED"), (unknown, "UNKNOWN_PEER")):
            remote = RemoteBlocks(layout=handle, blocks=blocks)
            for note in (
                group.execute_remote_onboard(remote, HOST, [1]),
                group.execute_remote_offload(HOST, [1], remote),
            ):
                result = await note.result()
                assert {one.refusal.reason for one in result.outcomes if one.refusal} == {reason}

    run(test())


def test_group_of_one_uses_the_named_layout_as_it_is():
    async def test():
        ours, theirs, _, _ = await joined(2, 2)
        remote = RemoteBlocks(layout=theirs[1].metadata.layouts[1].handle, blocks=as_ids([5]))
        await leader(ours[:1]).execute_remote_onboard(remote, HOST, [3])
        assert (ours[0].array(HOST)[3] == theirs[1].array(HOST)[5]).all()

    run(test())


@pytest.mark.parametrize("mode", [None, REPLICATED])
def test_objects_are_stored_by_all_ranks_or_divided_among_them(mode):
    async def test():
        ours, _, group, _ = await joined(2, 2, 4, mode=mode)
        await group.export_metadata()
        for rank in ours:
            rank.object_rank = 0 if mode else rank.metadata.rank
            rank.array(HOST)[:] = ours[0].array(HOST) if mode else rank.array(HOST)
        keys = ObjectKeys(keys=(b"a", b"b", b"c"))
        ours[1].fails = {0: FULL}
        result = await group.execute_remote_offload(HOST, [4, 5, 6], keys).result()
        assert [len(rank.named("execute_remote_offload")[0].keys) for rank in ours] == ([2, 1] if mode else [3, 3])
        assert [one.num_done for one in result.outcomes] == ([2, 0] if mode else [3, 2])
        assert result.failed_indices() == ({1} if mode else {0})
        ours[1].fails = {}
        await group.execute_remote_offload(HOST, [4, 5, 6], keys)
        before = copies(ours, DEVICE)
        await group.execute_remote_onboard(ObjectKeys(keys=(b"c", b"a", b"c")), DEVICE, [1, 2, 3])
        for rank, old in zip(ours, before, strict=True):
            check_moved(rank.array(DEVICE), old, rank.array(HOST), [6, 4, 6], [1, 2, 3])

    run(test())
