"""Process groups of backend "ayni" whose ranks are threads of this process."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.support.coordinator import CoordinatorProcess
from tests.support.joined_runs import settings, side_by_side
from worker_agent.integrations.collective_stream import CollectiveStream
from worker_agent.integrations.joined_run import client_config
from worker_agent.integrations.process_group import AyniProcessGroup


@contextlib.contextmanager
def groups(server: CoordinatorProcess, size: int, timeout: float = 30.0) -> Iterator[list[AyniProcessGroup]]:
    """A group with all its ranks; destroyed at the end."""
    name = uuid.uuid4().hex

    def enter(rank: int) -> CollectiveStream:
        config = client_config(settings(server, f"process-{rank}"))
        return CollectiveStream.open(config, name, size, rank, 20.0)

    streams = side_by_side(enter, size)
    made = [AyniProcessGroup(stream, range(size), "all", timedelta(seconds=timeout)) for stream in streams]
    try:
        yield made
    finally:
        for group in made:
            group.shutdown()
        for stream in streams:
            stream.close()


def on_all(made: list[AyniProcessGroup], work: Callable[[AyniProcessGroup, int], Any]) -> list[Any]:
    return side_by_side(lambda rank: work(made[rank], rank), len(made))


def reducing(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options
