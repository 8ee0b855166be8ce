"""A TCP proxy between a worker and the coordinator, that can be cut, stand still, or be slow."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

_CHUNK_BYTES = 1 << 16
_AHEAD_CHUNKS = 64
"""Chunks that are under way at once, where a link has a delay."""
SLOW_BYTES_PER_S = 2_000_000.0
DELAY_S = 0.05


@dataclass(eq=False)
class _Way:
    """One direction of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    under_way: asyncio.Queue = field(default_factory=lambda: asyncio.Queue(_AHEAD_CHUNKS))


class Link:
    """Listens for one worker and passes its bytes on to the coordinator, for as long as the link is whole."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task] = set()
        self._passable = asyncio.Event()
        self._passable.set()
        self._cut = False
        self._bytes_per_s = 0.0
        self._delay_s = 0.0

    async def open(self) -> str:
        """Starts to listen, and returns where."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    @property
    def whole(self) -> bool:
        """Whether nothing is the matter."""
        return self._passable.is_set() and not (self._cut or self._bytes_per_s or self._delay_s)

    def disturb(self, mode: str) -> None:
        """Cuts all connections and refuses new ones ("cut"), or has bytes stand still, be few, or come late."""
        if mode == "cut":
            self._cut = True
            for writer in tuple(self._writers):
                writer.transport.abort()
        elif mode == "stall":
            self._passable.clear()
        elif mode == "slow":
            self._bytes_per_s = SLOW_BYTES_PER_S
        else:
            self._delay_s = DELAY_S

    def mend(self) -> None:
        """Makes the link whole again."""
        self._cut, self._bytes_per_s, self._delay_s = False, 0.0, 0.0
        self._passable.set()

    async def close(self) -> None:
        """Ends all connections and stops listening."""
        self._cut = True
        self._passable.set()
        if self._server:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._server:
            await self._server.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        self._writers.add(writer)
        try:
            if self._cut:
                return
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._writers.add(far_writer)
            try:
                await self._pass(_Way(reader, far_writer), _Way(far_reader, writer))
            finally:
                await self._drop(far_writer)
        except OSError:
            pass  # Nobody listens: the worker sees its connection end, as without a proxy.
        except asyncio.CancelledError:
            pass  # By `close`; asyncio's own callback can't bear a handler that was cancelled.
        finally:
            await self._drop(writer)

    async def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _pass(self, *ways: _Way) -> None:
        """Passes bytes on until either side ends; both connections end then."""
        moving = [asyncio.create_task(part) for way in ways for part in (self._read(way), self._write(way))]
        try:
            await asyncio.wait(moving, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in moving:
                task.cancel()
            await asyncio.gather(*moving, return_exceptions=True)

    async def _read(self, way: _Way) -> None:
        while data := await way.reader.read(_CHUNK_BYTES):
            await way.under_way.put((time.monotonic() + self._delay_s, data))
        await way.under_way.put((time.monotonic(), b""))
        # The writer ends the connection once everything before the end is through.
        await asyncio.Event().wait()

    async def _write(self, way: _Way) -> None:
        while True:
            due, data = await way.under_way.get()
            if not data:
                return
            if (early := due - time.monotonic()) > 0:
                await asyncio.sleep(early)
            if self._bytes_per_s:
                await asyncio.sleep(len(data) / self._bytes_per_s)
            await self._passable.wait()
            way.writer.write(data)
            await way.writer.drain()
