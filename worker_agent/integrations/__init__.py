"""Ayni in programs that train with tools of their own: plain loops, DistributedDataParallel, Hugging Face's Trainer.

`join(model)` makes the process a worker of a run; docs/integrations.md shows the few lines that each kind of program
needs.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_agent.integrations.ddp import ddp_hook
    from worker_agent.integrations.joined_run import JoinedRun, join

__all__ = ["JoinedRun", "ddp_hook", "join"]

_HOMES = {"JoinedRun": "joined_run", "join": "joined_run", "ddp_hook": "ddp"}


def __getattr__(name: str) -> object:
    """Loads a name when it is asked for: the package's pure modules must not pull the network in."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
