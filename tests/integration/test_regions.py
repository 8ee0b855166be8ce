"""A region is read by others and written by its owner, is found by its addresses, and goes with its last user."""

import gc
import mmap
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ayni.errors import PeerLost, TooLarge
from ayni.shm import regions as module
from ayni.shm.memory import share
from ayni.shm.regions import Regions, map_region
from tests.support.region_peers import num_fds, num_maps, reader_process


@pytest.fixture
def regions():
    made = Regions()
    yield made
    made.close()


def test_region_begins_at_a_page_with_zeros_and_is_written_by_its_owner_only(regions):
    region = regions.allocate(5000)
    assert region.bytes.shape == (5000,)
    assert region.bytes.ctypes.data % 4096 == 0
    assert not region.bytes.any()
    assert region.bytes.flags.writeable
    assert 0 <= region.id < 1 << 63
    for attempt in (
        lambda: os.ftruncate(region.fd, 0),
        lambda: os.pwrite(region.fd, b"x", 0),
        lambda: mmap.mmap(region.fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    ):
        with pytest.raises(PermissionError):
            attempt()


def test_forked_reader_sees_bytes_and_generation(regions):
    region = regions.allocate(10_000)
    region.bytes[:] = 7
    with reader_process(region) as reader:
        assert reader.tell("look") == (0, b"\7" * 10_000)
        assert region.renew() == region.generation == 1
        region.bytes[:] = 8
        assert reader.tell("look") == (1, b"\10" * 10_000)
        regions.free(region)
        assert reader.tell("look") == (1, b"\10" * 10_000)


def test_reader_can_not_write_and_keeps_what_the_owner_freed(regions):
    region = regions.allocate(100)
    region.bytes[:] = 3
    mapped = map_region(region.fd, region.id, 100, "ant")
    assert (mapped.id, mapped.size, mapped.generation) == (region.id, 100, 0)
    with pytest.raises(ValueError, match="read-only"):
        mapped.bytes[0] = 1
    regions.free(region)
    assert mapped.bytes.tobytes() == b"\3" * 100


def test_memory_that_is_no_region_of_that_size_is_not_mapped(regions):
    region, other = regions.allocate(100), share("test", 4096 + 100)
    # What earlier tests left is no business of this one.
    gc.collect()
    before = num_fds()
    for fd, size, text in (
        (region.fd, 99, "no region of 99 bytes: its header says 0x.*, 100 bytes"),
        (region.fd, 101, "its memory has 4196 bytes of 4197"),
        (region.fd, (1 << 63) - 1, "its memory has 4196 bytes of"),
        (other.fd, 100, "no region of 100 bytes: its header says 0x0, 0 bytes"),
    ):
        with pytest.raises(PeerLost, match=f"ant.* can't be used: {text}"):
            map_region(fd, 1, size, "ant")
    os.close(other.fd)
    with open(__file__) as unsealed, pytest.raises(PeerLost, match="Invalid argument"):
        map_region(unsealed.fileno(), 1, 10, "ant")
    gc.collect()
    assert num_fds() == before - 1


def test_arrays_are_found_where_they_lie(regions):
    first, second = regions.allocate(4096), regions.allocate(1 << 20)
    values = second.bytes.view(np.float32)
    assert regions.find(first.bytes) == (first, 0)
    assert regions.find(first.bytes[4095:]) == (first, 4095)
    assert regions.find(values) == (second, 0)
    assert regions.find(values[10:20].reshape(2, 5)) == (second, 40)
    for elsewhere in (np.zeros(5), values[:0], values[::2], values[:100].reshape(10, 10).T, values[::-1]):
        assert regions.find(elsewhere) is None
    regions.free(second)
    assert regions.find(values) is None
    assert regions.find(first.bytes) == (first, 0)
    assert Regions().find(first.bytes) is None


def test_array_that_reaches_beyond_the_payload_is_not_found(regions):
    region = regions.allocate(100)
    whole = region.bytes.base
    while whole.base is not None and isinstance(whole.base, np.ndarray):
        whole = whole.base
    assert regions.find(whole) is None
    assert regions.find(whole[4096:]) == (region, 0)
    assert regions.find(whole[4095:4100]) is None
    page_end = np.lib.stride_tricks.as_strided(region.bytes, (101,))
    assert regions.find(page_end) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9000), st.booleans()), min_size=1, max_size=12), st.randoms())
def test_find_agrees_with_a_search_through_all(sizes, random):
    regions = Regions()
    made = [(regions.allocate(size), keep) for size, keep in sizes]
    for region, keep in random.sample(made, len(made)):
        if not keep:
            regions.free(region)
    for region, keep in made:
        start = random.randrange(region.size)
        found = regions.find(region.bytes[start : random.randrange(start, region.size) + 1])
        assert found == ((region, start) if keep else None)
        assert regions.get(region.id) is (region if keep else None)
    assert regions.total_bytes == sum(region.size for region, keep in made if keep)
    regions.close()
    assert regions.total_bytes == 0


def test_vector_is_a_region_of_its_own(regions):
    vector = regions.vector(1000)
    assert (vector.dtype, vector.shape) == (np.float32, (1000,))
    vector[:] = 2.5
    region, offset = regions.find(vector)
    assert (region.size, offset) == (4000, 0)
    assert map_region(region.fd, region.id, 4000, "").bytes.view(np.float32).sum() == 2500


def test_memory_is_there_as_long_as_an_array_looks_at_it_and_then_goes_back(regions):
    gc.collect()
    fds, maps = num_fds(), num_maps()
    region = regions.allocate(1 << 20)
    vector = region.bytes.view(np.float32)[100:200]
    vector[:] = 4
    regions.free(region)
    regions.free(region)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(region.fd)
    del region
    assert num_maps() == maps + 1
    assert vector.sum() == 400
    del vector
    assert (num_fds(), num_maps()) == (fds, maps)


def test_regions_that_nobody_freed_go_with_their_table():
    gc.collect()
    fds, maps = num_fds(), num_maps()
    made = Regions()
    made.allocate(10)
    assert num_fds() > fds
    del made
    assert (num_fds(), num_maps()) == (fds, maps)


def test_limit_holds_for_all_regions_together(regions):
    first = regions.allocate(600, limit=1000)
    with pytest.raises(TooLarge, match="would have 1001 bytes, and may have 1000") as caught:
        regions.allocate(401, limit=1000)
    assert caught.value.metadata == {"field": "num_bytes", "limit": "1000", "received": "1001"}
    assert regions.total_bytes == 600
    regions.allocate(400, limit=1000)
    regions.free(first)
    regions.allocate(600, limit=1000)


def test_region_that_the_machine_has_no_memory_for_leaves_nothing(regions):
    fds = num_fds()
    with pytest.raises(TooLarge, match="does not fit into this process's memory"):
        regions.allocate(1 << 60)
    assert (regions.total_bytes, num_fds()) == (0, fds)


def test_threads_allocate_find_and_free_at_once(regions):
    def work() -> None:
        for size in range(1, 60):
            region = regions.allocate(size * 100)
            assert regions.find(region.bytes[size:]) == (region, size)
            if size % 3:
                regions.free(region)

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert regions.total_bytes == 4 * sum(size * 100 for size in range(1, 60) if not size % 3)


def test_generation_is_counted_in_the_header_where_readers_look(regions):
    region = regions.allocate(10)
    for _ in range(3):
        region.renew()
    assert os.pread(region.fd, 24, 0) == (3).to_bytes(8, "little") + b"AYNIRGN1" + (10).to_bytes(8, "little")
    assert module._HEADER_BYTES == 4096
