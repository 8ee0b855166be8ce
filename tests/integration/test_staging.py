"""Gradients that are put into shared regions on several threads, and contributions that are given up meanwhile."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ayni import tensors
from ayni.errors import StorageFailed
from ayni.shm.regions import Region
from worker_agent.same_host import SharedParts, SharedVectors
from worker_agent.shared_regions import SharedRegions

CHUNK_BYTES = 1 << 16
SIZE = 20_001

Free = list[Region]


def vector(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def bytes_of(values: np.ndarray, dtype: str) -> bytes:
    """What would travel, chunk after chunk."""
    step = CHUNK_BYTES // tensors.position_bytes(dtype)
    chunks = [values[at : at + step] for at in range(0, values.size, step)]
    return b"".join(bytes(tensors.encode(chunk, dtype)) for chunk in chunks)


def free_of(vectors: SharedVectors, dtype: str) -> Free:
    return vectors._staging.setdefault(tensors.payload_bytes(SIZE, dtype), [])


@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
def test_a_region_holds_what_would_travel(dtype):
    vectors = SharedVectors()
    for seed in (1, 2):
        region = vectors.stage(vector(seed), dtype, CHUNK_BYTES)
        assert region.bytes.tobytes() == bytes_of(vector(seed), dtype)
        vectors.unstage(region)
    assert free_of(vectors, dtype) == [region], "the second one was put where the first one had been"


class Glanced(list[Any]):
    """A list that lets another thread look, too, before whoever asks whether it is empty goes on."""

    def __init__(self, items: Free, both: threading.Barrier) -> None:
        super().__init__(items)
        self.both = both

    def __bool__(self) -> bool:
        there = len(self) > 0
        self.both.wait(10)
        return there


def test_two_threads_that_see_one_free_region_do_not_both_take_it():
    vectors = SharedVectors()
    spare = vectors.stage(vector(0), "float32", CHUNK_BYTES)
    vectors._staging[spare.size] = Glanced([spare], threading.Barrier(2))
    with ThreadPoolExecutor(2) as threads:
        taken = list(threads.map(lambda seed: vectors.stage(vector(seed), "float32", CHUNK_BYTES), (1, 2)))
    assert len({region.id for region in taken}) == 2
    assert spare in taken
    assert [region.bytes.tobytes() for region in taken] == [vector(seed).tobytes() for seed in (1, 2)]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_many_threads_never_hold_the_same_region(dtype):
    vectors, held, lock = SharedVectors(), set[int](), threading.Lock()
    small = [vector(seed, 300) for seed in range(8)]

    def work(number: int) -> None:
        for _ in range(50):
            region = vectors.stage(small[number], dtype, CHUNK_BYTES)
            with lock:
                assert region.id not in held
                held.add(region.id)
            assert region.bytes.tobytes() == bytes_of(small[number], dtype)
            with lock:
                held.remove(region.id)
            vectors.unstage(region)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert len(vectors._staging[tensors.payload_bytes(300, dtype)]) <= 8


class Lent:
    """A coordinator that maps whatever it is lent."""

    async def lend(self, region: Region) -> None:
        assert region.generation


class Slow(SharedVectors):
    """Copies when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go_on = threading.Event(), threading.Event()

    def stage(self, vector: np.ndarray, dtype: str, chunk_bytes: int) -> Region:
        region = super().stage(vector, dtype, chunk_bytes)
        self.began.set()
        assert self.go_on.wait(20)
        return region


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_region_is_not_lost_when_its_contribution_is_given_up_during_the_copy(dtype):
    async def main() -> None:
        vectors = Slow()
        parts = SharedParts(Lent(), vectors)  # type: ignore[arg-type]
        placing = asyncio.create_task(parts.place({0: vector(1)}, dtype, CHUNK_BYTES))
        await until(vectors.began.is_set)
        placing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await placing
        parts.close()
        assert free_of(vectors, dtype) == [], "the thread is writing there"
        vectors.go_on.set()
        await until(lambda: len(free_of(vectors, dtype)) == 1)
        (region,) = free_of(vectors, dtype)
        assert region.generation == 2, "whoever was told of the copy must not use it"
        again = SharedParts(Lent(), vectors)  # type: ignore[arg-type]
        places = await again.place({0: vector(2), 1: vector(3)}, dtype, CHUNK_BYTES)
        assert places is not None
        assert places[0].region == region.id
        assert places[1].region != region.id
        again.close()
        assert len(free_of(vectors, dtype)) == 2

    asyncio.run(main())


