"""Partial sums: the parts of any shard complete one tree, bit for bit."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni import tree
from ayni.tree import Node
from worker_agent.training.partial_sums import PartialSums, Vector

N = 5


def reference(leaves: list[Vector | None], start: int, stop: int) -> Vector | None:
    """The tree's definition, by recursion."""
    if stop - start == 1:
        return leaves[start]
    middle = start + (1 << ((stop - start - 1).bit_length() - 1))
    left, right = reference(leaves, start, middle), reference(leaves, middle, stop)
    if left is None or right is None:
        return right if left is None else left
    return left + right


def bytes_of(values: Vector | None) -> bytes | None:
    return None if values is None else values.tobytes()


def leaves_of(seed: int, count: int, absent: frozenset[int]) -> list[Vector | None]:
    rng = np.random.Generator(np.random.Philox(seed))
    scales = 10.0 ** rng.integers(-6, 7, count)
    values = [(rng.standard_normal(N) * scale).astype(np.float32) for scale in scales]
    return [None if index in absent else value for index, value in enumerate(values)]


def parts_of(sums: PartialSums, leaves: list[Vector | None], start: int, stop: int) -> list[Vector | None]:
    sums.begin(start, stop, len(leaves))
    for leaf in leaves[start:stop]:
        if leaf is None:
            sums.push_absent()
        else:
            sums.leaf()[...] = leaf
            sums.push()
    return sums.parts()


@given(
    count=st.integers(1, 40),
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_parts_of_a_shard_are_the_values_of_its_nodes(count: int, data: st.DataObject, seed: int) -> None:
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    absent = data.draw(st.frozensets(st.integers(0, count - 1)))
    leaves = leaves_of(seed, count, absent)
    parts = parts_of(PartialSums(N), leaves, start, stop)
    nodes = tree.cover(start, stop, count)
    assert len(parts) == len(nodes)
    for node, part in zip(nodes, parts, strict=True):
        expected = reference(leaves, node.start, node.stop)
        assert bytes_of(part) == bytes_of(expected)


@given(count=st.integers(1, 24), cuts=st.lists(st.integers(0, 24), max_size=4), seed=st.integers(0, 2**32 - 1))
def test_the_sum_of_the_whole_step_does_not_depend_on_the_cuts(count: int, cuts: list[int], seed: int) -> None:
    leaves = leaves_of(seed, count, frozenset())
    edges = sorted({0, count, *(min(cut, count) for cut in cuts)})
    given_nodes: dict[Node, Vector | None] = {}
    for start, stop in itertools.pairwise(edges):
        nodes = tree.cover(start, stop, count)
        given_nodes |= dict(zip(nodes, parts_of(PartialSums(N), leaves, start, stop), strict=True))

    def total(node: Node) -> Vector | None:
        if node in given_nodes:
            return given_nodes[node]
        halves = tree.children(node)
        assert halves is not None
        left, right = (total(half) for half in halves)
        assert left is not None
        assert right is not None
        return left + right

    assert bytes_of(total(tree.root(count))) == bytes_of(reference(leaves, 0, count))


def test_left_to_right_addition_would_give_other_bytes() -> None:
    leaves = leaves_of(5, 8, frozenset())
    straight = np.zeros(N, np.float32)
    for leaf in leaves:
        assert leaf is not None
        straight += leaf
    (part,) = parts_of(PartialSums(N), leaves, 0, 8)
    assert bytes_of(part) != bytes_of(straight)


def test_buffers_are_used_again_by_the_next_shard() -> None:
    sums = PartialSums(N)
    leaves = leaves_of(1, 8, frozenset())
    first = {id(part) for part in parts_of(sums, leaves, 1, 8)}
    before = len(sums._free) + len(sums._stack)
    for _ in range(5):
        again = {id(part) for part in parts_of(sums, leaves, 1, 8)}
    assert len(sums._free) + len(sums._stack) == before
    assert len(first & again) > 0


def test_an_absent_leaf_is_not_a_vector_of_zeros() -> None:
    minus_zero = np.full(N, -0.0, np.float32)
    (part,) = parts_of(PartialSums(N), [minus_zero, None], 0, 2)
    assert part is not None
    assert np.signbit(part).all()


def test_parts_of_an_unfinished_shard_and_leaves_beyond_it_are_refused() -> None:
    sums = PartialSums(N)
    sums.begin(0, 2, 4)
    sums.push_absent()
    with pytest.raises(AssertionError, match=r"micro-batches \[1, 2\) have not been pushed"):
        sums.parts()
    sums.push_absent()
    with pytest.raises(AssertionError, match="outside the shard"):
        sums.push_absent()


def test_sums_of_one_bucket_share_buffers_but_not_values() -> None:
    free: list[Vector] = []
    one, two = PartialSums(N, free), PartialSums(N, free)
    leaves = leaves_of(2, 8, frozenset())
    first = [part.copy() for part in parts_of(one, leaves, 0, 3) if part is not None]
    parts = parts_of(two, leaves, 3, 8)
    assert [bytes_of(part) for part in one.parts()] == [bytes_of(part) for part in first]
    assert not {id(part) for part in parts} & {id(part) for part in one.parts()}
    two.release()
    again = {id(part) for part in parts_of(PartialSums(N, free), leaves, 3, 8)}
    assert again <= {id(part) for part in [*parts, *free]}
    assert [bytes_of(part) for part in one.parts()] == [bytes_of(part) for part in first]


def test_a_leaf_that_was_not_pushed_is_given_back() -> None:
    free: list[Vector] = []
    sums = PartialSums(N, free)
    sums.begin(0, 1, 1)
    sums.leaf()
    sums.release()
    assert len(free) == 1
