"""A worker of a training run: `WorkerClient` for any loop, and the agent process around the loop in tree."""

from typing import TYPE_CHECKING

import ayni  # noqa: F401  Before anything loads gRPC: it sets how much that writes, and that it leaves fork() alone.

if TYPE_CHECKING:
    from worker_agent.client import ClientConfig, WorkerClient

__all__ = ["ClientConfig", "WorkerClient"]


def __getattr__(name: str) -> object:
    """Loads the client when it is asked for: the package's pure modules must not pull the network in."""
    if name in __all__:
        from worker_agent import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
