"""How the workers of a run under chaos reach the coordinator, and what can be the matter with it."""

import asyncio
from typing import Protocol

from scripts.chaos_proxy import Link


class Ways(Protocol):
    """How workers reach the coordinator."""

    insecure: bool
    host: str
    """Where the coordinator listens."""

    async def add(self, name: str, port: int) -> "Way":
        """Makes a worker's way to the coordinator's port, or returns the one that it has."""

    async def close(self) -> None:
        """Takes all ways away."""


class Way(Protocol):
    """One worker's way to the coordinator."""

    @property
    def address(self) -> str:
        """What the worker dials."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """A command that runs the worker."""

    @property
    def listen(self) -> str:
        """Where the worker's own service listens."""

    @property
    def whole(self) -> bool:
        """Whether nothing is the matter."""

    def disturb(self, mode: str) -> None:
        """Begins a disturbance."""

    def mend(self) -> None:
        """Ends it."""


class ProxyWay(Link):
    """A way through a proxy of this process."""

    prefix: tuple[str, ...] = ()
    listen = "127.0.0.1:0"
    address = ""


class Proxies:
    """Ways through proxies on loopback."""

    insecure = False
    host = "127.0.0.1"

    def __init__(self) -> None:
        self._ways: dict[str, ProxyWay] = {}

    async def add(self, name: str, port: int) -> ProxyWay:
        if name not in self._ways:
            way = self._ways[name] = ProxyWay(self.host, port)
            way.address = await way.open()
        return self._ways[name]

    async def close(self) -> None:
        await asyncio.gather(*(way.close() for way in self._ways.values()))
