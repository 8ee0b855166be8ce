"""Copies that a transfer consists of: runs of blocks, chunks of a part, and how two lists of chunks meet."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks.layouts import Axis, LayoutConfig, LayoutKind, StorageKind
from ayni.blocks.transfers import AxisSlice
from ayni.errors import IncompatibleLayout
from tests.support.block_layouts import (
    FC,
    HND,
    KINDS_AND_ORDERS,
    KNOWN,
    LS_FIRST,
    LS_SECOND,
    NHD,
    UNIVERSAL,
    UNKNOWN,
    address,
    configs,
    geometry,
    in_order,
    parts,
)
from worker_agent.blocks import plan
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Part

SYSTEM, PINNED, DEVICE, DISK = StorageKind.SYSTEM, StorageKind.PINNED, StorageKind.DEVICE, StorageKind.DISK


def chunks(layout: Geometry, block: int, part: Part) -> list[plan.Chunk]:
    return plan.chunks(layout, block, part.layers, part.slice, part.axis_order)


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        ([], [], []),
        ([5], [2], [(5, 2, 1)]),
        ([0, 1, 2], [7, 8, 9], [(0, 7, 3)]),
        ([0, 1, 2], [7, 9, 10], [(0, 7, 1), (1, 9, 2)]),
        ([2, 1, 0], [2, 1, 0], [(2, 2, 1), (1, 1, 1), (0, 0, 1)]),
        ([4, 4, 5], [0, 1, 2], [(4, 0, 1), (4, 1, 2)]),
    ],
)
def test_neighbours_on_both_sides_are_one_run(source, destination, expected):
    assert plan.runs(np.array(source, dtype=np.int64), np.array(destination, dtype=np.int64)) == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_runs_name_each_pair_once_in_order_and_are_as_few_as_can_be(pairs):
    source, destination = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    found = plan.runs(source, destination)
    assert [(one + i, other + i) for one, other, count in found for i in range(count)] == pairs
    for (one, other, count), (next_one, next_other, _) in pairwise(found):
        assert (next_one, next_other) != (one + count, other + count)


@pytest.mark.fact("T88")
def test_whole_blocks_move_at_once_only_between_contiguous_layouts():
    contiguous = geometry(FC)
    assert plan.moves_whole_blocks(contiguous, contiguous, None)
    assert plan.moves_whole_blocks(contiguous, contiguous, (0, 3))
    assert not plan.moves_whole_blocks(contiguous, contiguous, (0, 2))
    for apart in (geometry(LS_FIRST), geometry(LS_SECOND)):
        assert not plan.moves_whole_blocks(contiguous, apart, None)
        assert not plan.moves_whole_blocks(apart, contiguous, None)
        assert not plan.moves_whole_blocks(apart, apart, None)


@pytest.mark.fact("T90")
@pytest.mark.parametrize(
    ("source", "destination", "hops"),
    [
        (SYSTEM, SYSTEM, False),
        (SYSTEM, PINNED, False),
        (SYSTEM, DEVICE, False),
        (SYSTEM, DISK, False),
        (PINNED, SYSTEM, False),
        (PINNED, PINNED, False),
        (PINNED, DEVICE, False),
        (PINNED, DISK, False),
        (DEVICE, SYSTEM, False),
        (DEVICE, PINNED, False),
        (DEVICE, DEVICE, False),
        (DEVICE, DISK, True),
        (DISK, SYSTEM, False),
        (DISK, PINNED, False),
        (DISK, DEVICE, True),
        (DISK, DISK, True),
    ],
)
def test_only_what_the_processor_can_not_copy_itself_hops(source, destination, hops):
    assert plan.needs_host_hop(source, destination) is hops


@given(configs(), st.sampled_from(KINDS_AND_ORDERS), st.data())
def test_chunks_are_the_string_and_as_few_as_can_be(config, kind_and_order, data):
    layout = Geometry(config=config, kind=kind_and_order[0], axis_order=kind_and_order[1])
    part = data.draw(parts(layout)) if layout.axis_order is not UNKNOWN else Part()
    block = data.draw(st.integers(0, config.num_blocks - 1))
    expected: list[list[int]] = []
    for inside in in_order(layout, part):
        allocation, offset = address(layout, block, *inside)
        if expected and (allocation, offset) == (expected[-1][0], sum(expected[-1][1:])):
            expected[-1][2] += 1
        else:
            expected.append([allocation, offset, 1])
    assert chunks(layout, block, part) == [tuple(chunk) for chunk in expected]


@pytest.mark.parametrize(
    ("order", "length", "count"), [(NHD, 4 * 16 * 2, 2 * 1 * 4), (HND, 4 * 4 * 16 * 2, 2), (UNIVERSAL, 1024, 1)]
)
def test_a_head_slice_has_the_chunks_that_its_order_allows(order, length, count):
    config = LayoutConfig(num_blocks=3, num_layers=2, outer_dim=1, page_size=4, inner_dim=128, num_heads=8)
    part = Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=4, stop=8))
    found = chunks(Geometry(config=config, axis_order=order), 1, part)
    assert [chunk[2] for chunk in found] == [length] * count
    assert sum(chunk[2] for chunk in found) * 2 == config.block_bytes


@pytest.mark.parametrize(("kind", "order"), KNOWN)
def test_a_slice_of_all_heads_is_the_whole_block(kind, order):
    layout = geometry(kind, order)
    full = Part(slice=AxisSlice(axis=Axis.HEAD_COUNT, start=0, stop=5))
    assert chunks(layout, 2, full) == chunks(layout, 2, Part())


@pytest.mark.parametrize("kind", list(LayoutKind))
def test_whole_blocks_have_one_chunk_or_one_for_each_layer_or_region(kind):
    expected = {FC: 1, LS_FIRST: 3, LS_SECOND: 3 * 2}
    assert len(chunks(geometry(kind), 1, Part())) == expected[kind]


@given(configs(num_blocks=3), st.sampled_from(KNOWN), st.sampled_from(list(LayoutKind)), st.data())
def test_copies_put_one_string_into_the_other(config, kind_and_order, other_kind, data):
    source = Geometry(config=config, kind=kind_and_order[0], axis_order=kind_and_order[1])
    other_kind = FC if source.axis_order is UNIVERSAL else other_kind
    destination = Geometry(config=config, kind=other_kind, axis_order=source.axis_order)
    part = data.draw(parts(source))
    ours, theirs = chunks(source, 2, part), chunks(destination, 1, part)
    found = plan.copies(ours, theirs)
    assert _bytes_of(ours) == [(c[0], c[1] + i) for c in found for i in range(c[4])]
    assert _bytes_of(theirs) == [(c[2], c[3] + i) for c in found for i in range(c[4])]
    assert max(len(ours), len(theirs)) <= len(found) < len(ours) + len(theirs)


def test_strings_of_unequal_length_do_not_meet():
    with pytest.raises(IncompatibleLayout, match="10 bytes and the destination's 12") as refusal:
        plan.copies([(0, 0, 4), (0, 8, 6)], [(1, 0, 12)])
    assert refusal.value.metadata == {"field": "part_bytes", "source": "10", "destination": "12"}


def test_chunks_that_happen_to_be_neighbours_are_one():
    table = np.array([(0, 0, 4), (0, 4, 4), (1, 8, 4), (1, 12, 1), (1, 14, 1)])
    assert plan.merged(table).tolist() == [[0, 0, 8], [1, 8, 5], [1, 14, 1]]


def test_a_table_that_is_kept_can_not_be_changed_by_who_got_it():
    first = plan.chunk_table(geometry(), 0, None, None, None)
    first[:] = 0
    assert plan.chunk_table(geometry(), 0, None, None, None)[0, 2] == geometry().config.block_bytes


def _bytes_of(found: list[plan.Chunk]) -> list[tuple[int, int]]:
    return [(allocation, offset + i) for allocation, offset, length in found for i in range(length)]
