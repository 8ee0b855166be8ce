"""gRPC without anything of ours: bytes in frames of 1 MiB, joined at one end and copied into place at the other.

What ours can't be quicker than. As a program it is the other end: `python blocks_bare.py COUNT BLOCK_BYTES` prints
"listening on ADDRESS".
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc import aio

from ayni import rpc
from ayni.endpoints import Keepalive
from tests.bench import blocks_agents as agents
from tests.bench.blocks_agents import MIB
from tests.bench.blocks_measure import Contender
from tests.bench.processes import Program
from worker_agent.blocks.memory import Bytes

HEADER = bytes(64)
"""As much as the small fields of one of our frames."""
_READ, _WRITE = "/bench/Read", "/bench/Write"


@dataclass
class Bare:
    """This end."""

    program: Program
    channel: aio.Channel
    data: Bytes

    def __post_init__(self) -> None:
        self._out = np.zeros_like(self.data)

    @property
    def pull(self) -> Contender:
        return self._contender("bare grpc pull", self._pull)

    @property
    def push(self) -> Contender:
        return self._contender("bare grpc push", self._push)

    def _start(self, method: str) -> Any:
        make = self.channel.unary_stream if method == _READ else self.channel.stream_unary
        return make(method)

    def _contender(self, name: str, work: Any) -> Contender:
        return Contender(name=name, num_bytes=self.data.nbytes, work=work, pids=(self.program.pid,))

    async def _pull(self) -> None:
        await place(aiter(self._start(_READ)(b"")), self._out)

    async def _push(self) -> None:
        call = self._start(_WRITE)()
        for frame in frames(self.data):
            await call.write(frame)
        await call.done_writing()
        await call


@contextlib.asynccontextmanager
async def bare(folder: Path, data: Bytes) -> AsyncIterator[Bare]:
    count, block_bytes = data.shape
    command = [str(Path(__file__)), str(count), str(block_bytes)]
    with Program.start("bare grpc", command, folder) as program:
        options = rpc.client_options(Keepalive(), loopback=True)
        async with aio.insecure_channel(program.word(), options=options) as channel:
            yield Bare(program, channel, data)


def frames(data: Bytes) -> Iterator[bytes]:
    """Blocks in shuffled order, about 1 MiB in each frame."""
    blocks, step = agents.shuffled(len(data), 7).tolist(), max(1, MIB // data.shape[1])
    for start in range(0, len(blocks), step):
        yield b"".join((HEADER, *(data[block].data for block in blocks[start : start + step])))


async def place(source: AsyncIterator[bytes], out: Bytes) -> None:
    """Copies the blocks of each frame to shuffled places."""
    blocks, done = agents.shuffled(len(out), 8).tolist(), 0
    async for frame in source:
        rows = np.frombuffer(frame, np.uint8, offset=len(HEADER)).reshape(-1, out.shape[1])
        for block, row in zip(blocks[done : done + len(rows)], rows, strict=True):
            out[block] = row
        done += len(rows)
    assert done == len(out), "a bare gRPC stream was cut short"


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, count: int, block_bytes: int) -> None:
        self._data = agents.pattern(count, block_bytes)
        self._out = np.zeros_like(self._data)

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        if call.method == _READ:
            return grpc.unary_stream_rpc_method_handler(self._read)
        return grpc.stream_unary_rpc_method_handler(self._write)

    async def _read(self, _request: bytes, _context: object) -> AsyncIterator[bytes]:
        for frame in frames(self._data):
            yield frame

    async def _write(self, requests: AsyncIterator[bytes], _context: object) -> bytes:
        await place(requests, self._out)
        return b""


async def _serve(count: int, block_bytes: int) -> None:
    server = aio.server(options=rpc.server_options(Keepalive()))
    server.add_generic_rpc_handlers((_Handlers(count, block_bytes),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    rpc.tune_allocator()
    asyncio.run(_serve(*map(int, sys.argv[1:])))
