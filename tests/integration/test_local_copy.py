"""Copies between any two tiers, kinds and orders of one worker: host memory, a device, a slab on disk.

The device is one of CUDA where there is one; else torch plays it on the CPU, by the same code.

Content is unique for each block, layer and outer part; every block that is not copied to is compared with what it was.
"""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from ayni.blocks.layouts import Axis, AxisOrder, LayoutKind, StorageKind
from ayni.blocks.transfers import AxisSlice
from ayni.errors import Cancelled, Checksum, StorageFailed, Unsupported
from tests.support.block_layouts import FC, HND, KNOWN, LS_FIRST, LS_SECOND, NHD, UNIVERSAL, UNKNOWN, geometry
from worker_agent.blocks import array_copy, local_copy, paths, tensor_copy
from worker_agent.blocks.device_memory import DeviceMemory
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.local_copy import copy, copy_batches
from worker_agent.blocks.memory import WHOLE, Bytes, Memory, Part
from worker_agent.blocks.paths import Hop, Selection, Straight, path_between
from worker_agent.blocks.patterns import RankDistinct, checksums, fill, read
from worker_agent.blocks.plan import needs_host_hop
from worker_agent.blocks.slab import SlabMemory
from worker_agent.blocks.slab_header import SlabHeader

STORAGES = ("host", "device", "disk")
KINDS = list(LayoutKind)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCHES = (1, 63, 64, 65, 1023, 1025)


