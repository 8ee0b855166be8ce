"""TLS files become gRPC credentials, and every file is checked before a socket is touched.  [shell]"""

import ssl
from pathlib import Path

import grpc

from ayni.endpoints import ClientTls, ServerTls
from ayni.settings import SettingsError


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Returns the credentials of a server that speaks TLS.

    Raises:
        SettingsError: a file can't be read, isn't PEM, or key and certificate don't belong together.
    """
    assert tls.certificate
    assert tls.key
    _check_pair(tls.certificate, tls.key)
    pair = (_read(tls.key, "TLS key"), _read(tls.certificate, "TLS certificate"))
    if not tls.client_ca:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], _read_ca(tls.client_ca, "TLS client CA"), require_client_auth=True)


def server_context(tls: ServerTls) -> ssl.SSLContext:
    """Returns the same for a server that is not gRPC's.

    Raises:
        SettingsError: a file can't be read, isn't PEM, or key and certificate don't belong together.
    """
    assert tls.certificate
    assert tls.key
    _check_pair(tls.certificate, tls.key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    if tls.client_ca:
        context.load_verify_locations(cadata=_read_ca(tls.client_ca, "TLS client CA").decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Returns the credentials of a client that speaks TLS.

    Raises:
        SettingsError: a file can't be read, isn't PEM, or key and certificate don't belong together.
    """
    roots = _read_ca(tls.ca, "TLS CA") if tls.ca else None
    if not (tls.certificate and tls.key):
        return grpc.ssl_channel_credentials(roots)
    _check_pair(tls.certificate, tls.key)
    return grpc.ssl_channel_credentials(roots, _read(tls.key, "TLS key"), _read(tls.certificate, "TLS certificate"))


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"can't read the {what} {path}: {error.strerror}") from None


def _read_ca(path: Path, what: str) -> bytes:
    content = _read(path, what)
    try:
        ssl.create_default_context(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise SettingsError(f"the {what} {path} holds no certificate in PEM form") from None
    return content


def _check_pair(certificate: Path, key: Path) -> None:
    _read(certificate, "TLS certificate")
    _read(key, "TLS key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise SettingsError(
            f"the TLS certificate {certificate} and the key {key} are no pair in unencrypted PEM form: {reason}"
        ) from None


def _no_password() -> str:
    raise ValueError("the key is encrypted")
