"""CollectiveService, frame by frame: what a process may say when, and what the others hear of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from ayni import PROTOCOL_VERSION
from ayni.channels import open_channel
from ayni.errors import BadRequest, Deadline, Incompatible, TokenRefused, TooLarge
from ayni.rpc import error_from
from ayni.v1 import collective_pb2 as pb
from tests.support.coordinator import TOKEN, CoordinatorProcess, coordinator
from tests.support.joined_runs import OWN


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    run = {**OWN, "timeouts": {"shutdown": "1s", "accept": "1500ms", "heartbeat_interval": "100ms", "lease": "1s"}}
    with coordinator(tmp_path_factory.mktemp("coordinator"), run) as running:
        yield running


def hello(group: str, size: int = 2, **changes: Any) -> pb.ExchangeRequest:
    fields = {"protocol_version": PROTOCOL_VERSION, "group": group, "world_size": size, **changes}
    return pb.ExchangeRequest(hello=pb.CollectiveHello(**fields))


def message(to: list[int], data: bytes = b"x", **changes: Any) -> pb.ExchangeRequest:
    fields = {"to": to, "key": b"k", "about": "a thing", "total_bytes": len(data), "data": data, **changes}
    return pb.ExchangeRequest(send=pb.CollectiveSend(**fields))


@asynccontextmanager
async def stream(server: CoordinatorProcess, token: str = TOKEN) -> AsyncIterator[Any]:
    async with open_channel(server.address, token) as channel:
        call = channel.stream_stream("/ayni.v1.CollectiveService/Exchange")(timeout=30)
        yield call
        call.cancel()


async def say(call: Any, *frames: pb.ExchangeRequest) -> None:
    for frame in frames:
        await call.write(frame.SerializeToString())


async def hear(call: Any) -> pb.ExchangeResponse:
    data = await call.read()
    assert data is not grpc.aio.EOF
    return pb.ExchangeResponse.FromString(data)


async def refusal(call: Any) -> Exception | None:
    """How a stream ended, which it does with an error."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
        code, details = await call.code(), await call.details()
        assert code != grpc.StatusCode.OK
        initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
        return error_from(grpc.aio.AioRpcError(code, initial, trailing, details))
    except grpc.aio.AioRpcError as error:
        return error_from(error)


def test_messages_arrive_as_they_were_sent_and_leaving_is_told(server: CoordinatorProcess):
    async def talk() -> None:
        async with stream(server) as one, stream(server) as other:
            await say(one, hello("pair", process_name="ant"))
            await say(other, hello("pair", process_name="bee"))
            welcome = (await hear(one)).welcome
            assert list(welcome.process_names) in (["ant", "bee"], ["bee", "ant"])
            mine, theirs = welcome.rank, (await hear(other)).welcome.rank
            assert {mine, theirs} == {0, 1}
            await say(
                one, message([theirs], b"abc", total_bytes=5), message([theirs], b"de", total_bytes=5, offset_bytes=3)
            )
            await say(one, pb.ExchangeRequest(bye=pb.CollectiveBye()))
            first, second = (await hear(other)).delivery, (await hear(other)).delivery
            assert (first.sender, first.send.data, first.send.about) == (mine, b"abc", "a thing")
            assert (second.send.offset_bytes, second.send.data) == (3, b"de")
            assert (await hear(other)).left.rank == mine
            assert await one.read() is grpc.aio.EOF

    asyncio.run(talk())


