"""A store that dies, freezes or fills up: every key has its true outcome by the deadline, and the next call works."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import AxisOrder, LayoutConfig, LayoutKind, fingerprint
from ayni.blocks.objects import KeyOutcome, OutcomeState, Presence, PresenceState
from ayni.blocks.sequence_hash import synthetic
from ayni.errors import StorageFailed
from tests.support import seaweedfs
from tests.support.coordinator import ROOT, environment
from tests.support.seaweedfs import CREDENTIALS, SeaweedFS
from tests.support.store_conformance import fresh, read, view
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import WHOLE
from worker_agent.blocks.objects.file_store import FileStore
from worker_agent.blocks.objects.keys import Shelf
from worker_agent.blocks.objects.obstore_store import ObstoreStore
from worker_agent.blocks.objects.tier import ObjectTier
from worker_agent.blocks.patterns import RankDistinct, fill

COUNT = 200
CONFIG = LayoutConfig(num_blocks=COUNT, num_layers=2, outer_dim=2, page_size=16, inner_dim=256, num_heads=4)
FINGERPRINT = fingerprint(CONFIG, AxisOrder.NHD, "model")
KEYS = [bytes(synthetic("fault", number)) for number in range(COUNT)]
BLOCKS = as_ids(range(COUNT))
GOOD = {OutcomeState.DONE, OutcomeState.ALREADY_PRESENT}


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedFS]:
    started = seaweedfs.start()
    yield started
    started.stop()


@pytest.fixture
def s3(server: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> SeaweedFS:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    if server.process.poll() is not None:
        server.restart()
    return server


class Watched:
    """A store that tells when a call was answered for the n-th time."""

    def __init__(self, store: Any, call: str, after: int) -> None:
        self._store, self._call, self._left = store, call, after
        self.reached = threading.Event()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        return self._counting(real) if name == self._call else real

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            answer = real(*arguments)
            with self._lock:
                self._left -= 1
                if not self._left:
                    self.reached.set()
            return answer

        return call


def memory_of(rank: int) -> HostMemory:
    geometry = Geometry(config=CONFIG, kind=LayoutKind.FULLY_CONTIGUOUS, axis_order=AxisOrder.NHD)
    memory = allocate_host(geometry)
    fill(memory, range(COUNT), RankDistinct(rank))
    return memory


def rows(memory: HostMemory) -> np.ndarray:
    view_of_all = memory.rows(WHOLE)
    assert view_of_all is not None
    return view_of_all


def tier_of(store: Any, prefix: str) -> ObjectTier:
    return ObjectTier(
        store, Shelf(prefix=prefix, fingerprint=FINGERPRINT, rank=0), CONFIG.block_bytes, "group", max_requests=8
    )


def run(test: Coroutine[Any, Any, Any], limit_s: float = 100.0) -> Any:
    return asyncio.run(asyncio.wait_for(test, limit_s))


def now() -> float:
    return asyncio.get_running_loop().time()


async def reached(store: Watched) -> None:
    assert await asyncio.to_thread(store.reached.wait, 30)


def good(outcomes: Sequence[KeyOutcome]) -> list[int]:
    return [place for place, outcome in enumerate(outcomes) if outcome.state in GOOD]


def reasons(outcomes: Sequence[KeyOutcome] | Sequence[Presence]) -> set[str]:
    return {outcome.failure.reason for outcome in outcomes if outcome.failure}


@pytest.mark.parametrize("validity", [None, 300.0], ids=["plain", "claims"])
def test_server_killed_in_the_middle_of_a_put(s3: SeaweedFS, validity: float | None) -> None:
    source, destination = memory_of(0), memory_of(1)
    store = Watched(ObstoreStore(s3.config(timeout_s=5)), "put_if_absent", after=40)
    tier = tier_of(store, fresh("/"))

    async def put() -> list[int]:
        began = now()
        batch = tier.put(source, BLOCKS, KEYS, validity, began + 30)
        await reached(store)
        s3.send(signal.SIGKILL)
        outcomes = await batch
        assert now() - began < 15, "no key waits for a server that is gone"
        await batch.quiesced
        done = good(outcomes)
        assert 10 < len(done) < COUNT
        assert len(done) + sum(outcome.state is OutcomeState.FAILED for outcome in outcomes) == COUNT
        assert reasons(outcomes) == {"STORAGE_FAILED"}
        presences = await tier.has(KEYS, now() + 10)
        assert {presence.state for presence in presences} == {PresenceState.UNKNOWN}
        assert reasons(presences) == {"STORAGE_FAILED"}
        return done

    async def get_and_put_again(done: list[int]) -> None:
        some = [KEYS[place] for place in done]
        outcomes = await tier.get(some, destination, as_ids(done), now() + 60)
        assert len(good(outcomes)) == len(done), "what was called stored is stored"
        assert np.array_equal(rows(destination)[done], rows(source)[done])
        if validity is None:
            assert len(good(await tier.put(source, BLOCKS, KEYS, None, now() + 60))) == COUNT

    done = run(put())
    s3.restart()
    run(get_and_put_again(done))
    tier.close()


def test_server_killed_in_the_middle_of_a_get(s3: SeaweedFS) -> None:
    source, destination = memory_of(0), memory_of(1)
    before = rows(destination).copy()
    store = Watched(ObstoreStore(s3.config(timeout_s=5)), "get", after=50)
    tier = tier_of(store, fresh("/"))

    async def test() -> None:
        assert len(good(await tier.put(source, BLOCKS, KEYS, None, now() + 60))) == COUNT
        began = now()
        batch = tier.get(KEYS, destination, BLOCKS, began + 30)
        await reached(store)
        s3.send(signal.SIGKILL)
        outcomes = await batch
        assert now() - began < 15
        await batch.quiesced
        done = good(outcomes)
        rest = sorted(set(range(COUNT)) - set(done))
        assert done
        assert rest, "the server was killed after all objects were read; store more of them"
        assert {outcomes[place].state for place in rest} == {OutcomeState.FAILED}, "nothing that is stored is absent"
        assert reasons(outcomes) == {"STORAGE_FAILED"}
        assert np.array_equal(rows(destination)[done], rows(source)[done])
        assert np.array_equal(rows(destination)[rest], before[rest])

    run(test())
    tier.close()


def test_server_that_freezes_ends_a_get_by_its_deadline(s3: SeaweedFS) -> None:
    source, destination = memory_of(0), memory_of(1)
    before = rows(destination).copy()
    store = Watched(ObstoreStore(s3.config(timeout_s=6)), "get", after=40)
    tier = tier_of(store, fresh("/"))

    async def test() -> None:
        assert len(good(await tier.put(source, BLOCKS, KEYS, None, now() + 60))) == COUNT
        deadline = now() + 2
        batch = tier.get(KEYS, destination, BLOCKS, deadline)
        await reached(store)
        s3.send(signal.SIGSTOP)
        outcomes = await batch
        assert now() < deadline + 1
        done = good(outcomes)
        rest = sorted(set(range(COUNT)) - set(done))
        assert rest
        assert {outcomes[place].state for place in rest} == {OutcomeState.FAILED}
        assert reasons(outcomes) == {"DEADLINE"}
        assert batch.quiesced.done(), "requests are out, but no block is touched"
        s3.send(signal.SIGCONT)
        # Waits in line behind the answers that now come late.
        assert {p.state for p in await tier.has(KEYS, now() + 60)} == {PresenceState.PRESENT}
        assert np.array_equal(rows(destination)[done], rows(source)[done])
        assert np.array_equal(rows(destination)[rest], before[rest]), "late answers land nowhere"
        assert len(good(await tier.get(KEYS, destination, BLOCKS, now() + 60))) == COUNT
        assert np.array_equal(rows(destination), rows(source))

    run(test())
    tier.close()


def test_server_that_stays_frozen_frees_the_threads_by_the_request_timeout(s3: SeaweedFS) -> None:
    tier = tier_of(ObstoreStore(s3.config(timeout_s=1)), fresh("/"))

    async def test() -> None:
        s3.send(signal.SIGSTOP)
        try:
            began = now()
            presences = await tier.has(KEYS, began + 20)
            assert now() - began < 10
            assert {presence.state for presence in presences} == {PresenceState.UNKNOWN}
            assert reasons(presences) == {"STORAGE_FAILED"}
        finally:
            s3.send(signal.SIGCONT)
        assert {p.state for p in await tier.has(KEYS[:8], now() + 20)} == {PresenceState.ABSENT}

    run(test())
    tier.close()


# A disk that is full.


class FullDisk:
    """Takes so many bytes and no more, as the kernel does it: a short write first, then an error."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._lock = threading.Lock()
        self._write = os.write

    def __call__(self, file: int, data: memoryview) -> int:
        with self._lock:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            length = min(self.room, len(data))
            self.room -= length
        return self._write(file, data[:length])


