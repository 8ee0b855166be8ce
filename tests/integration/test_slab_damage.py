"""What is damaged, or only in part on disk, is not taken for a block; what was written part by part is one."""

import os
from pathlib import Path

import numpy as np
import pytest

from ayni.blocks.layouts import Axis, AxisOrder, LayoutKind
from ayni.blocks.transfers import AxisSlice
from ayni.errors import Checksum, StorageFailed
from tests.integration.test_slab import (
    CONFIG,
    LARGE,
    LAYOUTS,
    geometry_of,
    open_slab,
    part_bytes,
    read,
    unique_rows,
    write,
)
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import WHOLE, Part
from worker_agent.blocks.slab import SlabMemory
from worker_agent.blocks.slab_header import PAGE_BYTES, places

LAYERS = [Part(layers=(i, i + 1)) for i in range(3)]
HEADS = [Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=start, stop=start + 4)) for start in (0, 4)]


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def damage(path: Path, block: int, geometry: Geometry | None = None) -> None:
    """Changes the last byte of the last layer of a block."""
    geometry = geometry or geometry_of()
    offset = places(geometry).allocations[-1] + (block + 1) * geometry.block_stride - 1
    old = path.read_bytes()[offset]
    change(path, offset, bytes([old ^ 1]))


def write_parts(slab: SlabMemory, block: int, parts: list[Part], seed: int) -> None:
    for i, part in enumerate(parts):
        write(slab, [block], unique_rows(1, part_bytes(slab.geometry, part), seed + i), part)


@pytest.mark.parametrize(("kind", "order"), [(kind, order) for kind, order in LAYOUTS if order is AxisOrder.NHD])
@pytest.mark.parametrize("config", [CONFIG, LARGE], ids=["small", "large"])
def test_part_of_a_damaged_block_is_not_read(tmp_path, kind, order, config):
    geometry = geometry_of(kind, order, config)
    slab = open_slab(tmp_path / "a.slab", geometry)
    data = unique_rows(6, config.block_bytes, 30)
    write(slab, np.arange(6), data)
    if kind is not LayoutKind.LAYER_SEPARATE_BLOCK_SECOND:
        damage(tmp_path / "a.slab", 3, geometry)
    else:
        start = places(geometry).allocations[-1] + 3 * geometry.block_stride
        change(tmp_path / "a.slab", start, bytes([(tmp_path / "a.slab").read_bytes()[start] ^ 1]))
    for part in (LAYERS[0], HEADS[0]):
        with pytest.raises(Checksum, match=r"block 3 .* its bytes are not those"):
            read(slab, np.arange(6), part)
        read(slab, [0, 1, 2, 4, 5], part)
    slab.close()


@pytest.mark.parametrize("parts", [LAYERS, HEADS, [LAYERS[0], *HEADS]], ids=["layers", "heads", "overlapping"])
def test_damaged_block_stays_damaged_until_all_of_its_parts_are_written(tmp_path, parts):
    slab = open_slab(tmp_path / "a.slab")
    write(slab, np.arange(4), unique_rows(4, CONFIG.block_bytes, 31))
    damage(tmp_path / "a.slab", 1)
    for _ in range(2):
        write_parts(slab, 1, parts[:-1], 32)
        for part in (WHOLE, parts[0]):
            with pytest.raises(Checksum, match=r"block 1 .* it was torn"):
                read(slab, [1], part)
        slab.close()
        slab = open_slab(tmp_path / "a.slab")
    with pytest.raises(Checksum, match=r"block 1 .* it was torn"):
        read(slab, [1])
    write_parts(slab, 1, parts, 40)
    assert read(slab, [1]).any()
    slab.close()


def test_block_of_a_recovered_slab_is_read_once_all_of_its_parts_are_written(tmp_path):
    open_slab(tmp_path / "a.slab").close()
    slab = open_slab(tmp_path / "a.slab")
    write_parts(slab, 6, LAYERS[:2], 33)
    write_parts(slab, 6, LAYERS[:2], 34)
    with pytest.raises(StorageFailed, match="block 6 was written only in part"):
        read(slab, [6])
    assert slab.written_blocks().tolist() == []
    write_parts(slab, 6, LAYERS[2:], 36)
    assert slab.written_blocks().tolist() == [6]
    expected = np.concatenate([unique_rows(1, part_bytes(slab.geometry, LAYERS[0]), 34 + i) for i in range(3)], axis=1)
    np.testing.assert_array_equal(read(slab, [6]), expected)
    slab.close()


def test_block_written_only_in_part_is_not_whole_after_the_slab_was_closed(tmp_path):
    slab = open_slab(tmp_path / "a.slab")
    write_parts(slab, 2, LAYERS[:2], 35)
    assert not read(slab, [2], LAYERS[2]).any()
    slab.close()
    again = open_slab(tmp_path / "a.slab")
    assert again.written_blocks().size == 0
    with pytest.raises(Checksum, match="not all of its parts were written"):
        read(again, [2])
    again.close()


def test_all_parts_of_a_block_are_a_whole_block_without_a_close(tmp_path):
    """The owner ends without closing, as with a kill."""
    slab = open_slab(tmp_path / "a.slab")
    write_parts(slab, 5, LAYERS, 36)
    write_parts(slab, 6, HEADS, 36)
    write_parts(slab, 7, LAYERS[1:], 36)
    write(slab, [8], unique_rows(1, CONFIG.block_bytes, 37))
    write_parts(slab, 8, LAYERS[1:], 36)
    expected = read(slab, [5, 6])
    slab._file.close()
    again = open_slab(tmp_path / "a.slab")
    assert again.written_blocks().tolist() == [5, 6]
    np.testing.assert_array_equal(read(again, [5, 6]), expected)
    again.close()


def test_failed_part_does_not_count_with_those_before_it(tmp_path, monkeypatch):
    slab = open_slab(tmp_path / "a.slab")
    write_parts(slab, 5, LAYERS[:2], 38)

    def failing(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(StorageFailed):
        write_parts(slab, 5, LAYERS[1:2], 39)
    monkeypatch.undo()
    write_parts(slab, 5, LAYERS[2:], 39)
    with pytest.raises(Checksum, match="it was torn"):
        read(slab, [5])
    slab.close()


@pytest.mark.parametrize("bit", range(128))
def test_slot_with_a_changed_bit_switches_no_check_off(tmp_path, bit):
    slab = open_slab(tmp_path / "a.slab")
    write(slab, np.arange(4), unique_rows(4, CONFIG.block_bytes, 39))
    slab.close()
    damage(tmp_path / "a.slab", 1)
    content = (tmp_path / "a.slab").read_bytes()
    for block in (1, 6):
        offset = PAGE_BYTES + 16 * block + bit // 8
        change(tmp_path / "a.slab", offset, bytes([content[offset] ^ 1 << bit % 8]))
    again = open_slab(tmp_path / "a.slab")
    assert again.written_blocks().tolist() == [0, 2, 3]
    for block in (1, 6):
        with pytest.raises(Checksum, match=rf"block {block} .* its slot is damaged"):
            read(again, [block])
    again.close()


def test_slots_of_a_cut_short_making_are_not_revived(tmp_path):
    """Bytes that an unfinished file had are gone once it is made anew, whatever its size was."""
    (tmp_path / "a.slab").write_bytes(b"\0" * (places(geometry_of()).end + 5000))
    slab = open_slab(tmp_path / "a.slab")
    assert not slab.recovered
    assert (tmp_path / "a.slab").stat().st_size == places(geometry_of()).end
    slab.close()
