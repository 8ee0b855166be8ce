"""Blocks of 1 MiB as objects: in a folder and in SeaweedFS, against the same store without any of our own code."""

import asyncio
import os
import shutil
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.metadata import GroupConfig
from ayni.blocks.objects import ObjectStoreConfig
from ayni.blocks.sequence_hash import synthetic
from tests.bench import blocks_agents as agents
from tests.bench.blocks_agents import HOST, MIB, variables
from tests.bench.blocks_measure import (
    CPU_UNIT,
    CaseResult,
    Contender,
    Scale,
    blocking,
    compared,
    limited,
    measure,
)
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.worker import LocalBlockWorker

COUNT = 300
THREADS = 8
_FILE_GOALS = {"put": 1.2, "get": 8.0}
_S3_PUT_RATIO, _S3_GET_RATE, _S3_GET_CPU = 0.9, 0.9, 0.9
_CHECKED = "page cache; ours also packs a header and computes (put) or compares (get) a checksum"
_SERVER = "bound by the server, which shares the cores"


async def file_store(folder: Path, scale: Scale) -> CaseResult:
    count = scale.count(COUNT)
    data = agents.pattern(count, MIB)
    async with agents.local_worker(folder) as worker:
        ours = Ours(worker, data)
        await ours.open(ObjectStoreConfig(kind="file", bucket="objects"))
        bare = BareFiles(folder / "bare", data)
        samples = await measure([ours.putting(), bare.putting()], scale.repeat(5))
        samples |= await measure([ours.getting(), bare.getting()], scale.repeat(7))
    result = CaseResult()
    for way in ("put", "get"):
        case = f"object {way}, file store, {count:,} x 1 MiB"
        mine, bare_rate = samples[way].rate, samples[f"bare {way}"].rate
        result.rows.append(compared(case, mine, "bare files", bare_rate, "GB/s", note=_CHECKED))
        result.rows.append(limited(case, mine, "GB/s", _FILE_GOALS[way], _CHECKED))
    result.keep("file store", samples)
    return result


async def s3(folder: Path, scale: Scale) -> CaseResult:
    if why := _why_no_server():
        result = CaseResult()
        result.skip("s3", why)
        return result
    from tests.support import seaweedfs

    server = seaweedfs.start()
    try:
        with variables(**seaweedfs.CREDENTIALS):
            return await _s3(folder, scale, server)
    finally:
        server.stop()


async def _s3(folder: Path, scale: Scale, server: Any) -> CaseResult:
    count = scale.count(COUNT)
    data = agents.pattern(count, MIB)
    with ThreadPoolExecutor(THREADS) as threads:
        async with agents.local_worker(folder) as worker:
            ours = Ours(worker, data)
            await ours.open(server.config("bench"))
            bare = BareObstore(server.raw(), data, threads)
            samples = await measure([ours.putting(), bare.putting()], scale.repeat(3))
            samples |= await measure([ours.getting(), bare.getting()], scale.repeat(5))
    result, size = CaseResult(), f"{count:,} x 1 MiB"
    peer = f"obstore, {THREADS} threads"
    put, get = samples["put"], samples["get"]
    result.rows += [
        compared(f"object put, S3, {size}", put.rate, peer, samples["bare put"].rate, "GB/s", _S3_PUT_RATIO, _SERVER),
        compared(f"object get, S3, {size}", get.rate, peer, samples["bare get"].rate, "GB/s", note=_SERVER),
        limited(f"object get, S3, {size}", get.rate, "GB/s", _S3_GET_RATE, _SERVER),
        limited(f"object get, S3, {size}, this process", get.cpu_per_gb, CPU_UNIT, _S3_GET_CPU),
        limited(f"object put, S3, {size}, this process", put.cpu_per_gb, CPU_UNIT),
    ]
    result.keep("s3", samples)
    return result


def _why_no_server() -> str:
    try:
        import obstore  # noqa: F401 -- the extra s3
    except ImportError as error:
        return f"the extra s3 is not installed: {error}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return "" if shutil.which("weed", path=path) else "SeaweedFS is not installed; the extra 'dev' brings it"


