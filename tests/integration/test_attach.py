"""Agents that nobody can dial: their leader's calls and peers' reads travel over a stream that they have opened."""

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from ayni import rpc
from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.messages import error_of, handle_message, ids_message
from ayni.blocks.metadata import GroupConfig, WorkerMetadata
from ayni.blocks.transfers import RemoteBlocks, TransferOptions
from ayni.channels import open_channel
from ayni.errors import BadRequest, Deadline, PeerLost, StaleEpoch, TooLarge, UnknownBlock, UnknownPeer, UnknownWorker
from ayni.v1 import coordinator_pb2, worker_pb2_grpc
from ayni.v1 import worker_pb2 as pb
from coordinator_service import attached_calls
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.support.array_groups import SHAPE
from tests.support.array_layouts import World
from tests.support.array_worker import ArrayWorker
from tests.support.attached_agent import (
    BLOCK_BYTES,
    HOST,
    SESSION,
    Coordinator,
    attached,
    block_agent,
    coordinating,
    filled,
    hidden,
    start_program,
)
from tests.support.block_peer import HANDLE, Lender, config
from tests.support.block_peer import filled as filled_memory
from tests.support.coordinator import TOKEN
from worker_agent.attached_calls import AttachedCall
from worker_agent.attachment import is_needed
from worker_agent.blocks.engines.grpc_engine import Relay
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.streams import read_blocks
from worker_agent.service import WorkerServicer
from worker_agent.serving import BlockService

DEVICE = LocalLayout(tier=Tier.DEVICE)
GROUP = "6f1d7a52-0b7e-4a6c-9c3d-2f4e5a6b7c8d"
LIMIT_S = 40.0
SECOND = TransferOptions(timeout_s=10.0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LIMIT_S))


@asynccontextmanager
async def one_attached(servicer: Any, worker_id: int = 0) -> AsyncIterator[tuple[Coordinator, str, GrpcBlockWorker]]:
    """A coordinator with one attached agent, and the stub that calls it through the coordinator."""
    coordinator = Coordinator()
    async with coordinating(coordinator) as address, attached(address, servicer, worker_id):
        await coordinator.until_attached(worker_id)
        stub = GrpcBlockWorker(coordinator.attachments.channel(worker_id), name="ant")
        try:
            yield coordinator, address, stub
        finally:
            await stub.close()


def group(epoch: int = 1) -> GroupConfig:
    return GroupConfig(epoch=epoch, instance_id=GROUP, rank=0, world_size=1)


def through(address: str, session: int = 3) -> Relay:
    return Relay(address=address, headers={"ayni-relay": "0", "ayni-session": SESSION.format(session)})


async def pulled(reader: BlockService, metadata: WorkerMetadata, blocks: range) -> np.ndarray:
    """Pulls blocks of a peer into the reader's own, and returns them."""
    await reader.worker.import_metadata([metadata])
    source = RemoteBlocks(layout=metadata.layouts[0].handle, blocks=as_ids(blocks))
    await reader.worker.execute_remote_onboard(source, HOST, blocks, SECOND)
    return await reader.worker.read(HOST, as_ids(blocks))


def test_a_stub_can_not_tell_an_attached_agent_from_one_that_it_dials(tmp_path: Path) -> None:
    async def test() -> None:
        async with block_agent(tmp_path) as agent, one_attached(agent.servicer) as (_, _, stub):
            dialled = GrpcBlockWorker.dial(agent.worker.address, TOKEN)
            assert await stub.export_metadata() == await dialled.export_metadata()
            await stub.configure_layouts(group(3))
            # One fence for both ways in: the agent has one servicer.
            with pytest.raises(StaleEpoch):
                await dialled.configure_layouts(group(2))
            copy = stub.execute_local_transfer(HOST, HOST, [0], [1], SECOND)
            assert (await copy).outcomes[0].num_done == 1
            with pytest.raises(UnknownBlock, match="block 9"):
                raise_refusal(await stub.execute_local_transfer(HOST, HOST, [9], [1], SECOND).result())
            assert (await agent.worker.read(HOST, as_ids([1]))).tobytes() == filled(1).tobytes()
            await dialled.close()

    run(test())