def leftovers(root: Path) -> list[Path]:
    return [path for path in (root / ".ayni" / "staging").rglob("*") if path.is_file() and path.name != "lock"]


@pytest.mark.parametrize("validity", [None, 300.0], ids=["plain", "claims"])
def test_full_disk_fails_what_does_not_fit_and_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validity: float | None
) -> None:
    source, destination = memory_of(0), memory_of(1)
    store = FileStore(tmp_path / "store")
    tier = tier_of(store, "")
    disk = FullDisk(room=100 * CONFIG.block_bytes)
    monkeypatch.setattr("worker_agent.blocks.objects.file_store.os.write", disk)

    async def test() -> None:
        outcomes = await tier.put(source, BLOCKS, KEYS, validity, now() + 60)
        done = good(outcomes)
        assert 80 <= len(done) <= 100
        assert reasons(outcomes) == {"STORAGE_FAILED"}
        failure = next(outcome.failure for outcome in outcomes if outcome.failure)
        assert "No space left on device" in failure.message
        assert dict(failure.metadata)["place"] == str(tmp_path / "store")
        assert leftovers(store.root) == []
        presences = await tier.has(KEYS, now() + 60)
        assert [p for p, presence in enumerate(presences) if presence.state is PresenceState.PRESENT] == done
        disk.room = 1 << 40
        assert len(good(await tier.put(source, BLOCKS, KEYS, validity, now() + 60))) == COUNT
        assert len(good(await tier.get(KEYS, destination, BLOCKS, now() + 60))) == COUNT

    run(test())
    assert np.array_equal(rows(destination), rows(source))
    tier.close()
    store.close()


LIMITED = """
import resource, sys
from pathlib import Path
from ayni.errors import StorageFailed
from worker_agent.blocks.objects.file_store import FileStore

store = FileStore(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
store.put_if_absent("small", memoryview(b"x" * 5000))
try:
    store.put_if_absent("large", memoryview(b"x" * 5001))
except StorageFailed as error:
    print(error)
print(store.has("large"), store.put_if_absent("next", memoryview(b"x")))
store.close()
"""


def test_write_that_the_kernel_cuts_short_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=60,
        check=True,
    )
    error, after = ended.stdout.splitlines()
    assert error == f"could not store large in {tmp_path / 'store'}: File too large"
    assert after == "None True"


def test_file_that_can_not_be_read_is_unknown_and_not_absent(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.put_if_absent("a/b", view(b"x"))
    folder = next(path for path in (tmp_path / "store" / "a").iterdir())
    (folder / "b").unlink()
    (folder / "b").mkdir()
    with pytest.raises(StorageFailed, match="could not read a/b"):
        read(store, "a/b")
    store.close()
