"""Blocks through ReadBlocks and WriteBlocks: sizes, parts, orders, kinds of memory, refusals, single failures."""

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import grpc
import numpy as np
import pytest

from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.layouts import Axis, AxisOrder, LayoutHandle, LayoutKind, StorageKind
from ayni.blocks.transfers import AxisSlice
from ayni.channels import open_channel
from ayni.endpoints import ClientTls, Keepalive, ServerTls
from ayni.errors import AyniError, PeerLost, StorageFailed, Unsupported
from ayni.rpc import client_options, error_from
from ayni.v1 import worker_pb2 as pb
from scripts import make_certs
from tests.support import block_peer
from tests.support.block_peer import HANDLE, TOKEN, Lender, Servicer, blocks_of, config, descriptor, filled, metadata
from worker_agent.blocks import frames, streams
from worker_agent.blocks.engine import Move, MoveResult, Ticket
from worker_agent.blocks.engines.grpc_calls import MOST_PER_CALL, Share, read_request
from worker_agent.blocks.engines.grpc_engine import Dialling, GrpcEngine
from worker_agent.blocks.engines.grpc_link import GrpcLink
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Memory, Part

LIMIT = 20.0
"""Deadline of moves that are to end long before."""

FC, BLOCK_FIRST, BLOCK_SECOND = LayoutKind
NHD, HND, UNIVERSAL = AxisOrder.NHD, AxisOrder.HND, AxisOrder.UNIVERSAL


@dataclass
class Pair:
    """A peer that serves, and a link to it."""

    link: GrpcLink
    lender: Lender
    servicer: Servicer

    async def pull(self, local: Memory, remote_blocks: Any, local_blocks: Any, **options: Any) -> MoveResult:
        return await ended(self.link.pull(self.move(local, remote_blocks, local_blocks, **options)))

    async def push(self, local: Memory, remote_blocks: Any, local_blocks: Any, **options: Any) -> MoveResult:
        return await ended(self.link.push(self.move(local, remote_blocks, local_blocks, **options)))

    def move(self, local: Memory, remote_blocks: Any, local_blocks: Any, limit: float = LIMIT, **options: Any) -> Move:
        return Move(
            remote=descriptor(self.lender.memory.geometry),
            remote_blocks=as_ids(remote_blocks),
            local=local,
            local_blocks=as_ids(local_blocks),
            deadline=asyncio.get_running_loop().time() + limit,
            **options,
        )


async def ended(ticket: Ticket) -> MoveResult:
    """Returns a move's outcome once it is quiesced."""
    async with asyncio.timeout(LIMIT + 5):
        await ticket.quiesced
        return await ticket.outcome


@asynccontextmanager
async def connected(memory: Memory, servicer_class: type[Servicer] = Servicer) -> AsyncIterator[Pair]:
    lender = Lender(memory)
    servicer = servicer_class(lender)
    async with block_peer.serving(servicer) as address:
        worker, export = metadata(memory.geometry, address)
        engine = GrpcEngine(Dialling(token=TOKEN))
        link = await engine.connect(worker, export, asyncio.get_running_loop().time() + LIMIT)
        try:
            yield Pair(link, lender, servicer)
        finally:
            await link.close()
    assert lender.lent == [], "blocks are still lent"


def geometry(order: AxisOrder = NHD, kind: LayoutKind = FC, **fields: Any) -> Geometry:
    return Geometry(config=config(**fields), kind=kind, axis_order=order)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


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


def naive(data: np.ndarray, order: AxisOrder, layers: slice, heads: slice) -> np.ndarray:
    """Returns blocks' elements as [N, layer, outer, page, head, element of uint16], sliced."""
    shapes = {NHD: (2, 2, 2, 4, -1), HND: (2, 2, 4, 2, -1), UNIVERSAL: (4, 2, 2, 2, -1)}
    places = {NHD: (0, 1, 2, 3, 4, 5), HND: (0, 1, 2, 4, 3, 5), UNIVERSAL: (0, 2, 3, 4, 1, 5)}
    elements = data.view(np.uint16).reshape(len(data), *shapes[order]).transpose(places[order])
    return elements[:, layers, :, :, heads]


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


