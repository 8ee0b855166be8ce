"""The face of WorkerService: every call of a worker without blocks is refused; with blocks it reads, asks, answers."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from ayni import rpc
from ayni.blocks.layouts import AxisOrder, LayoutKind, LocalLayout, Tier
from ayni.channels import open_channel
from ayni.errors import AyniError, BadRequest, StaleEpoch, UnknownLayout
from ayni.v1 import worker_pb2 as pb
from ayni.v1 import worker_pb2_grpc
from tests.support.array_groups import SHAPE, TOKEN, served
from tests.support.array_layouts import World
from tests.support.array_worker import ArrayWorker
from tests.support.block_peer import HANDLE, Lender, blocks_of, config, filled
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.streams import Lender as AnyLender
from worker_agent.service import SERVICE, WorkerServicer

DEADLINE = 10.0
"""Seconds for one call."""

DEVICE = pb.LocalLayout(tier=pb.TIER_DEVICE)
GROUP = "6f1d7a52-0b7e-4a6c-9c3d-2f4e5a6b7c8d"


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, 3 * DEADLINE))


async def one(request: object) -> AsyncIterator[object]:
    yield request


async def call_once(stub: Any, name: str, request: Any = None) -> grpc.aio.AioRpcError:
    """Makes one call, of whatever shape, and returns the error that it ends with."""
    method = SERVICE.methods_by_name[name]
    request = request or GetMessageClass(method.input_type)()
    call = getattr(stub, name)(one(request) if method.client_streaming else request, timeout=DEADLINE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if method.server_streaming else call)
    return caught.value


@asynccontextmanager
async def client(worker: ArrayWorker | None, lender: AnyLender | None = None) -> AsyncIterator[Any]:
    """Gives the generated stub of a served worker."""
    async with served(worker, lender) as address, open_channel(address, TOKEN) as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel)


@pytest.mark.parametrize("name", [method.name for method in SERVICE.methods])
def test_without_blocks_every_call_is_refused_with_a_text_that_names_it(name: str) -> None:
    async def test() -> None:
        async with client(None) as stub:
            refusal = await call_once(stub, name)
        assert refusal.code() is grpc.StatusCode.UNIMPLEMENTED
        assert str(refusal.details()).startswith(f"{name} is not available: this worker moves no blocks.")

    run(test())


@pytest.mark.parametrize("name", ["ReadBlocks", "WriteBlocks"])
def test_without_a_lender_streams_are_refused(name: str) -> None:
    async def test() -> None:
        async with client(ArrayWorker(World(), SHAPE)) as stub:
            refusal = await call_once(stub, name)
        assert refusal.code() is grpc.StatusCode.UNIMPLEMENTED

    run(test())


def test_service_has_the_calls_of_both_planes() -> None:
    streams = {method.name for method in SERVICE.methods if method.client_streaming or method.server_streaming}
    assert streams == {"ReadBlocks", "WriteBlocks"}
    assert pb.DESCRIPTOR.package == "ayni.v1"
    assert all(hasattr(WorkerServicer, method.name) for method in SERVICE.methods)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("ConfigureLayouts", "rank"),
        ("ImportMetadata", "metadata"),
        ("ConnectRemote", "instance_id"),
        ("DisconnectRemote", "instance_id"),
        ("HasRemoteMetadata", "instance_id"),
        ("ExecuteLocalTransfer", "source"),
        ("ExecuteRemoteOnboard", "source"),
        ("ExecuteRemoteOffload", "source"),
        ("ExecuteRemoteOnboardForInstance", "instance_id"),
        ("HasBlocks", "layout"),
        ("PutBlocks", "source"),
        ("RemoveBlocks", "layout"),
        ("GetBlocks", "destination"),
    ],
)
def test_an_empty_request_is_refused_by_the_field_that_it_lacks(name: str, field: str) -> None:
    async def test() -> None:
        worker = ArrayWorker(World(), SHAPE)
        async with client(worker) as stub:
            refusal = rpc.error_from(await call_once(stub, name))
        assert isinstance(refusal, BadRequest)
        assert refusal.metadata["field"] == field
        assert refusal.message.startswith(f"{field}, as 127.0.0.1:")
        assert worker.calls == []

    run(test())


def copy(**fields: Any) -> pb.ExecuteLocalTransferRequest:
    return pb.ExecuteLocalTransferRequest(
        source=DEVICE,
        destination=DEVICE,
        source_blocks=pb.BlockIds(starts=[0], counts=[2]),
        destination_blocks=pb.BlockIds(starts=[8], counts=[2]),
        **fields,
    )


@pytest.mark.parametrize("timeout_s", [None, 5.0, 0.4])
def test_a_transfer_has_the_time_of_its_call_less_the_time_for_the_answer(timeout_s: float | None) -> None:
    async def test() -> None:
        worker = ArrayWorker(World(), SHAPE)
        async with client(worker) as stub:
            answer = await stub.ExecuteLocalTransfer(copy(), timeout=timeout_s)
        assert (answer.outcome.num_done, answer.outcome.quiesced) == (2, True)
        assert worker.options
        given = worker.options.timeout_s
        assert {None: 60.0, 5.0: 4.5, 0.4: 0.1}[timeout_s] <= given <= {None: 60.0, 5.0: 4.9, 0.4: 0.3}[timeout_s]
        assert worker.options.drain_s < given

    run(test())


def test_a_refused_transfer_is_a_status_with_its_reason() -> None:
    async def test() -> None:
        async with client(ArrayWorker(World(), SHAPE)) as stub:
            request = copy()
            request.destination.tier = pb.TIER_HOST
            refusal = rpc.error_from(await call_once(stub, "ExecuteLocalTransfer", request))
        assert isinstance(refusal, UnknownLayout)
        assert refusal.metadata == {"layout": str(LocalLayout(tier=Tier.HOST))}

    run(test())


def configuration(epoch: int) -> pb.ConfigureLayoutsRequest:
    return pb.ConfigureLayoutsRequest(
        epoch=epoch, instance_id=GROUP, rank=0, world_size=1, mode=pb.PARALLELISM_MODE_TENSOR_PARALLEL
    )


def test_an_epoch_below_the_configured_one_is_refused_whatever_the_call() -> None:
    async def test() -> None:
        worker = ArrayWorker(World(), SHAPE)
        async with client(worker) as stub:
            await stub.ConfigureLayouts(configuration(5), timeout=DEADLINE)
            await stub.ExecuteLocalTransfer(copy(epoch=9), timeout=DEADLINE)
            for epoch in (5, 0):
                await stub.ExecuteLocalTransfer(copy(epoch=epoch), timeout=DEADLINE)
            calls = list(worker.calls)
            for name, request in {
                "ExecuteLocalTransfer": copy(epoch=4),
                "ExportMetadata": pb.ExportMetadataRequest(epoch=4),
                "DisconnectRemote": pb.DisconnectRemoteRequest(epoch=4, instance_id=GROUP),
                "HasBlocks": pb.HasBlocksRequest(epoch=4, layout=DEVICE),
            }.items():
                assert isinstance(rpc.error_from(await call_once(stub, name, request)), StaleEpoch)
            refusal = rpc.error_from(await call_once(stub, "ExportMetadata", pb.ExportMetadataRequest(epoch=-1)))
            assert isinstance(refusal, BadRequest)
        assert worker.calls == calls

    run(test())


def test_a_request_that_can_not_be_read_does_not_move_the_epoch() -> None:
    async def test() -> None:
        async with client(ArrayWorker(World(), SHAPE)) as stub:
            wrong = configuration(9)
            wrong.ClearField("instance_id")
            assert isinstance(rpc.error_from(await call_once(stub, "ConfigureLayouts", wrong)), AyniError)
            await stub.ExecuteLocalTransfer(copy(epoch=1), timeout=DEADLINE)

    run(test())


def test_peers_read_and_write_what_is_lent() -> None:
    geometry = Geometry(config=config(), kind=LayoutKind.FULLY_CONTIGUOUS, axis_order=AxisOrder.NHD)
    handle = pb.LayoutHandle(low=HANDLE.owner_id, high=HANDLE.number)
    blocks = pb.BlockIds(starts=[5, 1])

    async def test() -> None:
        lender = Lender(filled(geometry))
        async with client(ArrayWorker(World(), SHAPE), lender) as stub:
            request = pb.ReadBlocksRequest(layout=handle, incarnation=1, blocks=blocks)
            frames = [frame async for frame in stub.ReadBlocks(request, timeout=DEADLINE)]
            data = b"".join(frame.chunk.data for frame in frames)
            assert data == blocks_of(lender.memory, [5, 1]).tobytes()
            assert frames[-1].complete.sent_bytes == len(data)

            call = stub.WriteBlocks(timeout=DEADLINE)
            begin = pb.WriteBegin(
                layout=handle,
                incarnation=1,
                blocks=pb.BlockIds(starts=[0, 7]),
                block_bytes=geometry.config.block_bytes,
                write_notification=11,
            )
            await call.write(pb.WriteBlocksRequest(begin=begin))
            await call.initial_metadata()
            chunk = pb.BlockChunk(blocks=[0, 7], layer_stop=geometry.config.num_layers, data=data)
            await call.write(pb.WriteBlocksRequest(chunk=chunk))
            await call.done_writing()
            answer = await call
        assert answer.written_bytes == len(data)
        assert blocks_of(lender.memory, [0, 7]).tobytes() == data
        assert (lender.notified, lender.lent) == ([11], [])

    run(test())
