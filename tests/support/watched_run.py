"""A coordinator with a dashboard, and light workers that step for ever in a thread: frames by hand, no torch."""

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ayni.messages import times_message
from ayni.step_values import StepTimes
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import CoordinatorProcess, RawWorker, coordinator, raw_worker

_SIZE = 1000
_WAIT_S = 60.0


@dataclass
class Watched:
    """A run that somebody may look at."""

    coordinator: CoordinatorProcess
    url: str
    drained: list[str] = field(default_factory=list)
    """Names of workers that were let go."""


@contextlib.contextmanager
def watched_run(
    folder: Path, names: Sequence[str], *flags: str, compute_s: float = 0.02, **run: object
) -> Iterator[Watched]:
    """Yields a run without end, once its workers have begun; ends it."""
    whole: dict[str, Any] = {
        "run_id": "watched",
        "num_steps": 0,
        "min_workers": 1,
        "start_workers": len(names),
        "batch": {"samples": 2 * len(names), "microbatches": len(names)},
        # Nobody is late or lost on a machine that is busy: these workers take no extra leases and have no heartbeat.
        "timeouts": {"shutdown": "1s", "lease": "60s", "accept": "90s"},
        "stragglers": {"shortest": "60s", "longest": "60s"},
        "dashboard": "127.0.0.1:0",
        **run,
    }
    with coordinator(folder, whole, *flags) as process:
        process.wait_for_log("the dashboard is at ")
        url = process.read_log().partition("the dashboard is at ")[2].split()[0]
        watched = Watched(process, url)
        with _working(watched, names, compute_s):
            yield watched


class _Crew:
    """Workers on an event loop in a thread of its own."""

    def __init__(self, watched: Watched, names: Sequence[str], compute_s: float) -> None:
        self._watched, self._names, self._compute_s = watched, names, compute_s
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self.started: Future[None] = Future()
        self.ended: Future[None] = Future()

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._work())
        except BaseException as error:
            for future in (self.started, self.ended):
                if not future.done():
                    future.set_exception(error)
        else:
            self.ended.set_result(None)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # It has ended.
            self._loop.call_soon_threadsafe(self._over.set)

    async def _work(self) -> None:
        address, count = self._watched.coordinator.address, len(self._names)
        async with AsyncExitStack() as stack:
            crew = [await stack.enter_async_context(raw_worker(address, name)) for name in self._names]
            for number, worker in enumerate(crew):
                await _join(worker, number)
            self.started.set_result(None)
            async with asyncio.TaskGroup() as group:
                times = [self._compute_s * (1 + number / count) for number in range(count)]
                turns = [
                    group.create_task(_turns(worker, self._watched, seconds))
                    for worker, seconds in zip(crew, times, strict=True)
                ]
                await self._over.wait()
                for turn in turns:
                    turn.cancel()


@contextlib.contextmanager
def _working(watched: Watched, names: Sequence[str], compute_s: float) -> Iterator[None]:
    crew = _Crew(watched, names, compute_s)
    thread = threading.Thread(target=crew.run, name="crew")
    thread.start()
    try:
        crew.started.result(_WAIT_S)
        yield
    finally:
        crew.stop()
        thread.join(_WAIT_S)
    crew.ended.result(_WAIT_S)


async def _join(worker: RawWorker, number: int) -> None:
    kinds: list[dict[str, Any]] = [{"backend": "cpu"}, {"backend": "cuda", "device_names": ["NVIDIA H100 80GB HBM3"]}]
    await worker.join(elastic=True, join_nonce=f"nonce-{number}", **kinds[number % len(kinds)])
    worker.open_assignments()


async def _turns(worker: RawWorker, watched: Watched, compute_s: float) -> None:
    """Takes leases until the worker is let go."""
    worker.num_buckets = 1
    while await _lease(worker, watched):
        step = worker.assignment.step
        await asyncio.sleep(compute_s)  # What a worker would compute.
        weights = dict.fromkeys(worker.leased, 2)
        parts = [np.full(_SIZE, 1.0, np.float32)] * len(_cover(worker))
        await worker.reduce(parts, weights)
        times = StepTimes(
            compute=compute_s, exchange=0.3 * compute_s, commit_wait=0.2 * compute_s, update=0.1 * compute_s
        )
        loss = 0.4 + 2.5 * math.exp(-step / 60) + 0.05 * math.sin(step)
        request = worker.commit_request(weights, times=times_message(times))
        for stats in request.microbatches:
            stats.loss_sum = loss * stats.weight
        await worker.stub.CommitStep(request, timeout=_WAIT_S)
    await worker.leave("it was drained")


async def _lease(worker: RawWorker, watched: Watched) -> bool:
    while True:
        async with asyncio.timeout(_WAIT_S):
            frame: pb.ShardAssignmentResponse = await worker.stream.read()
        if frame.HasField("shutdown"):
            if frame.shutdown.drained:
                watched.drained.append(worker.name)
            return False
        if frame.HasField("assignment"):
            worker.assignment = frame.assignment
            return True


def _cover(worker: RawWorker) -> Sequence[object]:
    from ayni.tree import cover

    lease = worker.assignment
    return cover(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches)