class Ours:
    """`put_blocks` and `get_blocks` of a worker: blocks 0 to N - 1 are put, N to 2 N - 1 are loaded into."""

    def __init__(self, worker: LocalBlockWorker, data: Bytes) -> None:
        self._worker, self._data = worker, data
        self._first: Ids = np.arange(len(data))
        self._second: Ids = self._first + len(data)
        self._round = 0

    async def open(self, store: ObjectStoreConfig) -> None:
        await self._worker.allocate(HOST, agents.geometry(2 * len(self._data), MIB))
        await self._worker.write(HOST, self._first, self._data)
        config = GroupConfig(epoch=1, instance_id=str(uuid.uuid4()), rank=0, world_size=1, object_store=store)
        await self._worker.configure_layouts(config)

    def putting(self) -> Contender:
        return Contender(name="put", num_bytes=self._data.nbytes, prepare=self._next_round, work=self._put)

    def getting(self) -> Contender:
        return Contender(name="get", num_bytes=self._data.nbytes, prepare=self._roll, work=self._get, check=self._check)

    @property
    def _keys(self) -> list[bytes]:
        return [bytes(synthetic(f"round {self._round}", i)) for i in range(len(self._data))]

    async def _next_round(self) -> None:
        """Takes keys that nobody used, and empties the write-back cache."""
        self._round += 1
        await asyncio.to_thread(os.sync)

    async def _put(self) -> None:
        report = await self._worker.put_blocks(HOST, self._first, self._keys)
        assert report.is_done, report.outcomes

    async def _roll(self) -> None:
        self._second = np.roll(self._second, 1)

    async def _get(self) -> None:
        report = await self._worker.get_blocks(self._keys, HOST, self._second)
        assert report.is_done, report.outcomes

    async def _check(self) -> None:
        await agents.check(self._worker, HOST, self._second, self._data, self._first)


class BareFiles:
    """One file for each block, written beside the others and then linked to its name."""

    def __init__(self, folder: Path, data: Bytes) -> None:
        self._folder, self._data, self._out = str(folder), data, np.zeros_like(data)
        self._round, self._names = 0, list[str]()
        folder.mkdir(parents=True)

    def putting(self) -> Contender:
        return Contender(
            name="bare put", num_bytes=self._data.nbytes, prepare=blocking(self._next_round), work=blocking(self._put)
        )

    def getting(self) -> Contender:
        return Contender(name="bare get", num_bytes=self._data.nbytes, work=blocking(self._get))

    def _next_round(self) -> None:
        # Nothing is deleted: ext4 looks for a long time at what it has freed a moment ago.
        self._round += 1
        self._names = [f"{self._folder}/{self._round}-{i}" for i in range(len(self._data))]
        os.sync()

    def _put(self) -> None:
        staged = f"{self._folder}/staged"
        for name, row in zip(self._names, self._data, strict=True):
            file = os.open(staged, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            assert os.write(file, row.data) == MIB
            os.close(file)
            os.link(staged, name)
            os.unlink(staged)

    def _get(self) -> None:
        for name, row in zip(self._names, self._out, strict=True):
            file = os.open(name, os.O_RDONLY)
            assert os.readv(file, [row.data]) == MIB
            os.close(file)


class BareObstore:
    """obstore with threads; puts are conditional, as ours are."""

    def __init__(self, store: Any, data: Bytes, threads: ThreadPoolExecutor) -> None:
        self._store, self._data, self._threads = store, data, threads
        self._round = 0

    def putting(self) -> Contender:
        return Contender(
            name="bare put", num_bytes=self._data.nbytes, prepare=blocking(self._next_round), work=blocking(self._put)
        )

    def getting(self) -> Contender:
        return Contender(name="bare get", num_bytes=self._data.nbytes, work=blocking(self._get))

    def _next_round(self) -> None:
        self._round += 1

    def _put(self) -> None:
        import obstore

        put = partial(obstore.put, self._store, mode="create")
        done: Sequence[Any] = list(self._threads.map(put, self._names, [row.data for row in self._data]))
        assert len(done) == len(self._data)

    def _get(self) -> None:
        import obstore

        def get(name: str) -> int:
            return len(obstore.get(self._store, name).bytes())

        assert sum(self._threads.map(get, self._names)) == self._data.nbytes

    @property
    def _names(self) -> list[str]:
        return [f"bare/{self._round}/{i}" for i in range(len(self._data))]
