"""Blocks through ReadBlocks and WriteBlocks: sizes, parts, orders, kinds of memory, refusals, single failures."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ayni.blocks.layouts import Axis, AxisOrder, LayoutHandle
from ayni.blocks.transfers import AxisSlice
from ayni.errors import Unsupported
from tests.support.block_peer import HANDLE, blocks_of, descriptor, filled
from tests.support.grpc_pairs import (
    BLOCK_FIRST,
    BLOCK_SECOND,
    FC,
    HND,
    NHD,
    UNIVERSAL,
    Apart,
    connected,
    ended,
    geometry,
    naive,
    run,
)
from worker_agent.blocks.engine import MoveResult
from worker_agent.blocks.memory import Part


@pytest.mark.fact("T116")
@pytest.mark.parametrize("kind", [FC, BLOCK_SECOND])
@pytest.mark.parametrize("num_blocks", [0, 1, 63, 64, 65, 1023, 1025])
def test_batches_of_any_size_arrive_and_nothing_else_changes(num_blocks, kind):
    """Both ways, permuted on both sides; the blocks around the destinations are compared."""

    async def test() -> None:
        remote = filled(geometry(kind=kind, num_blocks=1100, region_bytes=1024), seed=1)
        local = filled(geometry(num_blocks=1100, region_bytes=1024), seed=2)
        remote_ids, local_ids = (np.random.permutation(1100)[:num_blocks] for _ in range(2))
        expected = blocks_of(local)
        expected[local_ids] = blocks_of(remote, remote_ids)
        async with connected(remote) as pair:
            result = await pair.pull(local, remote_ids, local_ids)
            assert result == MoveResult(moved_bytes=num_blocks * 4096)
            assert np.array_equal(blocks_of(local), expected)

            expected = blocks_of(remote)
            expected[remote_ids] = blocks_of(local, np.sort(local_ids))
            result = await pair.push(local, remote_ids, np.sort(local_ids))
            assert result == MoveResult(moved_bytes=num_blocks * 4096)
            assert np.array_equal(blocks_of(remote), expected)

    run(test)


@pytest.mark.parametrize("kinds", [(FC, FC), (FC, BLOCK_FIRST), (BLOCK_SECOND, FC), (BLOCK_FIRST, BLOCK_SECOND)])
def test_blocks_larger_than_a_frame_come_in_parts(kinds):
    async def test() -> None:
        remote = filled(geometry(kind=kinds[0], num_blocks=3, region_bytes=7 << 17), seed=1)
        local = filled(geometry(kind=kinds[1], num_blocks=4, region_bytes=7 << 17), seed=2)
        assert remote.geometry.config.block_bytes == 7 << 19
        before = blocks_of(local)
        async with connected(remote) as pair:
            assert not (await pair.pull(local, [2, 0], [1, 3], checksum=True)).failures
            after = blocks_of(local)
            assert np.array_equal(after[[1, 3]], blocks_of(remote, [2, 0]))
            assert np.array_equal(after[[0, 2]], before[[0, 2]])
            assert not (await pair.push(local, [0, 1], [0, 2], checksum=True)).failures
            assert np.array_equal(blocks_of(remote, [0, 1]), before[[0, 2]])

    run(test)


HEADS = AxisSlice(axis=Axis.HEAD_COUNT, start=1, stop=3)
PARTS = {
    "whole": (Part(), slice(None), slice(None)),
    "layer": (Part(layers=(1, 2)), slice(1, 2), slice(None)),
    "heads": (Part(slice=HEADS), slice(None), slice(1, 3)),
    "both": (Part(layers=(0, 1), slice=HEADS), slice(0, 1), slice(1, 3)),
}


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("local_kind", [FC, BLOCK_SECOND])
@pytest.mark.parametrize("orders", [(NHD, NHD), (NHD, HND), (HND, NHD), (UNIVERSAL, NHD)])
def test_parts_and_axis_orders(way, part, orders, local_kind):
    async def test() -> None:
        remote = filled(geometry(orders[0]), seed=1)
        local = filled(geometry(orders[1], local_kind), seed=2)
        what, layers, heads = PARTS[part]
        target = local if way == "pull" else remote
        before = naive(blocks_of(target), orders[target is local], slice(None), slice(None)).copy()
        async with connected(remote) as pair:
            move = pair.pull if way == "pull" else pair.push
            result = await move(local, [5, 1], [0, 7], remote_part=what, local_part=what)
        assert not result.failures
        assert result.moved_bytes == 2 * remote.geometry.part_bytes(what.layers, what.slice, None)
        theirs = naive(blocks_of(remote), orders[0], slice(None), slice(None))
        ours = naive(blocks_of(local), orders[1], slice(None), slice(None))
        assert np.array_equal(theirs[[5, 1], layers][..., heads, :], ours[[0, 7], layers][..., heads, :])
        after = ours if way == "pull" else theirs
        after, ids = after.copy(), [0, 7] if way == "pull" else [5, 1]
        for block in ids:
            after[block, layers, :, :, heads] = before[block, layers, :, :, heads]
        assert np.array_equal(after, before), "nothing outside the part changed"

    run(test)


def test_order_can_be_claimed_for_blocks_whose_order_the_peer_does_not_know():
    async def test() -> None:
        remote, local = filled(geometry(AxisOrder.UNKNOWN), seed=1), filled(geometry(NHD), seed=2)
        async with connected(remote) as pair:
            result = await pair.pull(local, [0], [1], remote_part=Part(axis_order=HND))
            assert not result.failures
            expected = naive(blocks_of(remote, [0]), HND, slice(None), slice(None))
            assert np.array_equal(naive(blocks_of(local, [1]), NHD, slice(None), slice(None)), expected)
            assert not (await pair.push(local, [6], [1], remote_part=Part(axis_order=HND))).failures
            assert np.array_equal(blocks_of(remote, [6]), blocks_of(remote, [0]))
            with pytest.raises(Unsupported, match="a slice can't be combined with hnd order"):
                pair.link.pull(pair.move(local, [0], [1], remote_part=Part(axis_order=HND, slice=HEADS)))

    run(test)


@pytest.mark.parametrize(("own", "taken_for"), [(NHD, UNIVERSAL), (UNIVERSAL, NHD), (UNIVERSAL, AxisOrder.UNKNOWN)])
def test_layers_that_the_peer_has_elsewhere_are_refused_before_anything_moves(own, taken_for):
    async def test() -> None:
        remote, local = filled(geometry(own), seed=1), filled(geometry(NHD), seed=2)
        before = blocks_of(remote), blocks_of(local)
        parts: dict[str, Any] = {
            "remote_part": Part(layers=(0, 1), axis_order=taken_for),
            "local_part": Part(layers=(0, 1)),
        }
        async with connected(remote) as pair:
            with pytest.raises(Unsupported, match="a range of layers can't be combined") as error:
                pair.link.pull(pair.move(local, [0], [1], **parts))
            assert error.value.metadata["field"] == "options.source_axis_order"
            with pytest.raises(Unsupported, match="a range of layers can't be combined") as error:
                pair.link.push(pair.move(local, [0], [1], **parts))
            assert error.value.metadata["field"] == "options.destination_axis_order"
            everything = Part(layers=(0, 2), axis_order=taken_for)
            if taken_for is not AxisOrder.UNKNOWN:
                assert not (await pair.pull(local, [0], [2], remote_part=everything)).failures
        assert np.array_equal(blocks_of(remote), before[0])
        assert np.array_equal(blocks_of(local, [0, 1]), before[1][[0, 1]])

    run(test)


def test_layers_of_orders_that_have_them_in_the_same_places_can_be_taken():
    async def test() -> None:
        remote, local = filled(geometry(HND), seed=1), filled(geometry(NHD), seed=2)
        part = Part(layers=(1, 2))
        async with connected(remote) as pair:
            result = await pair.pull(local, [0], [1], remote_part=replace(part, axis_order=NHD), local_part=part)
            assert not result.failures
        half = blocks_of(local).shape[1] // 2
        assert np.array_equal(blocks_of(local, [1])[:, half:], blocks_of(remote, [0])[:, half:])

    run(test)


@pytest.mark.parametrize("order", [NHD, HND, UNIVERSAL])
@pytest.mark.parametrize("unknown", ["remote", "local"])
@pytest.mark.parametrize("way", ["pull", "push"])
def test_blocks_of_a_side_that_does_not_know_its_heads_are_copied_as_they_are(order, unknown, way):
    async def test() -> None:
        of = {side: geometry(order) for side in ("remote", "local")}
        of[unknown] = replace(of[unknown], config=replace(of[unknown].config, num_heads=0))
        remote, local = filled(of["remote"], seed=1), filled(of["local"], seed=2)
        target, source = (local, remote) if way == "pull" else (remote, local)
        expected = blocks_of(target)
        expected[[1, 4]] = blocks_of(source, [3, 0])
        async with connected(remote) as pair:
            lists = ([3, 0], [1, 4]) if way == "pull" else ([1, 4], [3, 0])
            assert not (await getattr(pair, way)(local, *lists)).failures
        assert np.array_equal(blocks_of(target), expected)

    run(test)


def test_a_source_block_may_be_read_twice():
    async def test() -> None:
        remote, local = filled(geometry(), seed=1), filled(geometry(), seed=2)
        async with connected(remote) as pair:
            assert not (await pair.pull(local, [3, 3, 3], [0, 1, 2])).failures
        assert np.array_equal(blocks_of(local, [0, 1, 2]), blocks_of(remote, [3, 3, 3]))

    run(test)


@pytest.mark.parametrize("region_bytes", [32, 7 << 17])
@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("broken_side", ["remote", "local"])
def test_blocks_that_storage_fails_are_named_and_the_others_are_done(way, broken_side, region_bytes):
    async def test() -> None:
        broken = frozenset({2, 5})
        remote_host = filled(geometry(num_blocks=6, region_bytes=region_bytes), seed=1)
        local_host = filled(geometry(num_blocks=6, region_bytes=region_bytes), seed=2)
        remote = Apart(remote_host, broken if broken_side == "remote" else frozenset())
        local = Apart(local_host, broken if broken_side == "local" else frozenset())
        ids = [1, 2, 3, 5, 0]
        target, source = (local_host, remote_host) if way == "pull" else (remote_host, local_host)
        before = blocks_of(target)
        async with connected(remote) as pair:
            result = await (pair.pull if way == "pull" else pair.push)(local, ids, ids)
        assert [index for index, _ in result.failures] == [1, 3]
        assert {failure.reason for _, failure in result.failures} == {"STORAGE_FAILED"}
        assert [failure.message for _, failure in result.failures] == ["block 2 is broken", "block 5 is broken"]
        assert result.moved_bytes == 3 * remote.geometry.config.block_bytes
        assert np.array_equal(blocks_of(target, [1, 3, 0]), blocks_of(source, [1, 3, 0]))
        assert np.array_equal(blocks_of(target, [2, 5, 4]), before[[2, 5, 4]])

    run(test)


def test_more_failures_than_an_answer_names_end_the_stream(monkeypatch):
    async def test() -> None:
        broken = frozenset(range(4, 8))
        remote, local = Apart(filled(geometry(), seed=1), broken), filled(geometry(), seed=2)
        for module in ("stream_moves", "streams"):
            monkeypatch.setattr(f"worker_agent.blocks.{module}.MOST_FAILURES", 2)
        async with connected(remote) as pair:
            result = await pair.pull(local, range(8), range(8))
            assert [index for index, _ in result.failures] == list(range(8)), "the stream was never complete"
            assert {failure.reason for _, failure in result.failures} == {"STORAGE_FAILED"}
            result = await pair.push(local, range(8), range(8))
            assert [index for index, _ in result.failures] == list(range(8)), "what was refused counts as not written"

    run(test)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "incarnation": ({"incarnation": 2}, "STALE_EPOCH"),
    "layout": ({"handle": LayoutHandle(owner_id=7, number=4)}, "UNKNOWN_LAYOUT"),
    "block": ({"remote_blocks": [0, 8]}, "UNKNOWN_BLOCK"),
    "busy": ({"busy": {1}}, "BLOCK_BUSY"),
    "size": ({"region_bytes": 64}, "INCOMPATIBLE_LAYOUT"),
    "order": ({"order": HND}, "INCOMPATIBLE_LAYOUT"),
}


@pytest.mark.parametrize(
    ("name", "way"),
    # Bytes in the order of the layout are what a push sends, so it can't be wrong about the order.
    [(name, way) for name in REFUSALS for way in ("pull", "push") if (name, way) != ("order", "push")],
)
def test_refusal_of_the_peer_becomes_the_failure_of_every_block(name, way):
    """The peer believes something else than the link was told."""
    changes, reason = REFUSALS[name]

    async def test() -> None:
        remote = filled(geometry(), seed=1)
        local = filled(geometry(region_bytes=changes.get("region_bytes", 32)), seed=2)
        before = blocks_of(local), blocks_of(remote)
        async with connected(remote) as pair:
            pair.lender.incarnation = changes.get("incarnation", 1)
            pair.lender.busy = changes.get("busy", set())
            believed = geometry(changes.get("order", NHD), region_bytes=changes.get("region_bytes", 32))
            seen = descriptor(believed)
            seen = replace(seen, handle=changes.get("handle", HANDLE))
            move = replace(pair.move(local, changes.get("remote_blocks", [0, 1]), [4, 5]), remote=seen)
            result = await ended(pair.link.pull(move) if way == "pull" else pair.link.push(move))
            assert [(index, failure.reason) for index, failure in result.failures] == [(0, reason), (1, reason)]
            assert result.moved_bytes == 0
            assert np.array_equal(before[0], blocks_of(local))
            assert np.array_equal(before[1], blocks_of(remote))
            pair.lender.incarnation, pair.lender.busy = 1, set()
            assert not (await pair.pull(filled(geometry(), seed=3), [0], [0])).failures, "the link goes on working"

    run(test)


def test_write_notification_is_told_after_a_whole_write_only():
    async def test() -> None:
        remote, local = Apart(filled(geometry(), seed=1), frozenset({7})), filled(geometry(), seed=2)
        async with connected(remote) as pair:
            await pair.push(local, [0, 7], [0, 1], write_notification=41)
            assert pair.lender.notified == []
            await pair.push(local, [0, 1], [0, 1], write_notification=42)
            await pair.push(local, [0, 1], [0, 1])
            assert pair.lender.notified == [42]

    run(test)


def test_long_lists_become_several_calls(monkeypatch):
    async def test() -> None:
        monkeypatch.setattr("worker_agent.blocks.engines.grpc_calls.MOST_PER_CALL", 3)
        remote, local = Apart(filled(geometry(), seed=1), frozenset({5})), filled(geometry(), seed=2)
        async with connected(remote) as pair:
            result = await pair.pull(local, range(8), range(8))
            assert [index for index, _ in result.failures] == [5]
            assert np.array_equal(blocks_of(local, [0, 1, 6, 7]), blocks_of(filled(geometry(), seed=1), [0, 1, 6, 7]))
            result = await pair.push(local, range(8), range(8), write_notification=1)
            assert [index for index, _ in result.failures] == [5]

    run(test)
