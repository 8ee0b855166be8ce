"""What a server takes at a time, and that what is below a limit is served while more is turned away."""

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from google.protobuf.wrappers_pb2 import BytesValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ayni.channels import open_channel
from ayni.endpoints import ClientTls, ServerLimits, ServerTls
from ayni.errors import BadRequest, TokenRefused
from ayni.rpc import error_from
from ayni.servers import TokenInterceptor, certificate_names
from scripts import make_certs
from tests.support.echo import KINDS, SERVICE, Echo, calls, outcome, serving

TOKEN = "a-token-of-some-length"
HELLO = BytesValue(value=b"hello")
LIMIT = 60.0


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, LIMIT))


def limited(**limits: Any) -> Any:
    chosen = ServerLimits(**limits)
    return serving(Echo(), TokenInterceptor(TOKEN, chosen), limits=chosen)


async def code_of(call: Any) -> str:
    try:
        await call
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


async def until_ok(make: Any) -> None:
    """Goes on until there is a place again; the end of a call is told to its caller first and to the server later."""
    async with asyncio.timeout(10):
        while await code_of(make()) != "OK":
            pass


@pytest.mark.parametrize("ending", ["answered", "refused", "cancelled"])
def test_calls_above_the_limit_are_turned_away_and_places_come_back(ending: str):
    async def test() -> None:
        async with limited(calls=3) as address, open_channel(address, TOKEN) as channel:
            chats = [calls(channel)["Chat"]() for _ in range(3)]
            for chat in chats:
                await chat.write(HELLO)
                await chat.read()
            assert await code_of(calls(channel)["One"](HELLO)) == "RESOURCE_EXHAUSTED"
            for chat in chats:
                if ending == "answered":
                    await chat.done_writing()
                    assert await chat.code() == grpc.StatusCode.OK
                else:
                    chat.cancel()
            await until_ok(lambda: calls(channel)["One"](HELLO))
            if ending == "refused":
                for _ in range(10):
                    assert await code_of(calls(channel)["Absent"](HELLO)) == "UNIMPLEMENTED"
            for _ in range(10):
                await until_ok(lambda: calls(channel)["One"](HELLO))

    run(test())


def test_strangers_take_no_places_of_callers_with_the_token():
    async def test() -> None:
        async with limited(calls=1, strangers=1) as address, open_channel(address, "wrong") as strange:
            waiting = [calls(strange)["Chat"]() for _ in range(5)]
            codes = [asyncio.create_task(code_of(call.read())) for call in waiting]
            async with open_channel(address, TOKEN) as channel:
                await until_ok(lambda: calls(channel)["One"](HELLO))
            assert await asyncio.gather(*codes) == ["FAILED_PRECONDITION"] * 5

    run(test())


def test_only_so_many_strangers_are_listened_to():
    """One stream is read on for two seconds; the others hear the refusal at once."""

    async def test() -> None:
        async with limited(strangers=1) as address, open_channel(address, "wrong") as strange:
            loop = asyncio.get_running_loop()
            start = loop.time()
            tasks = [asyncio.create_task(code_of(calls(strange)["Chat"]().read())) for _ in range(6)]
            done, _ = await asyncio.wait(tasks, timeout=1.0)
            assert len(done) == 5
            await asyncio.wait(tasks)
            assert 1.5 < loop.time() - start < 20

    run(test())


def test_streams_of_open_services_are_limited_and_a_single_health_check_is_not():
    async def test() -> None:
        async with limited(strangers=2) as address, open_channel(address, "") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
            for watch in watches:
                await watch.read()
            assert await code_of(stub.Watch(health_pb2.HealthCheckRequest()).read()) == "RESOURCE_EXHAUSTED"
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watches[0].cancel()
            await until_ok(lambda: stub.Watch(health_pb2.HealthCheckRequest()).read())

    run(test())


def test_connections_above_the_limit_are_closed_and_open_ones_go_on():
    async def test() -> None:
        async with limited(connections=3) as address, AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(open_channel(address, TOKEN)) for _ in range(3)]
            for channel in channels:
                assert await outcome(channel, "One", [HELLO]) == [HELLO]
            other = await stack.enter_async_context(open_channel(address, TOKEN))
            assert await code_of(calls(other)["One"](HELLO)) == "UNAVAILABLE"
            for channel in channels:
                assert await outcome(channel, "One", [HELLO]) == [HELLO]
            await channels[0].close()
            await until_ok(lambda: calls(other)["One"](HELLO))

    run(test())