def raise_refusal(result: Any) -> None:
    raise error_of(result.outcomes[0].refusal)


def test_blocks_of_an_attached_agent_are_read_through_the_coordinator(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            block_agent(tmp_path / "a", 300) as agent,
            block_agent(tmp_path / "b", 300, seed=2) as reader,
            one_attached(agent.servicer) as (_, address, stub),
        ):
            (metadata,) = await stub.export_metadata()
            undialable = hidden(metadata)
            with pytest.raises(PeerLost):
                await reader.worker.import_metadata([undialable])
            reader.relays[metadata.incarnation] = through(address)
            blocks = await pulled(reader, undialable, range(300))
            assert blocks.tobytes() == filled(300).tobytes()

    run(test())


async def refusal_of_read(address: str, **headers: str) -> Any:
    async with open_channel(address, TOKEN) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).ReadBlocks(
            pb.ReadBlocksRequest(), timeout=5, metadata=tuple((f"ayni-{k}", v) for k, v in headers.items())
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return rpc.error_from(caught.value)


def test_the_coordinator_passes_reads_on_for_members_and_to_attached_agents_only(tmp_path: Path) -> None:
    async def test() -> None:
        async with block_agent(tmp_path) as agent, one_attached(agent.servicer) as (_, address, _):
            own = SESSION.format(3)
            assert isinstance(await refusal_of_read(address, relay="0"), UnknownWorker)
            assert isinstance(await refusal_of_read(address, relay="0", session="guessed"), UnknownWorker)
            assert isinstance(await refusal_of_read(address, relay="2", session=own), UnknownPeer)
            assert isinstance(await refusal_of_read(address, relay="x", session=own), BadRequest)
            # A request that goes through is the agent's to refuse.
            refusal = await refusal_of_read(address, relay="0", session=own)
            assert isinstance(refusal, BadRequest)
            assert "layout" in refusal.message

    run(test())


def test_only_a_member_can_attach(tmp_path: Path) -> None:
    async def test() -> None:
        coordinator = Coordinator()
        async with block_agent(tmp_path) as agent, coordinating(coordinator) as address:
            async with attached(address, agent.servicer, 7) as attachment:
                assert attachment._keeping
                async with asyncio.timeout(5):
                    await attachment._keeping
            assert not coordinator.attachments.is_attached(7)
            channel = coordinator.attachments.channel(7)
            with pytest.raises(ConnectionError, match="worker 7 is not attached"):
                await GrpcBlockWorker(channel, name="ant").export_metadata()

    run(test())


def test_a_call_that_is_given_up_ends_at_the_agent() -> None:
    async def test() -> None:
        worker = ArrayWorker(World(), SHAPE)
        worker.go.clear()
        async with one_attached(WorkerServicer(worker)) as (_, _, stub):
            copying = stub.execute_local_transfer(DEVICE, DEVICE, [0], [1], SECOND)
            async with asyncio.timeout(5):
                while not worker._tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            copying.cancel()
            result = await copying.result()
            assert not result.is_done
            async with asyncio.timeout(5):
                while worker._tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await worker.close()

    run(test())


def test_a_call_ends_at_its_deadline_although_the_agent_goes_on() -> None:
    async def test() -> None:
        worker = ArrayWorker(World(), SHAPE)
        worker.go.clear()
        async with one_attached(WorkerServicer(worker)) as (_, _, stub):
            loop = asyncio.get_running_loop()
            began = loop.time()
            result = await stub.execute_local_transfer(
                DEVICE, DEVICE, [0], [1], TransferOptions(timeout_s=0.5, drain_s=0.1)
            ).result()
            assert not result.is_done
            assert 0.3 < loop.time() - began < 3
        worker.go.set()
        await worker.close()

    run(test())


def test_more_calls_than_may_run_at_a_time_wait_for_their_turn() -> None:
    async def test() -> None:
        worker = ArrayWorker(World(), SHAPE)
        worker.go.clear()
        async with one_attached(WorkerServicer(worker)) as (_, _, stub):
            copies = [
                stub.execute_local_transfer(DEVICE, DEVICE, [0], [block], SECOND)
                for block in range(1, attached_calls.MOST_CALLS + 4)
            ]
            async with asyncio.timeout(5):
                while len(worker._tasks) < attached_calls.MOST_CALLS:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert len(worker._tasks) == attached_calls.MOST_CALLS
            worker.go.set()
            for copy in copies:
                assert (await copy).is_done
        await worker.close()

    run(test())


def test_what_does_not_fit_into_a_frame_is_refused_on_either_side() -> None:
    class Talkative(WorkerServicer):
        async def ExportMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
            return SimpleNamespace(SerializeToString=lambda: bytes(5 << 20))

    async def test() -> None:
        servicer = Talkative(ArrayWorker(World(), SHAPE))
        async with one_attached(servicer) as (coordinator, _, stub):
            with pytest.raises(TooLarge, match="the answer to ExportMetadata"):
                await stub.export_metadata()
            with pytest.raises(TooLarge, match="through an attachment"):
                await coordinator.attachments.open(0, "ExportMetadata", bytes(4 << 20), 5.0, is_unary=True)
            assert await stub.has_remote_metadata(GROUP)

    run(test())


def test_what_an_attachment_can_not_carry_is_said_to_be_unimplemented() -> None:
    async def test() -> None:
        async with one_attached(WorkerServicer(ArrayWorker(World(), SHAPE))) as (coordinator, _, _):
            channel = coordinator.attachments.channel(0)
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.WriteBlocks(iter(()))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            call = await coordinator.attachments.open(0, "WriteBlocks", b"", 5.0, is_unary=True)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(test())


class Endless(WorkerServicer):
    """Sends frames as fast as they are taken."""

    num_sent = 0
    ended = False

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: N802
        try:
            while True:
                yield bytes(1 << 20)
                self.num_sent += 1
        finally:
            self.ended = True


def test_a_reader_that_takes_nothing_stalls_the_agent_and_loses_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_calls, "STALL_S", 1.0)

    async def test() -> None:
        servicer = Endless(ArrayWorker(World(), SHAPE))
        async with one_attached(servicer) as (coordinator, _, stub):
            call = await coordinator.attachments.open(0, "ReadBlocks", b"", 30.0, is_unary=False)
            assert len(await call.read()) == 1 << 20
            async with asyncio.timeout(10):
                while not servicer.ended:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            # What was sent lies in the queue, in gRPC's windows and in sockets, and nowhere else.
            assert servicer.num_sent < 60
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert isinstance(rpc.error_from(caught.value), Deadline)
            # The others go on.
            assert await stub.export_metadata()

    run(test())


