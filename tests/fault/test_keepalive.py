"""A server that freezes is taken for dead in time, although its sockets stay open."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from ayni import rpc
from ayni.channels import open_channel, open_sync_channel
from ayni.endpoints import Keepalive
from tests.support.echo import calls

ROOT = Path(__file__).parents[2]
KEEPALIVE = Keepalive(interval=timedelta(seconds=1), timeout=timedelta(seconds=1))
SLACK = 1.0
"""Seconds beyond interval + timeout."""

LIMIT = 30.0
"""Deadline of each call, far beyond what is tested."""


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """Address and process id of a server in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}
    command = [sys.executable, "-m", "tests.support.echo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.kill()


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, LIMIT))


@pytest.mark.parametrize("method", ["Hang", "Chat"])
def test_a_waiting_call_ends(server: tuple[str, int], method: str) -> None:
    address, process_id = server

    async def test() -> None:
        async with open_channel(address, "", keepalive=KEEPALIVE) as channel:
            start = calls(channel)
            await start["One"](BytesValue(), timeout=LIMIT)
            if method == "Hang":
                waiting = asyncio.ensure_future(start["Hang"](BytesValue(), timeout=LIMIT))
            else:
                stream = start["Chat"](timeout=LIMIT)
                await stream.write(BytesValue(value=b"x"))
                await stream.read()
                waiting = asyncio.ensure_future(stream.read())
            os.kill(process_id, signal.SIGSTOP)
            begun = time.monotonic()
            check_failure(await failure_of(waiting))
            check_time(begun)

    run(test())


async def failure_of(waiting: "asyncio.Future[Any]") -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        await waiting
    return caught.value


def check_failure(error: Any) -> None:
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert rpc.error_from(error) is None


def check_time(begun: float) -> None:
    assert time.monotonic() - begun <= (KEEPALIVE.interval + KEEPALIVE.timeout).total_seconds() + SLACK


def test_a_blocking_call_ends(server: tuple[str, int]) -> None:
    address, process_id = server
    with open_sync_channel(address, "", keepalive=KEEPALIVE) as channel:
        start = calls(channel)
        start["One"](BytesValue(), timeout=LIMIT)
        waiting = start["Hang"].future(BytesValue(), timeout=LIMIT)  # type: ignore[attr-defined]
        os.kill(process_id, signal.SIGSTOP)
        begun = time.monotonic()
        check_failure(waiting.exception())
        check_time(begun)


def test_an_idle_connection_is_given_up_and_a_thawed_server_is_found_again(server: tuple[str, int]) -> None:
    address, process_id = server

    async def test() -> None:
        async with open_channel(address, "", keepalive=KEEPALIVE) as channel:
            start = calls(channel)
            await start["One"](BytesValue(), timeout=LIMIT)
            os.kill(process_id, signal.SIGSTOP)
            begun = time.monotonic()
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            check_time(begun)
            os.kill(process_id, signal.SIGCONT)
            assert await start["One"](BytesValue(value=b"x"), timeout=LIMIT, wait_for_ready=True) == BytesValue(
                value=b"x"
            )

    run(test())


def test_frequent_pings_are_not_punished(server: tuple[str, int]) -> None:
    """An idle client pings once a second; a server with gRPC's own settings ends the connection after three pings."""
    address, _ = server

    async def test() -> None:
        async with open_channel(address, "", keepalive=KEEPALIVE) as channel:
            await calls(channel)["One"](BytesValue(), timeout=LIMIT)
            changed = channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(changed, 6.0)

    run(test())