def test_a_connection_that_says_nothing_is_ended_after_the_handshake_time():
    async def test() -> None:
        async with limited(handshake=timedelta(seconds=1)) as address:
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            async with asyncio.timeout(20):
                while await reader.read(1000):
                    pass
            writer.close()

    run(test())


def test_a_connection_without_calls_is_ended_and_comes_back_by_itself():
    async def test() -> None:
        async with limited(idle=timedelta(seconds=1)) as address, open_channel(address, TOKEN) as channel:
            assert await outcome(channel, "One", [HELLO]) == [HELLO]
            assert channel.get_state() is grpc.ChannelConnectivity.READY
            async with asyncio.timeout(20):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            assert await outcome(channel, "One", [HELLO]) == [HELLO]

    run(test())


def test_a_connection_with_a_quiet_stream_is_not_idle():
    async def test() -> None:
        async with limited(idle=timedelta(seconds=1)) as address, open_channel(address, TOKEN) as channel:
            chat = calls(channel)["Chat"]()
            await chat.write(HELLO)
            assert await chat.read() == HELLO
            await asyncio.sleep(2.5)
            await chat.write(HELLO)
            assert await chat.read() == HELLO

    run(test())


def test_metadata_is_limited():
    async def test() -> None:
        async with limited(metadata_bytes=4096) as address, open_channel(address, TOKEN) as channel:
            call = calls(channel)["One"]
            assert await code_of(call(HELLO, metadata=(("x", "y" * 2_000),))) == "OK"
            assert await code_of(call(HELLO, metadata=(("x", "y" * 20_000),))) == "RESOURCE_EXHAUSTED"

    run(test())


def test_messages_are_limited():
    async def test() -> None:
        async with limited() as address, open_channel(address, TOKEN) as channel:
            large = BytesValue(value=bytes(4 << 20))
            assert await code_of(calls(channel)["One"](large)) == "RESOURCE_EXHAUSTED"
            assert await code_of(calls(channel)["One"](HELLO)) == "OK"

    run(test())


def test_calls_above_those_of_one_connection_are_not_begun():
    async def test() -> None:
        async with limited(connection_calls=2) as address, open_channel(address, TOKEN) as channel:
            await outcome(channel, "One", [HELLO])
            chats = [calls(channel)["Chat"]() for _ in range(2)]
            for chat in chats:
                await chat.write(HELLO)
                await chat.read()
            third = asyncio.create_task(code_of(calls(channel)["One"](HELLO)))
            done, _ = await asyncio.wait({third}, timeout=0.3)
            assert not done
            await chats[0].done_writing()
            # The server may count the first call for a moment longer than its caller, and cut the third off.
            assert await third in ("OK", "UNAVAILABLE")
            for chat in chats[1:]:
                await chat.write(HELLO)
                assert await chat.read() == HELLO

    run(test())


def test_strangers_can_not_fill_the_log(caplog: pytest.LogCaptureFixture):
    async def test() -> None:
        async with limited() as address, open_channel(address, "wrong") as channel:
            codes = await asyncio.gather(*(code_of(calls(channel)["One"](HELLO)) for _ in range(300)))
            assert codes == ["FAILED_PRECONDITION"] * 300

    with caplog.at_level(logging.DEBUG, logger="ayni"):
        run(test())
    lines = [record.getMessage() for record in caplog.records if "TOKEN_REFUSED" in record.getMessage()]
    assert 1 <= len(lines) <= 10
    assert lines[0].startswith(f"refused /{SERVICE}/One from 127.0.0.1:")


# What is no message of the schema

