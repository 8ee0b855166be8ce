"""Messages and descriptors between two workers of one host."""

import asyncio
import os
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ayni.errors import BadRequest, PeerLost
from ayni.shm.regions import Region
from worker_agent.host_streams import HostStream, Kind


@contextmanager
def pair() -> Iterator[tuple[HostStream, HostStream]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in (ours, theirs):
        one.setblocking(False)
    left, right = HostStream(ours, "the right one"), HostStream(theirs, "the left one")
    try:
        yield left, right
    finally:
        left.close()
        right.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(bounded())


def test_messages_come_in_order_and_regions_with_their_descriptors():
    async def scenario() -> None:
        region = Region(1000)
        with pair() as (left, right):
            await left.send(Kind.HELLO, b"secret")
            await left.lend(region)
            await left.lend(region)
            for length in (30_000, 60_000):
                await left.send(Kind.FRAME, b"f" * length)
            await left.send(Kind.END)
            said = [await right.receive() for _ in range(4)]
            assert [(kind, len(content)) for kind, content in said] == [(1, 6), (3, 30_000), (3, 60_000), (4, 0)]
            lend, fd = right.take_offered(region.id)
            assert (lend.size, os.fstat(fd).st_size >= 1000) == (1000, True)
            os.close(fd)
            with pytest.raises(BadRequest, match="does not lend"):
                right.take_offered(region.id)

    run(scenario())


def test_who_sends_waits_for_who_does_not_read_and_is_told_of_the_end():
    async def scenario() -> None:
        with pair() as (left, right):

            async def flood() -> None:
                while True:
                    await left.send(Kind.FRAME, b"f" * 40_000)

            flooding = asyncio.create_task(flood())
            await asyncio.wait({flooding}, timeout=0.3)
            assert not flooding.done()
            for _ in range(1000):
                await right.receive()
            right.close()
            with pytest.raises(PeerLost, match="the right one"):
                await flooding

    run(scenario())


def test_what_was_said_before_the_end_is_heard_and_no_descriptor_stays():
    async def scenario() -> None:
        region = Region(1000)
        before = len(os.listdir("/proc/self/fd"))
        with pair() as (left, right):
            await left.lend(region)
            await left.send(Kind.DONE)
            assert (await right.receive())[0] == Kind.DONE
            ended = asyncio.Event()
            right.on_end = ended.set
            left.close()
            await ended.wait()
            with pytest.raises(PeerLost):
                await right.receive()
        assert len(os.listdir("/proc/self/fd")) == before

    run(scenario())


@pytest.mark.parametrize(
    "packet", [b"\x03", b"\x03\xff\xff\x00\x00", b"\x02\x01\x00\x00\x00x", b"\x04\x00\x00\x00\x00\x01"]
)
def test_a_packet_that_can_not_be_read_ends_the_connection(packet: bytes):
    async def scenario() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        stream = HostStream(theirs, "a stranger")
        ours.send(packet)
        with pytest.raises(PeerLost, match="a packet can't be read"):
            await stream.receive()
        ours.close()

    run(scenario())