def test_a_stream_that_nobody_takes_ends_at_the_agent_and_says_why() -> None:
    geometry = Geometry(config=config(num_blocks=8))
    lender = Lender(filled_memory(geometry))

    class Impatient(WorkerServicer):
        async def ReadBlocks(self, request: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: N802
            async with aclosing(read_blocks(request, lender, context, stall_s=0.2)) as frames:
                async for frame in frames:
                    yield frame

    async def test() -> None:
        taken: asyncio.Queue[Any] = asyncio.Queue()
        resumed = asyncio.Event()

        async def send(reply: Any) -> None:
            if not reply.last:
                await resumed.wait()
            await taken.put(reply)

        request = pb.ReadBlocksRequest(layout=handle_message(HANDLE), incarnation=1, blocks=ids_message(as_ids([0, 1])))
        call = coordinator_pb2.AttachCall(call_id=3, method="ReadBlocks", request=request.SerializeToString())
        answering = AttachedCall(Impatient(ArrayWorker(World(), SHAPE)), call, send)
        reply = await asyncio.wait_for(taken.get(), 5)
        await answering.task
        assert (reply.last, reply.reason) == (True, "DEADLINE")
        assert "stood still for 0.2 s" in reply.status_message
        await lender.idle()

    run(test())


def test_a_slow_reader_slows_the_agent_down_and_gets_everything() -> None:
    async def test() -> None:
        servicer = Endless(ArrayWorker(World(), SHAPE))
        async with one_attached(servicer) as (coordinator, _, _):
            call = await coordinator.attachments.open(0, "ReadBlocks", b"", 30.0, is_unary=False)
            for taken in range(40):
                assert len(await call.read()) == 1 << 20
                await asyncio.sleep(0.01)
                assert servicer.num_sent < taken + 60
            call.cancel()
            async with asyncio.timeout(5):
                while not servicer.ended:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    run(test())


def test_a_relayed_read_that_is_given_up_ends_at_the_agent() -> None:
    async def test() -> None:
        servicer = Endless(ArrayWorker(World(), SHAPE))
        async with one_attached(servicer) as (_, address, _), open_channel(address, TOKEN) as channel:
            metadata = (("ayni-relay", "0"), ("ayni-session", SESSION.format(1)))
            call = worker_pb2_grpc.WorkerServiceStub(channel).ReadBlocks(
                pb.ReadBlocksRequest(), timeout=30, metadata=metadata
            )
            await call.read()
            call.cancel()
            async with asyncio.timeout(5):
                while not servicer.ended:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    run(test())


def test_a_killed_agent_fails_its_calls_and_is_not_attached_any_more(tmp_path: Path) -> None:
    async def test() -> None:
        coordinator = Coordinator()
        async with coordinating(coordinator) as address:
            process = start_program(address, tmp_path, 1, 4)
            try:
                await coordinator.until_attached(1, limit=30)
                stub = GrpcBlockWorker(coordinator.attachments.channel(1), name="ant")
                assert (await stub.export_metadata())[0].layouts[0].config.block_bytes == BLOCK_BYTES
                process.send_signal(signal.SIGSTOP)
                asking = asyncio.create_task(stub.export_metadata())
                await asyncio.sleep(0.1)
                process.kill()
                with pytest.raises(ConnectionError, match="not attached any more"):
                    await asyncio.wait_for(asking, 10)
                await coordinator.until_attached(1, is_attached=False)
            finally:
                process.kill()
                process.wait()

    run(test())


def test_an_agent_attaches_again_when_the_coordinator_is_back(tmp_path: Path) -> None:
    async def test() -> None:
        first, second = Coordinator(), Coordinator()
        async with block_agent(tmp_path) as agent:
            async with coordinating(first) as address:
                attaching = attached(address, agent.servicer)
                await attaching.__aenter__()
                await first.until_attached(0)
            async with coordinating(second, address):
                await second.until_attached(0, limit=15)
                stub = GrpcBlockWorker(second.attachments.channel(0), name="ant")
                assert await stub.export_metadata()
                await attaching.__aexit__(None, None, None)
                await second.until_attached(0, is_attached=False)

    run(test())


@pytest.mark.parametrize(
    ("attach", "listen", "coordinator", "expected"),
    [
        ("auto", "127.0.0.1:0", "127.0.0.1:1", False),
        ("auto", "127.0.0.1:0", "10.0.0.1:1", True),
        ("auto", "0.0.0.0:0", "10.0.0.1:1", False),
        ("always", "0.0.0.0:0", "127.0.0.1:1", True),
        ("never", "127.0.0.1:0", "10.0.0.1:1", False),
    ],
)
def test_an_agent_attaches_where_nobody_could_dial_it(attach: str, listen: str, coordinator: str, expected: bool):
    assert is_needed(attach, listen, coordinator) is expected
