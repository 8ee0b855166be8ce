"""Makes a private certificate authority, and certificates of a server, a client and workers that come from it.

    python scripts/make_certs.py --out certs --host coordinator.example.org --host 192.0.2.10 --worker ant --worker bee

The server gets server.pem and server.key (and ca.pem to ask clients for theirs), every caller ca.pem. Where the server
asks for certificates, worker ant gets worker-ant.pem and worker-ant.key, and may join as "ant" or "ant-" and anything
more; whoever only looks, such as the status command, gets client.pem and client.key. ca.key signs further certificates:
keep it off all of them, and give it with --ca to make certificates of workers that come later.
"""

import argparse
import ipaddress
import os
import re
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
_WORKER_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
"""Also a name of files; 64 is the longest common name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files and returns the exit code."""
    given = _parser().parse_args(arguments)
    lifetime = timedelta(days=given.days)
    try:
        ca = _load_ca(given.ca) if given.ca else make_ca(lifetime)
        made = {f"worker-{name}": issue(ca, name, lifetime) for name in given.worker}
        if not given.ca:
            server = issue(ca, "ayni server", lifetime, given.host or DEFAULT_HOSTS)
            made |= {"ca": ca, "server": server, "client": issue(ca, "ayni client", lifetime)}
        write(given.out, _contents(made), force=given.force)
    except (OSError, ValueError) as error:
        print(f"make_certs: {error}", file=sys.stderr)
        return 1
    _explain(given.out, given.worker, is_new=not given.ca)
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
    """Returns a certificate of a server that is reached as any of `hosts`; without hosts, of a client.

    Raises:
        ValueError: the name does not fit into a certificate.
    """
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


def _load_ca(folder: Path) -> Issued:
    certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{folder}/ca.key is not a key that this program made")
    return Issued(certificate=certificate, key=key)


def _contents(made: Mapping[str, Issued]) -> dict[str, bytes]:
    return {
        f"{name}{suffix}": pem
        for name, issued in made.items()
        for suffix, pem in ((".pem", _certificate_pem(issued)), (".key", _key_pem(issued)))
    }


def _explain(out: Path, workers: Sequence[str], *, is_new: bool) -> None:
    if is_new:
        print(f"server: --tls-certificate {out}/server.pem --tls-key {out}/server.key")
        print(f"client: --tls-ca {out}/ca.pem")
        print(f"both sides known to one another: server --tls-client-ca {out}/ca.pem, and of those who call")
        print(f"status command: --tls-certificate {out}/client.pem --tls-key {out}/client.key")
    if not workers:
        print(f"worker: a certificate that binds its name: make_certs.py --out {out} --ca {out} --worker NAME")
    for name in workers:
        print(f"worker {name}: --tls-certificate {out}/worker-{name}.pem --tls-key {out}/worker-{name}.key")


def _worker_name(text: str) -> str:
    if not _WORKER_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: 1 to 64 letters, digits, dots, dashes and underscores, no dot first"
        )
    return text


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
    parser = argparse.ArgumentParser(description="Makes a private CA and certificates.")
    parser.add_argument("--out", type=Path, default=Path("certs"), help="folder to write to (default: certs)")
    parser.add_argument(
        "--host",
        action="append",
        metavar="NAME",
        help=f"name or IP address that clients reach the server by; repeatable (default: {', '.join(DEFAULT_HOSTS)})",
    )
    parser.add_argument(
        "--worker", action="append", default=[], type=_worker_name, metavar="NAME", help="worker or machine; repeatable"
    )
    parser.add_argument("--ca", type=Path, metavar="FOLDER", help="folder with ca.pem and ca.key: only adds workers")
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
