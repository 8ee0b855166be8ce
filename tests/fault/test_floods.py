"""Strangers in great numbers: memory and descriptors stay bounded, and a worker with the token still gets through."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from ayni.channels import open_channel
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import CoordinatorProcess, coordinator, make_step, raw_worker, raw_workers
from tests.support.fuzz_servers import num_descriptors, num_threads, resident_bytes

RUN: dict[str, Any] = {
    "run_id": "flooded",
    "num_steps": 0,
    "min_workers": 2,
    "batch": {"samples": 10, "microbatches": 5},
    "timeouts": {"lease": "60s", "accept": "61s", "shutdown": "1s"},
}
SERVICE = "/ayni.v1.CoordinatorService/"
MOST_GROWTH = 96 << 20
"""Bytes. Calls that wait to be looked at are kept, some kilobytes each, up to a limit."""
MOST_STREAM_GROWTH = 1200 << 20
"""Bytes of a thousand streams. gRPC takes what a stream sends into a window of its own, about 1 MiB on a fast link,
before anybody can refuse it. How many streams get so far before gRPC cuts the connection off is chance."""


@pytest.fixture(autouse=True)
def _loops_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiled loops take is no part of what a flood takes."""
    monkeypatch.setenv("AYNI_KERNELS", "compiled")


GRADIENTS = [np.full(100, value, np.float32) for value in range(5)]


class Watch:
    """Looks at a process while it is flooded."""

    def __init__(self, server: CoordinatorProcess) -> None:
        self.pid = server.process.pid
        self.before = self._now()
        self.peak = self.before

    def _now(self) -> dict[str, int]:
        return {
            "resident": resident_bytes(self.pid),
            "descriptors": num_descriptors(self.pid),
            "threads": num_threads(self.pid),
        }

    def look(self) -> None:
        now = self._now()
        self.peak = {name: max(value, now[name]) for name, value in self.peak.items()}

    async def over(self, flood: Coroutine[Any, Any, Any]) -> Any:
        """Looks again and again until a flood is over; returns what it returned."""
        task = asyncio.ensure_future(flood)
        while not task.done():
            await asyncio.wait({task}, timeout=0.1)
            self.look()
        return await task

    def grown(self) -> dict[str, int]:
        return {name: self.peak[name] - value for name, value in self.before.items()}


async def ended(call: Any) -> str:
    try:
        await call
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


async def steps_until(stop: asyncio.Event, workers: Any) -> int:
    """Makes steps one after the other; returns how many."""
    count = 0
    while not stop.is_set():
        await make_step(workers, GRADIENTS)
        for worker in workers:
            await worker.next_frame()
        count += 1
    return count


def flooded(tmp_path: Path, flood: Any) -> tuple[Any, int, Watch]:
    """Returns what a flood came to, how many steps two good workers made meanwhile, and what the server held."""

    async def scenario(address: str, watch: Watch) -> tuple[Any, int]:
        async with raw_workers(address, "ant", "bee") as workers:
            await make_step(workers, GRADIENTS)
            for worker in workers:
                await worker.next_frame()
            stop = asyncio.Event()
            stepping = asyncio.create_task(steps_until(stop, workers))
            result = await watch.over(flood(address))
            stop.set()
            return result, await stepping

    with coordinator(tmp_path, RUN) as server:
        watch = Watch(server)
        result, steps = asyncio.run(asyncio.wait_for(scenario(server.address, watch), 100))
        assert server.process.poll() is None
        assert "Traceback" not in server.read_log()
        assert len(server.read_log()) < 1 << 20, "strangers fill the log"
    return result, steps, watch


def test_ten_thousand_calls_with_a_wrong_token(tmp_path: Path):
    async def flood(address: str) -> Counter[str]:
        async with open_channel(address, "a-wrong-token-for-tests") as channel:
            calls = [channel.unary_unary(SERVICE + "GetRun")(bytes(100), timeout=60) for _ in range(10_000)]
            return Counter(await asyncio.gather(*map(ended, calls)))

    result, steps, watch = flooded(tmp_path, flood)
    # Those above the limit of one connection are cut off by gRPC itself.
    assert set(result) <= {"FAILED_PRECONDITION", "UNAVAILABLE"}
    assert result["FAILED_PRECONDITION"] > 500
    assert steps
    assert watch.grown()["resident"] < MOST_GROWTH
    assert watch.grown()["descriptors"] < 10
    assert watch.grown()["threads"] < 10


def test_a_thousand_streams_of_strangers_that_write(tmp_path: Path):
    async def stream(channel: Any) -> str:
        call = channel.stream_stream(SERVICE + "Gradient")(timeout=60)
        try:
            for _ in range(60):
                await call.write(bytes(100_000))
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass
        return (await call.code()).name

    async def flood(address: str) -> Counter[str]:
        async with open_channel(address, "a-wrong-token-for-tests") as channel:
            return Counter(await asyncio.gather(*(stream(channel) for _ in range(1_000))))

    result, steps, watch = flooded(tmp_path, flood)
    assert "OK" not in result
    assert result["FAILED_PRECONDITION"]
    assert steps
    assert watch.grown()["resident"] < MOST_STREAM_GROWTH
    assert watch.grown()["descriptors"] < 10


def test_messages_of_a_hundred_megabytes(tmp_path: Path):
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield bytes(2 << 20)

    async def flood(address: str) -> list[str]:
        large = bytes(100 << 20)
        async with (
            open_channel(address, "a-wrong-token-for-tests") as wrong,
            open_channel(address, "") as without,
        ):
            calls = [channel.unary_unary(SERVICE + "Join")(large, timeout=60) for channel in (wrong, without) * 5]
            streams = [wrong.stream_stream(SERVICE + "Gradient")(parts(), timeout=60).read() for _ in range(5)]
            return await asyncio.gather(*map(ended, (*calls, *streams)))

    result, steps, watch = flooded(tmp_path, flood)
    assert set(result) == {"FAILED_PRECONDITION"}
    assert steps
    assert watch.grown()["resident"] < 256 << 20, "of 1,500 MB that were sent"


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_connections_that_never_call(tmp_path: Path, says: bytes):
    """More of them than the limit: those that are open go on, and there is room again when their time is over."""
    run = {**RUN, "limits": {"connections": 100, "handshake": "2s"}}

    async def scenario(address: str, watch: Watch) -> None:
        host, port = address.split(":")
        async with raw_workers(address, "ant", "bee") as workers, AsyncExitStack() as later:
            with ExitStack() as sockets:
                for _ in range(300):
                    connection = sockets.enter_context(socket.create_connection((host, int(port)), timeout=10))
                    connection.sendall(says)
                watch.look()
                await make_step(workers, GRADIENTS)
                async with asyncio.timeout(30):
                    while num_descriptors(watch.pid) > watch.before["descriptors"] + 10:
                        await ended(workers[0].stub.GetRun(pb.GetRunRequest(), timeout=20))
                cat = await later.enter_async_context(raw_worker(address, "cat"))
                await cat.join()

    with coordinator(tmp_path, run) as server:
        watch = Watch(server)
        asyncio.run(asyncio.wait_for(scenario(server.address, watch), 100))
        assert server.process.poll() is None
        assert "Traceback" not in server.read_log()
    assert watch.grown()["descriptors"] <= 110
    assert watch.grown()["resident"] < 48 << 20
