"""What every BlockWorker must do with other workers and with stored objects; see `block_conformance`."""

from collections.abc import Awaitable
from dataclasses import replace

import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import LayoutHandle, Tier
from ayni.blocks.objects import KeyReport, OutcomeState, PresenceReport, PresenceState
from ayni.blocks.transfers import ObjectKeys, RemoteBlocks, TransferFailed
from ayni.errors import AyniError, StaleEpoch
from tests.support.block_conformance import DEVICE, HOST, NOWHERE, conforms, done, refused
from tests.support.block_groups import BlockGroup, Contents, keys, soon

STRANGER = "00000000-0000-4000-8000-000000000000"


async def connect(group: BlockGroup) -> None:
    metadata = await soon(group.far.worker.export_metadata(), "the peer's export")
    await soon(group.worker.connect_remote(group.far.config.instance_id, metadata), "a connection")


class RemoteConformance:
    """Other workers."""

    @conforms
    async def test_a_connection_is_there_or_not_and_can_be_made_again(self, group: BlockGroup) -> None:
        worker, name = group.worker, group.far.config.instance_id
        metadata = await soon(group.far.worker.export_metadata(), "the peer's export")
        assert not (await soon(worker.has_remote_metadata(name), "a question")).connected
        assert not await soon(worker.disconnect_remote(name), "a disconnection of nobody")
        for _ in range(2):
            layouts = await soon(worker.connect_remote(name, metadata), "a connection")
            state = await soon(worker.has_remote_metadata(name), "a question")
            assert state.connected
            assert state.remote_epoch == group.far.config.epoch
            assert state.layouts == layouts
            assert await soon(worker.connect_remote(name, metadata), "the same connection") == layouts
            assert {(one.remote_rank, one.tier) for one in layouts} <= {
                (rank, tier) for rank in range(group.num_ranks) for tier in group.tiers
            }
            assert [(one.remote_rank, one.resource_id) for one in layouts] == sorted(
                (one.remote_rank, one.resource_id) for one in layouts
            )
            assert await soon(worker.disconnect_remote(name), "a disconnection")
            assert not (await soon(worker.has_remote_metadata(name), "a question")).connected

    @conforms
    async def test_a_connection_that_fails_on_one_rank_is_none(self, group: BlockGroup) -> None:
        worker, name = group.worker, group.far.config.instance_id
        metadata = list(await soon(group.far.worker.export_metadata(), "the peer's export"))
        metadata[-1] = replace(metadata[-1], engines=())
        with pytest.raises((AyniError, ConnectionError)):
            await soon(worker.connect_remote(name, metadata), "a connection")
        state = await soon(worker.has_remote_metadata(name), "a question")
        assert not state.connected
        assert state.layouts == ()
        pull = worker.execute_remote_onboard_for_instance(name, Tier.HOST, [0], HOST, [0])
        await refused(pull, group, "UNKNOWN_PEER")

    @conforms
    async def test_a_newer_epoch_replaces_and_an_older_one_is_refused(self, group: BlockGroup) -> None:
        worker, name = group.worker, group.far.config.instance_id
        older = await soon(group.far.worker.export_metadata(), "the peer's export")
        await soon(worker.connect_remote(name, older), "a connection")
        newer_config = replace(group.far.config, epoch=group.far.config.epoch + 1)
        await soon(group.far.worker.configure_layouts(newer_config), "a newer configuration")
        newer = await soon(group.far.worker.export_metadata(), "the newer export")
        await soon(worker.connect_remote(name, newer), "the newer connection")
        assert (await soon(worker.has_remote_metadata(name), "a question")).remote_epoch == newer_config.epoch
        with pytest.raises(StaleEpoch):
            await soon(worker.connect_remote(name, older), "an older connection")
        assert (await soon(worker.has_remote_metadata(name), "a question")).remote_epoch == newer_config.epoch
        await _pulls(group)

    @conforms
    async def test_an_older_configuration_is_refused(self, group: BlockGroup) -> None:
        newer = replace(group.config, epoch=group.config.epoch + 1)
        await soon(group.worker.configure_layouts(newer), "a newer configuration")
        with pytest.raises(StaleEpoch):
            await soon(group.worker.configure_layouts(group.config), "an older configuration")

    @pytest.mark.fact("T98")
    @conforms
    async def test_a_pull_goes_in_one_direction(self, group: BlockGroup) -> None:
        size = group.shape.block_bytes
        far = await Contents(group.far, 1).fill(lambda *_: b"\xaa" * size)
        near = await Contents(group, 1).fill(lambda *_: b"\xbb" * size)
        await connect(group)
        blocks = range(4)
        pull = group.worker.execute_remote_onboard_for_instance(
            group.far.config.instance_id, Tier.HOST, blocks, HOST, blocks
        )
        await done(pull, group, len(blocks), size)
        near.copied(far, (Tier.HOST, Tier.HOST), blocks, blocks)
        await near.check()
        await far.check()

    @pytest.mark.fact("T99")
    @conforms
    async def test_both_groups_may_pull_from_one_another(self, group: BlockGroup) -> None:
        await _pulls(group)
        await _pulls(replace(group.far, peer=replace(group, peer=None)))

    @conforms
    async def test_layouts_that_were_imported_are_read_and_written_by_handle(self, group: BlockGroup) -> None:
        far, near = await Contents(group.far, 2).fill(), await Contents(group, 3).fill()
        metadata = await soon(group.far.worker.export_metadata(), "the peer's export")
        for _ in range(2):
            imported = await soon(group.worker.import_metadata(metadata), "an import")
            assert [one.layouts for one in imported] == [
                tuple(layout.handle for layout in one.layouts) for one in metadata
            ]
        handle = next(layout.handle for layout in metadata[0].layouts if layout.tier is Tier.HOST)
        sources, destinations = [7, 8, 2], [0, 9, 10]
        onboard = group.worker.execute_remote_onboard(
            RemoteBlocks(layout=handle, blocks=as_ids(sources)), DEVICE, destinations
        )
        await done(onboard, group, 3, group.shape.block_bytes)
        near.copied(far, (Tier.HOST, Tier.DEVICE), sources, destinations)
        offload = group.worker.execute_remote_offload(HOST, [5, 6], RemoteBlocks(layout=handle, blocks=as_ids([12, 3])))
        await done(offload, group, 2, group.shape.block_bytes)
        far.copied(near, (Tier.HOST, Tier.HOST), [5, 6], [12, 3])
        await near.check()
        await far.check()

    @conforms
    async def test_who_is_not_known_is_refused(self, group: BlockGroup) -> None:
        worker = group.worker
        stranger = RemoteBlocks(layout=LayoutHandle(owner_id=1, number=0), blocks=as_ids([0]))
        await refused(worker.execute_remote_onboard(stranger, HOST, [0]), group, "UNKNOWN_PEER")
        await refused(worker.execute_remote_offload(HOST, [0], stranger), group, "UNKNOWN_PEER")
        pull = worker.execute_remote_onboard_for_instance(STRANGER, Tier.HOST, [0], HOST, [0])
        await refused(pull, group, "UNKNOWN_PEER")

    @conforms
    async def test_blocks_that_the_peer_does_not_have_are_not_pulled(self, group: BlockGroup) -> None:
        near = await Contents(group, 4).fill()
        await connect(group)
        pull = group.worker.execute_remote_onboard_for_instance(
            group.far.config.instance_id, Tier.HOST, [0, 1000], HOST, [1, 2]
        )
        with pytest.raises(TransferFailed) as caught:
            await soon(pull, "a pull of unknown blocks")
        assert caught.value.reasons == {"UNKNOWN_BLOCK"}
        await near.check()


