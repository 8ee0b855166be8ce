"""ReadBlocks and WriteBlocks on the wire: peers that lie, stubs of other makers, writes that are wrong."""

import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from ayni.channels import open_channel
from ayni.errors import AyniError
from ayni.rpc import error_from
from ayni.v1 import worker_pb2 as pb
from tests.support import block_peer
from tests.support.block_peer import TOKEN, Lender, Servicer, blocks_of, filled
from tests.support.grpc_pairs import HND, LIMIT, NHD, Pair, connected, geometry, naive, run
from worker_agent.blocks import streams


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
