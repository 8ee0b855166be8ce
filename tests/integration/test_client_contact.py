"""First contact: WorkerClient before it is a member."""

import re
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from ayni.errors import TokenRefused
from tests.support.coordinator import coordinator
from tests.support.echo_coordinator import TOKEN, EchoCoordinator, breaking, serving
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.faults import CoordinatorUnreachable, NotACoordinator


def connect(address: str, seconds: float = 20, token: str = TOKEN) -> WorkerClient:
    config = ClientConfig(
        coordinator=address, token=token, worker_name="ant", connect_timeout=timedelta(seconds=seconds)
    )
    return WorkerClient.connect(config, 0, "cpu")


def test_a_join_whose_answer_was_lost_is_repeated_as_the_same_process(caplog):
    server = EchoCoordinator()
    server.on["Join"] = breaking(2)
    with serving(server) as address, connect(address) as client:
        assert client.worker_id == 7
    assert len(server.joins) == 3
    assert len({join.join_nonce for join in server.joins}) == 1
    tries = [record.message for record in caplog.records if record.message.startswith("try ")]
    assert len(tries) == 2
    assert re.search(r"try 1: Join to the coordinator at .* UNAVAILABLE, Socket closed; next try in \d\.\d s", tries[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_coordinator_that_nobody_started_is_given_up_after_the_allowance(caplog):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        CoordinatorUnreachable,
        match=rf"{address} did not answer within 2 s \(\d tries\).*is it running.*does it ask for a client certificate",
    ):
        connect(address, seconds=2)
    tries = [record.message for record in caplog.records]
    assert len(tries) >= 2
    assert all(re.match(rf"try \d: Join .*{address}.*UNAVAILABLE.*; next try in \d\.\d s$", line) for line in tries)


def test_a_coordinator_that_starts_later_is_found(tmp_path: Path):
    port = free_port()
    found: list[WorkerClient] = []

    thread = threading.Thread(target=lambda: found.append(connect(f"127.0.0.1:{port}", seconds=60)))
    thread.start()
    with coordinator(tmp_path, {"timeouts": {"shutdown": "2s"}}, "--listen", f"127.0.0.1:{port}") as server:
        thread.join(60)
        assert len(found) == 1
        assert found[0].worker_id == 0
        found[0].close()
        server.wait_for_log("worker ant left: done")


def test_a_refusal_is_not_tried_again():
    server = EchoCoordinator()
    with serving(server) as address, pytest.raises(TokenRefused, match="token is missing or wrong"):
        connect(address, token="another-token-of-length")
    assert server.calls["Join"] == 0


def test_a_server_of_another_kind_is_told_from_a_coordinator():
    async def not_here(context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    server = EchoCoordinator()
    server.on["Join"] = not_here
    with serving(server) as address, pytest.raises(NotACoordinator, match=r"no Ayni coordinator.*Method not found"):
        connect(address)
