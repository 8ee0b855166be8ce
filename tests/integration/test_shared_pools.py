"""Memory that is lent: peers can read it and nothing else, it is all there, and there is never too much of it."""

import mmap
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ayni.blocks.layouts import MAX_LAYERS, LayoutConfig, LayoutKind
from ayni.errors import PeerLost, StaleEpoch, TooLarge
from ayni.shm import memory
from tests.support.shm_owner import (
    GEOMETRIES,
    fill,
    part_of,
)
from worker_agent.blocks import pools
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import WHOLE
from worker_agent.blocks.pools import PoolMemory


def test_peer_can_only_read(tmp_path):
    pool = PoolMemory(GEOMETRIES["nhd"])
    assert pool.files is not None
    fd = pool.files.data_fd
    size = os.fstat(fd).st_size
    for attempt in (
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, 2 * size),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_TRUNC),
    ):
        with pytest.raises(PermissionError):
            attempt()
    mapped = pools.map_pool(pool.geometry, pool.files, "peer")
    data = fill(pool, 5)
    np.testing.assert_array_equal(part_of(mapped.memory, range(80)), data)
    with pytest.raises(ValueError, match="read-only"):
        mapped.memory.write(np.array([0]), WHOLE, data[:1])
    pool.close()
    np.testing.assert_array_equal(part_of(mapped.memory, range(80)), data)
    with pytest.raises(StaleEpoch):
        mapped.control.check(0, 0)


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_memory_that_could_shrink_or_is_too_small_is_not_mapped(size):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    with pytest.raises(PeerLost, match="the shared memory of ant can't be used: its memory has"):
        memory.map_shared(fd, 4096, "ant")
    os.close(fd)
    sealed = memory.share("test", 4096)
    assert memory.map_shared(sealed.fd, 4096, "ant").nbytes == 4096
    with pytest.raises(PeerLost, match="has 4096 bytes of 4097"):
        memory.map_shared(sealed.fd, 4097, "ant")
    os.close(sealed.fd)


def test_pool_larger_than_memory_is_refused_before_anything_is_taken():
    config = replace(GEOMETRIES["nhd"].config, num_blocks=1 << 36)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TooLarge, match=r"does not fit into this process's memory: [0-9]+ bytes are available"):
        memory.share("test", config.total_bytes)
    assert len(os.listdir("/proc/self/fd")) == before


def test_control_group_limits_what_is_available(tmp_path, monkeypatch):
    group = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    place = tmp_path / (group[1] if group else "")
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text("1000000\n")
    (place / "memory.current").write_text("900000\n")
    (place / "memory.stat").write_text("anon 5\ninactive_file 30000\nactive_file 20000\nfile 7\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_bytes() == 150_000
    (place / "memory.max").write_text("max\n")
    assert memory.available_bytes() > 1 << 20


@pytest.mark.parametrize("kind", list(LayoutKind))
def test_pool_is_aligned_as_its_configuration_says(kind):
    config = LayoutConfig(num_blocks=3, num_layers=2, outer_dim=1, page_size=1, inner_dim=8, alignment_bytes=1 << 16)
    geometry = Geometry(config=config, kind=kind)
    pool = PoolMemory(geometry)
    data = fill(pool, 6)
    assert all(buffer.ctypes.data % (1 << 16) == 0 for buffer in pool.buffers)
    assert pool.files is not None
    np.testing.assert_array_equal(part_of(pools.map_pool(geometry, pool.files, "").memory, range(3)), data)
    pool.close()
    pool.close()


def test_pool_that_is_smaller_than_its_layout_is_refused_before_its_layers_are_counted(monkeypatch):
    pool = PoolMemory(GEOMETRIES["nhd"])
    huge = LayoutConfig(num_blocks=4, num_layers=MAX_LAYERS, outer_dim=1, page_size=1, inner_dim=1 << 10)
    geometry = Geometry(config=huge, kind=LayoutKind.LAYER_SEPARATE_BLOCK_FIRST)
    monkeypatch.setattr(pools, "_split", lambda *_: pytest.fail("the layers were told apart"))
    assert pool.files is not None
    with pytest.raises(PeerLost, match="its memory has"):
        pools.map_pool(geometry, pool.files, "ant")
    pool.close()
