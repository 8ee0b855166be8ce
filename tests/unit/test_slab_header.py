"""What a slab file says about itself is read back as it was written, or refused with the reason."""

import re
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks.layouts import Axis, AxisOrder, LayoutConfig, LayoutKind
from ayni.blocks.transfers import AxisSlice
from ayni.errors import IncompatibleLayout, StorageFailed
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import WHOLE, Part
from worker_agent.blocks.slab_extents import MAX_CALL_BYTES, Track, cover, extents, pieces, tracks
from worker_agent.blocks.slab_header import (
    PAGE_BYTES,
    SLOT,
    SlabHeader,
    check_same,
    checks_of,
    checksum_of,
    checksums_of,
    decode,
    encode,
    places,
    unsound,
)

CONFIG = LayoutConfig(num_blocks=300, num_layers=3, outer_dim=2, page_size=4, inner_dim=16, num_heads=4)
GEOMETRY = Geometry(config=CONFIG, axis_order=AxisOrder.NHD)
HEADER = SlabHeader.of(GEOMETRY, fingerprint="ab" * 32, instance_id="0" * 36, rank=2)
KINDS = list(LayoutKind)


def test_header_is_read_as_it_was_written():
    page = encode(HEADER)
    assert len(page) == PAGE_BYTES
    assert decode(page, "a.slab") == HEADER
    assert decode(encode(replace(HEADER, clean=True)), "a.slab") == replace(HEADER, clean=True)


@pytest.mark.parametrize("page", [b"", b"\0" * PAGE_BYTES], ids=["empty", "zeros"])
def test_page_of_zeros_is_no_header_yet(page):
    assert decode(page, "a.slab") is None


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"hello" * 1000, "it is not a slab file"),
        (encode(HEADER)[:100], "it is not a slab file"),
        (encode(HEADER)[:8] + b"\x07" + encode(HEADER)[9:], "it has version 7 of the slab format; this program reads"),
    ],
    ids=["foreign", "short", "version"],
)
def test_other_files_are_refused_with_the_reason(page, reason):
    with pytest.raises(StorageFailed, match=re.escape(f"the slab file a.slab can't be used: {reason}")) as caught:
        decode(page, "a.slab")
    assert caught.value.metadata["place"] == "a.slab"


@given(place=st.integers(12, len(encode(HEADER).rstrip(b"\0")) - 1), bit=st.integers(0, 7))
def test_damaged_header_is_refused(place, bit):
    page = bytearray(encode(HEADER))
    page[place] ^= 1 << bit
    with pytest.raises(StorageFailed, match="its header is damaged"):
        decode(bytes(page), "a.slab")


@pytest.mark.parametrize(
    "text",
    [
        b'{"x": 1}',
        b"[]",
        b"7",
        b"not json",
        b"\xff",
        b"[" * 4000,
        encode(HEADER)[20:].rstrip(b"\0").replace(b"300", b"null"),
    ],
    ids=["names", "list", "number", "text", "bytes", "deep", "types"],
)
def test_sound_header_with_other_fields_is_refused(text):
    page = struct.pack("<8sIII", b"AYNISLAB", 2, zlib.crc32(text), len(text)) + text
    with pytest.raises(StorageFailed, match=r"a\.slab .* does not have the fields of version 2"):
        decode(page.ljust(PAGE_BYTES, b"\0"), "a.slab")


@given(state=st.integers(1, 4), checksum=st.integers(0, 2**64 - 1), block=st.integers(0, 63), bit=st.integers(0, 127))
def test_slot_is_sound_as_it_was_written_and_only_in_its_place(state, checksum, block, bit):
    slots = np.zeros(64, SLOT)
    slots["state"][block], slots["checksum"][block] = state, checksum
    slots["check"][block] = checks_of(np.arange(64), slots)[block]
    assert not unsound(slots).any()
    moved = np.roll(slots, 1)
    assert np.flatnonzero(unsound(moved)).tolist() == [(block + 1) % 64]
    slots.view(np.uint8)[16 * block + bit // 8] ^= 1 << bit % 8
    assert np.flatnonzero(unsound(slots)).tolist() == [block]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_cover_a_block_when_every_byte_is_in_one(kind):
    geometry = Geometry(config=CONFIG, kind=kind, axis_order=AxisOrder.NHD)
    layers = [Part(layers=(i, i + 1)) for i in range(3)]
    heads = [Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=i, stop=i + 2)) for i in range(3)]
    for parts in ([WHOLE], layers, heads[::2], heads, [layers[0], *heads[::2]], [Part(layers=(0, 2)), *layers[1:]]):
        assert cover(geometry, frozenset(parts))
    for parts in (layers[:2], heads[:2], heads[1:], [*layers[:2], *heads[:2]], [*PARTS[1:3], layers[1]]):
        assert not cover(geometry, frozenset(parts))


