"""Blocks between host memory and the disk tier, against the bare system calls on a file of the same size.

Everything stays in the page cache: nothing is forced onto the disk.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ayni.blocks.layouts import LocalLayout, Tier
from tests.bench import blocks_agents as agents
from tests.bench.blocks_agents import HOST, MIB
from tests.bench.blocks_measure import CaseResult, Contender, Samples, Scale, blocking, compared, limited, measure
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.worker import LocalBlockWorker

COUNT = 1000
DISK = LocalLayout(tier=Tier.DISK)
_GOALS = {"write": 7.0, "read": 12.0}
_CHECKED = "page cache; ours also computes and keeps (write) or compares (read) a checksum of each block"


async def slab(folder: Path, scale: Scale) -> CaseResult:
    count = scale.count(COUNT)
    data = agents.pattern(count, MIB)
    async with agents.local_worker(folder) as worker:
        for place in (HOST, DISK):
            await worker.allocate(place, agents.geometry(2 * count if place is HOST else count, MIB))
        await worker.write(HOST, np.arange(count), data)
        with _file(folder / "bare", data.nbytes) as file:
            contenders = [*_ours(worker, data), *_bare(file, data)]
            samples = await measure(contenders, scale.repeat(5), warm_up=2)
    return _result(count, samples)


def _ours(worker: LocalBlockWorker, data: Bytes) -> list[Contender]:
    first, second = np.arange(len(data)), np.arange(len(data), 2 * len(data))

    nothing = np.zeros_like(data)

    async def clear() -> None:
        await worker.write(HOST, second, nothing)

    async def check() -> None:
        await agents.check(worker, HOST, second, data, first)

    async def write() -> None:
        await worker.execute_local_transfer(HOST, DISK, first, first)

    async def read() -> None:
        await worker.execute_local_transfer(DISK, HOST, first, second)

    return [
        Contender(name="write", num_bytes=data.nbytes, work=write),
        Contender(name="read", num_bytes=data.nbytes, work=read, prepare=clear, check=check),
    ]


@contextlib.contextmanager
def _file(path: Path, num_bytes: int) -> Iterator[int]:
    """A file that is set aside, as its descriptor."""
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(file, 0, num_bytes)
        yield file
    finally:
        os.close(file)


def _bare(file: int, data: Bytes) -> list[Contender]:
    out = np.zeros_like(data)

    def write() -> None:
        for i, row in enumerate(data):
            assert os.pwrite(file, row.data, i * MIB) == MIB

    def read() -> None:
        for i, row in enumerate(out):
            assert os.preadv(file, [row.data], i * MIB) == MIB

    return [
        Contender(name="bare write", num_bytes=data.nbytes, work=blocking(write)),
        Contender(name="bare read", num_bytes=data.nbytes, work=blocking(read)),
    ]


def _result(count: int, samples: dict[str, Samples]) -> CaseResult:
    result = CaseResult()
    for way, call in (("write", "pwrite"), ("read", "preadv")):
        ours, bare = samples[way].rate, samples[f"bare {way}"].rate
        case = f"slab {way}, {count:,} x 1 MiB"
        result.rows.append(compared(case, ours, call, bare, "GB/s", note=_CHECKED))
        result.rows.append(limited(case, ours, "GB/s", _GOALS[way], _CHECKED))
    result.keep("slab", samples)
    return result
