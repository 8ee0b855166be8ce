"""Blocks on disk: what was written is read, what a crash tore is known, and a full disk is told when a slab is made."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ayni.blocks.layouts import Axis, AxisOrder, LayoutConfig, LayoutKind
from ayni.blocks.transfers import AxisSlice
from ayni.errors import BadRequest, Checksum, IncompatibleLayout, StorageFailed
from tests.support.coordinator import environment
from worker_agent.blocks.folders import folder_under
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import allocate_host
from worker_agent.blocks.memory import WHOLE, Part
from worker_agent.blocks.slab import Fsync, SlabMemory, SlabOptions
from worker_agent.blocks.slab_header import PAGE_BYTES, SlabHeader, places

CONFIG = LayoutConfig(num_blocks=70, num_layers=3, outer_dim=2, page_size=8, inner_dim=128, num_heads=8)
ORDERS = {
    LayoutKind.FULLY_CONTIGUOUS: [AxisOrder.NHD, AxisOrder.HND, AxisOrder.UNIVERSAL, AxisOrder.UNKNOWN],
    LayoutKind.LAYER_SEPARATE_BLOCK_FIRST: [AxisOrder.NHD, AxisOrder.HND],
    LayoutKind.LAYER_SEPARATE_BLOCK_SECOND: [AxisOrder.NHD],
}
LAYOUTS = [(kind, order) for kind, orders in ORDERS.items() for order in orders]
PARTS = [
    WHOLE,
    Part(layers=(1, 3)),
    Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=2, stop=5)),
    Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=0, stop=1), layers=(0, 2)),
]
LARGE = replace(CONFIG, num_blocks=6, page_size=64, inner_dim=1024)


def geometry_of(kind=LayoutKind.FULLY_CONTIGUOUS, order=AxisOrder.NHD, config=CONFIG) -> Geometry:
    return Geometry(config=config, kind=kind, axis_order=order)


def open_slab(path: Path, geometry: Geometry | None = None, rank: int = 0, **options) -> SlabMemory:
    geometry = geometry or geometry_of()
    header = SlabHeader.of(geometry, "f" * 64, "instance", rank)
    return SlabMemory(path, geometry, header, SlabOptions(**options))


def unique_rows(count: int, row_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, row_bytes), np.uint8)


def part_bytes(geometry: Geometry, part: Part = WHOLE) -> int:
    return geometry.part_bytes(part.layers, part.slice, part.axis_order)


def read(slab: SlabMemory, ids, part: Part = WHOLE) -> np.ndarray:
    out = np.zeros((len(ids), part_bytes(slab.geometry, part)), np.uint8)
    slab.read(np.asarray(ids, np.int64), part, out)
    return out


def write(slab: SlabMemory, ids, data: np.ndarray, part: Part = WHOLE) -> None:
    slab.write(np.asarray(ids, np.int64), part, data)


@pytest.mark.parametrize(("kind", "order"), LAYOUTS)
@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("config", [CONFIG, LARGE], ids=["small", "large"])
def test_same_as_host_memory_and_guards_are_unchanged(tmp_path, kind, order, part, config):
    """Every part of a slab behaves as that of memory, which has tests of its own."""
    if part is not WHOLE and (order is AxisOrder.UNKNOWN or (order is AxisOrder.UNIVERSAL and part.layers)):
        return
    geometry = geometry_of(kind, order, config)
    slab, memory = open_slab(tmp_path / "a.slab", geometry), allocate_host(geometry)
    everything = np.arange(config.num_blocks)
    start = unique_rows(config.num_blocks, config.block_bytes, 1)
    ids = np.array([4, 5, 1, 0, 3][: config.num_blocks - 1])
    data = unique_rows(len(ids), part_bytes(geometry, part), 2)
    for target in (slab, memory):
        target.write(everything, WHOLE, start)
        target.write(ids, part, data)
    expected = np.zeros_like(start)
    memory.read(everything, WHOLE, expected)
    np.testing.assert_array_equal(read(slab, everything), expected)
    np.testing.assert_array_equal(read(slab, ids, part), data)
    slab.close()
    recovered = open_slab(tmp_path / "a.slab", geometry)
    assert recovered.recovered
    np.testing.assert_array_equal(read(recovered, everything), expected)
    recovered.close()


@pytest.mark.parametrize("num_blocks", [1, 63, 64, 65, 1023, 1025])
def test_every_batch_size(tmp_path, num_blocks):
    config = LayoutConfig(num_blocks=num_blocks + 2, num_layers=1, outer_dim=1, page_size=1, inner_dim=1024)
    slab = open_slab(tmp_path / "a.slab", geometry_of(order=AxisOrder.UNKNOWN, config=config))
    guards = unique_rows(2, config.block_bytes, 3)
    write(slab, [0, num_blocks + 1], guards)
    ids = np.random.default_rng(num_blocks).permutation(num_blocks) + 1
    data = unique_rows(num_blocks, config.block_bytes, 4)
    write(slab, ids, data)
    np.testing.assert_array_equal(read(slab, ids), data)
    np.testing.assert_array_equal(read(slab, [0, num_blocks + 1]), guards)
    assert slab.written_blocks().tolist() == list(range(num_blocks + 2))
    slab.close()


def test_nothing_is_in_memory_and_an_empty_list_is_nothing(tmp_path):
    slab = open_slab(tmp_path / "a.slab")
    assert slab.rows(WHOLE) is None
    assert slab.views(0, WHOLE) is None
    write(slab, [], np.zeros((0, CONFIG.block_bytes), np.uint8))
    assert read(slab, []).size == 0
    assert slab.written_blocks().size == 0
    slab.close()
    slab.close()


@pytest.mark.parametrize("fsync", list(Fsync))
def test_every_fsync_policy_recovers_what_was_written(tmp_path, fsync, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    slab = open_slab(tmp_path / "a.slab", fsync=fsync)
    data = unique_rows(3, CONFIG.block_bytes, 5)
    write(slab, [1, 2, 3], data)
    assert len(synced) == (1 if fsync is Fsync.ALWAYS else 0)
    slab.close()
    assert len(synced) == {Fsync.NEVER: 0, Fsync.CLOSE: 1, Fsync.ALWAYS: 2}[fsync]
    again = open_slab(tmp_path / "a.slab", fsync=fsync)
    np.testing.assert_array_equal(read(again, [1, 2, 3]), data)
    again.close()


def test_slab_is_of_full_size_when_it_is_made(tmp_path):
    slab = open_slab(tmp_path / "a" / "b" / "c.slab")
    found = (tmp_path / "a" / "b" / "c.slab").stat()
    assert not slab.recovered
    assert found.st_size == places(geometry_of()).end
    assert found.st_blocks * 512 >= found.st_size
    assert found.st_mode & 0o777 == 0o600
    slab.close()


def test_more_than_is_free_is_refused_with_both_numbers_and_leaves_no_file(tmp_path):
    config = replace(CONFIG, num_blocks=1 << 40)
    with pytest.raises((StorageFailed, MemoryError)) as caught:
        open_slab(tmp_path / "a.slab", geometry_of(config=config))
    wanted = places(geometry_of(config=config)).end
    assert isinstance(caught.value, StorageFailed)
    assert f"it needs {wanted} bytes" in caught.value.message
    assert str(tmp_path / "a.slab") in caught.value.message
    assert int(caught.value.metadata["free"]) > 0
    assert list(tmp_path.iterdir()) == []


def test_other_shape_other_owner_and_other_files_are_refused_and_unchanged(tmp_path):
    slab = open_slab(tmp_path / "a.slab")
    write(slab, [0], unique_rows(1, CONFIG.block_bytes, 6))
    slab.close()
    content = (tmp_path / "a.slab").read_bytes()
    with pytest.raises(IncompatibleLayout, match="num_blocks is 70, not 71"):
        open_slab(tmp_path / "a.slab", geometry_of(config=replace(CONFIG, num_blocks=71)))
    with pytest.raises(IncompatibleLayout, match="kind is"):
        open_slab(tmp_path / "a.slab", geometry_of(LayoutKind.LAYER_SEPARATE_BLOCK_FIRST))
    with pytest.raises(StorageFailed, match="rank is 0, not 1"):
        open_slab(tmp_path / "a.slab", rank=1)
    assert (tmp_path / "a.slab").read_bytes() == content
    for foreign in (b"\0" * 4096 + b"precious" * 1000, b"\0" * 4096 + content[4096:]):
        (tmp_path / "c.slab").write_bytes(foreign)
        with pytest.raises(StorageFailed, match="it holds bytes, but not the header of a slab file"):
            open_slab(tmp_path / "c.slab")
        assert (tmp_path / "c.slab").read_bytes() == foreign
    (tmp_path / "b.slab").write_bytes(b"somebody else's")
    with pytest.raises(StorageFailed, match="it is not a slab file"):
        open_slab(tmp_path / "b.slab")
    (tmp_path / "a.slab").write_bytes(content[:10] + b"?" + content[11:])
    with pytest.raises(StorageFailed, match=r"version|damaged"):
        open_slab(tmp_path / "a.slab")
    (tmp_path / "a.slab").write_bytes(content[:-1])
    with pytest.raises(StorageFailed, match=f"it was cut short: it has {len(content) - 1} bytes"):
        open_slab(tmp_path / "a.slab")


def test_slab_that_was_never_written_makes_way_for_another_shape(tmp_path):
    open_slab(tmp_path / "a.slab").close()
    other = geometry_of(config=replace(CONFIG, num_blocks=7))
    slab = open_slab(tmp_path / "a.slab", other)
    assert not slab.recovered
    write(slab, [6], unique_rows(1, CONFIG.block_bytes, 6))
    slab.close()
    with pytest.raises(IncompatibleLayout):
        open_slab(tmp_path / "a.slab")
    assert open_slab(tmp_path / "a.slab", other).written_blocks().tolist() == [6]


def test_link_in_place_of_the_file_is_not_followed(tmp_path):
    (tmp_path / "victim").write_bytes(b"")
    (tmp_path / "a.slab").symlink_to(tmp_path / "victim")
    with pytest.raises(StorageFailed, match="could not open it"):
        open_slab(tmp_path / "a.slab")
    assert (tmp_path / "victim").read_bytes() == b""


def test_file_of_a_live_process_is_refused(tmp_path):
    slab = open_slab(tmp_path / "a.slab")
    with pytest.raises(StorageFailed, match="a live process has it; end that process"):
        open_slab(tmp_path / "a.slab")
    slab.close()
    open_slab(tmp_path / "a.slab").close()


@pytest.mark.parametrize("where", [0, -1])
def test_changed_byte_is_told_by_block_and_only_when_asked_for(tmp_path, where):
    slab = open_slab(tmp_path / "a.slab")
    data = unique_rows(70, CONFIG.block_bytes, 7)
    write(slab, np.arange(70), data)
    offset = places(geometry_of()).allocations[0] + 33 * CONFIG.block_bytes + where % CONFIG.block_bytes
    with (tmp_path / "a.slab").open("r+b") as file:
        file.seek(offset)
        file.write(bytes([data[33, where] ^ 1]))
    with pytest.raises(Checksum, match=r"block 33 of the slab file .* is damaged") as caught:
        read(slab, np.arange(70))
    assert caught.value.metadata["expected"] != caught.value.metadata["received"]
    np.testing.assert_array_equal(read(slab, [32, 34]), data[[32, 34]])
    slab.close()
    blind = open_slab(tmp_path / "a.slab", verify=False)
    assert (read(blind, [33]) != data[33]).sum() == 1
    blind.close()


def test_two_blocks_that_changed_places_are_told(tmp_path):
    slab = open_slab(tmp_path / "a.slab")
    write(slab, [1, 2], unique_rows(2, CONFIG.block_bytes, 8))
    start = places(geometry_of()).allocations[0]
    with (tmp_path / "a.slab").open("r+b") as file:
        file.seek(start + CONFIG.block_bytes)
        one, two = file.read(CONFIG.block_bytes), file.read(CONFIG.block_bytes)
        file.seek(start + CONFIG.block_bytes)
        file.write(two + one)
        slots = PAGE_BYTES + 16
        file.seek(slots)
        first, second = file.read(16), file.read(16)
        file.seek(slots)
        file.write(second + first)
    slab.close()
    again = open_slab(tmp_path / "a.slab")
    with pytest.raises(Checksum, match="block 1"):
        read(again, [1])
    again.close()


def test_file_cut_short_while_it_is_open_is_told(tmp_path):
    slab = open_slab(tmp_path / "a.slab")
    data = unique_rows(70, CONFIG.block_bytes, 9)
    write(slab, np.arange(70), data)
    os.truncate(tmp_path / "a.slab", places(geometry_of()).end - CONFIG.block_bytes - 1)
    with pytest.raises(StorageFailed, match="it was cut short to"):
        read(slab, np.arange(70))
    np.testing.assert_array_equal(read(slab, np.arange(68)), data[:68])
    slab.close()


def test_never_written_block_is_zeros_in_a_new_slab_and_refused_in_a_recovered_one(tmp_path):
    slab = open_slab(tmp_path / "a.slab")
    assert not read(slab, [3]).any()
    slab.close()
    again = open_slab(tmp_path / "a.slab")
    with pytest.raises(StorageFailed, match="block 3 was never written"):
        read(again, [2 + 1])
    write(again, [3], unique_rows(1, CONFIG.block_bytes, 10))
    read(again, [3])
    again.close()


def test_block_in_parts_gets_its_checksum_when_the_slab_is_closed(tmp_path):
    slab = open_slab(tmp_path / "a.slab")
    layers = [Part(layers=(i, i + 1)) for i in range(3)]
    rows = [unique_rows(1, part_bytes(slab.geometry, part), 11 + i) for i, part in enumerate(layers)]
    for part, row in zip(layers, rows, strict=True):
        write(slab, [5], row, part)
    np.testing.assert_array_equal(read(slab, [5]), np.concatenate(rows, axis=1))
    slab.close()
    again = open_slab(tmp_path / "a.slab")
    np.testing.assert_array_equal(read(again, [5]), np.concatenate(rows, axis=1))
    again.close()
    with (tmp_path / "a.slab").open("r+b") as file:
        file.seek(places(geometry_of()).allocations[0] + 5 * CONFIG.block_bytes)
        file.write(bytes([rows[0][0, 0] ^ 1]))
    again = open_slab(tmp_path / "a.slab")
    with pytest.raises(Checksum, match="block 5"):
        read(again, [5])
    again.close()


KILLED = textwrap.dedent(
    """
    import os, signal
    import numpy as np
    from tests.integration.test_slab import CONFIG, Part, open_slab, part_bytes, unique_rows, write
    from pathlib import Path
    slab = open_slab(Path({path!r}))
    write(slab, [0, 1, 2], unique_rows(3, CONFIG.block_bytes, 20))
    part = Part(layers=(0, 1))
    write(slab, [2, 3], unique_rows(2, part_bytes(slab.geometry, part), 21), part)
    real = os.pwritev
    def torn(fd, buffers, offset):
        real(fd, [buffers[0][: len(buffers[0]) // 2]], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    os.pwritev = torn
    write(slab, [1], unique_rows(1, CONFIG.block_bytes, 22))
    """
)


def test_what_a_kill_tore_is_known_and_all_else_is_recovered(tmp_path):
    code = KILLED.format(path=str(tmp_path / "a.slab"))
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    slab = open_slab(tmp_path / "a.slab")
    assert slab.recovered
    np.testing.assert_array_equal(read(slab, [0]), unique_rows(3, CONFIG.block_bytes, 20)[:1])
    with pytest.raises(Checksum, match=r"block 1 .* its bytes are not those"):
        read(slab, [1])
    with pytest.raises(Checksum, match=r"block 1 .* its bytes are not those"):
        read(slab, [1], Part(layers=(1, 2)))
    for block in (2, 3):
        with pytest.raises(Checksum, match=f"block {block} .* it was torn"):
            read(slab, [block])
        with pytest.raises(Checksum, match=f"block {block} .* it was torn"):
            read(slab, [block], Part(layers=(1, 2)))
    assert slab.written_blocks().tolist() == [0, 1]
    data = unique_rows(4, CONFIG.block_bytes, 23)
    write(slab, [0, 1, 2, 3], data)
    np.testing.assert_array_equal(read(slab, [0, 1, 2, 3]), data)
    slab.close()


def test_file_whose_making_was_cut_short_is_made_anew(tmp_path):
    (tmp_path / "a.slab").write_bytes(b"\0" * 10_000)
    slab = open_slab(tmp_path / "a.slab")
    assert not slab.recovered
    data = unique_rows(1, CONFIG.block_bytes, 12)
    write(slab, [69], data)
    np.testing.assert_array_equal(read(slab, [69]), data)
    slab.close()


def test_failed_write_leaves_other_blocks_and_is_known(tmp_path, monkeypatch):
    """The disk fails after half a block of the second batch."""
    config = replace(LARGE, num_blocks=9)
    slab = open_slab(tmp_path / "a.slab", geometry_of(config=config))
    old, new = unique_rows(9, config.block_bytes, 13), unique_rows(6, config.block_bytes, 14)
    write(slab, np.arange(9), old)
    real, calls = os.pwritev, []

    def failing(fd, buffers, offset):
        calls.append(offset)
        if len(calls) == 3:
            return real(fd, [buffers[0][:1000]], offset)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(StorageFailed, match=r"could not write .* no room is left") as caught:
        write(slab, [1, 2, 3, 4, 5, 6], new)
    monkeypatch.undo()
    assert caught.value.metadata["place"] == str(tmp_path / "a.slab")
    np.testing.assert_array_equal(read(slab, [1, 2]), new[:2])
    with pytest.raises(Checksum, match=r"block 3 .* torn"):
        read(slab, [3])
    np.testing.assert_array_equal(read(slab, [0, 4, 5, 6, 7, 8]), old[[0, 4, 5, 6, 7, 8]])
    slab.close()


@pytest.mark.parametrize("name", ["/etc", "../x", "a/../../x", "a/..", "link", "link/x", "a\0b"])
def test_folder_can_not_leave_the_root(tmp_path, name):
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(BadRequest, match="is outside the root"):
        folder_under(root, name)


def test_folder_inside_the_root(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "inner").symlink_to(tmp_path / "a")
    assert folder_under(tmp_path, "a/b/c") == tmp_path.resolve() / "a" / "b" / "c"
    assert folder_under(tmp_path, "inner/b") == tmp_path.resolve() / "a" / "b"
    assert folder_under(tmp_path, "") == tmp_path.resolve()
