"""Many workers, one after the other and all at once: nothing is left behind, and memory stays flat.

The workers are light: numpy over `WorkerClient`, in threads of the test's own process (200 that come and go) and of
eight processes with eight workers each (64 at once).
"""

import gc
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ayni.channels import open_sync_channel
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import coordinator_pb2_grpc
from tests.support.chaos_light import Light, in_threads
from tests.support.coordinator import ROOT, TOKEN, coordinator, environment

NUM_JOINS = 200
AT_ONCE = 4
WARM_UP = 40
"""Joins after which threads, descriptors and memory are looked at for the first time."""
MORE_BYTES = 24 << 20
"""Allocators keep some: much less than 160 leaked members, each with its streams, would take."""

ENDLESS: dict[str, Any] = {
    "run_id": "soak",
    "num_steps": 0,
    "min_workers": 1,
    "start_workers": 1,
    "max_workers": 16,
    "audit_every": 0,
    "batch": {"samples": 12, "microbatches": 12},
    "timeouts": {"shutdown": "2s"},
}


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a process holds."""

    threads: int
    descriptors: int
    resident_bytes: int


def held_by(pid: int) -> Held:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Held(
        threads=int(status["Threads"]),
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        resident_bytes=int(status["VmRSS"].split()[0]) << 10,
    )


def calm(pid: int, before: Held, timeout: float = 20.0) -> Held:
    """Returns what a process holds once connections that were closed have gone, which takes a moment."""
    deadline = time.monotonic() + timeout
    while held_by(pid).descriptors > before.descriptors + 4 and time.monotonic() < deadline:
        select.select([], [], [], 0.1)
    return held_by(pid)


def left_over() -> set[str]:
    """Shared memory and temporary files of this machine that are ours."""
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return names | {name for name in os.listdir(tempfile.gettempdir()) if "ayni" in name}


def committed_steps(address: str) -> int:
    with open_sync_channel(address, TOKEN) as channel:
        return coordinator_pb2_grpc.CoordinatorServiceStub(channel).GetRun(pb.GetRunRequest()).snapshot.committed_steps


@pytest.mark.timeout(300)
def test_two_hundred_workers_come_and_go_and_leave_nothing_behind(tmp_path):
    before = left_over()
    done = threading.Event()
    with coordinator(tmp_path, ENDLESS) as process:
        stays = Light(process.address, TOKEN, "stays", fixed=True)
        staying = threading.Thread(target=stays.work, args=(lambda _: done.is_set(),))
        staying.start()
        pid, first = process.process.pid, None
        try:
            for start in range(0, NUM_JOINS, AT_ONCE):
                steps = committed_steps(process.address)
                crowd = [
                    Light(process.address, TOKEN, f"guest-{start + n}", fixed=True, completed_steps=steps)
                    for n in range(AT_ONCE)
                ]
                in_threads(crowd, lambda guest: guest.contributed > 0 and len(guest.commits) > 1)
                assert all(guest.contributed for guest in crowd)
                if start + AT_ONCE == WARM_UP:
                    gc.collect()
                    first = held_by(pid), held_by(os.getpid())
            gc.collect()
            assert first
            last = calm(pid, first[0]), calm(os.getpid(), first[1])
        finally:
            done.set()
            staying.join(60)
        log = process.read_log()
        assert sum(f"worker guest-{number} joined" in log for number in range(NUM_JOINS)) == NUM_JOINS
    for then, now in zip(first, last, strict=True):
        assert now.threads <= then.threads + 2
        assert now.descriptors <= then.descriptors + 4
        assert now.resident_bytes <= then.resident_bytes + MORE_BYTES
    assert left_over() <= before


@pytest.mark.timeout(300)
def test_sixty_four_workers_join_train_fifty_steps_and_leave(tmp_path):
    run = {
        "run_id": "many",
        "num_steps": 50,
        "min_workers": 64,
        "batch": {"samples": 128, "microbatches": 64},
        "optimizer": {"learning_rate": 0.2, "schedule": "constant"},
    }
    with coordinator(tmp_path, run) as process:
        crews = [_start(process.address, first, 8) for first in range(0, 64, 8)]
        workers = [worker for crew in crews for worker in _end(crew)]
        assert process.process.wait(60) == 0, process.read_log()
        log = process.read_log()
    assert len({worker["name"] for worker in workers}) == 64
    assert {worker["commits"] for worker in workers} == {50}
    assert sum(worker["contributed"] for worker in workers) == 50 * 64
    assert len({worker["sha256"] for worker in workers}) == 1
    assert log.count(" joined as ") == 64


def _start(address: str, first: int, count: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.support.chaos_light", address, TOKEN, str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)


def _end(crew: subprocess.Popen) -> list[dict[str, Any]]:
    said, _ = crew.communicate(timeout=240)
    assert crew.returncode == 0
    return json.loads(said)
