"""TLS and mTLS with certificates that scripts/make_certs.py makes."""

import asyncio
import stat
from collections.abc import Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from ayni import rpc
from ayni.channels import open_channel, open_sync_channel
from ayni.endpoints import ClientTls, ServerTls
from ayni.errors import TokenRefused
from ayni.servers import TokenInterceptor, bind, make_server
from ayni.settings import SettingsError
from scripts import make_certs
from tests.support.echo import Echo, blocking_outcome, outcome, serving

TOKEN = "a-token-of-some-length"
HELLO = BytesValue(value=b"hello")
LIMIT = 60.0
"""Seconds after which a test has failed."""


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates for 127.0.0.1 and coordinator.test."""
    folder = tmp_path_factory.mktemp("certs")
    arguments = ["--out", str(folder), "--host", "127.0.0.1", "--host", "coordinator.test"]
    assert make_certs.main(arguments) == 0
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of another authority, for another host."""
    folder = tmp_path_factory.mktemp("foreign")
    assert make_certs.main(["--out", str(folder), "--host", "other.test"]) == 0
    return folder


def server_tls(folder: Path, client_ca: Path | None = None) -> ServerTls:
    return ServerTls(certificate=folder / "server.pem", key=folder / "server.key", client_ca=client_ca)


def client_tls(ca: Path, own: Path | None = None, server_name: str = "") -> ClientTls:
    certificate, key = (own / "client.pem", own / "client.key") if own else (None, None)
    return ClientTls(ca=ca / "ca.pem", server_name=server_name, certificate=certificate, key=key)


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, LIMIT))


async def call(server: ServerTls, client: ClientTls | None, token: str = TOKEN) -> list[Any]:
    async with serving(Echo(), TokenInterceptor(TOKEN), tls=server) as address:
        async with open_channel(address, token, client) as channel:
            return await outcome(channel, "One", [HELLO])


def code_of(server: ServerTls, client: ClientTls | None) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        run(call(server, client))
    assert rpc.error_from(caught.value) is None
    return caught.value.code().name


def test_the_client_knows_the_server(certs: Path) -> None:
    assert run(call(server_tls(certs), client_tls(certs))) == [HELLO]


def test_a_name_can_be_expected_instead_of_the_address(certs: Path) -> None:
    assert run(call(server_tls(certs), client_tls(certs, server_name="coordinator.test"))) == [HELLO]


def test_both_know_one_another(certs: Path) -> None:
    assert run(call(server_tls(certs, certs / "ca.pem"), client_tls(certs, certs))) == [HELLO]


def test_a_blocking_client_knows_the_server(certs: Path) -> None:
    async def test() -> None:
        async with serving(Echo(), TokenInterceptor(TOKEN), tls=server_tls(certs)) as address:
            assert await asyncio.to_thread(blocking_outcome, address, "One", HELLO, TOKEN, client_tls(certs)) == [HELLO]

    run(test())


def test_the_token_is_asked_for_under_tls_too(certs: Path) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        run(call(server_tls(certs), client_tls(certs), token="another-token-of-some-length"))
    assert type(rpc.error_from(caught.value)) is TokenRefused


def test_what_does_not_connect(certs: Path, foreign: Path) -> None:
    both = server_tls(certs, certs / "ca.pem")
    refused = {
        "authority of the server is another": (server_tls(certs), client_tls(foreign)),
        "server's certificate is of another host": (server_tls(foreign), client_tls(foreign)),
        "another name is expected": (server_tls(certs), client_tls(certs, server_name="other.test")),
        "client has no certificate": (both, client_tls(certs)),
        "client's certificate is of another authority": (both, client_tls(certs, foreign)),
        "client speaks in clear": (server_tls(certs), None),
        "server speaks in clear": (ServerTls(), client_tls(certs)),
    }
    assert {why: code_of(*sides) for why, sides in refused.items()} == dict.fromkeys(refused, "UNAVAILABLE")


