"""gRPC without anything of ours, with our options and allocator: the bytes of a star, which nobody adds.

Legend: N elements in the vector.

Each worker sends its vector in frames of 1 MiB and gets as many back: what a star can't be cheaper than. Bytes are
joined into a frame once on their way out and copied into place once on their way in, which no client of gRPC can avoid.
As a program it is the server: `python bare_grpc.py aio|threads`, on an event loop or on threads, prints "listening on
ADDRESS".
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import grpc
import numpy as np
from grpc import aio

from ayni import rpc
from ayni.endpoints import Keepalive
from worker_agent import bridge
from worker_agent.session import Vector

DEADLINE = 300.0
FRAME_BYTES = 1 << 20
KINDS = ("aio", "threads")
_ECHO = "/bench/Echo"
_THREADS = 16


@dataclass
class Bare:
    """This end: as many bytes as a vector has on the wire, to the server and back."""

    kind: str
    """"aio" or "threads", at both ends."""
    address: str
    server_pid: int
    vector: Vector
    num_bytes: int
    """Of the vector's, so many travel each way."""

    def __post_init__(self) -> None:
        self.name = f"grpc-{self.kind}"
        self._out = self.vector.view(np.uint8)[: self.num_bytes].data
        self._in_N = np.zeros(len(self._out), np.uint8)
        self._in = self._in_N.data
        options = rpc.client_options(Keepalive(), loopback=True)
        # A channel of grpc.aio belongs to one loop, and the process has one already.
        make = self._make_aio if self.kind == "aio" else self._make_threads
        make(options)

    def prepare(self) -> None:
        self._in_N.fill(0)

    def work(self) -> None:
        if self.kind == "aio":
            bridge.shared().wait(self._exchange_aio(), DEADLINE, "a bare exchange")
        else:
            self._exchange_threads()

    def finish(self) -> None:
        assert self._in == self._out, "a bare exchange gave other bytes back"

    def _make_aio(self, options: rpc.Options) -> None:
        async def make() -> Any:
            return aio.insecure_channel(self.address, options=options).stream_stream(_ECHO)

        self._call = bridge.shared().wait(make(), DEADLINE, "a channel")

    def _make_threads(self, options: rpc.Options) -> None:
        self._call = grpc.insecure_channel(self.address, options=options).stream_stream(_ECHO)

    async def _exchange_aio(self) -> None:
        call = self._call(timeout=DEADLINE)

        async def send() -> None:
            for frame in self._frames():
                await call.write(frame)
            await call.done_writing()

        sending, start = asyncio.create_task(send()), 0
        while (frame := await call.read()) is not aio.EOF:
            start = self._place(frame, start)
        await sending

    def _exchange_threads(self) -> None:
        start = 0
        for frame in self._call(self._frames(), timeout=DEADLINE):
            start = self._place(frame, start)

    def _frames(self) -> Iterator[bytes]:
        for start in range(0, len(self._out), FRAME_BYTES):
            yield bytes(self._out[start : start + FRAME_BYTES])

    def _place(self, frame: bytes, start: int) -> int:
        self._in[start : start + len(frame)] = frame
        return start + len(frame)


class _Echo(grpc.GenericRpcHandler):
    def __init__(self, method: Any) -> None:
        self._method = method

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._method)


async def _echo_aio(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
    async for frame in requests:
        yield frame


def _echo_threads(requests: Iterator[bytes], _context: object) -> Iterator[bytes]:
    yield from requests


async def _serve_aio() -> None:
    server = aio.server(options=rpc.server_options(Keepalive()))
    server.add_generic_rpc_handlers((_Echo(_echo_aio),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def _serve_threads() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(_THREADS), options=rpc.server_options(Keepalive()))
    server.add_generic_rpc_handlers((_Echo(_echo_threads),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    rpc.tune_allocator()
    if sys.argv[1] == "aio":
        asyncio.run(_serve_aio())
    else:
        _serve_threads()
