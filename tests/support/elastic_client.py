"""An elastic WorkerClient beside a coordinator that does as it is told."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np

from ayni.buckets import FLAT
from ayni.v1 import coordinator_pb2 as pb
from tests.support.echo_coordinator import TOKEN, EchoCoordinator, lease, serving
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.session import Commit, MicrobatchStats, Report, ShardAssignment, Vector

LIMIT = timedelta(seconds=20)
ONES = np.ones(50_000, np.float32)
EXTRA = {"extra": True, "lease_id": 99, "microbatch_start": 1, "microbatch_stop": 2, "num_microbatches": 2}
"""Fields of an extra lease on the second of two micro-batches."""
FIRST = {"num_microbatches": 2}

_numbers = itertools.count()


def connect(address: str, **changes: Any) -> WorkerClient:
    limits = {"connect_timeout": LIMIT, "exchange_timeout": LIMIT, "shard_timeout": LIMIT, "rejoin_timeout": LIMIT}
    fields: dict[str, Any] = {"worker_name": "ant", "elastic": True, **limits, **changes}
    return WorkerClient.connect(ClientConfig(coordinator=address, token=TOKEN, **fields), 0, "cpu")


@contextmanager
def membership(server: EchoCoordinator, **changes: Any) -> Iterator[WorkerClient]:
    with serving(server) as address, connect(address, **changes) as client:
        yield client


def begin(server: EchoCoordinator, client: WorkerClient, **fields: Any) -> ShardAssignment:
    server.say(lease(**fields))
    shard = client.receive_shard()
    assert shard
    return shard


def stats(shard: ShardAssignment) -> list[MicrobatchStats]:
    return [MicrobatchStats(microbatch=m, weight=4) for m in shard.microbatches]


def contribute(
    client: WorkerClient, shard: ShardAssignment, values: Vector = ONES, out: Vector | None = None
) -> "Future[Vector]":
    parts: Sequence[Vector] = [values] * len(shard.microbatches)
    return client.contribute(shard, FLAT, parts, stats(shard), out=np.empty_like(values) if out is None else out)


def report(shard: ShardAssignment, **changes: Any) -> Report:
    return Report(num_buckets=1, microbatches=stats(shard), **changes)


def extra_lease(outcome: Commit | ShardAssignment) -> ShardAssignment:
    assert isinstance(outcome, ShardAssignment), outcome
    assert outcome.extra
    return outcome


def in_background(work: Callable[[], Any]) -> "Future[Any]":
    """Runs work that waits on a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT.total_seconds()
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


def tell(server: EchoCoordinator, client: WorkerClient, *frames: pb.ShardAssignmentResponse) -> None:
    """Says something, and waits until the client has heard it."""
    reason = f"word {next(_numbers)}"
    for frame in (*frames, pb.ShardAssignmentResponse(waiting=pb.Waiting(reason=reason))):
        server.say(frame)
    eventually(lambda: client._presence.member.news.waiting_for == reason, "what was said")
