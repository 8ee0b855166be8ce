"""Patterns and checksums that other tests trust."""

import itertools

import numpy as np
import pytest

from ayni.errors import BadRequest, UnknownBlock
from tests.support.block_layouts import FC, KINDS_AND_ORDERS, KNOWN, LS_FIRST, NHD, UNKNOWN, geometry, noisy, snapshot
from worker_agent.blocks.array_copy import copy_blocks
from worker_agent.blocks.memory import WHOLE, Part
from worker_agent.blocks.pairs import between
from worker_agent.blocks.patterns import (
    Constant,
    RankDistinct,
    Sequential,
    checksums,
    expected,
    fill,
    fill_layers,
    read,
)


@pytest.mark.fact("T93")
@pytest.mark.parametrize(("kind", "order"), KINDS_AND_ORDERS)
def test_a_constant_is_every_byte_and_equal_blocks_have_equal_checksums(kind, order):
    memory = noisy(geometry(kind, order))
    fill(memory, [2, 3], Constant(42))
    assert (read(memory, [2, 3]) == 42).all()
    one, other, noise = checksums(memory, [2, 3, 4])
    assert one == other != noise
    assert len(one) == 32


@pytest.mark.fact("T94")
@pytest.mark.parametrize("order", [NHD, UNKNOWN])
def test_sequential_counts_from_block_and_layer(order):
    memory = noisy(geometry(order=order))
    fill(memory, range(7), Sequential())
    starts = [bytes(memory.views(block, Part(layers=(block, block + 1)))[0][:2]) for block in (0, 1)]
    assert starts == [bytes([0, 1]), bytes([2, 3])]


@pytest.mark.fact("T95")
@pytest.mark.parametrize(("kind", "order"), KINDS_AND_ORDERS)
def test_filling_layers_leaves_the_others(kind, order):
    memory = noisy(geometry(kind, order))
    others = [read(memory, range(7), (0, 1)), read(memory, range(7), (2, 3))]
    fill_layers(memory, [1, 5], Constant(9), (1, 2))
    assert (read(memory, [1, 5], (1, 2)) == 9).all()
    np.testing.assert_array_equal(read(memory, range(7), (0, 1)), others[0])
    np.testing.assert_array_equal(read(memory, range(7), (2, 3)), others[1])


@pytest.mark.parametrize(("kind", "order"), KNOWN)
def test_equal_content_has_equal_checksums_in_any_kind_and_order(kind, order):
    plain, other = noisy(geometry()), noisy(geometry(kind, order), 1)
    for memory in (plain, other):
        fill(memory, [0, 6], RankDistinct(3))
    assert checksums(plain, [0, 6]) == checksums(other, [0, 6])
    assert checksums(plain, [0, 6], (1, 3)) == checksums(other, [0, 6], (1, 3))
    blocks = np.array([0, 6])
    copy_blocks(between(other.geometry, WHOLE, plain.geometry, WHOLE), other.buffers, plain.buffers, blocks, blocks - 0)
    assert checksums(plain, [0, 6]) == checksums(other, [0, 6])


def test_kinds_of_unknown_order_have_equal_checksums_too():
    memories = [noisy(geometry(kind, UNKNOWN)) for kind in (FC, LS_FIRST)]
    for memory in memories:
        fill(memory, [4], RankDistinct(0))
    assert checksums(memories[0], [4]) == checksums(memories[1], [4])


def test_no_two_regions_of_any_rank_look_alike():
    regions = [
        RankDistinct(rank).region(block, layer, outer, 40).tobytes()
        for rank, block, layer, outer in itertools.product(range(4), range(8), range(3), range(2))
    ]
    pieces = {region[i : i + 8] for region in regions for i in range(0, 40, 8)}
    assert len(pieces) == len(regions) * 5
    assert RankDistinct(0, salt=1).region(0, 0, 0, 8).tobytes() not in pieces


def test_a_short_region_is_the_start_of_a_long_one():
    pattern = RankDistinct(2)
    assert pattern.region(1, 2, 0, 13).tolist() == pattern.region(1, 2, 0, 64)[:13].tolist()
    assert pattern.region(1, 2, 0, 13).tolist() == RankDistinct(2).region(1, 2, 0, 13).tolist()


def test_expected_is_what_is_read():
    memory = noisy(geometry(LS_FIRST))
    fill(memory, [3], RankDistinct(1))
    np.testing.assert_array_equal(read(memory, [3]), expected(memory.geometry, 3, RankDistinct(1)))
    np.testing.assert_array_equal(read(memory, [3], (1, 2)), expected(memory.geometry, 3, RankDistinct(1), (1, 2)))


def test_only_the_named_blocks_are_filled():
    memory = noisy(geometry())
    before = snapshot(memory)[0].reshape(7, -1)
    fill(memory, [2, 4], Constant(0))
    after = memory.buffers[0].reshape(7, -1)
    np.testing.assert_array_equal(after[[0, 1, 3, 5, 6]], before[[0, 1, 3, 5, 6]])


@pytest.mark.parametrize("call", [checksums, read, lambda memory, blocks: fill(memory, blocks, Constant(0))])
def test_blocks_outside_a_layout_are_refused(call):
    with pytest.raises(UnknownBlock, match="block 7 is outside its layout, whose ids end at 6"):
        call(noisy(geometry()), [0, 7])


def test_layers_outside_a_layout_are_refused():
    with pytest.raises(BadRequest, match="layers 2 to 4 is not within 0 to 3"):
        checksums(noisy(geometry()), [0], (2, 4))
    with pytest.raises(BadRequest, match="layers 2 to 4 is not within 0 to 3"):
        fill_layers(noisy(geometry()), [0], Constant(0), (2, 4))
