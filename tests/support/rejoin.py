"""What tests of workers that come back do to a coordinator."""

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from ayni.blocks.metadata import WorkerMetadata
from ayni.blocks.metadata_messages import metadata_message
from ayni.errors import (
    AyniError,
)
from tests.support.echo_coordinator import (
    EchoCoordinator,
    hang,
)
from tests.support.elastic_client import (
    contribute,
    eventually,
    in_background,
    report,
)
from worker_agent.client import WorkerClient
from worker_agent.session import ShardAssignment

SHORT = timedelta(seconds=0.5)


PEER = metadata_message(
    WorkerMetadata(
        instance_id="7d444840-9dc0-41d1-b245-5ffdce74fad2",
        epoch=1,
        rank=0,
        owner_id=2,
        incarnation=5,
        address="127.0.0.1:50051",
        layouts=(),
        engines=(),
        parallelism=None,
        resources=(),
        mode=None,
    )
)


def raising(error: AyniError, calls: int = 1_000_000) -> Callable[[Any], Any]:
    """Refuses the first calls."""
    left = iter(range(calls))

    async def refuse(_: Any) -> None:
        if next(left, None) is not None:
            raise error

    return refuse


def refuse_later_joins(server: EchoCoordinator, error: AyniError, times: int = 1_000_000) -> None:
    """Refuses every Join after the first one, so many times."""
    server.on["Join"] = raising(error, times)


def asked(server: EchoCoordinator, client: WorkerClient, shard: ShardAssignment) -> "Future[Any]":
    """Has a commit asked for that gets no answer."""
    server.on["CommitStep"] = hang
    contribute(client, shard).result(20)
    waiting = in_background(lambda: client.commit(shard, report(shard)))
    before = server.calls["CommitStep"]
    eventually(lambda: server.calls["CommitStep"] > before or len(server.commits) > 0, "the commit")
    return waiting


def is_worker(client: WorkerClient, number: int) -> bool:
    return client.worker_id == number
