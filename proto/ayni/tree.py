"""The canonical binary tree over a step's micro-batches.  [core]

Theory of operation. A step has micro-batches 0 to M-1. The tree's node at level j with index k covers the
micro-batches [k * 2^j, min((k + 1) * 2^j, M)). A node's value is the sum of its two children's, left plus right; a
node whose right child is empty has its left child's value. Addition in float32 does not associate, so a sum is a
function of the micro-batches alone only if everybody adds along this one tree. Who computed a node, and when it
arrived, never shows.

A worker's shard is a contiguous run of micro-batches. `cover` cuts it into the fewest nodes; a worker adds inside
each node and sends one vector per node. An aligned shard is one node.

Weightless nodes: a micro-batch of weight 0 has no gradient, and its leaf is *absent*, which is not the same as a
vector of zeros (-0.0 + 0.0 is 0.0). absent + x is x.

This file knows only integers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Node:
    """A node of the tree: micro-batches start to stop-1, all of them below one tree node."""

    start: int
    stop: int


def parent(node: Node, num_microbatches: int) -> Node:
    """Returns the smallest node that is larger than `node`.

    Raises:
        ValueError: `node` is the root.
    """
    size = 1 << _level(node)
    while True:
        size *= 2
        start = node.start // size * size
        candidate = Node(start=start, stop=min(start + size, num_microbatches))
        if candidate != node:
            return candidate
        if start == 0 and size >= num_microbatches:
            raise ValueError(f"{node} is the root of a tree over {num_microbatches} micro-batches")


def children(node: Node) -> tuple[Node, Node] | None:
    """Returns the left and the right half of a node; None for a leaf. Both halves are never empty."""
    size = node.stop - node.start
    if size == 1:
        return None
    middle = node.start + (1 << ((size - 1).bit_length() - 1))
    return Node(start=node.start, stop=middle), Node(start=middle, stop=node.stop)


def root(num_microbatches: int) -> Node:
    """Returns the node that covers the whole step."""
    return Node(start=0, stop=num_microbatches)


def cover(start: int, stop: int, num_microbatches: int) -> list[Node]:
    """Cuts the micro-batches [start, stop) into the fewest nodes of the tree, left to right.

    Raises:
        ValueError: not 0 <= start <= stop <= num_microbatches.
    """
    if not 0 <= start <= stop <= num_microbatches:
        raise ValueError(f"[{start}, {stop}) is not inside [0, {num_microbatches})")
    nodes = []
    while start < stop:
        node = _largest_at(start, stop, num_microbatches)
        nodes.append(node)
        start = node.stop
    return nodes


def _largest_at(start: int, stop: int, num_microbatches: int) -> Node:
    """Returns the largest node that begins at `start` and does not pass `stop`."""
    size = 1
    while start % (2 * size) == 0 and size < num_microbatches:
        if min(start + 2 * size, num_microbatches) > stop:
            break
        size *= 2
    return Node(start=start, stop=min(start + size, num_microbatches))


def _level(node: Node) -> int:
    """Returns the lowest level at which the node's range appears."""
    return (node.stop - node.start - 1).bit_length()
