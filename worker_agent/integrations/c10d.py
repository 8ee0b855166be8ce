"""Backend "ayni" of torch.distributed: a process group whose messages the coordinator passes on.  [shell]

    import worker_agent.integrations.c10d
    torch.distributed.init_process_group("ayni")                                          # ranks as torchrun says
    torch.distributed.init_process_group("ayni", init_method="ayni://", world_size=2)     # ranks from the coordinator

Importing the module registers the backend. Where the coordinator is, and the token, come from AYNI_COORDINATOR and
AYNI_TOKEN_FILE or AYNI_TOKEN. With `ayni://NAME` nobody else is dialed: processes that give the same name meet at the
coordinator. One stream carries all groups of a process. When a process dies, every collective of every other one fails
with `PeerLost`, which names it.
"""

import atexit
import os
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.rendezvous import register_rendezvous_handler

from worker_agent.integrations.collective_stream import CollectiveStream
from worker_agent.integrations.joined_run import client_config
from worker_agent.integrations.process_group import BACKEND, AyniProcessGroup

__all__ = ["BACKEND", "AyniProcessGroup"]

_GROUP_KEY = "ayni-group"


class _Shared:
    """The stream of this process, which its process groups share."""

    def __init__(self) -> None:
        self._stream: CollectiveStream | None = None
        self._users = 0
        self._lock = threading.Lock()

    def open(self, group: str, world_size: int, rank: int | None, timeout: timedelta) -> CollectiveStream:
        with self._lock:
            seconds = timeout.total_seconds()
            self._stream = CollectiveStream.open(client_config(os.environ), group, world_size, rank, seconds)
            atexit.register(self.close)
            return self._stream

    def use(self) -> CollectiveStream | None:
        with self._lock:
            return self._stream

    def add_user(self) -> None:
        with self._lock:
            self._users += 1

    def close(self) -> None:
        """Leaves in order, also where a program ends without destroying its groups."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream:
            stream.close()

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self.close()


_SHARED = _Shared()


def _create(options: Any, _: Any) -> AyniProcessGroup:
    """Makes a process group; called by torch."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    stream = _SHARED.use() or _meet(options)
    group = AyniProcessGroup(stream, ranks, options.group_id, options.timeout, _SHARED.give_back)
    _SHARED.add_user()
    return group


def _meet(options: Any) -> CollectiveStream:
    """Has the processes that torch's own rendezvous has brought together meet at the coordinator.

    Rank 0 draws a name that was never there, and the store tells the others.
    """
    if options.group_rank == 0:
        options.store.set(_GROUP_KEY, uuid.uuid4().hex)
    name = options.store.get(_GROUP_KEY).decode()
    return _SHARED.open(name, options.group_size, options.group_rank, options.timeout)


def _rendezvous(url: str, timeout: timedelta = dist.constants.default_pg_timeout, **_: Any) -> Iterator[Any]:
    """Has processes meet at the coordinator, which also gives ranks; called by torch for `ayni://NAME`."""
    parsed = urlparse(url)
    query = {key: int(values[-1]) for key, values in parse_qs(parsed.query).items()}
    world_size = query.get("world_size", int(os.environ.get("WORLD_SIZE", "-1")))
    rank = query.get("rank", int(os.environ.get("RANK", "-1")))
    if world_size < 1:
        raise ValueError(f"init_method {url!r} needs world_size: init_process_group(..., world_size=N) or WORLD_SIZE")
    stream = _SHARED.open(parsed.netloc or "default", world_size, rank if rank >= 0 else None, timeout)
    yield HashStore(), stream.rank, stream.world_size
    raise RuntimeError("ayni:// can't bring processes together again; start all of them anew")


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
register_rendezvous_handler("ayni", _rendezvous)
