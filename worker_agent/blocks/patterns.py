"""Fills blocks with bytes that tell where they belong, and takes checksums of blocks, for tests.  [shell]

A pattern gives the bytes of one region from the place of the block, layer and outer part, and of the byte in it. Where
a layout's axis order and heads are known, bytes are counted as in NHD order; so filling two layouts of any kinds and
orders with one pattern gives them the same content, and content that is equal has equal checksums. Where they are not
known, bytes are taken as they lie.

Legend: N blocks, L layers, O outer parts, R bytes of a region.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.layouts import AxisOrder
from worker_agent.blocks.array_copy import reordered
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import WHOLE, Bytes, Memory, Part
from worker_agent.blocks.validation import check_range


class Pattern(Protocol):
    """Says which bytes a region holds."""

    def region(self, block: int, layer: int, outer: int, length: int) -> Bytes:
        """Returns the bytes of one region, shape [R]."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The same byte everywhere."""

    value: int

    def region(self, block: int, layer: int, outer: int, length: int) -> Bytes:
        """See `Pattern`."""
        return np.full(length, self.value, np.uint8)


@dataclass(frozen=True, slots=True)
class Sequential:
    """Block + layer + position, modulo 256. Outer parts look alike, and so do ranks: not for proofs."""

    def region(self, block: int, layer: int, outer: int, length: int) -> Bytes:
        """See `Pattern`."""
        return (np.arange(length) + block + layer).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class RankDistinct:
    """Bytes that no other rank, block, layer or outer part has: whatever ends up in a wrong place is seen."""

    rank: int
    salt: int = 0
    """Another one gives other bytes everywhere."""

    def region(self, block: int, layer: int, outer: int, length: int) -> Bytes:
        """See `Pattern`."""
        seed = xxhash.xxh3_64_intdigest(f"{self.salt}/{self.rank}/{block}/{layer}/{outer}".encode())
        words = np.arange(-(-length // 8), dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed)
        for shift, factor in _MIXING:
            words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
        return (words ^ (words >> np.uint64(31))).view(np.uint8)[:length]


_GOLDEN = 0x9E3779B97F4A7C15
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The constants of splitmix64, a generator that can be asked for any place of its stream."""


def fill(memory: Memory, blocks: Iterable[int], pattern: Pattern) -> None:
    """Writes a pattern into blocks.

    Raises:
        UnknownBlock: an id is outside the layout.
    """
    fill_layers(memory, blocks, pattern, (0, memory.geometry.config.num_layers))


def fill_layers(memory: Memory, blocks: Iterable[int], pattern: Pattern, layers: tuple[int, int]) -> None:
    """Writes a pattern into some layers of blocks, and leaves the others as they are.

    Raises:
        UnknownBlock: an id is outside the layout.
        BadRequest: there are no such layers.
    """
    part, ids = _checked(memory.geometry, blocks, layers)
    for block in ids:
        content = expected(memory.geometry, int(block), pattern, part.layers)
        memory.write(np.array([block]), part, _own_order(memory.geometry, part, content))


def read(memory: Memory, blocks: Iterable[int], layers: tuple[int, int] | None = None) -> Bytes:
    """Returns the content of blocks in NHD order where that is known, shape [N, L * O * R]; raises as `fill_layers`."""
    geometry = memory.geometry
    part, ids = _checked(geometry, blocks, layers)
    out = np.empty((len(ids), geometry.part_bytes(part.layers, None, None)), np.uint8)
    memory.read(ids, part, out)
    return reordered(geometry, part, out, geometry.axis_order, AxisOrder.NHD) if _is_known(geometry) else out


def expected(geometry: Geometry, block: int, pattern: Pattern, layers: tuple[int, int] | None = None) -> Bytes:
    """Returns what `read` gives for one block that was filled with a pattern, shape [1, L * O * R]."""
    start, stop = layers or (0, geometry.config.num_layers)
    length = geometry.config.region_bytes
    regions = [
        pattern.region(block, layer, outer, length)
        for layer in range(start, stop)
        for outer in range(geometry.config.outer_dim)
    ]
    return np.concatenate(regions).reshape(1, -1)


def checksums(memory: Memory, blocks: Iterable[int], layers: tuple[int, int] | None = None) -> list[str]:
    """Returns the XXH3-128 of each block's content as `read` gives it, in hex; raises as `fill_layers`."""
    return [xxhash.xxh3_128_hexdigest(row.data) for row in read(memory, blocks, layers)]


def _checked(geometry: Geometry, blocks: Iterable[int], layers: tuple[int, int] | None) -> tuple[Part, Ids]:
    ids = as_ids(blocks)
    check_range(geometry, ids, "")
    if layers == (0, geometry.config.num_layers):
        return WHOLE, ids
    geometry.check_part(layers, None, None)
    return Part(layers=layers), ids


def _is_known(geometry: Geometry) -> bool:
    return geometry.axis_order is not AxisOrder.UNKNOWN and geometry.config.num_heads > 0


def _own_order(geometry: Geometry, part: Part, content: Bytes) -> Bytes:
    if not _is_known(geometry):
        return content
    return reordered(geometry, part, content, AxisOrder.NHD, geometry.axis_order)
