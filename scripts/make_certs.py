"""Makes a private certificate authority, and a server and a client certificate that come from it.

    python scripts/make_certs.py --out certs --host coordinator.example.org --host 192.0.2.10

The server gets server.pem and server.key (and ca.pem to ask clients for theirs), each worker ca.pem (and client.pem and
client.key where the server asks). ca.key signs further certificates; keep it off both.
"""

import argparse
import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DEFAULT_HOSTS = ("localhost", "127.0.0.1", "::1")
FILE_MODE = 0o600
_CLOCK_SKEW = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the six files and returns the exit code."""
    given = _parser().parse_args(arguments)
    lifetime = timedelta(days=given.days)
    ca = make_ca(lifetime)
    server = issue(ca, "ayni server", lifetime, given.host or DEFAULT_HOSTS)
    client = issue(ca, "ayni client", lifetime)
    contents = {
        f"{name}{suffix}": pem
        for name, issued in (("ca", ca), ("server", server), ("client", client))
        for suffix, pem in ((".pem", _certificate_pem(issued)), (".key", _key_pem(issued)))
    }
    try:
        write(given.out, contents, force=given.force)
    except OSError as error:
        print(f"make_certs: {error}", file=sys.stderr)
        return 1
    print(f"server: --tls-certificate {given.out}/server.pem --tls-key {given.out}/server.key")
    print(f"client: --tls-ca {given.out}/ca.pem")
    print(f"both sides known to one another: server --tls-client-ca {given.out}/ca.pem,", end=" ")
    print(f"client --tls-certificate {given.out}/client.pem --tls-key {given.out}/client.key")
    return 0


def make_ca(lifetime: timedelta) -> Issued:
    """Returns an authority that signs certificates of servers and clients, and no further authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("ayni private CA")
    builder = _builder(name, name, key.public_key(), lifetime)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return Issued(certificate=builder.sign(key, hashes.SHA256()), key=key)


def issue(ca: Issued, common_name: str, lifetime: timedelta, hosts: Sequence[str] = ()) -> Issued:
    """Returns a certificate of a server that is reached as any of `hosts`; without hosts, of a client."""
    key = ec.generate_private_key(ec.SECP256R1())
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = _builder(_name(common_name), ca.certificate.subject, key.public_key(), lifetime)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    builder = builder.add_extension(authority, critical=False)
    if hosts:
        names = x509.SubjectAlternativeName([_alternative_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return Issued(certificate=builder.sign(ca.key, hashes.SHA256()), key=key)


def write(folder: Path, contents: Mapping[str, bytes], *, force: bool) -> None:
    """Writes files that only their owner can read.

    Raises:
        FileExistsError: one of them is there already and `force` is not set; nothing was written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = [name for name in contents if (folder / name).exists()]
    if there and not force:
        raise FileExistsError(f"{folder} already holds {', '.join(there)}; --force replaces them")
    for name, content in contents.items():
        (folder / name).unlink(missing_ok=True)
        with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
            file.write(content)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Makes a private CA with a server and a client certificate.")
    parser.add_argument("--out", type=Path, default=Path("certs"), help="folder to write to (default: certs)")
    parser.add_argument(
        "--host",
        action="append",
        metavar="NAME",
        help=f"name or IP address that clients reach the server by; repeatable (default: {', '.join(DEFAULT_HOSTS)})",
    )
    parser.add_argument("--days", type=int, default=825, help="days that the certificates are valid (default: 825)")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    return parser


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate_pem(issued: Issued) -> bytes:
    return issued.certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(issued: Issued) -> bytes:
    return issued.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


if __name__ == "__main__":
    sys.exit(main())