class Apart:
    """Memory that the processor can't reach, like a disk or a device; some blocks fail."""

    storage = StorageKind.DISK

    def __init__(self, host: Memory, broken: frozenset[int] = frozenset()) -> None:
        self._host, self.geometry, self._broken = host, host.geometry, broken

    def rows(self, part: Part) -> None:
        return None

    def views(self, block: int, part: Part) -> None:
        return None

    def read(self, blocks: Ids, part: Part, out: np.ndarray) -> None:
        self._check(blocks)
        self._host.read(blocks, part, out)

    def write(self, blocks: Ids, part: Part, data: np.ndarray) -> None:
        self._check(blocks)
        self._host.write(blocks, part, data)

    def close(self) -> None:
        pass

    def _check(self, blocks: Ids) -> None:
        if broken := self._broken & set(blocks.tolist()):
            raise StorageFailed(f"block {min(broken)} is broken", place="a disk", detail="broken")


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


def lying(change: Callable[[list[pb.ReadBlocksResponse]], Any]) -> type[Servicer]:
    """Returns a peer whose answers to anything but the warm-up read are changed before they are sent."""

    class Lying(Servicer):
        async def ReadBlocks(self, request: Any, context: Any) -> AsyncGenerator[bytes, None]:  # noqa: N802
            answers = [pb.ReadBlocksResponse.FromString(f) async for f in Servicer.ReadBlocks(self, request, context)]
            if request.blocks.starts[0] or request.blocks.counts:
                change(answers)
            for answer in answers:
                yield answer.SerializeToString()

    return Lying


def _other_size(answers: list[Any]) -> None:
    answers[0].begin.block_bytes *= 2


def _damage(answers: list[Any]) -> None:
    answers[2].chunk.data = answers[2].chunk.data[:-1] + bytes([answers[2].chunk.data[-1] ^ 1])


def _cut(answers: list[Any]) -> None:
    del answers[2:]


def _never_complete(answers: list[Any]) -> None:
    del answers[-1]


def _swap(answers: list[Any]) -> None:
    answers[1], answers[2] = answers[2], answers[1]


def _skip(answers: list[Any]) -> None:
    del answers[1]


def _skip_well(answers: list[Any]) -> None:
    size = len(answers[1].chunk.data)
    del answers[1]
    for answer in answers[1:-1]:
        answer.chunk.stream_offset_bytes -= size
    answers[-1].complete.sent_bytes -= size


def _wrong_sum(answers: list[Any]) -> None:
    answers[-1].complete.sent_bytes += 1


def _no_such_block(answers: list[Any]) -> None:
    answers[-1].complete.failures.add(index=99)


def _drop_one(answers: list[Any]) -> None:
    answers[-1].complete.failures.add(index=1, block=4).failure.message = "on second thought"


LIES: dict[str, tuple[Callable[[list[Any]], Any], list[int], str]] = {
    "block_bytes": (_other_size, [0, 1, 2], "INCOMPATIBLE_LAYOUT"),
    "damage": (_damage, [0, 1, 2], "CHECKSUM"),
    "short": (_cut, [0, 1, 2], "PEER_LOST"),
    "no complete": (_never_complete, [0, 1, 2], "PEER_LOST"),
    "swap": (_swap, [0, 1, 2], "BAD_CHUNK"),
    "gap": (_skip, [0, 1, 2], "BAD_CHUNK"),
    "left out": (_skip_well, [0], "BAD_CHUNK"),
    "sum": (_wrong_sum, [0, 1, 2], "BAD_CHUNK"),
    "no such block": (_no_such_block, [0, 1, 2], "BAD_REQUEST"),
    "dropped": (_drop_one, [1], "UNSPECIFIED"),
}


@pytest.mark.parametrize("name", LIES)
def test_lie_of_a_peer_fails_every_block_that_it_did_not_complete(name):
    change, failed, reason = LIES[name]

    async def test() -> None:
        size: dict[str, Any] = {"num_blocks": 6, "region_bytes": 3 << 17}  # One block in each chunk.
        remote, local = filled(geometry(**size), seed=1), filled(geometry(**size), seed=2)
        before = blocks_of(local)
        async with connected(remote, lying(change)) as pair:
            result = await pair.pull(local, [3, 4, 5], [0, 2, 4], checksum=True)
        assert [index for index, _ in result.failures] == failed
        assert {failure.reason for _, failure in result.failures} <= {reason}
        done = [index for index in range(3) if index not in failed]
        assert np.array_equal(blocks_of(local)[[0, 2, 4]][done], blocks_of(remote)[[3, 4, 5]][done])
        assert np.array_equal(blocks_of(local)[[1, 3, 5]], before[[1, 3, 5]])

    run(test)