class Makes:
    """Makes layouts in any storage, filled with content of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()
        self._slabs: list[SlabMemory] = []

    def empty(self, storage: str, of: Geometry) -> Memory:
        if storage == "host":
            return allocate_host(of)
        if storage == "device":
            return DeviceMemory(
                of, [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for size in of.allocation_bytes]
            )
        path = self._folder / f"{next(self._numbers)}.slab"
        slab = SlabMemory(path, of, SlabHeader.of(of, "fingerprint", "instance", 0))
        self._slabs.append(slab)
        return slab

    def filled(self, storage: str, of: Geometry, salt: int = 0) -> Memory:
        memory = self.empty(storage, of)
        fill(memory, range(of.config.num_blocks), RankDistinct(0, salt))
        return memory

    def noisy(self, storage: str, of: Geometry) -> Memory:
        memory = self.empty(storage, of)
        data = np.random.randint(0, 256, (of.config.num_blocks, of.config.block_bytes), dtype=np.uint8)
        memory.write(np.arange(of.config.num_blocks), WHOLE, data)
        return memory

    def close(self) -> None:
        for slab in self._slabs:
            slab.close()


@pytest.fixture
def makes(tmp_path):
    makes = Makes(tmp_path)
    yield makes
    makes.close()


@pytest.fixture
def small_steps(monkeypatch):
    """Makes batches and buffers of 64 small blocks, and shares of 128."""
    block_bytes = geometry().config.block_bytes
    monkeypatch.setattr(local_copy, "BATCH_BYTES", 64 * block_bytes)
    monkeypatch.setattr(local_copy, "SHARE_BYTES", 128 * block_bytes)
    monkeypatch.setattr(paths, "BUFFER_BYTES", 16 * block_bytes)
    monkeypatch.setattr(paths, "IN_PLACE_BYTES", 4 * block_bytes)


def select(memory: Memory, blocks, part: Part = WHOLE) -> Selection:
    return Selection(memory=memory, blocks=np.array(blocks, dtype=np.int64), part=part)


def check_copy(
    source: Memory,
    destination: Memory,
    pairs: list[tuple[int, int]],
    layers: tuple[int, int] | None = None,
    bounce: Selection | None = None,
) -> None:
    """Copies pairs of blocks; compares them, all other blocks, and the layers left out."""
    count = destination.geometry.config.num_blocks
    start, stop = layers or (0, source.geometry.config.num_layers)
    expected = read(destination, range(count)).reshape(count, source.geometry.config.num_layers, -1)
    before = read(source, range(source.geometry.config.num_blocks))
    content = before.reshape(len(before), source.geometry.config.num_layers, -1)
    for one, other in pairs:
        expected[other, start:stop] = content[one, start:stop]
    part = Part(layers=layers)
    sides = select(source, [one for one, _ in pairs], part), select(destination, [other for _, other in pairs], part)
    assert copy(*sides, bounce) == ()
    np.testing.assert_array_equal(read(destination, range(count)), expected.reshape(count, -1))
    np.testing.assert_array_equal(read(source, range(len(before))), before)


@pytest.mark.fact("T82")
@pytest.mark.parametrize(
    "kinds", list(itertools.product(KINDS, KINDS)), ids=lambda kinds: f"{kinds[0].value}-{kinds[1].value}"
)
@pytest.mark.parametrize("source_storage", STORAGES)
@pytest.mark.parametrize("destination_storage", STORAGES)
def test_every_storage_and_kind_reaches_every_other(makes, source_storage, destination_storage, kinds):
    for order in (UNKNOWN, NHD):
        source = makes.filled(source_storage, geometry(kinds[0], order))
        destination = makes.filled(destination_storage, geometry(kinds[1], order), salt=1)
        check_copy(source, destination, [(0, 2), (1, 3)])
        assert checksums(source, [0, 1]) == checksums(destination, [2, 3])


@pytest.mark.fact("T96")
@pytest.mark.parametrize("source_storage", STORAGES)
@pytest.mark.parametrize("destination_storage", STORAGES)
@pytest.mark.parametrize("order", [NHD, HND, UNIVERSAL])
def test_every_known_order_becomes_every_other(makes, source_storage, destination_storage, order):
    source = makes.filled(source_storage, geometry(FC, order))
    for kind, other in KNOWN:
        destination = makes.filled(destination_storage, geometry(kind, other), salt=1)
        check_copy(source, destination, [(6, 0), (1, 5), (2, 6)])


@pytest.mark.fact("T82")
@pytest.mark.parametrize("storage", STORAGES)
def test_blocks_are_copied_within_one_layout(makes, storage):
    memory = makes.filled(storage, geometry(LS_SECOND))
    expected = read(memory, range(7))
    expected[[2, 3]] = expected[[0, 1]]
    assert copy(select(memory, [0, 1]), select(memory, [2, 3])) == ()
    np.testing.assert_array_equal(read(memory, range(7)), expected)


@pytest.mark.fact("T83")
@pytest.mark.parametrize("middle_storage", STORAGES)
@pytest.mark.parametrize("middle_kind", KINDS)
@pytest.mark.parametrize("kinds", [(FC, LS_SECOND), (LS_FIRST, FC)])
def test_a_round_trip_changes_nothing(makes, middle_storage, middle_kind, kinds):
    for storage in STORAGES:
        source = makes.filled(storage, geometry(kinds[0]))
        middle = makes.filled(middle_storage, geometry(middle_kind, HND), salt=1)
        back = makes.filled(storage, geometry(kinds[1]), salt=2)
        check_copy(source, middle, [(0, 3), (5, 1)])
        check_copy(middle, back, [(3, 6), (1, 0)])
        assert checksums(back, [6, 0]) == checksums(source, [0, 5])


@pytest.mark.fact("T84")
def test_blocks_in_between_leave_their_neighbours_alone(makes):
    host, bounce = makes.filled("host", geometry()), makes.filled("host", geometry(), salt=1)
    guards = checksums(host, [2, 5])
    check_copy(host, bounce, [(0, 2), (1, 3)])
    check_copy(bounce, host, [(2, 3), (3, 4)])
    assert checksums(host, [0, 1]) == checksums(host, [3, 4])
    assert checksums(host, [2, 5]) == guards


@pytest.mark.fact("T84")
@pytest.mark.parametrize("storages", [("disk", "disk"), ("disk", "device"), ("device", "disk")])
@pytest.mark.parametrize("blocks", [[3], [1, 2, 3], [5, 3], list(range(7))])
def test_a_hop_uses_the_bounce_blocks_it_is_given_and_no_others(makes, monkeypatch, storages, blocks):
    monkeypatch.setattr(paths, "new_buffer", lambda *_, **__: pytest.fail("made a buffer although it was given blocks"))
    source = makes.filled(storages[0], geometry(num_blocks=12))
    destination = makes.filled(storages[1], geometry(LS_FIRST, num_blocks=12), salt=1)
    bounce = makes.filled("host", geometry(), salt=2)
    guards = [block for block in range(7) if block not in blocks]
    before = checksums(bounce, guards)
    pairs = [(block, 11 - block) for block in range(10)]
    check_copy(source, destination, pairs, bounce=select(bounce, blocks))
    check_copy(source, destination, pairs, layers=(1, 3), bounce=select(bounce, blocks))
    assert checksums(bounce, guards) == before


def test_bounce_blocks_hold_another_order_and_larger_blocks(makes):
    source, destination = makes.filled("disk", geometry(FC, NHD)), makes.filled("disk", geometry(FC, UNIVERSAL), salt=1)
    bounce = makes.filled("host", geometry(num_layers=5), salt=2)
    check_copy(source, destination, [(0, 1), (1, 2), (6, 0)], bounce=select(bounce, [4, 2]))


def test_bounce_blocks_are_left_alone_where_none_are_needed(makes):
    source, destination = makes.filled("disk", geometry()), makes.filled("host", geometry(), salt=1)
    bounce = makes.filled("host", geometry(LS_FIRST), salt=2)
    before = checksums(bounce, range(7))
    check_copy(source, destination, [(0, 1), (1, 2)], bounce=select(bounce, [4, 2]))
    assert checksums(bounce, range(7)) == before


def test_bounce_blocks_that_are_of_no_use_are_refused(makes):
    source, destination = makes.filled("disk", geometry()), makes.filled("disk", geometry(), salt=1)
    for of in (geometry(LS_FIRST), geometry(num_layers=2)):
        with pytest.raises(Unsupported, match="must be fully contiguous, in host memory, and hold 720 bytes"):
            copy(select(source, [0]), select(destination, [1]), select(makes.empty("host", of), [3]))
    assert checksums(destination, [1]) == checksums(makes.filled("host", geometry(), salt=1), [1])


@pytest.mark.fact("T85", "T86")
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kinds", [(LS_FIRST, LS_FIRST), (LS_SECOND, FC), (FC, LS_SECOND)])
@pytest.mark.parametrize("storages", list(itertools.product(STORAGES, STORAGES)), ids="-".join)
def test_one_layer_is_copied_and_the_others_stay(makes, storages, kinds, layer):
    source = makes.filled(storages[0], geometry(kinds[0]))
    destination = makes.filled(storages[1], geometry(kinds[1]), salt=1)
    layers = (layer, layer + 1)
    check_copy(source, destination, [(0, 2), (1, 3)], layers)
    assert checksums(source, [0, 1], layers) == checksums(destination, [2, 3], layers)


@pytest.mark.fact("T87")
@pytest.mark.parametrize(
    "kinds", list(itertools.product((FC, LS_FIRST), (FC, LS_FIRST))), ids=lambda k: f"{k[0].value}-{k[1].value}"
)
def test_layer_after_layer_is_the_same_as_all_at_once(makes, kinds):
    source = makes.filled("host", geometry(kinds[0], num_layers=2))
    by_layer, at_once = (makes.filled("host", geometry(kinds[1], num_layers=2), salt=1) for _ in range(2))
    for layers in ((0, 1), (1, 2)):
        check_copy(source, by_layer, [(0, 2), (1, 3)], layers)
    check_copy(source, at_once, [(0, 2), (1, 3)])
    assert checksums(by_layer, range(7)) == checksums(at_once, range(7))


@pytest.mark.parametrize("storages", list(itertools.product(STORAGES, STORAGES)), ids="-".join)
def test_heads_go_to_another_place(makes, storages):
    """A rank's heads become part of a block that has more of them."""
    source = makes.filled(storages[0], geometry(LS_FIRST, NHD))
    destination = makes.filled(storages[1], geometry(FC, HND, num_heads=10, inner_dim=30), salt=1)
    expected = read(destination, range(7)).reshape(7, 3, 2, 4, 10, 6)
    content = read(source, range(7)).reshape(7, 3, 2, 4, 5, 6)
    expected[[4, 0], :, :, :, 5:10] = content[[1, 6]]
    cut = Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=5, stop=10))
    assert copy(select(source, [1, 6]), select(destination, [4, 0], cut)) == ()
    np.testing.assert_array_equal(read(destination, range(7)), expected.reshape(7, -1))


