"""Opens the dashboard where a run asks for one.  [shell]"""

import asyncio
import contextlib
import importlib.util
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

from ayni.credentials import server_context
from ayni.endpoints import Address, check_listening_in_clear, parse_address
from ayni.servers import unbound
from ayni.settings import SettingsError
from coordinator_service import status
from coordinator_service.run import Run
from coordinator_service.watch.gate import Gate
from coordinator_service.watch.operator import Operator
from coordinator_service.watch.view import RunView, plain
from coordinator_service.watch.view_messages import view_of

_MOST_CONNECTIONS = 128
_KEEPALIVE_S = 15.0
_NEEDED = ("aiohttp", "prometheus_client")


def check_dashboard(listen: str) -> None:
    """Refuses to begin where a dashboard is asked for that can't be served.

    Raises:
        SettingsError: a package is missing, or the address is no address.
    """
    if not listen:
        return
    parse_address(listen)
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise SettingsError(f"dashboard needs {' and '.join(missing)}: pip install 'ayni[dashboard]'")


@contextlib.asynccontextmanager
async def dashboard(run: Run, token: str, ask_for_state: Callable[[], None]) -> AsyncIterator[str]:
    """Serves the run's dashboard, if its file asks for one, and yields its URL; empty for none.

    Raises:
        SettingsError: the address or the TLS files are wrong, or TLS is missing.
        OSError: the port is in use, or the system refuses it.
    """
    if not run.file.dashboard:
        yield ""
        return
    address = parse_address(run.file.dashboard)
    check_listening_in_clear(address, run.file.tls, run.file.insecure)
    context = server_context(run.file.tls) if run.file.tls.is_on else None
    async with _served(run, token, ask_for_state, address, context) as port:
        yield f"http{'s' if context else ''}://{Address(host=address.host, port=port)}/"


@contextlib.asynccontextmanager
async def _served(
    run: Run, token: str, ask_for_state: Callable[[], None], address: Address, context: ssl.SSLContext | None
) -> AsyncIterator[int]:
    from aiohttp import web

    from coordinator_service.watch.dashboard import Dashboard, encode
    from coordinator_service.watch.exposition import Exposition
    from coordinator_service.watch.feed import Feed

    def view(with_history: bool = True) -> RunView:
        return view_of(run.file.run_id, status.snapshot(run, with_history=with_history))

    def encoded() -> bytes:
        return encode(plain(view()))

    async def next_change(pause: float, limit: float) -> None:
        await asyncio.sleep(pause)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await run.changed.wait()

    feed = Feed(encoded, next_change)
    metrics = Exposition(lambda: view(with_history=False), run.progress.history.durations)
    gate = Gate(token=token, is_loopback=address.is_loopback)
    app = Dashboard(gate, encoded, feed, metrics).application(Operator(run, ask_for_state), lambda: run.progress.state)
    options: Any = {"access_log": None, "keepalive_timeout": _KEEPALIVE_S, "logger": _logger()}
    runner = web.AppRunner(app, handler_cancellation=True, **options)
    await runner.setup()
    http = runner.server
    assert http

    def accept() -> asyncio.BaseProtocol:
        return http() if len(http.connections) < _MOST_CONNECTIONS else _TurnedAway()

    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(accept, address.host, address.port, ssl=context)
    except OSError as error:
        await runner.cleanup()
        raise OSError(f"--dashboard: {unbound(address, error)}") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await feed.close()
        await http.shutdown(0.0)
        await runner.cleanup()


def _logger() -> logging.Logger:
    """Returns a logger for what fails here. Requests that are no HTTP need no token, so they may not fill the log."""
    from aiohttp.http_exceptions import HttpProcessingError

    def is_ours(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

    logger = logging.Logger(__name__)
    logger.parent = logging.getLogger(__name__)
    logger.addFilter(is_ours)
    return logger


class _TurnedAway(asyncio.Protocol):
    """A connection above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
