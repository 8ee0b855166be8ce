"""Light workers of `scale.py`: some in one process, on one event loop, each with a connection of its own.

They speak frame by frame, compute nothing, and hold one vector, so that a machine can have many. Prints one JSON
object: what the clocks showed whenever the crew's first worker heard a commit. The first and the last mean are checked.
"""

import argparse
import asyncio
import json
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ayni.kernels import loading
from ayni.rpc import tune_allocator
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import RawWorker, raw_worker

TIMEOUT = 120.0


class Watch:
    """What the clocks of this process and of the coordinator's show, and its memory."""

    def __init__(self, coordinator: int) -> None:
        self._coordinator = coordinator
        self.marks: list[dict[str, float]] = []

    def mark(self) -> dict[str, float]:
        """Seconds of the wall clock, of this process's and of the coordinator's processor (see clock_getcpuclockid)."""
        return {
            "seconds": time.perf_counter(),
            "cpu_seconds": time.process_time(),
            "coordinator_cpu_seconds": time.clock_gettime(~self._coordinator << 3 | 2),
        }

    def note(self) -> None:
        self.marks.append(self.mark())

    def resident_bytes(self) -> int:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{self._coordinator}/status").read_text().splitlines())
        return int(status["VmRSS"].split()[0]) << 10


class Light:
    """One worker. Contributes its own number in every element; with 0 elements it only takes leases and commits."""

    def __init__(self, raw: RawWorker, number: int, given: argparse.Namespace) -> None:
        self.raw = raw
        self.raw.num_buckets = 1
        self._last = given.steps - 1
        self._mean = (given.workers + 1) / 2
        self._vector_N = np.full(given.elements, number + 1, np.float32)

    async def join(self) -> None:
        await self.raw.join(elastic=True)
        self.raw.open_assignments()

    async def lease(self) -> bool:
        """Waits for the next lease; False at the end of the run."""
        while True:
            async with asyncio.timeout(TIMEOUT):
                frame = await self.raw.stream.read()
            if frame.HasField("assignment"):
                self.raw.assignment = frame.assignment
                assert len(self.raw.leased) == 1, "every worker has one micro-batch, so that all do the same"
                return True
            if frame.HasField("shutdown"):
                return False

    async def turn(self) -> None:
        """Contributes and commits."""
        weights = dict.fromkeys(self.raw.leased, 1)
        if self._vector_N.size:
            mean_N, _ = await self.raw.reduce([self._vector_N], weights)
            if self.raw.assignment.step in (0, self._last):
                assert (mean_N == np.float32(self._mean)).all(), f"the mean is {mean_N[0]}, not {self._mean}"
        await self.raw.commit(weights, num_buckets=int(self._vector_N.size > 0))

    async def beat(self, times: int) -> None:
        for _ in range(times):
            await self.raw.stub.Heartbeat(pb.HeartbeatRequest(worker_id=self.raw.worker_id), timeout=TIMEOUT)


async def work(light: Light, watch: Watch | None) -> None:
    """Works to the end of the run, once the first lease is there."""
    while True:
        await light.turn()
        if watch:
            watch.note()
        if not await light.lease():
            break
    await light.raw.leave("done")


async def serve(given: argparse.Namespace) -> dict[str, Any]:
    watch = Watch(given.coordinator_pid)
    async with AsyncExitStack() as stack:
        numbers = range(given.first, given.first + given.count)
        raws = [await stack.enter_async_context(raw_worker(given.coordinator, f"light-{n}")) for n in numbers]
        crew = [Light(raw, number, given) for raw, number in zip(raws, numbers, strict=True)]
        await asyncio.gather(*(light.join() for light in crew))
        assert all(await asyncio.gather(*(light.lease() for light in crew)))
        joined = watch.mark()
        await asyncio.gather(*(light.beat(given.beats) for light in crew))
        beaten = watch.mark()
        idle_bytes = watch.resident_bytes()
        await asyncio.gather(*(work(light, watch if light is crew[0] else None) for light in crew))
        return {
            "joined": joined,
            "beaten": beaten,
            "marks": watch.marks,
            "idle_bytes": idle_bytes,
            "resident_bytes": watch.resident_bytes(),
            "pid": os.getpid(),
        }


def main() -> None:
    tune_allocator()
    loading.choose("compiled")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True)
    for name in ("coordinator-pid", "workers", "first", "count", "elements", "steps", "beats"):
        parser.add_argument(f"--{name}", required=True, type=int)
    print(json.dumps(asyncio.run(serve(parser.parse_args()))))


if __name__ == "__main__":
    main()
