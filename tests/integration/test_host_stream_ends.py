"""Regions lent by a worker that dies before they are taken do not stay in this process."""

import asyncio
import os
import socket
from collections.abc import Callable

import pytest

from ayni.shm.regions import Region
from worker_agent.host_streams import HostStream, Kind


@pytest.mark.parametrize("num_read", [0, 2])
def test_what_a_gone_peer_had_lent_is_closed_with_the_stream(num_read: int) -> None:
    async def scene() -> tuple[int, int]:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in ends:
            end.setblocking(False)
        own, other = HostStream(ends[0], "the other"), HostStream(ends[1], "this")
        region = Region(4096)
        before = _regions_open()
        await other.send(Kind.FRAME, b"first")
        await other.lend(region)
        await other.send(Kind.FRAME, b"second")
        await _until(lambda: not own.is_quiet)
        other.close()
        await _until(lambda: not own.is_open)
        for _ in range(num_read):
            await own.receive()
        own.close()
        after = _regions_open()
        region.close_fd()
        return before, after

    before, after = asyncio.run(asyncio.wait_for(scene(), 20))
    assert after == before


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 -- the stream tells nobody that something came
        await asyncio.sleep(0)


def _regions_open() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += "ayni-region" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return count