def test_generated_stub_can_read_and_write():
    """Another language's client: message objects, unpadded, ids not packed as ours."""

    async def test() -> None:
        memory = filled(geometry(num_blocks=300, region_bytes=4096), seed=1)
        content = blocks_of(memory)
        async with block_peer.serving(Servicer(Lender(memory))) as address, open_channel(address, TOKEN) as channel:
            read = channel.unary_stream(
                "/ayni.v1.WorkerService/ReadBlocks",
                request_serializer=pb.ReadBlocksRequest.SerializeToString,
                response_deserializer=pb.ReadBlocksResponse.FromString,
            )
            handle = pb.LayoutHandle(low=7, high=3)
            request = pb.ReadBlocksRequest(layout=handle, incarnation=1, checksum=True, chunk_bytes=100_000)
            request.blocks.starts.extend([10, 299])
            request.blocks.counts.extend([20, 1])
            answers = [answer async for answer in read(request, timeout=LIMIT)]
            assert [answer.WhichOneof("frame") for answer in answers] == ["begin", *["chunk"] * 4, "complete"]
            assert b"".join(answer.chunk.data for answer in answers) == content[[*range(10, 30), 299]].tobytes()
            assert [answer.chunk.index for answer in answers[1:-1]] == [0, 6, 12, 18]
            for answer in answers[1:-1]:
                assert answer.chunk.crc32 == zlib.crc32(answer.chunk.data)
                assert (answer.chunk.layer_start, answer.chunk.layer_stop) == (0, 2)

            write = channel.stream_unary(
                "/ayni.v1.WorkerService/WriteBlocks",
                request_serializer=pb.WriteBlocksRequest.SerializeToString,
                response_deserializer=pb.WriteBlocksResponse.FromString,
            )
            call = write(timeout=LIMIT)
            begin = pb.WriteBegin(layout=handle, incarnation=1, block_bytes=len(content[0]))
            begin.blocks.starts.extend([5, 2])
            await call.write(pb.WriteBlocksRequest(begin=begin))
            await call.initial_metadata()
            data = content[[100, 200]].tobytes()
            for start in range(0, len(data), 5000):  # Chunks that end inside blocks, or in several.
                index, stop = start // len(content[0]), min(start + 5000, len(data))
                chunk = pb.BlockChunk(
                    stream_offset_bytes=start,
                    index=index,
                    blocks=[5, 2][index : (stop - 1) // len(content[0]) + 1],
                    layer_stop=2,
                    offset_bytes=start % len(content[0]),
                    data=data[start:stop],
                )
                await call.write(pb.WriteBlocksRequest(chunk=chunk))
            await call.done_writing()
            assert await call == pb.WriteBlocksResponse(written_bytes=len(data))
        assert np.array_equal(blocks_of(memory, [5, 2]), content[[100, 200]])

    run(test)


@asynccontextmanager
async def raw_write(pair: Pair, begin: pb.WriteBegin) -> AsyncIterator[Any]:
    """Starts a write by hand."""
    call = pair.link._write(timeout=LIMIT)
    await call.write(pb.WriteBlocksRequest(begin=begin).SerializeToString())
    try:
        yield call
    finally:
        call.cancel()


async def refusal_of(call: Any) -> AyniError:
    with pytest.raises(grpc.RpcError) as error:
        await call
    refusal = error_from(error.value)
    assert refusal, error.value
    return refusal


def begin_of(block_bytes: int = 128, **fields: Any) -> pb.WriteBegin:
    begin = pb.WriteBegin(layout=pb.LayoutHandle(low=7, high=3), incarnation=1, block_bytes=block_bytes, **fields)
    begin.blocks.starts.extend([1, 2])
    return begin


def chunk_frame(**fields: Any) -> bytes:
    values: dict[str, Any] = {"blocks": [1], "layer_stop": 2, "data": bytes(128)} | fields
    return pb.WriteBlocksRequest(chunk=pb.BlockChunk(**values)).SerializeToString()


BAD_WRITES: dict[str, tuple[pb.WriteBegin, list[bytes], str]] = {
    "checksum": (begin_of(), [chunk_frame(crc32=5)], "CHECKSUM"),
    "order": (begin_of(), [chunk_frame(index=1, blocks=[1])], "BAD_CHUNK"),
    "second begin": (begin_of(), [pb.WriteBlocksRequest(begin=begin_of()).SerializeToString()], "BAD_REQUEST"),
    "no protobuf": (begin_of(), [b"\x12\xff"], "BAD_REQUEST"),
    "size": (begin_of(64), [], "INCOMPATIBLE_LAYOUT"),
    "layers": (begin_of(layers=pb.LayerRange(start=1, stop=3)), [], "BAD_REQUEST"),
    "no layers": (begin_of(layers=pb.LayerRange(start=1, stop=1)), [], "BAD_REQUEST"),
    "unknown order": (begin_of(axis_order=pb.AXIS_ORDER_UNKNOWN), [], "INCOMPATIBLE_LAYOUT"),
}


@pytest.mark.parametrize("name", BAD_WRITES)
def test_wrong_write_is_refused_with_its_reason(name):
    begin, chunks, reason = BAD_WRITES[name]

    async def test() -> None:
        async with connected(filled(geometry(), seed=1)) as pair, raw_write(pair, begin) as call:
            if chunks:
                await call.initial_metadata()
                for frame in [*chunks, *[chunk_frame()] * 50]:
                    await call.write(frame)
                await call.done_writing()
            assert (await refusal_of(call)).reason == reason

    run(test)


def test_write_in_another_order_is_brought_into_the_layouts_own():
    async def test() -> None:
        memory = filled(geometry(NHD), seed=1)
        sent = blocks_of(filled(geometry(HND), seed=5), [3, 4])
        begin = begin_of(axis_order=pb.AXIS_ORDER_HND)
        async with connected(memory) as pair, raw_write(pair, begin) as call:
            await call.initial_metadata()
            await call.write(chunk_frame(blocks=[1, 2], data=sent.tobytes()))
            await call.done_writing()
            assert (await call).written_bytes == 256
        everything = slice(None), slice(None)
        assert np.array_equal(naive(blocks_of(memory, [1, 2]), NHD, *everything), naive(sent, HND, *everything))

    run(test)


class Unmarked(Servicer):
    """Accepts as a server that knows only the contract does."""

    async def WriteBlocks(self, requests: Any, context: Any) -> Any:  # noqa: N802
        class Context:
            def __getattr__(self, name: str) -> Any:
                return getattr(context, name)

            async def send_initial_metadata(self, _metadata: Any) -> None:
                await context.send_initial_metadata(())

        return await streams.write_blocks(requests, Context(), self.lender)  # type: ignore[arg-type]


def test_acceptance_without_a_mark_is_one_all_the_same():
    async def test() -> None:
        remote, local = filled(geometry(), seed=1), filled(geometry(), seed=2)
        async with connected(remote, Unmarked) as pair:
            assert not (await pair.push(local, range(8), range(8))).failures
            assert (await pair.push(local, [8], [0])).failures[0][1].reason == "UNKNOWN_BLOCK"
        assert np.array_equal(blocks_of(local), blocks_of(remote))

    run(test)


def test_half_closed_write_names_the_blocks_that_did_not_come():
    async def test() -> None:
        memory = filled(geometry(), seed=1)
        async with connected(memory) as pair, raw_write(pair, begin_of()) as call:
            await call.initial_metadata()
            await call.write(chunk_frame(data=bytes(range(128))))
            await call.done_writing()
            response = await call
            assert response.written_bytes == 128
            assert [(failure.index, failure.block) for failure in response.failures] == [(1, 2)]
        assert blocks_of(memory, [1]).tobytes() == bytes(range(128))

    run(test)


def test_cancelled_pull_ends_at_once_and_leaves_the_blocks_alone_from_then_on():
    async def test() -> None:
        size: dict[str, Any] = {"num_blocks": 512, "region_bytes": 1 << 14}
        remote, local = filled(geometry(**size), seed=1), filled(geometry(**size), seed=2)
        async with connected(remote) as pair:
            ticket = pair.link.pull(pair.move(local, range(512), range(512)))
            before = blocks_of(local, [0])
            while np.array_equal(blocks_of(local, [0]), before):
                assert not ticket.outcome.done(), "the move was over before it could be disturbed"
                await asyncio.sleep(0)
            ticket.cancel()
            result = await ended(ticket)
            failed = [index for index, _ in result.failures]
            assert failed == list(range(512)), "the peer had not said yet that they are good"
            assert {failure.reason for _, failure in result.failures} == {"CANCELLED"}
            after = blocks_of(local)
            await asyncio.sleep(0.05)
            assert np.array_equal(blocks_of(local), after), "bytes landed after the move was quiesced"
            ticket.cancel()

    run(test)


def test_cancelled_push_is_quiesced_when_the_peer_has_let_go():
    async def test() -> None:
        size: dict[str, Any] = {"num_blocks": 512, "region_bytes": 1 << 14}
        remote, local = filled(geometry(**size), seed=1), filled(geometry(**size), seed=2)
        async with connected(remote) as pair:
            before = blocks_of(remote, [0])
            ticket = pair.link.push(pair.move(local, range(512), range(512)))
            while np.array_equal(blocks_of(remote, [0]), before):
                assert not ticket.outcome.done(), "the move was over before it could be disturbed"
                await asyncio.sleep(0)
            ticket.cancel()
            result = await ended(ticket)
            assert [index for index, _ in result.failures] == list(range(512)), "no answer: nothing counts as written"
            assert pair.lender.busy == set()
            assert not (await pair.push(local, [0, 511], [0, 511])).failures

    run(test)


class Stuck(Servicer):
    """Answers nothing but the warm-up."""

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncGenerator[bytes, None]:  # noqa: N802
        async with aclosing(Servicer.ReadBlocks(self, request, context)) as answers:
            async for frame in answers:
                yield frame
                if request.blocks.starts[0]:
                    await asyncio.Event().wait()

    async def WriteBlocks(self, requests: Any, context: Any) -> Any:  # noqa: N802
        await asyncio.Event().wait()


@pytest.mark.parametrize("way", ["pull", "push"])
def test_outcome_is_there_at_the_deadline(way):
    async def test() -> None:
        local = filled(geometry(), seed=2)
        async with connected(filled(geometry(), seed=1), Stuck) as pair:
            move = pair.move(local, [1, 2], [1, 2], limit=0.2)
            ticket = pair.link.pull(move) if way == "pull" else pair.link.push(move)
            async with asyncio.timeout_at(move.deadline + 0.1):
                result = await ticket.outcome
            assert asyncio.get_running_loop().time() >= move.deadline
            assert [(index, failure.reason) for index, failure in result.failures] == [(0, "DEADLINE"), (1, "DEADLINE")]
            await ended(ticket)

    run(test)


def test_closing_a_link_fails_what_is_in_flight():
    async def test() -> None:
        async with connected(filled(geometry(), seed=1), Stuck) as pair:
            ticket = pair.link.pull(pair.move(filled(geometry(), seed=2), [1], [1]))
            await asyncio.sleep(0)
            await pair.link.close()
            assert ticket.quiesced.done()
            assert (await ticket.outcome).failures[0][1].reason == "PEER_LOST"

    run(test)


class SlowDisk(Apart):
    """Memory whose writes take a while, in a thread."""

    def __init__(self, host: Memory) -> None:
        super().__init__(host)
        self.writing = 0

    def write(self, blocks: Ids, part: Part, data: np.ndarray) -> None:
        self.writing += 1
        time.sleep(0.3)
        super().write(blocks, part, data)
        self.writing -= 1


def test_move_into_a_slow_disk_has_its_outcome_in_time_and_is_quiesced_later():
    async def test() -> None:
        local = SlowDisk(filled(geometry(), seed=2))
        async with connected(filled(geometry(), seed=1)) as pair:
            ticket = pair.link.pull(pair.move(local, range(8), range(8), limit=0.1))
            result = await ticket.outcome
            assert len(result.failures) == 8
            assert not ticket.quiesced.done()
            assert local.writing == 1
            await ended(ticket)
            assert local.writing == 0

    run(test)


def test_connect_says_why_it_is_not_possible():
    async def test() -> None:
        memory, loop = filled(geometry(), seed=1), asyncio.get_running_loop()
        engine = GrpcEngine(Dialling(token=TOKEN, keepalive=Keepalive(interval=timedelta(seconds=1))))
        assert engine.export() is None
        began = loop.time()
        with pytest.raises(PeerLost, match="rank 0 of group"):
            await engine.connect(*metadata(memory.geometry, "127.0.0.1:1"), loop.time() + LIMIT)
        assert loop.time() - began < 1.0
        with pytest.raises(Unsupported, match="speaks TLS"):
            await engine.connect(*metadata(memory.geometry, "127.0.0.1:1", is_tls=True), loop.time() + LIMIT)
        with pytest.raises(Unsupported, match="without TLS"):
            await engine.connect(*metadata(memory.geometry, "worker.example:1"), loop.time() + LIMIT)
        async with block_peer.serving(Stuck(Lender(memory))) as address:
            wrong = GrpcEngine(Dialling(token="another token of the same length"))
            with pytest.raises(AyniError) as error:
                await wrong.connect(*metadata(memory.geometry, address), loop.time() + LIMIT)
            assert error.value.reason == "TOKEN_REFUSED"
            with pytest.raises(AyniError) as error:
                await engine.connect(*metadata(memory.geometry, address, incarnation=9), loop.time() + LIMIT)
            assert error.value.reason == "STALE_EPOCH"

    run(test)


@pytest.mark.parametrize("is_mutual", [False, True])
def test_blocks_move_through_tls(tmp_path, is_mutual):
    assert make_certs.main(["--out", str(tmp_path), "--host", "127.0.0.1"]) == 0
    server = ServerTls(
        certificate=tmp_path / "server.pem",
        key=tmp_path / "server.key",
        client_ca=tmp_path / "ca.pem" if is_mutual else None,
    )
    client = ClientTls(ca=tmp_path / "ca.pem", certificate=tmp_path / "client.pem", key=tmp_path / "client.key")

    async def test() -> None:
        lender, local = Lender(filled(geometry(), seed=1)), filled(geometry(), seed=2)
        async with block_peer.serving(Servicer(lender), tls=server) as address:
            engine, loop = GrpcEngine(Dialling(token=TOKEN, tls=client)), asyncio.get_running_loop()
            assert engine.capabilities.encrypted
            link = await engine.connect(*metadata(lender.memory.geometry, address, is_tls=True), loop.time() + LIMIT)
            pair = Pair(link, lender, Servicer(lender))
            assert not (await pair.pull(local, range(8), range(8))).failures
            await link.close()
        assert np.array_equal(blocks_of(local), blocks_of(lender.memory))

    run(test)


def test_busy_warm_up_block_does_not_keep_a_peer_from_being_connected():
    async def test() -> None:
        lender = Lender(filled(geometry(), seed=1))
        lender.busy = {0}
        async with block_peer.serving(Servicer(lender)) as address:
            loop = asyncio.get_running_loop()
            worker, export = metadata(lender.memory.geometry, address)
            link = await GrpcEngine(Dialling(token=TOKEN)).connect(worker, export, loop.time() + LIMIT)
            await link.close()

    run(test)


def test_large_block_is_asked_for_and_not_read_by_the_warm_up(monkeypatch):
    async def test() -> None:
        monkeypatch.setattr("worker_agent.blocks.engines.grpc_engine.MOST_WARM_UP_BYTES", 64)

        def refuse_memory(geometry: Geometry) -> Memory:
            raise AssertionError(f"memory for {geometry}")

        monkeypatch.setattr("worker_agent.blocks.engines.grpc_engine.allocate_host", refuse_memory)
        remote, local = filled(geometry(), seed=1), filled(geometry(), seed=2)
        async with connected(remote) as pair:
            assert not (await pair.pull(local, [1], [1])).failures
        lender = Lender(filled(geometry(), seed=1), incarnation=2)
        async with block_peer.serving(Servicer(lender)) as address:
            worker, export = metadata(lender.memory.geometry, address)
            with pytest.raises(AyniError, match="another incarnation"):
                await GrpcEngine(Dialling(token=TOKEN)).connect(worker, export, asyncio.get_running_loop().time() + 5)

    run(test)


class Silent(Servicer):
    """Holds the blocks of a write while `asleep`, whatever becomes of the call, and breaks the call itself."""

    def __init__(self, lender: Lender) -> None:
        super().__init__(lender)
        self.asleep, self.written = asyncio.Event(), asyncio.Event()

    async def WriteBlocks(self, requests: Any, context: Any) -> Any:  # noqa: N802
        await context.send_initial_metadata(streams.ACCEPTED)
        await anext(requests)
        await anext(requests)
        self.lender.busy |= {1, 2}
        self.written.set()
        if self.asleep.is_set():
            await asyncio.Event().wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")


@pytest.mark.parametrize("end", ["break", "cancel", "deadline"])
def test_push_without_an_answer_is_quiesced_when_the_peer_lets_its_blocks_be_read(end):
    async def test() -> None:
        async with connected(filled(geometry(), seed=1), Silent) as pair:
            assert isinstance(pair.servicer, Silent)
            if end != "break":
                pair.servicer.asleep.set()
            limit = 0.3 if end == "deadline" else LIMIT
            ticket = pair.link.push(pair.move(filled(geometry(), seed=2), [1, 2], [1, 2], limit=limit))
            await pair.servicer.written.wait()
            if end == "cancel":
                ticket.cancel()
            reason = {"break": "PEER_LOST", "cancel": "CANCELLED", "deadline": "DEADLINE"}[end]
            assert {failure.reason for _, failure in (await ticket.outcome).failures} == {reason}
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ticket.quiesced), 0.3 if end == "break" else 1.5)
            pair.lender.busy.clear()
            await ended(ticket)

    run(test)