class ObjectConformance:
    """Stored objects."""

    @conforms
    async def test_objects_come_back_in_the_order_of_the_keys(self, group: BlockGroup) -> None:
        contents = await Contents(group, 1).fill()
        one, two, three, missing = keys(0, 1, 2, 3)
        size = group.shape.block_bytes
        assert _states(await _has(group, [one, missing])) == [PresenceState.ABSENT, PresenceState.ABSENT]
        put = await soon(group.worker.put_blocks(HOST, [5, 6, 7], [one, two, three]), "a put")
        assert [outcome.state for outcome in put.outcomes] == [OutcomeState.DONE] * 3
        assert len(put.by_rank) == group.num_ranks
        again = await soon(group.worker.put_blocks(HOST, [7, 6], [one, two]), "a second put")
        assert [outcome.state for outcome in again.outcomes] == [OutcomeState.ALREADY_PRESENT] * 2
        assert again.is_done
        found = await _has(group, [two, missing, one, two])
        assert _states(found) == [
            PresenceState.PRESENT,
            PresenceState.ABSENT,
            PresenceState.PRESENT,
            PresenceState.PRESENT,
        ]
        assert [presence.size_bytes for presence in found.presences] == [size, 0, size, size]
        got = await soon(group.worker.get_blocks([two, missing, one, two], DEVICE, [0, 1, 2, 3]), "a get")
        assert [outcome.state for outcome in got.outcomes] == [
            OutcomeState.DONE,
            OutcomeState.ABSENT,
            OutcomeState.DONE,
            OutcomeState.DONE,
        ]
        assert not got.is_done
        contents.copied(contents, (Tier.HOST, Tier.DEVICE), [6, 5, 6], [0, 2, 3])
        await contents.check()

    @conforms
    async def test_calls_about_no_keys_have_no_answers(self, group: BlockGroup) -> None:
        assert (await _has(group, [])).presences == ()
        assert (await soon(group.worker.put_blocks(HOST, [], []), "a put")).outcomes == ()
        assert (await soon(group.worker.get_blocks([], HOST, []), "a get")).outcomes == ()

    @conforms
    async def test_objects_are_ends_of_transfers_too(self, group: BlockGroup) -> None:
        contents = await Contents(group, 2).fill()
        stored = ObjectKeys(keys=tuple(keys(10, 11)))
        await done(group.worker.execute_remote_offload(HOST, [3, 4], stored), group, 2, group.shape.block_bytes)
        onboard = group.worker.execute_remote_onboard(stored, DEVICE, [9, 8])
        await done(onboard, group, 2, group.shape.block_bytes)
        contents.copied(contents, (Tier.HOST, Tier.DEVICE), [3, 4], [9, 8])
        await contents.check()
        with_missing = ObjectKeys(keys=(*keys(99), *keys(11)))
        result = await soon(
            group.worker.execute_remote_onboard(with_missing, DEVICE, [0, 1]).result(), "an onboard with a miss"
        )
        assert result.failed_indices() == {0}
        for outcome in result.outcomes:
            assert [(f.block, f.failure.reason) for f in outcome.failures] == [(0, "UNKNOWN_OBJECT")]
        contents.copied(contents, (Tier.HOST, Tier.DEVICE), [4], [1])
        await contents.check()

    @conforms
    async def test_removed_objects_are_gone_and_can_be_stored_again(self, group: BlockGroup) -> None:
        contents = await Contents(group, 6).fill()
        one, two, missing = keys(21, 22, 23)
        await soon(group.worker.put_blocks(HOST, [1, 2], [one, two]), "a put")
        removed = await soon(group.worker.remove_blocks(HOST, [one, missing]), "a removal")
        assert removed.is_done
        assert _states(await _has(group, [one, two])) == [PresenceState.ABSENT, PresenceState.PRESENT]
        again = await soon(group.worker.put_blocks(HOST, [1, 2], [one, two]), "another put")
        assert [outcome.state for outcome in again.outcomes] == [OutcomeState.DONE, OutcomeState.ALREADY_PRESENT]
        assert (await soon(group.worker.remove_blocks(HOST, []), "a removal")).outcomes == ()
        await contents.check()

    @conforms
    async def test_a_request_that_is_not_possible_succeeds_for_no_key(self, group: BlockGroup) -> None:
        contents = await Contents(group, 3).fill()
        await _none(group.worker.has_blocks(NOWHERE, keys(1)))
        await _none(group.worker.put_blocks(NOWHERE, [0], keys(1)))
        await _none(group.worker.remove_blocks(NOWHERE, keys(1)))
        await _none(group.worker.put_blocks(HOST, [1000], keys(1)))
        await _none(group.worker.get_blocks(keys(1), HOST, [1000]))
        await _none(group.worker.get_blocks(keys(1, 2), HOST, [3, 3]))
        await _none(group.worker.get_blocks(keys(1, 2), HOST, [3]))
        assert _states(await _has(group, keys(1))) == [PresenceState.ABSENT]
        await contents.check()