def test_slab_of_another_shape_is_refused_with_both_values():
    other = replace(HEADER, num_blocks=7, kind="layer_separate_block_first", rank=1)
    with pytest.raises(IncompatibleLayout) as caught:
        check_same(other, HEADER, "a.slab")
    for text in (
        "kind is 'layer_separate_block_first', not 'fully_contiguous'",
        "num_blocks is 7, not 300",
        "rank is 1",
    ):
        assert text in caught.value.message
    assert caught.value.metadata == {
        "field": "kind",
        "source": "layer_separate_block_first",
        "destination": "fully_contiguous",
    }


def test_slab_of_another_owner_is_refused_and_a_clean_one_is_the_same():
    with pytest.raises(StorageFailed, match="rank is 3, not 2"):
        check_same(replace(HEADER, rank=3), HEADER, "a.slab")
    check_same(replace(HEADER, clean=True), HEADER, "a.slab")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alignment", [1, 8192])
def test_allocations_lie_apart_and_aligned_behind_the_slots(kind, alignment):
    geometry = Geometry(config=replace(CONFIG, alignment_bytes=alignment), kind=kind)
    found = places(geometry)
    slots_end = PAGE_BYTES + 16 * CONFIG.num_blocks
    ends = [slots_end]
    for start, size in zip(found.allocations, geometry.allocation_bytes, strict=True):
        assert start >= ends[-1]
        assert start % max(PAGE_BYTES, alignment) == 0
        ends.append(start + size)
    assert found.end == ends[-1]


def test_checksum_depends_on_the_block_it_belongs_to():
    rows = np.zeros((2, 64), np.uint8)
    assert checksum_of(0, rows[0]) != checksum_of(1, rows[1])
    assert checksums_of([5, 9], rows) == [checksum_of(5, rows[0]), checksum_of(9, rows[1])]


PARTS = [
    WHOLE,
    Part(layers=(1, 3)),
    Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=1, stop=3)),
    Part(slice=AxisSlice(axis=Axis.OUTER, start=1, stop=2), layers=(0, 1)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_tracks_are_the_bytes_of_a_part_in_order(kind, part):
    """A naive loop over all indices of the part says where each byte lies."""
    geometry = Geometry(config=CONFIG, kind=kind, axis_order=AxisOrder.NHD)
    starts = places(geometry).allocations
    views = geometry.strided(part.layers, part.slice, part.axis_order)
    for block in (0, 7):
        expected = []
        for view in views:
            for index in np.ndindex(*view.shape[1:]):
                within = sum(i * stride for i, stride in zip(index, view.strides[1:], strict=True))
                expected.append(starts[view.allocation] + view.offset + block * view.strides[0] + within)
        found: list[int] = []
        for track in tracks(geometry, part, starts):
            assert track.place == len(found)
            found += range(track.offset + block * track.stride, track.offset + block * track.stride + track.length)
        assert found == expected


@given(
    ids=st.lists(st.integers(0, 40), max_size=60),
    length=st.sampled_from([1, 512, MAX_CALL_BYTES // 3, MAX_CALL_BYTES, 3 * MAX_CALL_BYTES]),
    gap=st.sampled_from([0, 64]),
)
def test_extents_cover_each_block_once_and_stay_within_a_call(ids, length, gap):
    track = Track(offset=4096, stride=length + gap, length=length, place=0)
    seen = []
    for offset, first, num_blocks in extents(ids, track):
        assert num_blocks == 1 or (num_blocks * length <= MAX_CALL_BYTES and gap == 0)
        for i in range(num_blocks):
            assert offset + i * length == track.offset + ids[first + i] * track.stride
            seen.append(first + i)
    assert seen == list(range(len(ids)))


def test_neighbours_are_moved_in_one_call():
    track = tracks(GEOMETRY, WHOLE, (8192,))[0]
    found = list(extents([5, 6, 7, 20, 21, 3], track))
    assert [(first, num_blocks) for _, first, num_blocks in found] == [(0, 3), (3, 2), (5, 1)]
    assert len(list(extents(range(2000), replace(track, stride=8, length=8)))) == 2


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65])
def test_pieces_cover_all_blocks_once_in_order(count):
    found = list(pieces(count, MAX_CALL_BYTES // 64))
    assert [i for places in found for i in range(places.start, places.stop)] == list(range(count))
    assert len(found) == (count + 63) // 64
    assert list(pieces(2, 2 * MAX_CALL_BYTES)) == [slice(0, 1), slice(1, 2)]