def test_push_without_an_answer_is_let_go_when_the_link_is_closed():
    async def test() -> None:
        async with connected(filled(geometry(), seed=1), Silent) as pair:
            ticket = pair.link.push(pair.move(filled(geometry(), seed=2), [1, 2], [1, 2]))
            await ticket.outcome
            async with asyncio.timeout(2):
                await pair.link.close()
            assert ticket.quiesced.done()

    run(test)


EXPORTS = [b"", b"{", b"[]", b'{"address": 1, "tls": true}', b'{"address": "x", "tls": false}', b" " * 5000, b"\xff"]


@pytest.mark.parametrize("data", EXPORTS)
def test_export_that_is_none_is_refused(data):
    async def test() -> None:
        worker, export = metadata(geometry(), "127.0.0.1:1")
        broken = replace(export, data=data)
        with pytest.raises(AyniError, match="grpc export can't be read"):
            await GrpcEngine(Dialling(token=TOKEN)).connect(worker, broken, 1e9)

    run(test)


def test_options_of_the_channel_hold_all_three_keepalive_arguments():
    names = {name for name, _ in client_options(Keepalive(), loopback=True)}
    assert {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"} <= names


def test_frames_stay_below_the_limit_of_grpc():
    head = frames.ChunkHead(
        stream_offset_bytes=2**63, index=2**63, blocks=[2**63] * 1024, layers=(2**31, 2**32 - 1), offset_bytes=2**63
    )
    assert len(frames.encode_block_chunk(head, [bytes(frames.MAX_CHUNK_BYTES)], checksum=True)) < 4 << 20


def test_longest_list_of_one_call_fits_into_a_message():
    ids = 2**62 + np.arange(MOST_PER_CALL, dtype=np.int64) // 2 * 2**20 + np.arange(MOST_PER_CALL) % 2
    local = filled(geometry())
    move = Move(remote=descriptor(geometry()), remote_blocks=ids, local=local, local_blocks=ids, deadline=0.0)
    share = Share(move=move, first=0, remote_blocks=ids, local_blocks=ids, is_last=True)
    assert read_request(share, 2**64 - 1).ByteSize() < 4 << 20
    ids = ids * 1 + np.arange(MOST_PER_CALL)
    share = Share(move=move, first=0, remote_blocks=ids, local_blocks=ids, is_last=True)
    assert read_request(share, 2**64 - 1).ByteSize() < 4 << 20
