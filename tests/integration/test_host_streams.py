"""Messages and descriptors between two workers of one host."""

import asyncio
import os
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ayni.errors import BadRequest, PeerLost, Unsupported
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


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_region_that_is_freed_before_its_loan_has_left_is_still_the_one_that_arrives(tmp_path: Path):
    async def scenario() -> None:
        region = Region(1000)
        region.bytes[:5] = tuple(b"ayni!")
        inode, number = os.fstat(region.fd).st_ino, region.fd
        with pair() as (left, right):
            await left.lend(region)
            region.close_fd()
            # The number is another file's now, before the loop has sent anything.
            with (tmp_path / "other").open("w") as other:
                assert other.fileno() == number
                await left.send(Kind.DONE)
                assert (await right.receive())[0] == Kind.DONE
                _, fd = right.take_offered(region.id)
                assert os.fstat(fd).st_ino == inode
                os.close(fd)

    run(scenario())


def test_copies_of_descriptors_are_closed_whether_they_were_sent_dropped_or_never_queued():
    async def scenario() -> None:
        regions = [Region(1000) for _ in range(3)]
        before = open_descriptors()
        with pair() as (left, right):
            await left.lend(regions[0])
            await left.send(Kind.DONE)
            await right.receive()
            right.forget_lent()
            assert open_descriptors() == before + 2
            await left.lend(regions[1])
            assert open_descriptors() == before + 3
            # Nothing has left since.
            left.close()
        assert open_descriptors() == before
        with pair() as (left, right):

            async def flood() -> None:
                while True:
                    await left.send(Kind.FRAME, b"f" * 60_000)

            tasks = [asyncio.create_task(flood())]
            await asyncio.wait(tasks, timeout=0.3)
            tasks.append(asyncio.create_task(left.lend(regions[2])))
            _, waiting = await asyncio.wait(tasks, timeout=0.1)
            assert (len(waiting), open_descriptors()) == (2, before + 3)
            left.close()
            assert [type(end) for end in await asyncio.gather(*tasks, return_exceptions=True)] == [PeerLost] * 2
        assert open_descriptors() == before

    run(scenario())


def test_what_is_no_descriptor_any_more_is_refused_each_time_and_the_connection_goes_on():
    async def scenario() -> None:
        region = Region(1000)
        with pair() as (left, right):
            region.close_fd()
            for _ in range(2):
                with pytest.raises(Unsupported, match="memory can't be lent to the right one: Bad file descriptor"):
                    await left.lend(region)
            await left.send(Kind.DONE)
            assert (await right.receive())[0] == Kind.DONE

    run(scenario())