def test_a_copy_that_fails_after_it_was_given_up_leaves_no_complaint(monkeypatch):
    async def main() -> list[Any]:
        complaints = list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        vectors, fail = SharedVectors(), threading.Event()

        def stage(*_: Any) -> Region:
            assert fail.wait(20)
            raise StorageFailed("no memory", detail="memfd", name="region")

        monkeypatch.setattr(vectors, "stage", stage)
        parts = SharedParts(Lent(), vectors)  # type: ignore[arg-type]
        placing = asyncio.create_task(parts.place({0: vector(1)}, "int8", CHUNK_BYTES))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        placing.cancel()
        await asyncio.wait({placing})
        parts.close()
        fail.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        await asyncio.sleep(0)
        return complaints

    assert asyncio.run(main()) == []


def test_where_there_is_no_memory_gradients_have_to_be_sent(monkeypatch):
    async def main() -> None:
        vectors = SharedVectors()

        def full(*_: Any) -> Region:
            raise StorageFailed("no memory", detail="memfd", name="region")

        monkeypatch.setattr(vectors.regions, "allocate", full)
        parts = SharedParts(Lent(), vectors)  # type: ignore[arg-type]
        assert await parts.place({0: vector(1)}, "bfloat16", CHUNK_BYTES) is None
        parts.close()

    asyncio.run(main())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_regions_of_sizes_that_no_group_uses_any_more_are_let_go_but_none_in_use():
    vectors = SharedVectors()
    used = vectors.stage(vector(1, 500), "float32", CHUNK_BYTES)
    again = vectors.stage(vector(2, 600), "float32", CHUNK_BYTES)
    vectors.unstage(again)
    counts = []
    for group in range(20):
        vectors.regroup()
        for seed in range(3):
            vectors.unstage(vectors.stage(vector(seed, 1000 + group), "float32", CHUNK_BYTES))
        if group % 3 == 0:
            found = vectors.stage(vector(3, 600), "float32", CHUNK_BYTES)
            assert found is again
            vectors.unstage(found)
        counts.append((descriptors(), vectors.regions.total_bytes))
    assert counts[-1][0] == counts[-10][0]
    assert counts[-1][1] - counts[-10][1] == 4 * (9 * 4)
    assert vectors.regions.get(used.id) is used
    assert used.bytes.tobytes() == vector(1, 500).tobytes()
    assert os.fstat(used.fd).st_size >= used.size
    vectors.unstage(used)
    for _ in range(4):
        vectors.regroup()
    assert vectors._staging == {}
    assert vectors.regions.total_bytes == 0


def test_what_the_coordinator_was_lent_stays():
    async def main() -> None:
        vectors = SharedVectors()

        class Calls:
            def check_open(self) -> None: ...

            async def ask(self, *_: Any) -> None: ...

        shared = SharedRegions(Calls(), vectors.regions)  # type: ignore[arg-type]
        parts = SharedParts(shared, vectors)
        assert await parts.place({0: vector(1)}, "int8", CHUNK_BYTES)
        parts.close()
        (region,) = free_of(vectors, "int8")
        for _ in range(10):
            vectors.regroup()
        assert free_of(vectors, "int8") == [region]
        assert vectors.regions.get(region.id) is region

    asyncio.run(main())


def test_regions_are_let_go_while_threads_stage():
    vectors, over = SharedVectors(), threading.Event()

    def work(number: int) -> None:
        for round_ in range(60):
            values = vector(number, 300 + round_ // 10)
            region = vectors.stage(values, "float32", CHUNK_BYTES)
            assert vectors.regions.get(region.id) is region
            assert region.bytes.tobytes() == values.tobytes()
            assert os.fstat(region.fd).st_size >= region.size
            vectors.unstage(region)

    def let_go() -> None:
        while not over.is_set():
            vectors.regroup()

    with ThreadPoolExecutor(5) as threads:
        letting_go = threads.submit(let_go)
        try:
            list(threads.map(work, range(4)))
        finally:
            over.set()
        letting_go.result()
    for _ in range(4):
        vectors.regroup()
    assert vectors.regions.total_bytes == 0
