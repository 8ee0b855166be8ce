"""The proxy of the chaos program passes bytes on, and is cut, stands still and is slow as it is told."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from scripts.chaos_proxy import DELAY_S, SLOW_BYTES_PER_S, Link

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PAYLOAD = bytes(range(256)) * 4096


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, Callable[[], Awaitable[Streams]]]]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link(*server.sockets[0].getsockname())
    host, port = (await link.open()).rsplit(":", 1)
    opened: list[Streams] = []

    async def dial() -> Streams:
        opened.append(await asyncio.open_connection(host, int(port)))
        return opened[-1]

    try:
        yield link, dial
    finally:
        for _, writer in opened:
            await drop(writer)
        await link.close()
        server.close()
        await server.wait_closed()


async def drop(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def round_trip(streams: Streams, payload: bytes = PAYLOAD) -> float:
    reader, writer = streams
    began = time.monotonic()
    writer.write(payload)
    async with asyncio.timeout(20):
        assert await reader.readexactly(len(payload)) == payload
    return time.monotonic() - began


def test_bytes_come_through_and_back():
    async def scenario() -> None:
        async with linked() as (link, dial):
            assert link.whole
            await asyncio.gather(*[round_trip(await dial()) for _ in range(4)])

    asyncio.run(scenario())


def test_cut_ends_connections_and_refuses_new_ones_until_it_is_mended():
    async def scenario() -> None:
        async with linked() as (link, dial):
            reader, _ = streams = await dial()
            await round_trip(streams)
            link.disturb("cut")
            assert not link.whole
            async with asyncio.timeout(5):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await round_trip(await dial())
            link.mend()
            await round_trip(await dial())

    asyncio.run(scenario())


def test_stall_keeps_connections_and_bytes():
    async def scenario() -> None:
        async with linked() as (link, dial):
            streams = await dial()
            link.disturb("stall")
            waiting = asyncio.create_task(round_trip(streams))
            done, _ = await asyncio.wait({waiting}, timeout=0.3)
            assert not done
            link.mend()
            await waiting

    asyncio.run(scenario())


def test_slow_and_late_links_take_their_time():
    async def scenario() -> tuple[float, float]:
        async with linked() as (link, dial):
            streams = await dial()
            link.disturb("slow")
            slow = await round_trip(streams)
            link.mend()
            link.disturb("delay")
            return slow, await round_trip(streams, b"x")

    slow, late = asyncio.run(scenario())
    assert slow >= len(PAYLOAD) / SLOW_BYTES_PER_S
    assert late >= 2 * DELAY_S


def test_a_coordinator_that_is_down_looks_like_one_without_a_proxy():
    async def scenario() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        link = Link(*server.sockets[0].getsockname())
        server.close()
        await server.wait_closed()
        host, port = (await link.open()).rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        await drop(writer)
        await link.close()

    asyncio.run(scenario())
