"""Addresses, TLS files, keepalive, limits, and the rule that only loopback is spoken to in clear.  [core]

These are values that a service's configuration can hold; `ayni.servers` and `ayni.channels` act on them.
"""

import ipaddress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ayni.settings import SettingsError

_LARGEST_PORT = 65535
_LARGEST_COUNT = 1 << 20
_LEAST_METADATA = 4096
_SHORTEST, _LONGEST = timedelta(seconds=1), timedelta(days=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a service listens or is dialled."""

    host: str
    """Host name or IP address, without brackets."""
    port: int
    """TCP port; 0 lets the system choose one to listen on."""

    def __str__(self) -> str:
        """Returns host:port, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nothing outside this machine can be reached by, or reach, this address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str) -> Address:
    """Reads host:port.

    Raises:
        SettingsError: it isn't of that form; the sentence says what is.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    wrong_host = not host or "/" in host or any(character.isspace() for character in host)
    wrong_port = not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= _LARGEST_PORT)
    if not colon or wrong_host or wrong_port or bracketed != (":" in host):
        raise SettingsError(f"{text!r} is not an address; write host:port, such as 127.0.0.1:50051 or [::1]:50051")
    return Address(host=host, port=int(port))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTls:
    """TLS of a server; without a certificate it speaks in clear."""

    certificate: Path | None = None
    """PEM file with the server's certificate chain. Switches TLS on."""
    key: Path | None = None
    """PEM file with the private key of the certificate."""
    client_ca: Path | None = None
    """PEM file with the authority that clients' certificates must come from (mTLS). None: clients need none."""
    bind_names: bool = True
    """With client_ca: a worker may join only under a name of its certificate, alone or followed by a dash and more.
    Asked for where workers join, that is by the coordinator."""

    def __post_init__(self) -> None:
        """Checks that what belongs together is there together."""
        _both("certificate", self.certificate, "key", self.key)
        if self.client_ca and not self.certificate:
            raise ValueError("client_ca needs the server's own certificate and key as well")

    @property
    def is_on(self) -> bool:
        """Whether the server speaks TLS."""
        return self.certificate is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientTls:
    """TLS of a client; without an authority to trust it speaks in clear."""

    ca: Path | None = None
    """PEM file with the authority that the server's certificate must come from. Switches TLS on."""
    system_roots: bool = False
    """Trust the authorities that gRPC brings along, for servers with a public certificate. Switches TLS on."""
    certificate: Path | None = None
    """PEM file with the client's own certificate chain, where the server asks for one (mTLS)."""
    key: Path | None = None
    """PEM file with the private key of the certificate."""
    server_name: str = ""
    """Name to expect in the server's certificate. Empty: the host that is dialled."""

    def __post_init__(self) -> None:
        """Checks that what belongs together is there together."""
        _both("certificate", self.certificate, "key", self.key)
        if self.ca and self.system_roots:
            raise ValueError("give either ca or system_roots, not both")
        if (self.certificate or self.server_name) and not self.is_on:
            raise ValueError("certificate and server_name need an authority to trust as well: ca or system_roots")

    @property
    def is_on(self) -> bool:
        """Whether the client speaks TLS."""
        return self.ca is not None or self.system_roots


@dataclass(frozen=True, kw_only=True, slots=True)
class Keepalive:
    """When a silent connection is taken for broken: after interval + timeout."""

    interval: timedelta = timedelta(seconds=10)
    """Silence after which a ping is sent, calls or no calls."""
    timeout: timedelta = timedelta(seconds=5)
    """Time that the ping may take."""

    def __post_init__(self) -> None:
        """Checks the range; servers answer a ping every half second at most."""
        if self.interval < timedelta(seconds=1):
            raise ValueError(f"keepalive interval is {self.interval.total_seconds():g}s; it must be at least 1s")
        if self.timeout <= timedelta():
            raise ValueError("keepalive timeout must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """What a server takes at a time. What is above a limit is turned away, so that what is below it is served."""

    connections: int = 512
    """Connections; more are closed as they come. Keep it below the number of files that the process may open."""
    connection_calls: int = 1024
    """Calls of one connection; more wait at the caller or fail with UNAVAILABLE. A worker has up to two for each bucket
    of a step, and a few more."""
    calls: int = 16384
    """Calls of all callers with the right token; more end with RESOURCE_EXHAUSTED."""
    waiting_calls: int = 4096
    """Calls that came and were not looked at yet. Above it some are turned away unseen, above twice as many all are."""
    strangers: int = 64
    """Callers without the right token that are listened to: streams that are read on for 2 s so that their senders see
    the refusal, and streams of health checking and reflection. Others are refused at once."""
    metadata_bytes: int = 8192
    """Metadata of one call; above it calls may be refused, above twice as much they are."""
    handshake: timedelta = timedelta(seconds=10)
    """How long a new connection may take to speak TLS and HTTP/2."""
    idle: timedelta = timedelta(minutes=10)
    """How long a connection may be without a call. A caller that comes back connects again by itself."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        counts = ("connections", "connection_calls", "calls", "waiting_calls", "strangers")
        if low := [name for name in counts if not 1 <= getattr(self, name) <= _LARGEST_COUNT]:
            raise ValueError(f"limits: {', '.join(low)} must be 1 to {_LARGEST_COUNT}")
        if not _LEAST_METADATA <= self.metadata_bytes <= _LARGEST_COUNT:
            raise ValueError(f"limits: metadata_bytes must be {_LEAST_METADATA} to {_LARGEST_COUNT}")
        if not all(_SHORTEST <= time <= _LONGEST for time in (self.handshake, self.idle)):
            raise ValueError("limits: handshake and idle must be 1 s to 1 day")


def check_listening_in_clear(address: Address, tls: ServerTls, insecure: bool) -> None:
    """Refuses to listen without TLS where others could read along.

    Raises:
        SettingsError: the address is not loopback, TLS is off, and nobody said that this is meant.
    """
    if not (address.is_loopback or tls.is_on or insecure):
        raise SettingsError(
            f"listening on {address} without TLS would show the join token and all data to the network: "
            "give a server certificate and key (see --help: ...tls-certificate; scripts/make_certs.py makes them), "
            "listen on 127.0.0.1, "
            "or accept the risk with --insecure"
        )


def check_dialling_in_clear(address: Address, tls: ClientTls, insecure: bool) -> None:
    """Refuses to dial without TLS where others could read along.

    Raises:
        SettingsError: the address is not loopback, TLS is off, and nobody said that this is meant.
    """
    if not (address.is_loopback or tls.is_on or insecure):
        raise SettingsError(
            f"dialling {address} without TLS would show the join token and all data to the network: "
            "give --tls-ca (or --tls-system-roots), or accept the risk with --insecure"
        )


def _both(first: str, one: object, second: str, other: object) -> None:
    if bool(one) != bool(other):
        given, lacking = (first, second) if one else (second, first)
        raise ValueError(f"{given} is given without {lacking}; TLS needs both")