def test_an_end_without_a_word_is_told_as_a_loss(server: CoordinatorProcess):
    async def talk() -> None:
        async with stream(server) as one, stream(server) as other:
            await say(one, hello("lost", process_name="ant", rank=0))
            await say(other, hello("lost", process_name="bee", rank=1))
            await hear(one)
            await hear(other)
            one.cancel()
            lost = (await hear(other)).lost
            assert (lost.rank, lost.detail) == (0, "ant: its stream broke")
            assert await other.read() is grpc.aio.EOF

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("frames", "error", "sentence"),
    [
        ([message([1])], BadRequest, "first frame must be a hello"),
        ([hello("")], BadRequest, "first frame must be a hello"),
        ([hello("x", 0)], BadRequest, "first frame must be a hello"),
        ([hello("x", protocol_version=99)], Incompatible, "speaks protocol 1 and this process 99"),
        ([hello("x" * 129)], TooLarge, "group has 129 bytes"),
        ([hello("x\x1b[31m")], BadRequest, "can't be printed"),
        ([hello("early"), message([1])], BadRequest, "before the welcome"),
        ([hello("own", 1), message([0])], BadRequest, "can't go from rank 0 to ranks"),
        ([hello("none", 1), message([])], BadRequest, "can't go from rank 0 to ranks"),
        ([hello("again", 1), hello("again", 1)], BadRequest, "only `send` and `bye`"),
        ([], Deadline, "no first frame came within 1.5 s"),
    ],
)
def test_what_is_out_of_place_is_refused(
    server: CoordinatorProcess, frames: list[pb.ExchangeRequest], error: type[Exception], sentence: str
):
    async def talk() -> None:
        async with stream(server) as call:
            await say(call, *frames)
            found = await refusal(call)
            assert isinstance(found, error), found
            assert sentence in str(found)

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (message([1, 1]), "to ranks [1, 1]"),
        (message([2]), "to ranks [2]"),
        (message([1], key=b""), "needs a key"),
        (message([1], key=b"k" * 129), "key has 129 bytes"),
        (message([1], about="a" * 257), "about has 257 bytes"),
        (message([1], b"x" * ((1 << 20) + 1)), "may have 1048576"),
        (message([1], b"xyz", total_bytes=2), "reaches beyond its message"),
        (b"\xff\xff\xff", "can't be read"),
    ],
)
def test_a_message_that_does_not_fit_ends_its_sender_and_the_group(
    server: CoordinatorProcess, frame: pb.ExchangeRequest | bytes, sentence: str
):
    async def talk() -> None:
        async with stream(server) as one, stream(server) as other:
            await say(one, hello("wrong", rank=0))
            await say(other, hello("wrong", rank=1))
            await hear(one)
            await hear(other)
            await one.write(frame if isinstance(frame, bytes) else frame.SerializeToString())
            assert sentence in str(await refusal(one))
            assert (await hear(other)).lost.rank == 0

    asyncio.run(talk())


def test_strangers_are_refused_before_anything_is_read(server: CoordinatorProcess):
    async def talk() -> None:
        async with stream(server, token="another-token-of-16") as call:
            await say(call, hello("x"))
            assert isinstance(await refusal(call), TokenRefused)

    asyncio.run(talk())


def test_a_sender_waits_for_one_that_does_not_read(server: CoordinatorProcess):
    # Nobody's memory but the outbox and what HTTP/2 lets on its way: far less than what is to be sent.
    async def talk() -> None:
        async with stream(server) as one, stream(server) as other:
            await say(one, hello("slow", rank=0))
            await say(other, hello("slow", rank=1))
            await hear(one)
            await hear(other)
            sent: list[int] = []

            async def write() -> None:
                for number in range(100):
                    await say(one, message([1], b"x" * (1 << 20), total_bytes=100 << 20, offset_bytes=number << 20))
                    sent.append(number)

            writing = asyncio.create_task(write())
            await asyncio.wait({writing}, timeout=1.5)
            assert 10 < len(sent) < 90
            for number in range(100):
                assert (await hear(other)).delivery.send.offset_bytes == number << 20
            await writing

    asyncio.run(talk())


def test_a_group_that_does_not_become_whole_is_refused_with_the_missing_ranks(tmp_path: Path):
    # Three of four come, one of them leaves again; the name is free for another group at once.
    run = {**OWN, "timeouts": {**OWN["timeouts"], "group": "1500ms"}}

    async def talk(running: CoordinatorProcess) -> None:
        async with stream(running) as one, stream(running) as other, stream(running) as third:
            await say(one, hello("part", 4, rank=0, process_name="ant"))
            await say(other, hello("part", 4, rank=2, process_name="bee"))
            await say(third, hello("part", 4, rank=3, process_name="cat"))
            await say(third, pb.ExchangeRequest(bye=pb.CollectiveBye()))
            for found in await asyncio.gather(refusal(one), refusal(other)):
                assert isinstance(found, Deadline), found
                assert "ranks 1, 3 of 4 did not come; there are ant (rank 0), bee (rank 2)" in str(found)
                assert found.metadata["waiting_for"] == "ranks 1, 3"
        async with stream(running) as one, stream(running) as other:
            await say(one, hello("part", 2, rank=0))
            await say(other, hello("part", 2, rank=1))
            assert (await hear(one)).HasField("welcome")
            # A group that was whole in time goes on for as long as it likes.
            await asyncio.sleep(1.7)
            await say(one, message([1]))
            assert (await hear(other)).HasField("welcome")
            assert (await hear(other)).delivery.sender == 0

    with coordinator(tmp_path, run) as running:
        asyncio.run(asyncio.wait_for(talk(running), 30))
