"""Refusals and raw messages between real servers and clients on loopback."""
# ruff: noqa: N802 -- methods are named after calls

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from grpc_status import rpc_status

from ayni import rpc
from ayni.channels import open_channel, open_sync_channel
from ayni.errors import BY_REASON, AyniError, BadChunk, Incompatible, StepVoided
from ayni.servers import TokenInterceptor, add_service, make_server
from tests.support.echo import KINDS, REPEATS, SERVICE, Echo, blocking_outcome, calls, outcome, serving

TOKEN = "a-token-of-some-length"
HELLO = BytesValue(value=b"hello")
LIMIT = 60.0
"""Seconds after which a test has failed."""


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, LIMIT))


async def refusal_of(work: Awaitable[Any]) -> AyniError:
    with pytest.raises(grpc.RpcError) as caught:
        await work
    error = rpc.error_from(caught.value)
    assert error is not None, caught.value
    return error


async def status_of(work: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    return caught.value


@pytest.mark.parametrize("method", KINDS)
def test_every_reason_arrives_as_its_class_whatever_the_kind_of_call(method: str) -> None:
    async def test() -> None:
        servicer = Echo()
        async with serving(servicer) as address, open_channel(address, TOKEN) as channel:
            for reason, cls in BY_REASON.items():
                servicer.refusal = cls("chunk 3 of bucket 'q' is wrong: 50 %\n\u00e9", step=7, detail="line\nline")
                error = await refusal_of(outcome(channel, method, [HELLO]))
                assert type(error) is cls
                assert error.reason == reason
                assert error.message == servicer.refusal.message
                assert error.metadata == {"step": "7", "detail": "line\nline"}

    run(test())


@pytest.mark.parametrize("method", KINDS)
def test_a_blocking_client_sees_the_same_refusal(method: str) -> None:
    async def test() -> None:
        async with serving(Echo(StepVoided("worker 2 left", step=4))) as address:
            error = await asyncio.to_thread(blocking_refusal, address, method)
            assert type(error) is StepVoided
            assert (error.message, error.metadata) == ("worker 2 left", {"step": "4"})

    run(test())


def blocking_refusal(address: str, method: str) -> AyniError | None:
    with pytest.raises(grpc.RpcError) as caught:
        blocking_outcome(address, method, HELLO, TOKEN)
    return rpc.error_from(caught.value)


def test_the_status_is_what_other_languages_expect() -> None:
    async def test() -> None:
        async with serving(Echo(Incompatible("two runs", field="run_id"))) as address:
            detail = await asyncio.to_thread(rich_status, address)
            assert detail.message == "two runs"
            assert detail.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
            assert detail.details[0].type_url == "type.googleapis.com/google.rpc.ErrorInfo"

    run(test())


def rich_status(address: str) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        blocking_outcome(address, "One", HELLO, TOKEN)
    failed: Any = caught.value
    return rpc_status.from_call(failed)


def test_a_refusal_that_quotes_too_much_still_arrives() -> None:
    async def test() -> None:
        long = "\u00e9%" * 100_000
        refusal = Incompatible(long, **{f"key{index}": long for index in range(100)})
        async with serving(Echo(refusal)) as address, open_channel(address, TOKEN) as channel:
            for _ in range(50):  # Between the soft and the hard limit gRPC drops some, at random.
                error = await refusal_of(outcome(channel, "One", [HELLO]))
                assert type(error) is Incompatible
                assert long.startswith(error.message.removesuffix("..."))
                assert long.startswith(error.metadata["key0"].removesuffix("..."))

    run(test())


def test_a_refusal_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(Echo(BadChunk("offset 4"))) as address, open_channel(address, TOKEN) as channel:
            await refusal_of(outcome(channel, "Many", [HELLO]))

    with caplog.at_level(logging.INFO):
        run(test())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ayni.rpc"]
    assert line.startswith("refused Many from 127.0.0.1:")
    assert line.endswith("with BAD_CHUNK: offset 4")


class Broken:
    async def One(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise RuntimeError("a bug")


def test_what_no_service_decided_is_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(Broken()) as address, open_channel(address, TOKEN) as channel:
            bug = await status_of(outcome(channel, "One", [HELLO]))
            absent = await status_of(outcome(channel, "Absent", [HELLO]))
        async with open_channel(address, TOKEN) as channel:
            gone = await status_of(outcome(channel, "One", [HELLO]))
        assert [error.code().name for error in (bug, absent, gone)] == ["UNKNOWN", "UNIMPLEMENTED", "UNAVAILABLE"]
        assert [rpc.error_from(error) for error in (bug, absent, gone)] == [None, None, None]
        assert absent.details() == f"{SERVICE}.Absent is not implemented by this server"

    run(test())


def test_a_handler_ends_when_its_client_has_gone() -> None:
    async def test() -> None:
        servicer = Echo()
        async with serving(servicer) as address, open_channel(address, TOKEN) as channel:
            call = calls(channel)["Many"](BytesValue(value=bytes(3 << 20)))
            await call.read()
            call.cancel()
            await servicer.ended.wait()

    run(test())


# Raw messages


@pytest.mark.parametrize("method", ["Many", "Gather", "Chat"])
def test_raw_methods_take_and_give_bytes_and_any_stub_can_speak_with_them(method: str) -> None:
    async def test() -> None:
        servicer = Echo()
        takes_stream, _ = KINDS[method]
        if method == "Many":
            servicer = RawMany()
        async with serving(servicer, raw={method}) as address, open_channel(address, TOKEN) as channel:
            encoded = HELLO.SerializeToString()
            ordinary = await outcome(channel, method, [HELLO])
            raw = await outcome(channel, method, [encoded], raw=True)
        assert ordinary == [BytesValue(value=encoded) if method == "Gather" else HELLO]
        assert raw[-1].endswith(encoded)
        assert {type(request) for request in servicer.seen} == {bytes if takes_stream else BytesValue}

    run(test())


class RawMany(Echo):
    async def Many(self, request: BytesValue, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        self.seen.append(request)
        yield request.SerializeToString()


@pytest.mark.parametrize("method", KINDS)
def test_the_token_channel_carries_raw_calls_of_all_kinds(method: str) -> None:
    async def test() -> None:
        encoded = HELLO.SerializeToString()
        async with serving(Echo(), TokenInterceptor(TOKEN)) as address, open_channel(address, TOKEN) as channel:
            responses = await outcome(channel, method, [encoded], raw=True)
        assert responses == [encoded] * (REPEATS if method == "Many" else 1)

    run(test())


def test_what_a_service_can_not_have() -> None:
    async def test() -> None:
        with pytest.raises(ValueError, match="no streaming methods Chatt, One"):
            add_service(make_server(), SERVICE, Echo(), raw={"One", "Chatt", "Chat"})
        with pytest.raises(TypeError, match=r"Blocking\.One must be an async function"):
            add_service(make_server(), SERVICE, Blocking())

    run(test())


class Blocking:
    def One(self, request: Any, context: grpc.ServicerContext) -> Any:
        return request


# A refusal while the client is still writing

FRAMES = 50
FRAME = bytes(1 << 20)
TRIES = 40


class Refusing:
    """Refuses after the first frame, when the rest is under way."""

    def __init__(self, source: str, limit: timedelta = timedelta(seconds=30)) -> None:
        self.source = source
        self.limit = limit

    async def Chat(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        error = BadChunk("frame 0 is wrong", field="offset")
        if self.source == "task":
            reader = asyncio.create_task(self._read_all(context))
            await rpc.refuse_stream(context, reader, error, self.limit)
        await context.read()
        source: Any = {"iterator": requests, "read": context.read}[self.source]
        await rpc.refuse_stream(context, source, error, self.limit)

    async def _read_all(self, context: grpc.aio.ServicerContext) -> None:
        while await context.read() is not grpc.aio.EOF:
            pass


async def write_all_aio(address: str, tries: int) -> list[AyniError | None]:
    async def frames() -> AsyncIterator[bytes]:
        for _ in range(FRAMES):
            yield FRAME

    found = []
    async with open_channel(address, TOKEN) as channel:
        for _ in range(tries):
            call = channel.stream_stream(f"/{SERVICE}/Chat")(frames())
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()
            found.append(rpc.error_from(caught.value))
    return found


def write_all_sync(address: str, tries: int) -> list[AyniError | None]:
    def frames() -> Iterator[bytes]:
        for _ in range(FRAMES):
            yield FRAME

    found = []
    call: Any
    with open_sync_channel(address, TOKEN) as channel:
        for _ in range(tries):
            call = channel.stream_stream(f"/{SERVICE}/Chat")
            responses = call(frames())
            with pytest.raises(grpc.RpcError) as caught:
                next(responses)
            found.append(rpc.error_from(caught.value))
    return found


@pytest.mark.parametrize("source", ["iterator", "read", "task"])
@pytest.mark.parametrize("client", ["aio", "sync"])
def test_a_refusal_arrives_whole_while_the_client_is_writing(client: str, source: str) -> None:
    tries = TRIES if source == "task" else TRIES // 4

    async def test() -> None:
        async with serving(Refusing(source), raw={"Chat"}) as address:
            if client == "aio":
                found = await write_all_aio(address, tries)
            else:
                found = await asyncio.to_thread(write_all_sync, address, tries)
        assert [type(error) for error in found] == [BadChunk] * tries

    run(test())


def test_a_client_that_never_ends_its_stream_is_refused_at_the_limit() -> None:
    async def test() -> None:
        limit = timedelta(milliseconds=300)
        async with serving(Refusing("read", limit), raw={"Chat"}) as address, open_channel(address, TOKEN) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Chat")()
            await call.write(FRAME)
            assert type(await refusal_of(call.read())) is BadChunk

    run(test())


def test_the_allocator_is_tuned_on_glibc_only() -> None:
    import platform

    assert rpc.tune_allocator() == (platform.libc_ver()[0] == "glibc")