@pytest.mark.parametrize("storages", list(itertools.product(STORAGES, STORAGES)), ids="-".join)
@pytest.mark.parametrize("num_blocks", BATCHES)
def test_batches_of_any_size_are_whole(makes, small_steps, storages, num_blocks):
    for orders in ((NHD, NHD), (NHD, HND)):
        source = makes.noisy(storages[0], geometry(FC, orders[0], num_blocks=num_blocks + 2))
        destination = makes.noisy(storages[1], geometry(LS_FIRST, orders[1], num_blocks=num_blocks + 1))
        scattered = np.random.permutation(num_blocks + 1)[:num_blocks].tolist()
        check_copy(source, destination, list(zip(scattered, np.random.permutation(num_blocks).tolist(), strict=True)))
        check_copy(source, destination, [(block, block + 1) for block in range(num_blocks)])


@pytest.mark.parametrize("storages", list(itertools.product(STORAGES, STORAGES)), ids="-".join)
def test_rows_in_place_and_rows_through_a_buffer_are_the_same(makes, small_steps, storages):
    source = makes.noisy(storages[0], geometry(num_blocks=200))
    destination = makes.noisy(storages[1], geometry(num_blocks=200))
    pairs = [(block, (block + 50) % 200) for block in range(0, 150)]
    pairs += [(block, (block * 2 + 1) % 50) for block in range(150, 175)]
    check_copy(source, destination, pairs)
    check_copy(source, destination, pairs, (1, 2))


