"""Runs one case with real processes: a coordinator, and workers of unequal speed that join over gRPC.

Workers are forked from a server process that has loaded torch, which saves each of them some seconds.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.coordinator import TOKEN, CoordinatorProcess, coordinator
from tests.support.equality_cases import Case
from tests.support.equality_places import Crew, Place, capped, is_mixed
from tests.support.equality_worker import WorkerJob
from tests.support.equality_worker import main as worker_main

RUN_TIMEOUT_S = 150.0


class RunFailed(Exception):
    """A process of a run failed; says which and what it logged."""


@dataclass(frozen=True, kw_only=True)
class WorkerRecord:
    """What one worker saw of a run."""

    name: str
    steps: list[dict[str, Any]]
    evaluation_loss: float
    arrays: dict[str, np.ndarray]
    backend: str = "cpu"
    device: str = ""
    fallbacks: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run."""

    num_workers: int
    workers: list[WorkerRecord]
    wall_s: float

    @property
    def is_mixed(self) -> bool:
        """Returns whether some worker computed elsewhere than on the CPU."""
        return any(worker.backend != "cpu" for worker in self.workers)

    @property
    def shares(self) -> list[list[int]]:
        """Returns how many micro-batches each rank had, for each step."""
        steps = range(len(self.workers[0].steps))
        by_rank = [
            sorted((w.steps[step]["rank"], w.steps[step]["microbatches"]) for w in self.workers) for step in steps
        ]
        return [[stop - start for _, (start, stop) in step] for step in by_rank]


def run_case(context: ForkServerContext, case: Case, crew: Crew, num_steps: int, folder: Path) -> Run:
    """Runs a case to its end.

    Raises:
        RunFailed: a process failed or hung.
    """
    began = time.monotonic()
    folder.mkdir(parents=True)
    with coordinator(folder, case.run_for(len(crew), num_steps)) as server:
        jobs = [_job(case, server, folder, number, place) for number, place in enumerate(capped(crew, case))]
        if is_mixed(crew):
            # Devices differ in speed as they are.
            jobs = [replace(job, extra_forwards=0) for job in jobs]
        processes = [context.Process(target=worker_main, args=(job,), name=job.name, daemon=True) for job in jobs]
        for process in processes:
            process.start()
        _wait(server, processes, jobs, began + RUN_TIMEOUT_S)
    records = [_read(job.record) for job in jobs]
    return Run(num_workers=len(crew), workers=records, wall_s=time.monotonic() - began)


def _job(case: Case, server: CoordinatorProcess, folder: Path, number: int, place: Place) -> WorkerJob:
    return WorkerJob(
        address=server.address,
        token=TOKEN,
        name=f"worker-{number}",
        case=case,
        place=place,
        extra_forwards=case.extra_forwards[number % len(case.extra_forwards)],
        record=folder / f"worker-{number}",
    )


def _wait(
    server: CoordinatorProcess, processes: Sequence[ForkServerProcess], jobs: Sequence[WorkerJob], deadline: float
) -> None:
    """Waits for all workers and the coordinator to end well; ends the workers when one fails or hangs."""
    try:
        for process, job in zip(processes, jobs, strict=True):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                raise RunFailed(_why(server, process, job))
        code = server.process.wait(max(1.0, deadline - time.monotonic()))
        if code:
            raise RunFailed(f"the coordinator ended with {code}:\n{server.read_log()}")
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _why(server: CoordinatorProcess, process: ForkServerProcess, job: WorkerJob) -> str:
    log = job.record.with_suffix(".log")
    said = log.read_text() if log.exists() else "(it said nothing)"
    how = "hangs" if process.exitcode is None else f"ended with {process.exitcode}"
    return f"{process.name} {how}:\n{said}\nthe coordinator logged:\n{server.read_log()}"


def _read(path: Path) -> WorkerRecord:
    content = json.loads(path.with_suffix(".json").read_text())
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
        return WorkerRecord(**content, arrays={name: arrays[name] for name in arrays.files})
