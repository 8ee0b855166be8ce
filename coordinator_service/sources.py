"""Contributions that are read where their workers have put them, in regions of shared memory.  [shell]

The coordinator adds out of the worker's memory, and keeps views of it as long as a sum waits for its other half. A
worker that gives a contribution up may write there again; it counts its region's generation up before. So generations
are compared before anything that may contain such bytes is sent out, and what is torn makes the round start again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ayni.errors import BadChunk
from ayni.frames import ChunkView, SharedRange
from ayni.shm.regions import MappedRegion
from ayni.tensors import Floats

_ITEM_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A run of float32 in a worker's region."""

    region: MappedRegion
    generation: int
    values: Floats

    @property
    def is_intact(self) -> bool:
        """Whether the worker has not begun to write there again."""
        return self.region.generation == self.generation

    def pieces(self, length: int) -> Iterator[Floats]:
        """Yields its values, so many at a time."""
        for start in range(0, self.values.size, length):
            yield self.values[start : start + length]


def source(label: str, region: MappedRegion | None, chunk: ChunkView, shared: SharedRange) -> Source:
    """Returns where a chunk's values lie.

    Args:
        label: names step and bucket, for errors.
        region: the region that the chunk names; None where the worker has lent no such region.
        chunk: as it came.
        shared: its range.

    Raises:
        BadChunk: there is no such place, or the bytes are no whole elements.
    """
    if region is None:
        raise _bad(label, "region", "one that the worker has lent", shared.region)
    if len(chunk.data):
        raise _bad(label, "data", "none beside `shared`", f"{len(chunk.data)} bytes")
    stop = shared.offset_bytes + shared.length_bytes
    if stop > region.size or not shared.length_bytes:
        raise _bad(label, "shared.length_bytes", f"1 to {region.size - shared.offset_bytes}", shared.length_bytes)
    if shared.offset_bytes % _ITEM_BYTES or shared.length_bytes % _ITEM_BYTES:
        raise _bad(label, "shared.offset_bytes", "whole elements of 4 bytes", f"{shared.offset_bytes} to {stop}")
    values = region.bytes[shared.offset_bytes : stop].view(np.float32)
    return Source(region=region, generation=shared.generation, values=values)


def _bad(label: str, field: str, expected: object, received: object) -> BadChunk:
    return BadChunk(
        f"{label}: a chunk in shared memory has {field} {received}; expected {expected}",
        field=field,
        expected=expected,
        received=received,
        bucket=label,
    )
