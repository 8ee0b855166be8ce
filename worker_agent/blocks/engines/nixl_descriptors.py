"""What a NIXL request is made of: pairs of addresses and lengths.  [core]

A part of a block is a few chunks on either side. The two lists of chunks are cut against one another once; the same
copies hold for every block, each moved on by the distance between blocks. Requests are kept short, so that something
can happen between them.

Legend: M copies for one block, N blocks of a request.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ayni.blocks.ids import Ids
from worker_agent.blocks.engines.nixl_envelope import Regions
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Part
from worker_agent.blocks.plan import Table, chunk_table, copy_table

REQUEST_BYTES = 64 << 20
"""About how much one request moves."""

MOST_DESCRIPTORS = 1 << 14
"""About how many copies one request consists of."""

Descriptors = npt.NDArray[np.uint64]
"""Shape [N * M, 3]: address, length, ordinal of the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Parts of blocks that a request reads or writes."""

    chunks: Table
    """Those of block 0, in the order of its string, shape [., 3]: allocation, offset, length."""
    block_stride: int
    """Bytes from one block to the next, in every allocation."""
    regions: Regions


def side_of(geometry: Geometry, part: Part, regions: Regions) -> Side:
    """Returns parts of the blocks of a layout."""
    chunks = chunk_table(geometry, 0, part.layers, part.slice, part.axis_order)
    return Side(chunks=chunks, block_stride=geometry.block_stride, regions=regions)


def strings_of(block_bytes: int, regions: Regions) -> Side:
    """Returns strings that follow one another."""
    return Side(chunks=np.array([(0, 0, block_bytes)], np.int64), block_stride=block_bytes, regions=regions)


class Copies:
    """The copies between two sides."""

    def __init__(self, remote: Side, local: Side) -> None:
        """Cuts both sides' chunks; raises IncompatibleLayout when they do not have the same bytes."""
        table = copy_table(remote.chunks, local.chunks)
        self._lengths_M = table[:, 4]
        self._remote = _Addresses(remote, table[:, 0], table[:, 1])
        self._local = _Addresses(local, table[:, 2], table[:, 3])

    @property
    def block_bytes(self) -> int:
        """Bytes that each block moves."""
        return int(self._lengths_M.sum())

    @property
    def num_blocks(self) -> int:
        """Blocks that go into one request."""
        return max(1, min(REQUEST_BYTES // self.block_bytes, MOST_DESCRIPTORS // len(self._lengths_M)))

    def remote(self, blocks: Ids) -> Descriptors:
        """Returns the remote side of a request."""
        return self._remote.of(blocks, self._lengths_M)

    def local(self, blocks: Ids) -> Descriptors:
        """Returns the local side of a request."""
        return self._local.of(blocks, self._lengths_M)


class _Addresses:
    def __init__(self, side: Side, allocations_M: Table, offsets_M: Table) -> None:
        bases = np.array([address for address, _ in side.regions.allocations], np.uint64)
        self._first_M = bases[allocations_M] + offsets_M.astype(np.uint64)
        self._stride = np.uint64(side.block_stride)
        self._ordinal = side.regions.ordinal

    def of(self, blocks: Ids, lengths_M: Table) -> Descriptors:
        result = np.empty((len(blocks), len(lengths_M), 3), np.uint64)
        result[..., 0] = blocks.astype(np.uint64)[:, np.newaxis] * self._stride + self._first_M
        result[..., 1] = lengths_M
        result[..., 2] = self._ordinal
        return result.reshape(-1, 3)
