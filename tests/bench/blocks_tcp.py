"""A bare TCP stream on loopback with calls of 1 MiB that receives into prepared memory: what gRPC is compared with.

As a program it is the other end: `python blocks_tcp.py BYTES` prints its port, sends so many bytes on its first
connection whenever it is asked to, and takes as many on its second one.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.bench.blocks_measure import Contender, blocking
from tests.bench.processes import Program
from worker_agent.blocks.memory import Bytes

CALL_BYTES = 1 << 20
TIMEOUT_S = 120.0


@dataclass
class Stream:
    """Both connections, from this end."""

    program: Program
    incoming: socket.socket
    outgoing: socket.socket
    received: Bytes
    sent: Bytes
    threads: ThreadPoolExecutor

    @property
    def one_way(self) -> Contender:
        return self._contender("tcp", len(self.received), self._pull)

    @property
    def both_ways(self) -> Contender:
        return self._contender("tcp both ways", len(self.received) + len(self.sent), self._both)

    def _contender(self, name: str, num_bytes: int, work: Callable[[], None]) -> Contender:
        return Contender(name=name, num_bytes=num_bytes, work=blocking(work), pids=(self.program.pid,))

    def _pull(self) -> None:
        self.incoming.sendall(b"?")
        receive(self.incoming, self.received.data)

    def _both(self) -> None:
        pushing = self.threads.submit(self._push)
        self._pull()
        pushing.result(TIMEOUT_S)

    def _push(self) -> None:
        send(self.outgoing, self.sent.data)
        receive(self.outgoing, memoryview(bytearray(1)))


@contextlib.contextmanager
def stream(folder: Path, num_bytes: int) -> Iterator[Stream]:
    with (
        Program.start("tcp", [str(Path(__file__)), str(num_bytes)], folder) as program,
        contextlib.ExitStack() as stack,
    ):
        port = int(program.word())
        incoming, outgoing = (stack.enter_context(_connect(port)) for _ in range(2))
        received, sent = (np.full(num_bytes, fill, np.uint8) for fill in (0, 1))
        threads = stack.enter_context(ThreadPoolExecutor(1))
        yield Stream(program, incoming, outgoing, received, sent, threads)


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send(connection: socket.socket, data: memoryview) -> None:
    for start in range(0, len(data), CALL_BYTES):
        connection.sendall(data[start : start + CALL_BYTES])


def receive(connection: socket.socket, data: memoryview) -> None:
    start = 0
    while start < len(data):
        count = connection.recv_into(data[start : start + CALL_BYTES])
        if not count:
            raise EOFError("the other end of a bare stream has gone")
        start += count


def _serve(num_bytes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"listening on {server.getsockname()[1]}", flush=True)
        outgoing, incoming = server.accept()[0], server.accept()[0]
    threading.Thread(target=_take, args=(incoming, num_bytes), daemon=True).start()
    data = np.full(num_bytes, 2, np.uint8).data
    while outgoing.recv(1):
        send(outgoing, data)


def _take(incoming: socket.socket, num_bytes: int) -> None:
    data = np.zeros(num_bytes, np.uint8).data
    while True:
        receive(incoming, data)
        incoming.sendall(b"!")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
