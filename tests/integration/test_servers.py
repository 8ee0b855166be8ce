"""Servers on loopback: the token, headers, health and reflection, and the addresses that they listen on."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.wrappers_pb2 import BytesValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from ayni import rpc
from ayni.channels import open_channel, open_sync_channel
from ayni.errors import AyniError, TokenRefused
from ayni.servers import TokenInterceptor, bind, make_server
from ayni.settings import SettingsError
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


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("token", ["", "a-token-of-some-lengtH", TOKEN[:-1], TOKEN + "x"])
def test_a_wrong_token_is_refused_before_the_handler_runs(method: str, token: str) -> None:
    async def test() -> None:
        servicer = Echo()
        async with serving(servicer, TokenInterceptor(TOKEN)) as address, open_channel(address, token) as channel:
            error = await refusal_of(outcome(channel, method, [HELLO]))
        assert type(error) is TokenRefused
        assert error.metadata == {}
        assert (servicer.calls, servicer.seen, servicer.ended.is_set()) == ([], [], False)

    run(test())


def test_two_tokens_in_one_call_are_refused() -> None:
    async def test() -> None:
        async with serving(Echo(), TokenInterceptor(TOKEN)) as address, open_channel(address, TOKEN) as channel:
            call = calls(channel)["One"](HELLO, metadata=(("authorization", "Bearer x"),))
            assert type(await refusal_of(call)) is TokenRefused

    run(test())


def test_a_large_request_with_a_wrong_token_is_refused_whole() -> None:
    async def test() -> None:
        async with serving(Echo(), TokenInterceptor(TOKEN)) as address, open_channel(address, "wrong") as channel:
            for _ in range(20):
                error = await refusal_of(outcome(channel, "One", [BytesValue(value=bytes(3 << 20))]))
                assert type(error) is TokenRefused

    run(test())


def test_a_stream_with_a_wrong_token_is_refused_whole_while_its_client_is_writing() -> None:
    async def frames() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield bytes(1 << 20)

    async def test() -> None:
        servicer = Echo()
        async with serving(servicer, TokenInterceptor(TOKEN), raw={"Chat"}) as address:
            async with open_channel(address, "wrong") as channel:
                for _ in range(20):
                    call = channel.stream_stream(f"/{SERVICE}/Chat")(frames())
                    assert type(await refusal_of(call.read())) is TokenRefused
        assert servicer.seen == []

    run(test())


def test_a_quiet_stream_and_an_unknown_method_are_refused_too() -> None:
    async def test() -> None:
        async with serving(Echo(), TokenInterceptor(TOKEN)) as address, open_channel(address, "wrong") as channel:
            assert type(await refusal_of(calls(channel)["Chat"]().read())) is TokenRefused
            unknown: Any = channel.unary_unary("/ayni.test.None/None")
            assert type(await refusal_of(unknown(b""))) is TokenRefused

    run(test())


def test_headers_added_later_and_headers_of_one_call_arrive() -> None:
    async def test() -> None:
        servicer = Echo()
        async with serving(servicer, TokenInterceptor(TOKEN)) as address, open_channel(address, TOKEN) as channel:
            channel.headers["ayni-session"] = "s1"
            await calls(channel)["One"](HELLO, metadata=(("one", "call"),))
        assert servicer.metadata["ayni-session"] == "s1"
        assert servicer.metadata["one"] == "call"

    run(test())


@pytest.mark.parametrize("method", KINDS)
def test_a_blocking_channel_carries_the_token(method: str) -> None:
    async def test() -> None:
        async with serving(Echo(), TokenInterceptor(TOKEN)) as address:
            responses = await asyncio.to_thread(blocking_outcome, address, method, HELLO, TOKEN)
        assert responses == [HELLO] * (REPEATS if method == "Many" else 1)

    run(test())


def test_health_and_reflection_need_no_token() -> None:
    async def test() -> None:
        async with serving(Echo(), TokenInterceptor(TOKEN)) as address:
            assert await asyncio.to_thread(health_of, address, SERVICE) == health_pb2.HealthCheckResponse.SERVING
            assert await asyncio.to_thread(health_of, address, "") == health_pb2.HealthCheckResponse.SERVING
            names, methods = await asyncio.to_thread(reflected, address)
            assert names >= {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
            assert methods == [*KINDS, "Hang", "Absent"]

    run(test())


def health_of(address: str, service: str) -> int:
    with open_sync_channel(address, "") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT).status


def reflected(address: str) -> tuple[set[str], list[str]]:
    with open_sync_channel(address, "") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        service = DescriptorPool(database).FindServiceByName(SERVICE)
        return set(database.get_services()), [method.name for method in service.methods]


def test_a_port_in_use_is_an_error_that_says_so() -> None:
    async def test() -> None:
        async with serving(Echo()) as address:
            with pytest.raises(OSError, match=f"can't listen on {address}: Address already in use"):
                bind(make_server(), address)
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            with pytest.raises(OSError, match="Address already in use"):
                bind(make_server(), f"127.0.0.1:{other.getsockname()[1]}")

    run(test())


def test_an_address_of_another_machine_is_an_error_that_says_so() -> None:
    async def test() -> None:
        with pytest.raises(OSError, match=r"can't listen on 192\.0\.2\.1:50051: Cannot assign requested address"):
            bind(make_server(), "192.0.2.1:50051", insecure=True)

    run(test())


def test_other_addresses_than_loopback_need_tls_or_a_word() -> None:
    async def test() -> None:
        with pytest.raises(SettingsError, match=r"listening on 0\.0\.0\.0:0 without TLS .* --insecure"):
            bind(make_server(), "0.0.0.0:0")
        assert not bind(make_server(), "0.0.0.0:0", insecure=True).endswith(":0")
        for open_any in (open_channel, open_sync_channel):
            with pytest.raises(SettingsError, match=r"dialling 192\.0\.2\.1:50051 without TLS .* --insecure"):
                open_any("192.0.2.1:50051", TOKEN)
            open_any("192.0.2.1:50051", TOKEN, insecure=True)
            with pytest.raises(SettingsError, match=r"nobody can dial 127\.0\.0\.1:0: port 0"):
                open_any("127.0.0.1:0", TOKEN)

    run(test())


@pytest.mark.parametrize("listen", ["localhost:0", "[::1]:0"])
def test_other_names_of_loopback_work(listen: str) -> None:
    if listen == "[::1]:0" and not has_ipv6():
        pytest.skip("this machine has no IPv6")

    async def test() -> None:
        async with serving(Echo(), listen=listen) as address, open_channel(address, TOKEN) as channel:
            assert await outcome(channel, "One", [HELLO]) == [HELLO]

    run(test())


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
