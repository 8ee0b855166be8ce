"""Streams whose peer stands still, and parts of blocks that lie in very many pieces."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import Axis, AxisOrder, LayoutConfig
from ayni.blocks.transfers import AxisSlice
from ayni.channels import open_channel
from ayni.errors import AyniError
from ayni.rpc import error_from
from ayni.v1 import worker_pb2 as pb
from tests.support import block_peer
from tests.support.block_peer import TOKEN, Lender, Servicer, blocks_of, config, filled
from worker_agent.blocks import streams
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import Part
from worker_agent.blocks.stream_ends import MOST_RUNS, Sink, Source
from worker_agent.blocks.stream_order import Run

LIMIT = 20.0
HANDLE = pb.LayoutHandle(low=7, high=3)


class Impatient(Servicer):
    """Waits for a peer for a short time only."""

    stall_s = 0.2

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncGenerator[bytes, None]:  # noqa: N802
        async with aclosing(streams.read_blocks(request, self.lender, context, self.stall_s)) as frames:
            async for frame in frames:
                yield frame

    async def WriteBlocks(self, requests: Any, context: Any) -> Any:  # noqa: N802
        return await streams.write_blocks(requests, context, self.lender, self.stall_s)


class Patient(Impatient):
    """Waits long for a frame, so that only the time of the whole call is short."""

    stall_s = LIMIT


@asynccontextmanager
async def served(servicer_class: type[Servicer], **fields: Any) -> AsyncIterator[tuple[Any, Lender]]:
    lender = Lender(filled(Geometry(config=config(**fields), axis_order=AxisOrder.NHD), seed=1))
    async with block_peer.serving(servicer_class(lender)) as address, open_channel(address, TOKEN) as channel:
        yield channel, lender


def write(channel: Any, timeout: float | None = LIMIT) -> Any:
    return channel.stream_unary(
        "/ayni.v1.WorkerService/WriteBlocks",
        request_serializer=pb.WriteBlocksRequest.SerializeToString,
        response_deserializer=pb.WriteBlocksResponse.FromString,
    )(timeout=timeout)


def read(channel: Any, timeout: float | None = LIMIT, num_blocks: int = 2, chunk_bytes: int = 0) -> Any:
    blocks = pb.BlockIds(starts=[0], counts=[num_blocks])
    return channel.unary_stream(
        "/ayni.v1.WorkerService/ReadBlocks",
        request_serializer=pb.ReadBlocksRequest.SerializeToString,
        response_deserializer=pb.ReadBlocksResponse.FromString,
    )(
        pb.ReadBlocksRequest(layout=HANDLE, incarnation=1, blocks=blocks, chunk_bytes=chunk_bytes),
        timeout=timeout,
    )


def begin(block_bytes: int) -> pb.WriteBlocksRequest:
    blocks = pb.BlockIds(starts=[1], counts=[2])
    return pb.WriteBlocksRequest(
        begin=pb.WriteBegin(layout=HANDLE, incarnation=1, blocks=blocks, block_bytes=block_bytes)
    )


async def drained(call: Any) -> None:
    while await call.read() is not aio.EOF:
        pass


async def refusal_of(call: Any) -> AyniError:
    with pytest.raises(grpc.RpcError) as error:
        await call
    refusal = error_from(error.value)
    assert refusal, error.value
    return refusal


@pytest.mark.parametrize("num_frames", [0, 1])
def test_writer_that_sends_nothing_more_loses_its_blocks(num_frames):
    async def test() -> None:
        async with served(Impatient) as (channel, lender):
            call = write(channel)
            if num_frames:
                await call.write(begin(lender.memory.geometry.config.block_bytes))
                await call.initial_metadata()
                assert lender.lent == [([1, 2], True)]
            refusal = await refusal_of(call)
            assert (refusal.reason, refusal.metadata["timeout"]) == ("DEADLINE", "0.2")
            assert refusal.metadata["waiting_for"] == "the next frame of a write of a peer"
            assert lender.lent == []

    asyncio.run(test())


def test_reader_that_takes_nothing_loses_its_blocks(caplog):
    async def test() -> None:
        async with served(Impatient, num_blocks=512, region_bytes=1 << 15) as (channel, lender):
            call = read(channel, num_blocks=512)
            await call.read()
            assert lender.lent
            await lender.idle()
            refusal = await refusal_of(drained(call))
            assert refusal.metadata == {"waiting_for": "the next frame of a read of a peer", "timeout": "0.2"}

    with caplog.at_level(logging.ERROR):
        asyncio.run(test())
    assert not caplog.records


def test_reader_whose_deadline_is_its_own_is_left_alone():
    async def test() -> None:
        async with served(Patient) as (channel, _):
            answers = [answer async for answer in read(channel)]
            assert answers[-1].WhichOneof("frame") == "complete"

    asyncio.run(test())


def test_calls_without_a_deadline_get_one(monkeypatch):
    """Of a peer that goes on and on, but slowly."""
    monkeypatch.setattr(streams, "DEFAULT_TIMEOUT_S", 0.3)

    async def test() -> None:
        async with served(Patient, num_blocks=512, region_bytes=1 << 15) as (channel, lender):
            writing = write(channel, timeout=None)
            await writing.write(begin(lender.memory.geometry.config.block_bytes))
            refusal = await refusal_of(writing)
            assert refusal.metadata == {"waiting_for": "the end of a write of a peer", "timeout": "0.3"}
            reading = read(channel, timeout=None, num_blocks=512)
            await reading.read()
            await lender.idle()
            reading.cancel()

    asyncio.run(test())


class Counting(HostMemory):
    """Counts how often blocks are listed and read."""

    def __init__(self, memory: HostMemory) -> None:
        super().__init__(memory.geometry, memory.buffers)
        self.calls: list[str] = []

    def rows(self, part: Part) -> Any:
        self.calls.append("rows")
        return super().rows(part)

    def views(self, block: int, part: Part) -> Any:
        self.calls.append("views")
        return super().views(block, part)

    def read(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("read")
        super().read(*args, **kwargs)


def counting(page_size: int) -> Counting:
    shape = LayoutConfig(
        num_blocks=2, num_layers=2, outer_dim=2, page_size=page_size, inner_dim=16, num_heads=4, dtype_width_bytes=2
    )
    memory = allocate_host(Geometry(config=shape, axis_order=AxisOrder.NHD))
    memory.buffers[0][:] = np.random.default_rng(3).integers(0, 256, len(memory.buffers[0]), np.uint8)
    return Counting(memory)


HEAD = Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=1, stop=2))


@pytest.mark.parametrize(("page_size", "calls"), [(MOST_RUNS // 4, ["views"]), (MOST_RUNS // 2, ["read"])])
def test_block_in_many_pieces_is_listed_or_read_once_for_all_of_its_chunks(page_size, calls):
    memory = counting(page_size)
    size = memory.geometry.part_bytes(None, HEAD.slice, None)
    expected = np.empty((1, size), np.uint8)
    memory.read(as_ids([1]), HEAD, expected)
    memory.calls.clear()
    source = Source(memory, as_ids([1]), HEAD, AxisOrder.NHD)

    async def chunks() -> bytes:
        runs = [Run(0, 1, offset, min(1000, size - offset)) for offset in range(0, size, 1000)]
        return b"".join([bytes(piece) for run in runs for piece in await source.payload(run)])

    assert asyncio.run(chunks()) == expected.tobytes()
    assert memory.calls == calls


@pytest.mark.parametrize("page_size", [MOST_RUNS // 8, MOST_RUNS])
def test_blocks_in_many_pieces_are_written_as_they_were_read(page_size):
    source, target = counting(page_size), counting(page_size)
    for buffer in target.buffers:
        buffer[:] = 0
    size = source.geometry.part_bytes(None, HEAD.slice, None)
    run = Run(0, 2, 0, 2 * size)

    async def copy() -> None:
        data = b"".join(await Source(source, as_ids([0, 1]), HEAD, AxisOrder.NHD).payload(run))
        assert await Sink(target, as_ids([1, 0]), HEAD, AxisOrder.NHD).place(run, memoryview(data)) == {}

    asyncio.run(copy())
    heads_BLOPHS = blocks_of(source).reshape(2, 2, 2, page_size, 4, 8)
    written_BLOPHS = blocks_of(target).reshape(2, 2, 2, page_size, 4, 8)
    assert np.array_equal(written_BLOPHS[[1, 0], ..., 1, :], heads_BLOPHS[..., 1, :])
    assert not written_BLOPHS[..., [0, 2, 3], :].any()
