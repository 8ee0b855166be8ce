"""Adds a shard's micro-batch gradients along the canonical tree.  [core]

Legend: N elements in a bucket.

Theory of operation. A shard is cut into the fewest nodes of the tree (`ayni.tree.cover`); each node's value is one part
to send. Micro-batches come in order, so the sums that still wait for a right half form a stack, as in binary counting:
a leaf is pushed, and while the top two entries are the two halves of one node inside the shard, they become that node.

`begin` opens a shard; then `leaf` and `push`, or `push_absent`, once for each micro-batch; then `parts`. A micro-batch
of weight 0 is absent, which is not the same as zeros (see `ayni.tree`). Buffers come from a free list, which several
sums over the same bucket may share, and go back to it at `release` or the next `begin`: not before the receiver of the
last parts is done with them.

What is ugly: the caller must fill `leaf()` before `push()`, and nothing checks that it did.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ayni import tree
from ayni.tree import Node

Vector = npt.NDArray[np.float32]


NewVector = Callable[[int], Vector]
"""Returns a vector of so many elements, float32; its values are undefined."""


def new_ordinary_vector(num_elements: int) -> Vector:
    """Returns a vector in memory of this process alone."""
    return np.empty(num_elements, np.float32)


class PartialSums:
    """The sums of one bucket over one shard."""

    def __init__(
        self, num_elements: int, free: list[Vector] | None = None, new_vector: NewVector = new_ordinary_vector
    ) -> None:
        """Makes the sums of a bucket of `num_elements`; buffers are allocated where the free list has none.

        Args:
            num_elements: N.
            free: buffers that are not in use, each shape [N], float32; None for a list of its own.
            new_vector: allocates one more.
        """
        self._new_vector = new_vector
        self._num_elements = num_elements
        self._free = [] if free is None else free
        self._stack: list[tuple[Node, Vector | None]] = []
        self._leaf: Vector | None = None
        self._cover: list[Node] = []
        self._num_microbatches = 0
        self._next = 0
        self._stop = 0

    def begin(self, start: int, stop: int, num_microbatches: int) -> None:
        """Opens the shard of micro-batches [start, stop); `release` first."""
        self.release()
        self._cover = tree.cover(start, stop, num_microbatches)
        self._num_microbatches = num_microbatches
        self._next, self._stop = start, stop

    def release(self) -> None:
        """Gives all buffers back to the free list; parts that were handed out are not valid any more."""
        self._free += [values for _, values in self._stack if values is not None]
        self._stack.clear()
        if self._leaf is not None:
            self._free.append(self._leaf)
            self._leaf = None

    def leaf(self) -> Vector:
        """Returns the buffer for the next micro-batch's gradient, shape [N], float32; its values are undefined."""
        if self._leaf is None:
            self._leaf = self._free.pop() if self._free else self._new_vector(self._num_elements)
        return self._leaf

    def push(self) -> None:
        """Adds the gradient in `leaf()` as the next micro-batch."""
        values, self._leaf = self.leaf(), None
        self._push(values)

    def push_absent(self) -> None:
        """Says that the next micro-batch has weight 0."""
        self._push(None)

    def parts(self) -> list[Vector | None]:
        """Returns one vector for each node of the cover, left to right; None for a node without weight.

        The vectors stay valid until `release` or the next `begin`.
        """
        assert self._next == self._stop, f"micro-batches [{self._next}, {self._stop}) have not been pushed"
        return [values for _, values in self._stack]

    def _push(self, values: Vector | None) -> None:
        assert self._next < self._stop, f"micro-batch {self._next} is outside the shard, which ends at {self._stop}"
        node = Node(start=self._next, stop=self._next + 1)
        self._next += 1
        while node not in self._cover:
            above = tree.parent(node, self._num_microbatches)
            if above.start == node.start:
                break
            _, left = self._stack.pop()
            values, node = self._merge(left, values), above
        self._stack.append((node, values))

    def _merge(self, left: Vector | None, right: Vector | None) -> Vector | None:
        """Returns left plus right, in left's buffer; absent plus x is x."""
        if left is None or right is None:
            return right if left is None else left
        np.add(left, right, out=left)
        self._free.append(right)
        return left
