"""Channels to Ayni's servers, with the join token on every call.  [shell]

The token never leaves in clear by accident: a host that isn't loopback is dialled with TLS, or not at all.
"""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import grpc

from ayni import rpc
from ayni.credentials import channel_credentials
from ayni.endpoints import ClientTls, Keepalive, check_dialling_in_clear, parse_address
from ayni.settings import SettingsError

UNREACHED = (
    "is it running, is the address right, do both sides use TLS or neither, and does it ask for a client certificate "
    "(--tls-certificate, --tls-key)?"
)
"""What to look at where a coordinator does not answer; the flags are those of whoever calls."""


class HeaderChannel(grpc.aio.Channel):
    """A grpc.aio channel whose calls, of all four kinds, carry the same headers.

    Headers are added when a call starts, so that messages cost nothing more. Generated stubs and calls without
    serializers work as with any channel.
    """

    def __init__(self, channel: grpc.aio.Channel, headers: dict[str, str]) -> None:
        """Wraps a channel.

        Args:
            channel: does the work.
            headers: metadata; a later change holds for the calls that start after it.
        """
        self._channel = channel
        self.headers = headers

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what makes calls with one request and one response."""
        return self._with_headers(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what makes calls with one request and many responses."""
        return self._with_headers(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what makes calls with many requests and one response."""
        return self._with_headers(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what makes calls with many requests and many responses."""
        return self._with_headers(self._channel.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        """Ends the connection after `grace` seconds."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns the state of the connection."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits until the state is another one."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the connection is there."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        """Returns the channel."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """Ends the connection at once."""
        await self.close()

    def _with_headers(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Iterable[tuple[str, str | bytes]] | None = None, **kwargs: Any) -> Any:
            return start(*args, metadata=(*self.headers.items(), *(metadata or ())), **kwargs)

        return call


def open_channel(
    address: str,
    token: str,
    tls: ClientTls | None = None,
    insecure: bool = False,
    *,
    keepalive: Keepalive | None = None,
) -> HeaderChannel:
    """Returns a grpc.aio channel that sends the token with every call; connects when it is first used.

    Args:
        address: host:port.
        token: join token; empty sends none.
        tls: whom to trust; None or an empty one speaks in clear.
        insecure: speak in clear although others may read along.
        keepalive: when a silent server is taken for dead.

    Raises:
        SettingsError: the address or the TLS files are wrong, or TLS is missing.
    """
    target, credentials, options = _prepare(address, tls or ClientTls(), insecure, keepalive or Keepalive())
    if credentials:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    else:
        channel = grpc.aio.insecure_channel(target, options=options)
    return HeaderChannel(channel, _token_header(token))


def open_sync_channel(
    address: str,
    token: str,
    tls: ClientTls | None = None,
    insecure: bool = False,
    *,
    keepalive: Keepalive | None = None,
) -> grpc.Channel:
    """Returns a channel for calls that block; otherwise as `open_channel`."""
    target, credentials, options = _prepare(address, tls or ClientTls(), insecure, keepalive or Keepalive())
    if credentials:
        channel = grpc.secure_channel(target, credentials, options=options)
    else:
        channel = grpc.insecure_channel(target, options=options)
    return grpc.intercept_channel(channel, _SyncHeaders(_token_header(token)))


class _SyncHeaders(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def _start(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        metadata = (*self._headers.items(), *(client_call_details.metadata or ()))
        return continuation(client_call_details._replace(metadata=metadata), request)

    intercept_unary_unary: Any = _start
    intercept_unary_stream: Any = _start
    intercept_stream_unary: Any = _start
    intercept_stream_stream: Any = _start


def _prepare(
    address: str, tls: ClientTls, insecure: bool, keepalive: Keepalive
) -> tuple[str, grpc.ChannelCredentials | None, rpc.Options]:
    target = parse_address(address)
    if not target.port:
        raise SettingsError(f"nobody can dial {address}: port 0 has a server choose one; give the port that it printed")
    check_dialling_in_clear(target, tls, insecure)
    options = rpc.client_options(keepalive, target.is_loopback)
    if tls.server_name:
        options += (("grpc.ssl_target_name_override", tls.server_name),)
    return str(target), channel_credentials(tls) if tls.is_on else None, options


def _token_header(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}