def test_a_server_certificate_is_no_client_certificate(certs: Path) -> None:
    own = ClientTls(ca=certs / "ca.pem", certificate=certs / "server.pem", key=certs / "server.key")
    assert code_of(server_tls(certs, certs / "ca.pem"), own) == "UNAVAILABLE"


def test_tls_lifts_the_loopback_rule(certs: Path) -> None:
    async def test() -> None:
        assert bind(make_server(), "0.0.0.0:0", server_tls(certs)).startswith("0.0.0.0:")
        await open_channel("192.0.2.1:50051", TOKEN, client_tls(certs)).close()

    run(test())


def test_files_that_do_not_fit_are_named(certs: Path, foreign: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    none = tmp_path / "none.pem"
    good = certs / "server.pem"
    servers = {
        ServerTls(certificate=none, key=certs / "server.key"): f"can't read the TLS certificate {none}: No such file",
        ServerTls(certificate=good, key=none): f"can't read the TLS key {none}: No such file",
        ServerTls(certificate=good, key=foreign / "server.key"): "are no pair in unencrypted PEM form",
        ServerTls(certificate=text, key=certs / "server.key"): f"the TLS certificate {text} and the key",
        server_tls(certs, none): f"can't read the TLS client CA {none}: No such file",
        server_tls(certs, text): f"the TLS client CA {text} holds no certificate in PEM form",
    }
    clients = {
        ClientTls(ca=none): f"can't read the TLS CA {none}: No such file",
        ClientTls(ca=text): f"the TLS CA {text} holds no certificate in PEM form",
        ClientTls(ca=good, certificate=good, key=foreign / "client.key"): "are no pair in unencrypted PEM form",
    }

    async def test() -> None:
        for server, problem in servers.items():
            with pytest.raises(SettingsError) as caught:
                bind(make_server(), "127.0.0.1:0", server)
            assert problem in str(caught.value)
        for client, problem in clients.items():
            for open_any in (open_channel, open_sync_channel):
                with pytest.raises(SettingsError) as caught:
                    open_any("127.0.0.1:1", TOKEN, client)
                assert problem in str(caught.value)

    run(test())


def test_an_encrypted_key_is_refused_without_a_prompt(certs: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((certs / "server.key").read_bytes(), None)
    locked = tmp_path / "locked.key"
    encryption = serialization.BestAvailableEncryption(b"password")
    form = serialization.PrivateFormat.PKCS8
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))

    async def test() -> None:
        with pytest.raises(SettingsError, match="unencrypted PEM form: the key is encrypted"):
            bind(make_server(), "127.0.0.1:0", ServerTls(certificate=certs / "server.pem", key=locked))

    run(test())


# scripts/make_certs.py


def test_only_the_owner_can_read_what_was_made(certs: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in certs.iterdir()}
    names = [f"{name}{suffix}" for name in ("ca", "server", "client") for suffix in (".pem", ".key")]
    assert modes == dict.fromkeys(names, 0o600)


def test_nothing_is_replaced_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path)]
    (tmp_path / "client.key").write_text("mine")
    assert make_certs.main(arguments) == 1
    assert capsys.readouterr().err == f"make_certs: {tmp_path} already holds client.key; --force replaces them\n"
    assert [path.name for path in tmp_path.iterdir()] == ["client.key"]
    assert make_certs.main([*arguments, "--force"]) == 0
    assert (tmp_path / "client.key").read_text().startswith("-----BEGIN PRIVATE KEY-----")
    assert stat.S_IMODE((tmp_path / "client.key").stat().st_mode) == 0o600


def test_certificates_are_for_the_given_hosts_and_time() -> None:
    from cryptography import x509

    ca = make_certs.make_ca(timedelta(days=2))
    server = make_certs.issue(ca, "server", timedelta(days=1), ["a.test", "192.0.2.7", "::1"]).certificate
    server.verify_directly_issued_by(ca.certificate)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.test"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "::1"]
    assert timedelta(days=1) <= server.not_valid_after_utc - server.not_valid_before_utc < timedelta(days=1.1)
