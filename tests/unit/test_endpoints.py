"""Addresses, TLS settings, and what may be spoken to in clear."""

from datetime import timedelta
from pathlib import Path

import pytest

from ayni.endpoints import (
    ClientTls,
    Keepalive,
    ServerLimits,
    ServerTls,
    check_dialling_in_clear,
    check_listening_in_clear,
    parse_address,
)
from ayni.settings import SettingsError

FILE = Path("file.pem")


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0, True),
        ("127.8.9.1:65535", "127.8.9.1", 65535, True),
        ("[::1]:50051", "::1", 50051, True),
        ("localhost:1", "localhost", 1, True),
        ("0.0.0.0:1", "0.0.0.0", 1, False),
        ("[::]:1", "::", 1, False),
        ("localhost.example.org:1", "localhost.example.org", 1, False),
        ("10.0.0.1:1", "10.0.0.1", 1, False),
    ],
)
def test_addresses(text: str, host: str, port: int, loopback: bool) -> None:
    address = parse_address(f" {text}\n")
    assert (address.host, address.port, address.is_loopback, str(address)) == (host, port, loopback, text)


@pytest.mark.parametrize(
    "text",
    ["", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "::1:1", "[::1]", "[host]:1", "[]:1", "a b:1",
     "unix:/tmp/a:1", "http://host:1", "host:\u0661"],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(SettingsError, match="is not an address; write host:port"):
        parse_address(text)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_loopback_needs_nothing(text: str) -> None:
    check_listening_in_clear(parse_address(text), ServerTls(), insecure=False)
    check_dialling_in_clear(parse_address(text), ClientTls(), insecure=False)


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "coordinator.example.org:1"])
def test_anything_else_needs_tls_or_a_word(text: str) -> None:
    address = parse_address(text)
    with pytest.raises(SettingsError, match=r"listening on .* without TLS .* certificate .* --insecure"):
        check_listening_in_clear(address, ServerTls(), insecure=False)
    with pytest.raises(SettingsError, match=r"dialling .* without TLS .* --tls-ca .* --insecure"):
        check_dialling_in_clear(address, ClientTls(), insecure=False)
    check_listening_in_clear(address, ServerTls(certificate=FILE, key=FILE), insecure=False)
    check_dialling_in_clear(address, ClientTls(system_roots=True), insecure=False)
    check_listening_in_clear(address, ServerTls(), insecure=True)
    check_dialling_in_clear(address, ClientTls(), insecure=True)


def test_what_switches_tls_on() -> None:
    assert [ServerTls().is_on, ServerTls(certificate=FILE, key=FILE).is_on] == [False, True]
    assert [ClientTls().is_on, ClientTls(ca=FILE).is_on, ClientTls(system_roots=True).is_on] == [False, True, True]


def test_what_belongs_together_must_be_together() -> None:
    with pytest.raises(ValueError, match="certificate is given without key"):
        ServerTls(certificate=FILE)
    with pytest.raises(ValueError, match="key is given without certificate"):
        ClientTls(ca=FILE, key=FILE)
    with pytest.raises(ValueError, match="client_ca needs the server's own certificate"):
        ServerTls(client_ca=FILE)
    with pytest.raises(ValueError, match="either ca or system_roots"):
        ClientTls(ca=FILE, system_roots=True)
    with pytest.raises(ValueError, match="need an authority to trust"):
        ClientTls(certificate=FILE, key=FILE)
    with pytest.raises(ValueError, match="need an authority to trust"):
        ClientTls(server_name="name")


def test_keepalive_has_a_range() -> None:
    with pytest.raises(ValueError, match=r"keepalive interval is 0\.5s; it must be at least 1s"):
        Keepalive(interval=timedelta(seconds=0.5))
    with pytest.raises(ValueError, match="keepalive timeout must be above 0"):
        Keepalive(timeout=timedelta(0))


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"connections": 0}, "connections must be 1 to 1048576"),
        ({"calls": -1, "strangers": 1 << 21}, "calls, strangers must be 1 to 1048576"),
        ({"waiting_calls": 0}, "waiting_calls must be"),
        ({"connection_calls": 0}, "connection_calls must be"),
        ({"metadata_bytes": 100}, "metadata_bytes must be 4096 to"),
        ({"handshake": timedelta(milliseconds=10)}, "handshake and idle must be 1 s to 1 day"),
        ({"idle": timedelta(days=2)}, "handshake and idle must be 1 s to 1 day"),
    ],
)
def test_limits_have_ranges(limits: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ServerLimits(**limits)
    ServerLimits()
