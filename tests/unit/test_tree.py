"""The canonical tree against its definition."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.tree import Node, children, cover, parent, root


def nodes_below(node: Node) -> set[Node]:
    halves = children(node)
    return {node} if halves is None else {node} | nodes_below(halves[0]) | nodes_below(halves[1])


def nodes_by_definition(num_microbatches: int) -> set[Node]:
    found, size = set(), 1
    while True:
        found |= {Node(start=s, stop=min(s + size, num_microbatches)) for s in range(0, num_microbatches, size)}
        if size >= num_microbatches:
            return found
        size *= 2


@pytest.mark.parametrize("num_microbatches", range(1, 70))
def test_nodes_are_the_aligned_runs(num_microbatches):
    assert nodes_below(root(num_microbatches)) == nodes_by_definition(num_microbatches)


@pytest.mark.parametrize("num_microbatches", range(1, 40))
def test_parent_is_the_inverse_of_children(num_microbatches):
    for node in nodes_below(root(num_microbatches)):
        for half in children(node) or ():
            assert parent(half, num_microbatches) == node
    with pytest.raises(ValueError, match="root"):
        parent(root(num_microbatches), num_microbatches)


@given(st.data())
def test_cover_is_disjoint_exhaustive_canonical_and_smallest(data):
    num = data.draw(st.integers(1, 200))
    start, stop = sorted((data.draw(st.integers(0, num)), data.draw(st.integers(0, num))))
    nodes = cover(start, stop, num)
    assert [m for node in nodes for m in range(node.start, node.stop)] == list(range(start, stop))
    canonical = nodes_by_definition(num)
    assert set(nodes) <= canonical
    for left, right in pairwise(nodes):
        assert Node(start=left.start, stop=right.stop) not in canonical, "two neighbours could be one node"


def test_aligned_shard_is_one_node():
    assert cover(8, 16, 24) == [Node(start=8, stop=16)]
    assert cover(16, 23, 23) == [Node(start=16, stop=23)]
    assert cover(0, 5, 8) == [Node(start=0, stop=4), Node(start=4, stop=5)]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 9)])
def test_cover_refuses_what_is_outside(start, stop):
    with pytest.raises(ValueError, match="not inside"):
        cover(start, stop, 8)