async def _none(call: Awaitable[KeyReport | PresenceReport]) -> None:
    """Awaits a call that one worker refuses and a group answers for each key; no key may count as done."""
    try:
        report = await soon(call, "a request that is not possible")
    except AyniError:
        return
    entries = report.presences if isinstance(report, PresenceReport) else report.outcomes
    for entry in entries:
        assert entry.failure, entry
        assert entry.state in (PresenceState.UNKNOWN, OutcomeState.FAILED)


async def _has(group: BlockGroup, wanted: list[bytes]) -> PresenceReport:
    return await soon(group.worker.has_blocks(HOST, wanted), "a question for keys")


def _states(report: PresenceReport) -> list[PresenceState]:
    return [presence.state for presence in report.presences]


async def _pulls(group: BlockGroup) -> None:
    """Pulls blocks that differ in everything, and checks every other one on both sides."""
    far, near = await Contents(group.far, 5).fill(), await Contents(group, 6).fill()
    await connect(group)
    sources, destinations = [11, 3, 4, 5], [2, 0, 12, 13]
    pull = group.worker.execute_remote_onboard_for_instance(
        group.far.config.instance_id, Tier.HOST, sources, HOST, destinations
    )
    await done(pull, group, len(sources), group.shape.block_bytes)
    near.copied(far, (Tier.HOST, Tier.HOST), sources, destinations)
    await near.check()
    await far.check()
