"""Connecting a group with another: on all ranks or on none, once, and by epoch."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from ayni.blocks.layouts import Tier
from ayni.blocks.metadata import GroupConfig, LayoutRequest, ParallelismMode, RemoteState, WorkerMetadata
from ayni.errors import (
    AyniError,
    BadRequest,
    Deadline,
    IncompatibleLayout,
    PeerLost,
    StaleEpoch,
    StorageFailed,
    UnknownPeer,
)
from coordinator_service.leader import GroupSettings, SpmdParallelWorkers
from coordinator_service.parallelism import ParallelismTemplate
from tests.support.fake_ranks import HOST, Fabric, FakeRank, blob, config_of, make_group, stamp_of

A, B = "a0000000-1111-4222-8333-444455556666", "b0000000-1111-4222-8333-444455556666"
LOST = PeerLost("rank is gone", peer="x", detail="")


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, 20))


def leader(ranks: list[FakeRank], **settings) -> SpmdParallelWorkers:
    return SpmdParallelWorkers(ranks, settings=GroupSettings(**settings))


def pair(here: int = 2, there: int = 2) -> tuple[list[FakeRank], list[FakeRank]]:
    fabric = Fabric()
    return make_group(fabric, A, here), make_group(fabric, B, there)


async def exported(ranks: list[FakeRank]) -> tuple[WorkerMetadata, ...]:
    return await leader(ranks).export_metadata()


def connected(ranks: list[FakeRank]) -> list[bool]:
    return [B in rank.remotes for rank in ranks]


@pytest.mark.fact("T7")
def test_strict_connect_gives_every_local_rank_every_remote_rank():
    async def test():
        ours, theirs = pair(2, 4)
        group = leader(ours)
        layouts = await group.connect_remote(B, await exported(theirs))
        assert [sorted(rank.remotes[B]) for rank in ours] == [[0, 1, 2, 3]] * 2
        assert [(one.remote_rank, one.tier, one.engine) for one in layouts[:3]] == [
            (0, Tier.DEVICE, "fake"),
            (0, Tier.HOST, "fake"),
            (1, Tier.DEVICE, "fake"),
        ]
        assert len(layouts) == 8
        known = group.connections.group(B)
        assert known.handle(3, HOST) == theirs[3].metadata.layouts[1].handle
        assert (known.tp_size, len(known.descriptors)) == (4, 4)
        state = await group.has_remote_metadata(B)
        assert state == RemoteState(connected=True, remote_epoch=1, layouts=layouts)

    run(test())


@pytest.mark.fact("T7", "T8", "T9", "T11")
def test_stamps_of_a_peer_are_replaced_when_it_is_connected_anew():
    """A leader without workers, so that only what it keeps itself is seen."""

    async def test():
        group = leader([])
        assert group.connections.descriptors(B) is None
        for size, epoch in ((4, 1), (3, 2), (2, 3)):
            theirs = make_group(Fabric(), B, size, total_heads=12, epoch=epoch)
            await group.connect_remote(B, [replace(one, rank=0) for one in await exported(theirs)])
            stamps = group.connections.descriptors(B)
            assert stamps is not None
            assert [stamp.rank for stamp in stamps] == list(range(size))
            assert group.connections.group(B).tp_size == size
        with pytest.raises(AyniError):
            group.connections.group(B).handle(2, HOST)
        assert (await group.has_remote_metadata(B)).connected

    run(test())


@pytest.mark.fact("T3")
def test_empty_list_is_refused():
    with pytest.raises(BadRequest):
        run(leader([]).connect_remote(B, []))


@pytest.mark.fact("T10")
def test_unstamped_peer_of_another_size_is_refused_and_nothing_is_kept():
    async def test():
        group = leader([])
        with pytest.raises(IncompatibleLayout, match="remote rank 0 is not stamped") as caught:
            await group.connect_remote(B, [blob(0, instance_id=B)])
        assert "both leaders need a template" in caught.value.message
        assert group.connections.descriptors(B) is None

    run(test())


@pytest.mark.fact("T2", "T5", "T10")
def test_legacy_connect_joins_rank_by_rank():
    async def test():
        ours, theirs = pair(2, 2)
        group = leader(ours)
        await group.connect_remote(B, [replace(rank.metadata, rank=0) for rank in theirs])
        assert [list(rank.remotes[B]) for rank in ours] == [[0], [1]]
        assert ours[1].remotes[B][1].owner_id == theirs[1].owner_id
        assert group.connections.descriptors(B) == ()

    run(test())


def test_gate_refuses_before_any_rank_is_asked():
    async def test():
        ours, _ = pair()
        theirs = make_group(Fabric(), B, 2, total_heads=8)
        with pytest.raises(IncompatibleLayout, match="num_heads 8 and this group's 16"):
            await leader(ours).connect_remote(B, await exported(theirs))
        assert not any(rank.named("connect_remote") for rank in ours)

    run(test())


def test_local_ranks_that_cannot_say_what_they_are_are_not_connected():
    async def test():
        ours, theirs = pair()
        ours[1].raises["export_metadata"] = ConnectionError("gone")
        with pytest.raises(ConnectionError, match=r"exporting metadata failed on 1 .* rank 1"):
            await leader(ours).connect_remote(B, await exported(theirs))
        assert connected(ours) == [False, False]

    run(test())


def test_failure_of_one_rank_disconnects_the_others_again():
    async def test():
        fabric = Fabric()
        ours, theirs = make_group(fabric, A, 4), make_group(fabric, B, 4)
        ours[2].raises["connect_remote"] = LOST
        group = leader(ours)
        with pytest.raises(PeerLost, match=r"failed on 1 .* rank 2: PeerLost: rank is gone") as caught:
            await group.connect_remote(B, await exported(theirs))
        assert caught.value.metadata["rank"] == "2"
        assert connected(ours) == [False] * 4
        assert not ours[2].named("disconnect_remote")
        assert group.connections.descriptors(B) is None
        assert not (await group.has_remote_metadata(B)).connected
        del ours[2].raises["connect_remote"]
        await group.connect_remote(B, await exported(theirs))
        assert connected(ours) == [True] * 4

    run(test())


@pytest.mark.fact("T122")
def test_failures_of_two_ranks_are_both_in_the_error():
    async def test():
        ours, theirs = pair()
        ours[0].raises["connect_remote"] = LOST
        ours[1].raises["connect_remote"] = StorageFailed("disk is full", place="", detail="")
        with pytest.raises(PeerLost, match="rank 0: PeerLost: rank is gone; rank 1: StorageFailed: disk is full"):
            await leader(ours).connect_remote(B, await exported(theirs))
        assert not any(rank.named("disconnect_remote") for rank in ours)

    run(test())


def test_rank_that_does_not_answer_is_disconnected_too_since_nobody_knows():
    async def test():
        ours, theirs = pair()
        ours[1].gate = asyncio.Event()
        group = leader(ours, call_timeout_s=0.05)
        with pytest.raises(Deadline, match="rank 1 had not answered"):
            await group.connect_remote(B, await exported(theirs))
        assert [len(rank.named("disconnect_remote")) for rank in ours] == [1, 1]
        assert connected(ours) == [False, False]

    run(test())


def test_equal_metadata_connects_once():
    async def test():
        ours, theirs = pair()
        group, metadata = leader(ours), await exported(theirs)
        first = await group.connect_remote(B, metadata)
        assert await group.connect_remote(B, list(metadata)) == first
        assert [len(rank.named("connect_remote")) for rank in ours] == [1, 1]

    run(test())


@pytest.mark.fact("T126")
def test_local_rank_that_forgot_is_connected_again():
    async def test():
        ours, theirs = pair()
        group, metadata = leader(ours), await exported(theirs)
        await group.connect_remote(B, metadata)
        ours[1].remotes.clear()
        assert not (await group.has_remote_metadata(B)).connected
        await group.connect_remote(B, metadata)
        assert connected(ours) == [True, True]
        assert (await group.has_remote_metadata(B)).connected

    run(test())


@pytest.mark.fact("T126")
def test_restarted_peer_is_connected_without_restarting():
    async def test():
        ours, theirs = pair()
        group = leader(ours)
        await group.connect_remote(B, await exported(theirs))
        for rank in theirs:
            rank.metadata = replace(rank.metadata, incarnation=77)
        await group.connect_remote(B, await exported(theirs))
        assert ours[0].remotes[B][1].incarnation == 77

    run(test())


def test_older_epoch_is_refused_and_newer_one_replaces():
    async def test():
        ours, theirs = pair()
        group = leader(ours)
        metadata = [replace(one, epoch=5) for one in await exported(theirs)]
        await group.connect_remote(B, metadata)
        with pytest.raises(StaleEpoch) as caught:
            await group.connect_remote(B, [replace(one, epoch=4) for one in metadata])
        assert caught.value.metadata == {"epoch": "4", "current_epoch": "5"}
        assert [len(rank.named("connect_remote")) for rank in ours] == [1, 1]
        await group.connect_remote(B, [replace(one, epoch=6) for one in metadata])
        assert (await group.has_remote_metadata(B)).remote_epoch == 6

    run(test())


def test_refused_replacement_leaves_what_was_connected():
    async def test():
        ours, theirs = pair()
        group, metadata = leader(ours), await exported(theirs)
        await group.connect_remote(B, metadata)
        for rank in ours:
            rank.raises["connect_remote"] = LOST
        newer = [replace(one, epoch=6) for one in metadata]
        with pytest.raises(PeerLost):
            await group.connect_remote(B, newer)
        assert (await group.has_remote_metadata(B)).remote_epoch == 1
        del ours[0].raises["connect_remote"]
        with pytest.raises(PeerLost):
            await group.connect_remote(B, newer)
        assert connected(ours) == [False, False]
        assert not (await group.has_remote_metadata(B)).connected

    run(test())


def test_connects_at_one_time_share_one_attempt_which_goes_on_without_a_waiter():
    async def test():
        ours, theirs = pair()
        group, metadata = leader(ours), await exported(theirs)
        ours[0].gate = asyncio.Event()
        calls = [asyncio.create_task(group.connect_remote(B, metadata)) for _ in range(3)]
        await ours[0].connecting.wait()
        calls[0].cancel()
        assert not (await group.has_remote_metadata(B)).connected
        ours[0].gate.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1] == answers[2]
        assert [len(rank.named("connect_remote")) for rank in ours] == [1, 1]

    run(test())


def test_connects_that_share_an_attempt_share_its_failure():
    async def test():
        ours, theirs = pair()
        group, metadata = leader(ours), await exported(theirs)
        ours[1].raises["connect_remote"] = LOST
        answers = await asyncio.gather(*(group.connect_remote(B, metadata) for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [PeerLost] * 3
        assert [len(rank.named("connect_remote")) for rank in ours] == [1, 1]
        with pytest.raises(PeerLost):
            await group.connect_remote(B, metadata)
        assert [len(rank.named("connect_remote")) for rank in ours] == [2, 2]

    run(test())


def test_connects_with_other_metadata_run_one_after_another():
    async def test():
        ours, theirs = pair()
        group, metadata = leader(ours), await exported(theirs)
        ours[0].gate = asyncio.Event()
        first = asyncio.create_task(group.connect_remote(B, metadata))
        await ours[0].connecting.wait()
        second = asyncio.create_task(group.connect_remote(B, [replace(one, epoch=2) for one in metadata]))
        third = asyncio.create_task(group.disconnect_remote(B))
        ours[0].gate.set()
        await asyncio.gather(first, second)
        assert [asked[0].epoch for asked in ours[1].named("connect_remote")] == [1, 2]
        assert await third
        assert connected(ours) == [False, False]

    run(test())


def test_disconnect_reaches_all_ranks_and_may_be_repeated():
    async def test():
        ours, theirs = pair()
        group = leader(ours)
        await group.connect_remote(B, await exported(theirs))
        ours[0].raises["disconnect_remote"] = ConnectionError("gone")
        with pytest.raises(ConnectionError, match=r"disconnecting .* rank 0"):
            await group.disconnect_remote(B)
        assert connected(ours) == [True, False]
        assert not (await group.has_remote_metadata(B)).connected
        with pytest.raises(UnknownPeer, match="call connect_remote"):
            group.connections.group(B)
        del ours[0].raises["disconnect_remote"]
        assert await group.disconnect_remote(B)
        assert not await group.disconnect_remote(B)

    run(test())


@pytest.mark.parametrize("fault", ["gone", "forgot", "other epoch"])
def test_state_is_true_only_when_every_rank_is_usable(fault):
    async def test():
        ours, theirs = pair()
        group = leader(ours)
        await group.connect_remote(B, await exported(theirs))
        if fault == "gone":
            ours[1].raises["has_remote_metadata"] = ConnectionError("gone")
        elif fault == "forgot":
            ours[1].remotes.clear()
        else:
            ours[1].remotes[B] = {0: replace(theirs[0].metadata, epoch=9)}
        assert await group.has_remote_metadata(B) == RemoteState(connected=False, remote_epoch=1)
        assert await group.has_remote_metadata(A) == RemoteState(connected=False)

    run(test())


def test_export_is_in_rank_order_and_stamped():
    async def test():
        ours, _ = pair(4)
        metadata = await leader(ours).export_metadata()
        assert [one.owner_id for one in metadata] == [rank.owner_id for rank in ours]
        assert [stamp_of(one).rank for one in metadata] == [0, 1, 2, 3]

    run(test())


def test_import_gives_each_rank_its_entry():
    async def test():
        ours, theirs = pair()
        group, metadata = leader(ours), await exported(theirs)
        imported = await group.import_metadata(metadata)
        assert [rank.imported for rank in ours] == [[metadata[0]], [metadata[1]]]
        assert [one.layouts[0].owner_id for one in imported] == [rank.owner_id for rank in theirs]
        with pytest.raises(BadRequest, match="3 entries were given to a group of 2"):
            await group.import_metadata([*metadata, metadata[0]])
        assert not (await group.has_remote_metadata(B)).connected

    run(test())


def test_configuration_gives_each_rank_its_place():
    async def test():
        ours, _ = pair()
        group = leader(ours)
        config = GroupConfig(
            epoch=3, instance_id=B, rank=0, world_size=1, layouts=(LayoutRequest(tier=Tier.DISK, num_blocks=4),)
        )
        configured = await group.configure_layouts(config)
        asked = [rank.named("configure_layouts")[0] for rank in ours]
        assert asked == [replace(config, rank=rank, world_size=2) for rank in range(2)]
        assert [(one.instance_id, one.rank) for one in configured.metadata] == [(B, 0), (B, 1)]
        assert [stamp_of(one).tp_size for one in configured.metadata] == [2, 2]
        assert not configured.disk_recovered
        with pytest.raises(StaleEpoch):
            await group.configure_layouts(replace(config, epoch=2))
        assert [len(rank.named("configure_layouts")) for rank in ours] == [1, 1]

    run(test())


def test_one_name_of_the_call_goes_to_all_ranks_and_a_new_one_to_the_next():
    async def test():
        ours, _ = pair()
        group = leader(ours)
        await group.export_metadata()
        await group.export_metadata()
        assert ours[0].call_ids == ours[1].call_ids
        assert len(set(ours[0].call_ids)) == 2
        assert all(ours[0].call_ids)

    run(test())


def test_template_must_be_for_as_many_ranks():
    ours, _ = pair()
    template = ParallelismTemplate.from_layout(config_of(8), 3, ParallelismMode.REPLICATED_DATA)
    with pytest.raises(ValueError, match="for 3 ranks, but there are 2 workers"):
        SpmdParallelWorkers(ours, template=template)
    assert SpmdParallelWorkers(ours).worker_count == len(SpmdParallelWorkers(ours).workers) == 2
