"""WorkerClient when a call, a stream or the whole coordinator breaks."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ayni.buckets import FLAT, Bucket
from ayni.endpoints import Keepalive
from ayni.errors import Deadline, Halted, StaleStep, StepVoided, UnknownWorker
from tests.support.coordinator import CoordinatorProcess, coordinator, environment
from tests.support.echo_coordinator import (
    TOKEN,
    EchoCoordinator,
    accept_and_hang,
    accept_and_lose,
    breaking,
    hang,
    lease,
    serving,
    shutdown,
)
from worker_agent import bridge
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.faults import CoordinatorLost, TransportBroken
from worker_agent.session import MicrobatchStats, Report, ShardAssignment, Vector

LIMIT = timedelta(seconds=20)
RUN = {
    "run_id": "faults",
    "num_steps": 2,
    "min_workers": 2,
    "batch": {"samples": 4, "microbatches": 0},
    "timeouts": {"shutdown": "2s"},
}
ONES = np.ones(50_000, np.float32)


def config(address: str, **changes: Any) -> ClientConfig:
    base = ClientConfig(coordinator=address, token=TOKEN, worker_name="ant")
    return replace(base, **{"connect_timeout": LIMIT, "exchange_timeout": LIMIT, "shard_timeout": LIMIT, **changes})


@contextmanager
def membership(server: EchoCoordinator, **changes: Any) -> Iterator[WorkerClient]:
    with serving(server) as address, WorkerClient.connect(config(address, **changes), 0, "cpu") as client:
        yield client


def begin(server: EchoCoordinator, client: WorkerClient) -> ShardAssignment:
    server.say(lease())
    shard = client.receive_shard()
    assert shard
    return shard


def start(client: WorkerClient, shard: ShardAssignment, bucket: Bucket = FLAT, out: Vector | None = None) -> Any:
    stats = [MicrobatchStats(microbatch=0, weight=4)]
    return client.contribute(shard, bucket, [ONES], stats, out=np.empty_like(ONES) if out is None else out)


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT.total_seconds()
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


def test_a_lost_verdict_is_explained_by_the_next_lease_and_nothing_is_sent_twice():
    server = EchoCoordinator()
    server.gradient = accept_and_lose
    with membership(server) as client:
        future = start(client, begin(server, client))
        eventually(lambda: server.calls["Gradient"] == 1, "the contribution")
        server.say(lease(attempt=1))
        with pytest.raises(
            StepVoided, match="step 0 attempt 0 was given up: the coordinator has leased this step again"
        ):
            future.result(20)
        again = client.receive_shard()
        assert again
        assert (again.step, again.attempt) == (0, 1)
        assert server.calls["Gradient"] == 1


def test_a_lost_verdict_is_explained_by_a_refusal_on_the_assignment_stream():
    server = EchoCoordinator()
    server.gradient = accept_and_lose
    with membership(server) as client:
        future = start(client, begin(server, client))
        server.say(Halted("the run was halted: worker bee contributes nan", detail="nan"))
        with pytest.raises(Halted, match="worker bee contributes nan"):
            future.result(20)
        with pytest.raises(Halted):
            client.receive_shard()


def test_a_lost_verdict_that_nothing_explains_is_an_error_of_the_transport():
    server = EchoCoordinator(lease_seconds=0.3)
    server.gradient = accept_and_lose
    with membership(server) as client:
        future = start(client, begin(server, client))
        with pytest.raises(TransportBroken, match=r"INTERNAL.*the coordinator said nothing about it within 0.3 s"):
            future.result(20)
        assert server.calls["Gradient"] == 1


def test_an_attempt_that_is_over_when_the_contribution_comes_is_void():
    async def refuse(_: Any) -> None:
        raise StaleStep("step 0 attempt 0 is not open", step=0, attempt=0, current_step=0, current_attempt=1)

    server = EchoCoordinator()
    server.on["Gradient"] = refuse
    with membership(server) as client:
        with pytest.raises(StepVoided, match="given up: step 0 attempt 0 is not open"):
            start(client, begin(server, client)).result(20)


def test_a_void_attempt_ends_all_of_its_contributions():
    async def void_the_head(context: Any) -> None:
        if server.calls["Gradient"] == 3:
            raise StepVoided("step 0 attempt 0 was given up: worker bee left", step=0)
        await accept_and_hang(context)

    server = EchoCoordinator()
    server.gradient = void_the_head
    with membership(server) as client:
        shard = begin(server, client)
        futures = [start(client, shard, bucket) for bucket in (Bucket("block", 1), Bucket("block", 0))]
        eventually(lambda: server.calls["Gradient"] == 2, "two contributions")
        futures.append(start(client, shard, Bucket("non_block", 2)))
        with pytest.raises(StepVoided, match="worker bee left"):
            client.commit(shard, Report(num_buckets=3, microbatches=[MicrobatchStats(microbatch=0, weight=4)]))
        for future in futures:
            with pytest.raises(StepVoided, match="worker bee left"):
                future.result(20)


def test_after_the_next_lease_no_buffer_of_the_last_one_is_touched():
    server = EchoCoordinator()
    server.gradient = accept_and_hang
    with membership(server) as client:
        out = np.full_like(ONES, 7)
        future = start(client, begin(server, client), out=out)
        eventually(lambda: server.calls["Gradient"] == 1, "the contribution")
        server.say(lease(attempt=1))
        assert client.receive_shard()
        assert future.done()
        with pytest.raises(StepVoided, match="the worker went on to what came next"):
            future.result()
        assert np.all(out == 7)


def test_work_on_an_earlier_lease_is_refused_without_a_call():
    server = EchoCoordinator()
    with membership(server) as client:
        first = begin(server, client)
        server.say(lease(attempt=1))
        eventually(client._has_news, "the next lease")
        assert client.receive_shard()
        for work in (
            lambda: start(client, first).result(20),
            lambda: client.commit(first, Report(num_buckets=0, microbatches=[])),
        ):
            with pytest.raises(StepVoided, match="it is not the lease that this worker took last"):
                work()
    assert (server.calls["Gradient"], server.calls["CommitStep"]) == (0, 0)


def test_a_commit_is_asked_for_again_when_its_answer_was_lost():
    server = EchoCoordinator()
    server.on["CommitStep"] = breaking(1)
    with membership(server) as client:
        shard = begin(server, client)
        client.send_gradients(shard.step, ONES * 3, 1.0, 2, 4)
        averaged = client.receive_averaged()
        assert (averaged.global_loss, averaged.gradients[-1]) == (0.5, 3.0)
    assert server.calls["CommitStep"] == 2
    assert server.commits[0] == server.commits[1]
    assert server.calls["Gradient"] == 1


def test_a_shutdown_does_not_take_the_last_commit_away():
    answer = asyncio.Event()

    async def wait_for_answer(_: Any) -> None:
        await answer.wait()

    server = EchoCoordinator()
    server.on["CommitStep"] = wait_for_answer
    with membership(server) as client:
        shard = begin(server, client)
        client.send_gradients(shard.step, ONES, 1.0, 2, 4)
        eventually(lambda: server.calls["CommitStep"] == 1, "the commit")
        server.say(shutdown())
        eventually(lambda: client.finished, "the shutdown")
        bridge.shared().call_soon(answer.set)
        assert client.receive_averaged().global_loss == 0.5
        assert client.receive_shard() is None
        assert client.receive_shard() is None


def test_an_assignment_stream_that_ends_without_a_word_ends_everything():
    server = EchoCoordinator()
    server.gradient = accept_and_hang
    with membership(server) as client:
        future = start(client, begin(server, client))
        eventually(lambda: server.calls["Gradient"] == 1, "the contribution")
        server.say(None)
        words = (
            r"the coordinator at 127.0.0.1:\d+ is gone \(last heard of \d+\.\d s ago\): .* without a word; start this"
        )
        with pytest.raises(CoordinatorLost, match=words):
            future.result(20)
        with pytest.raises(CoordinatorLost, match=words):
            client.receive_shard()


def test_heartbeats_say_what_the_worker_does():
    server = EchoCoordinator()
    with membership(server) as client:
        eventually(lambda: len(server.heartbeats) > 0, "a heartbeat")
        first = server.heartbeats[0]
        assert (first.worker_id, first.epoch, first.step, first.activity) == (7, 0, -1, "loading")
        begin(server, client)
        client.report("computing")
        eventually(lambda: server.heartbeats[-1].activity == "computing", "the activity")
        assert (server.heartbeats[-1].epoch, server.heartbeats[-1].step) == (1, 0)


def test_a_membership_that_the_coordinator_has_ended_is_over():
    async def refuse(_: Any) -> None:
        raise UnknownWorker("worker 7 is not a member: its lease ended; join again", worker_id=7)

    server = EchoCoordinator()
    server.on["Heartbeat"] = refuse
    with membership(server) as client, pytest.raises(UnknownWorker, match="its lease ended"):
        client.receive_shard()


def test_a_coordinator_that_is_silent_for_a_lease_is_lost():
    server = EchoCoordinator(lease_seconds=0.3)
    server.on["Heartbeat"] = hang
    with membership(server) as client, pytest.raises(CoordinatorLost, match=r"DEADLINE_EXCEEDED"):
        client.receive_shard()


def test_an_exchange_has_a_deadline_that_says_what_was_waited_for():
    server = EchoCoordinator()
    server.gradient = accept_and_hang
    with membership(server, exchange_timeout=timedelta(seconds=0.5)) as client:
        shard = begin(server, client)
        with pytest.raises(
            Deadline, match=r"waited 0.5 s in vain for the mean of block 3 of step 0 \(step 0 attempt 0"
        ):
            start(client, shard, Bucket("block", 3)).result(20)


def test_a_goodbye_is_said_once_with_reason_and_hash():
    server = EchoCoordinator()
    with serving(server) as address:
        client = WorkerClient.connect(config(address), 0, "cpu")
        client.close("the run is over", "ab" * 32)
        client.close("again")
    [goodbye] = server.leaves
    assert (goodbye.worker_id, goodbye.reason, goodbye.parameters_sha256) == (7, "the run is over", "ab" * 32)


def test_a_goodbye_that_nobody_hears_is_no_error():
    server = EchoCoordinator()
    server.on["Leave"] = breaking(1)
    with membership(server):
        pass
    assert server.calls["Leave"] == 1


PARTNER = """
import sys
import numpy as np
from worker_agent import bridge
from worker_agent.client import ClientConfig, WorkerClient
client = WorkerClient.connect(ClientConfig(coordinator=sys.argv[1], token=sys.argv[2], worker_name="bee"), 0, "cpu")
shard = client.receive_shard()
print("leased", shard.step, flush=True)
sys.stdin.readline()
"""


@contextmanager
def partner(server: CoordinatorProcess) -> Iterator[subprocess.Popen]:
    """Another worker process, which takes a lease and does nothing with it."""
    command = [sys.executable, "-c", PARTNER, server.address, TOKEN]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_dead_worker_voids_the_step_and_the_survivor_makes_it_alone(tmp_path: Path):
    with (
        coordinator(tmp_path, {**RUN, "start_workers": 2, "min_workers": 1}) as server,
        partner(server) as bee,
        WorkerClient.connect(config(server.address), 0, "cpu") as client,
    ):
        shard = client.receive_shard()
        assert shard
        assert (shard.attempt, shard.world_size, client.total_workers) == (0, 2, 2)
        assert bee.stdout
        assert bee.stdout.readline() == "leased 0\n"
        client.send_gradients(0, ONES, 1.0, 1, 2)
        eventually(lambda: client.traffic.sent_bytes > 0, "its gradient on the way")
        bee.send_signal(signal.SIGKILL)
        with pytest.raises(StepVoided, match="worker bee left"):
            client.receive_averaged()
        again = client.receive_shard()
        assert again
        assert (again.step, again.attempt, again.world_size, client.total_workers) == (0, 1, 1, 1)
        client.send_gradients(0, ONES * 5, 1.0, 1, 4)
        assert client.receive_averaged().gradients[0] == 5


def test_a_killed_coordinator_ends_every_wait(tmp_path: Path):
    with coordinator(tmp_path, RUN) as server, partner(server):
        client = WorkerClient.connect(config(server.address), 0, "cpu")
        shard = client.receive_shard()
        assert shard
        client.send_gradients(shard.step, ONES, 1.0, 1, 2)
        server.process.kill()
        with pytest.raises(CoordinatorLost, match=f"the coordinator at {server.address} is gone"):
            client.receive_averaged()
        with pytest.raises(CoordinatorLost, match="start this worker again when the coordinator is back"):
            client.receive_shard()
        client.close()


def test_a_frozen_coordinator_is_noticed(tmp_path: Path):
    keepalive = Keepalive(interval=timedelta(seconds=1), timeout=timedelta(seconds=1))
    with coordinator(tmp_path, RUN) as server:
        client = WorkerClient.connect(config(server.address, keepalive=keepalive), 0, "cpu")
        server.wait_for_log("1 of 2")
        server.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(CoordinatorLost, match="is gone"):
                client.receive_shard()
            assert time.monotonic() - began < 15
            client.close()
        finally:
            server.process.send_signal(signal.SIGCONT)