BROKEN = [b"\x0a\xff", b"\x0b" * 200, b"\x0a\x05ab", b"\xff" * 11]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("method", KINDS)
def test_what_can_not_be_decoded_is_refused_by_name(method: str, broken: bytes, caplog: pytest.LogCaptureFixture):
    async def test() -> None:
        async with limited() as address, open_channel(address, TOKEN) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await outcome(channel, method, [broken], raw=True)
            error = error_from(caught.value)
            assert type(error) is BadRequest
            assert await outcome(channel, "One", [HELLO]) == [HELLO]

    run(test())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_caller_that_goes_away_leaves_no_error_in_the_log(caplog: pytest.LogCaptureFixture):
    async def frames() -> AsyncIterator[bytes]:
        yield b"\x0a\xff"
        await asyncio.sleep(10)

    async def test() -> None:
        async with limited() as address, open_channel(address, TOKEN) as channel:
            for delay in (0, 0, 0.001, 0.002, 0.003, 0.005, 0.01) * 20:
                call = channel.stream_stream(f"/{SERVICE}/Chat")(frames())
                await asyncio.sleep(delay)
                call.cancel()
            await until_ok(lambda: calls(channel)["One"](HELLO))

    run(test())
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# Who a caller is


class Named(Echo):
    """Answers with the names in the caller's certificate."""

    async def One(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        return BytesValue(value=",".join(certificate_names(context)).encode())


def test_names_of_a_certificate_are_those_that_the_authority_gave(tmp_path: Path):
    assert make_certs.main(["--out", str(tmp_path), "--host", "127.0.0.1", "--worker", "ant", "--worker", "bee.x"]) == 0

    async def names(client: str, client_ca: Path | None) -> str:
        server = ServerTls(certificate=tmp_path / "server.pem", key=tmp_path / "server.key", client_ca=client_ca)
        own = ClientTls(ca=tmp_path / "ca.pem", certificate=tmp_path / f"{client}.pem", key=tmp_path / f"{client}.key")
        async with serving(Named(), TokenInterceptor(TOKEN), tls=server) as address:
            async with open_channel(address, TOKEN, own) as channel:
                (answer,) = await outcome(channel, "One", [HELLO])
                return answer.value.decode()

    assert run(names("worker-ant", tmp_path / "ca.pem")) == "ant"
    assert run(names("worker-bee.x", tmp_path / "ca.pem")) == "bee.x"
    assert run(names("worker-ant", None)) == "", "a server that asks for none believes none"


def test_names_are_the_common_name_and_dns_names(tmp_path: Path):
    assert make_certs.main(["--out", str(tmp_path), "--host", "127.0.0.1"]) == 0
    alternatives = [
        x509.DNSName("bee.test"),
        x509.DNSName("*.wild.test"),
        x509.IPAddress(ipaddress.ip_address("192.0.2.1")),
        x509.RFC822Name("cat@dog.test"),
        x509.UniformResourceIdentifier("spiffe://eel.test/fox"),
    ]
    write_client(tmp_path, "ant", alternatives)

    async def test() -> str:
        server = ServerTls(
            certificate=tmp_path / "server.pem", key=tmp_path / "server.key", client_ca=tmp_path / "ca.pem"
        )
        own = ClientTls(ca=tmp_path / "ca.pem", certificate=tmp_path / "own.pem", key=tmp_path / "own.key")
        async with serving(Named(), TokenInterceptor(TOKEN), tls=server) as address:
            async with open_channel(address, TOKEN, own) as channel:
                (answer,) = await outcome(channel, "One", [HELLO])
                return answer.value.decode()

    assert run(test()) == "ant,bee.test,*.wild.test"


def write_client(folder: Path, common_name: str, alternatives: Sequence[x509.GeneralName]) -> None:
    """Writes a certificate of a client with other names beside its common name."""
    authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()).subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(authority, hashes.SHA256())
    )
    (folder / "own.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "own.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def test_without_tls_there_are_no_names():
    async def test() -> None:
        async with serving(Named(), TokenInterceptor(TOKEN)) as address, open_channel(address, TOKEN) as channel:
            assert await outcome(channel, "One", [HELLO]) == [BytesValue()]

    run(test())


def test_a_token_in_another_form_is_wrong():
    async def test() -> None:
        async with limited() as address, open_channel(address, "") as channel:
            for value in ("Bearer ", "Bearer", "Basic " + TOKEN, TOKEN, "Bearer  " + TOKEN, "x" * 4_000):
                with pytest.raises(grpc.RpcError) as caught:
                    await calls(channel)["One"](HELLO, metadata=(("authorization", value),))
                assert type(error_from(caught.value)) is TokenRefused

    run(test())
