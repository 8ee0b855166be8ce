"""Makes the engines that a worker was told to use.  [shell]"""

import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from ayni.endpoints import ClientTls
from ayni.errors import AyniError, Unsupported
from ayni.settings import SettingsError
from worker_agent.blocks.engine import Engine
from worker_agent.blocks.engines.grpc_engine import Dialling, GrpcEngine, Relays
from worker_agent.blocks_config import BlocksConfig

_log = logging.getLogger(__name__)


def make_engines(
    config: BlocksConfig, token: str, tls: ClientTls, insecure: bool, relays: Relays | None = None
) -> list[Engine]:
    """Returns the engines that are possible here, best first. Call it on the running loop.

    Args:
        config: names them.
        token: what peers are called with.
        tls: whom to trust when dialling peers.
        insecure: dial peers in clear although others may read along.
        relays: peers that are reached through somebody else; may change later.

    Raises:
        SettingsError: none is possible.
    """
    engines: list[Engine] = []
    dialling = Dialling(token=token, tls=tls, insecure=insecure, relays={} if relays is None else relays)
    for name in config.engines:
        try:
            engines.append(_make(name, dialling))
        except (AyniError, ImportError, OSError) as error:
            _log.warning("engine %s is not used: %s", name, error)
    if not engines:
        raise SettingsError(f"none of the engines {', '.join(config.engines)} can be used here")
    return engines


def announce(engines: list[Engine], address: str, is_tls: bool, notify: Callable[[int], None]) -> None:
    """Tells the engines where the worker's service can be dialled, and whom to tell the numbers of peers' pushes."""
    for engine in engines:
        if isinstance(engine, GrpcEngine):
            engine.serve_at(address, is_tls)
        elif isinstance(engine, HearingEngine):
            engine.on_notify = notify


@runtime_checkable
class HearingEngine(Protocol):
    """An engine whose peers' pushes do not come through the service."""

    on_notify: Callable[[int], None] | None


def _make(name: str, dialling: Dialling) -> Engine:
    if name == "grpc":
        return GrpcEngine(dialling)
    if name == "shm":
        from worker_agent.blocks.engines.shm import ShmEngine

        return ShmEngine()
    if name == "nixl":
        from worker_agent.blocks.engines.nixl_engine import NixlEngine

        return NixlEngine()
    raise Unsupported(f"there is no engine {name!r}", field="engines", detail=name)
