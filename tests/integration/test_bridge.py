"""Threads meet the event loop."""

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import CancelledError
from concurrent.futures import wait as wait_for_futures

import pytest

from ayni.errors import Deadline
from tests.support.coordinator import environment
from worker_agent.bridge import Bridge, shared, wait


@pytest.fixture
def network() -> Iterator[Bridge]:
    bridge = Bridge("test-network")
    yield bridge
    bridge.stop()
    assert "test-network" not in {thread.name for thread in threading.enumerate()}


async def answer() -> str:
    return threading.current_thread().name


async def fail() -> None:
    raise KeyError("x")


def test_coroutines_run_on_the_bridges_thread(network: Bridge):
    assert network.submit(answer()).result(20) == "test-network"
    assert network.wait(answer(), 20, "an answer") == "test-network"


def test_errors_come_back(network: Bridge):
    with pytest.raises(KeyError):
        network.wait(fail(), 20, "an answer")


def test_a_deadline_says_what_was_waited_for_and_stops_the_work(network: Bridge):
    stopped = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    with pytest.raises(Deadline, match=r"waited 0.05 s in vain for the sun") as caught:
        network.wait(endless(), 0.05, "the sun")
    assert caught.value.metadata == {"waiting_for": "the sun", "timeout": "0.05"}
    assert stopped.wait(20)


def test_a_timeout_of_the_work_itself_is_not_the_waits(network: Bridge):
    async def late() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        wait(network.submit(late()), 20, "an answer")


def test_an_error_that_nobody_waits_for_any_more_is_not_logged(network: Bridge, caplog: pytest.LogCaptureFixture):
    ended = threading.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyError("nobody's") from None
        finally:
            ended.set()

    caplog.set_level(logging.ERROR)
    future = network.submit(stubborn())
    network.wait(answer(), 20, "the start")
    assert future.cancel()
    assert ended.wait(20)
    done, _ = wait_for_futures([future], 20)
    assert done == {future}
    with pytest.raises(CancelledError):
        future.result()
    network.wait(asyncio.to_thread(__import__("gc").collect), 20, "the garbage collector")
    assert caplog.messages == []


def test_work_that_cancels_itself_is_cancelled(network: Bridge):
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(CancelledError):
        network.submit(give_up()).result(20)


def test_a_generator_is_iterated_and_closed(network: Bridge):
    closed = threading.Event()

    async def count() -> AsyncGenerator[int]:
        try:
            for number in range(1000):
                yield number
        finally:
            closed.set()

    assert list(network.iterate(count(), 20, "numbers")) == list(range(1000))
    closed.clear()
    numbers = network.iterate(count(), 20, "numbers")
    assert (next(numbers), next(numbers)) == (0, 1)
    numbers.close()
    assert closed.is_set()


FORGETFUL = """
import asyncio, sys
from worker_agent import bridge
from tests.support.echo_coordinator import TOKEN, EchoCoordinator, serving
from worker_agent.client import ClientConfig, WorkerClient
with serving(EchoCoordinator()) as address:
    client = WorkerClient.connect(ClientConfig(coordinator=address, token=TOKEN), 0, "cpu")
    print(client.worker_id)
"""


def test_a_program_that_forgets_to_close_its_client_ends_quietly():
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL], capture_output=True, text=True, env=environment(), timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "7\n")
    # gRPC's own core may say that the connection ended; Python has nothing to complain about.
    assert [line for line in done.stderr.splitlines() if "chttp2_transport" not in line] == []


def test_a_process_has_one_bridge():
    assert shared() is shared()