@pytest.mark.fact("T89")
@pytest.mark.parametrize("num_blocks", [1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("storage", STORAGES)
def test_thousands_of_blocks_go_in_one_copy(makes, storage, num_blocks):
    source = makes.noisy("host", geometry(num_blocks=num_blocks))
    destination = makes.empty(storage, geometry(num_blocks=num_blocks + 1))
    blocks = np.random.permutation(num_blocks)
    assert copy(select(source, blocks), select(destination, blocks[::-1])) == ()
    np.testing.assert_array_equal(read(destination, blocks[::-1]), read(source, blocks))


@pytest.mark.parametrize("way", [0, 1 << 30])
def test_large_and_small_runs_are_copied_alike_on_a_device(makes, monkeypatch, way):
    monkeypatch.setattr(tensor_copy, "INDEXED_BELOW_BYTES", way)
    monkeypatch.setattr(array_copy, "INDEXED_BELOW_BYTES", way)
    for kind, order in KNOWN:
        source, destination = makes.filled("device", geometry(kind, order)), makes.filled("device", geometry(), salt=1)
        check_copy(source, destination, [(0, 1), (1, 2), (6, 6), (4, 0)])


def test_no_blocks_are_copied_when_none_are_named(makes):
    for storages in itertools.product(STORAGES, STORAGES):
        check_copy(makes.filled(storages[0], geometry()), makes.filled(storages[1], geometry(), salt=1), [])


@pytest.mark.fact("T90")
@pytest.mark.parametrize("source", STORAGES)
@pytest.mark.parametrize("destination", STORAGES)
def test_the_way_taken_is_the_one_in_the_table(makes, source, destination):
    memories = makes.empty(source, geometry()), makes.empty(destination, geometry())
    path = path_between(select(memories[0], [0]), select(memories[1], [0]))
    kinds = {memories[0].storage, memories[1].storage}
    if needs_host_hop(memories[0].storage, memories[1].storage):
        assert isinstance(path, Hop)
    elif kinds <= {StorageKind.SYSTEM, StorageKind.PINNED} or kinds == {StorageKind.DEVICE}:
        assert isinstance(path, Straight)


def test_a_large_run_needs_no_buffer_next_to_host_memory(makes, monkeypatch, small_steps):
    monkeypatch.setattr(paths, "new_buffer", lambda *_, **__: pytest.fail("made a buffer"))
    host = makes.filled("host", geometry(num_blocks=40))
    for storage in ("disk", "device"):
        other = makes.filled(storage, geometry(num_blocks=40), salt=1)
        check_copy(host, other, [(block, block + 3) for block in range(20)])
        check_copy(other, host, [(block, block + 7) for block in range(20)])


@pytest.mark.parametrize("storage", STORAGES)
def test_batches_follow_one_another_without_gaps(makes, small_steps, storage):
    source, destination = makes.noisy("host", geometry(num_blocks=130)), makes.noisy(storage, geometry(num_blocks=130))
    before = read(destination, range(130))
    batches = copy_batches(select(source, range(130)), select(destination, range(130)))
    first = next(batches)
    assert (first.start, first.stop, first.failures) == (0, 64, ())
    np.testing.assert_array_equal(read(destination, range(64)), read(source, range(64)))
    np.testing.assert_array_equal(read(destination, range(64, 130)), before[64:])
    assert [(batch.start, batch.stop) for batch in batches] == [(64, 128), (128, 130)]


def test_a_copy_stops_between_batches_and_says_what_is_not_done(makes, small_steps):
    source, destination = makes.noisy("host", geometry(num_blocks=300)), makes.noisy("host", geometry(num_blocks=300))
    before = read(destination, range(300))
    asked = itertools.count()
    why = Cancelled("no longer needed")
    failures = copy(
        select(source, range(300)),
        select(destination, range(300)),
        stop=lambda: why if next(asked) >= 2 else None,
        num_threads=1,
    )
    assert failures == tuple((index, why) for index in range(128, 300))
    np.testing.assert_array_equal(read(destination, range(128)), read(source, range(128)))
    np.testing.assert_array_equal(read(destination, range(128, 300)), before[128:])


def test_a_copy_that_is_stopped_before_it_starts_copies_nothing(makes):
    source, destination = makes.noisy("host", geometry()), makes.noisy("host", geometry())
    before = read(destination, range(7))
    why = Cancelled("no longer needed")
    assert copy(select(source, [1, 2]), select(destination, [3, 4]), stop=lambda: why) == ((0, why), (1, why))
    np.testing.assert_array_equal(read(destination, range(7)), before)


def test_threads_share_a_large_copy_and_stop_together(makes, small_steps):
    source, destination = makes.noisy("host", geometry(num_blocks=500)), makes.noisy("host", geometry(num_blocks=500))
    used: set[int] = set()
    blocks = np.random.permutation(500)
    both = threading.Barrier(2, timeout=30)

    def meet() -> None:
        if threading.get_ident() not in used:
            used.add(threading.get_ident())
            both.wait()

    assert copy(select(source, blocks), select(destination, blocks[::-1]), stop=meet) == ()
    np.testing.assert_array_equal(read(destination, blocks[::-1]), read(source, blocks))
    assert len(used) == 2
    why = Cancelled("no longer needed")
    failures = copy(select(source, blocks), select(destination, blocks), stop=lambda: why)
    assert failures == tuple((index, why) for index in range(500))


def damage(slab: SlabMemory, blocks: list[int]) -> None:
    """Changes bytes of blocks in the slab's file, behind its back."""
    path = slab._file.path
    content = bytearray(path.read_bytes())
    for block in blocks:
        out = np.empty((1, slab.geometry.config.block_bytes), np.uint8)
        slab.read(np.array([block]), WHOLE, out)
        place = content.index(out.tobytes())
        content[place + 5] ^= 0xFF
    with path.open("r+b") as file:
        file.write(content)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_damaged_block_fails_alone(makes, small_steps, storage):
    source = makes.noisy("disk", geometry(num_blocks=200))
    destination = makes.noisy(storage, geometry(num_blocks=200))
    content = read(source, range(200))
    assert isinstance(source, SlabMemory)
    damage(source, [3, 64, 199])
    failures = copy(select(source, range(200)), select(destination, range(200)))
    assert [index for index, _ in failures] == [3, 64, 199]
    assert all(isinstance(error, Checksum) for _, error in failures)
    good = [block for block in range(200) if block not in (3, 64, 199)]
    np.testing.assert_array_equal(read(destination, good), content[good])


class Full:
    """A disk that takes so many blocks and no more."""

    storage = StorageKind.DISK

    def __init__(self, room: int) -> None:
        self.geometry = geometry(num_blocks=500)
        self._room, self.written, self._lock = room, 0, threading.Lock()

    def rows(self, part: Part) -> Bytes | None:
        return None

    def views(self, block: int, part: Part) -> list[memoryview] | None:
        return None

    def read(self, blocks, part: Part, out: Bytes) -> None:
        raise StorageFailed("the disk is gone", place="disk", detail="gone")

    def write(self, blocks, part: Part, data: Bytes) -> None:
        with self._lock:
            if self.written + len(blocks) > self._room:
                raise StorageFailed("the disk is full", place="disk", detail="full")
            self.written += len(blocks)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("storage", STORAGES)
def test_a_full_disk_ends_the_copy_on_all_threads(makes, small_steps, storage):
    source, disk = makes.noisy(storage, geometry(num_blocks=500)), Full(room=130)
    failures = copy(select(source, range(500)), select(disk, range(500)), num_threads=2)
    assert disk.written <= 130
    assert len(failures) >= 500 - disk.written
    assert {str(error) for _, error in failures} == {"the disk is full"}
    assert [index for index, _ in failures] == sorted({index for index, _ in failures})


def test_a_disk_that_is_gone_fails_every_block(makes):
    destination = makes.filled("host", geometry(num_blocks=10))
    failures = copy(select(Full(0), range(10)), select(destination, range(10)))
    assert [index for index, _ in failures] == list(range(10))
    assert {str(error) for _, error in failures} == {"the disk is gone"}


def test_what_is_not_foreseen_is_raised(makes):
    host = makes.filled("host", geometry())
    with pytest.raises(ValueError, match="size of buffer"):
        copy(select(host, [0]), select(host, [99]))


def test_an_order_can_be_given_for_a_layout_of_unknown_order(makes):
    for storage in STORAGES:
        source = makes.filled(storage, geometry(FC, UNKNOWN))
        destination = makes.filled("host", geometry(FC, HND), salt=1)
        taken_for = Part(axis_order=AxisOrder.NHD)
        assert copy(select(source, [2], taken_for), select(destination, [4])) == ()
        plain = makes.filled("host", geometry(FC, NHD))
        plain.write(np.array([2]), WHOLE, read(source, [2]))
        assert checksums(destination, [4]) == checksums(plain, [2])


def test_read_only_memory_is_a_source(makes):
    source = makes.filled("host", geometry())
    assert isinstance(source, HostMemory)
    buffers = [buffer.view() for buffer in source.buffers]
    for buffer in buffers:
        buffer.setflags(write=False)
    frozen = HostMemory(source.geometry, buffers)
    for storage in STORAGES:
        check_copy(frozen, makes.filled(storage, geometry(), salt=1), [(0, 1), (5, 2)])
