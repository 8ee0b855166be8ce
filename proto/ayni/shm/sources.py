"""Contributions that are read where their workers have put them, in regions of shared memory.  [shell]

Who reduces adds out of the worker's memory, and keeps views of it as long as a sum waits for its other half. A
worker that gives a contribution up may write there again; it counts its region's generation up before. So generations
are compared before anything that may contain such bytes is sent out, and what is torn makes the round start again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ayni import tensors
from ayni.errors import BadChunk
from ayni.frames import ChunkView, SharedRange
from ayni.reduce.packed import Values, packed
from ayni.shm.regions import MappedRegion, Region
from ayni.tensors import Bytes, Floats

_ALIGNMENT = 4
"""Bytes; sums over numbers that lie across words take half as long again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A run of a contribution's bytes in a worker's region; `region` is None where they lie in no region."""

    region: MappedRegion | Region | None
    generation: int
    data: Bytes
    dtype: str

    @property
    def is_intact(self) -> bool:
        """Whether the worker has not begun to write there again."""
        return self.region is None or self.region.generation == self.generation

    def run(self, first: int, length: int) -> Floats | None:
        """Returns `length` float32 values from value `first` on, as they lie there; they may be those of many chunks.

        None where there are fewer, or where they are of another type.
        """
        stop = 4 * (first + length)
        if self.dtype != "float32" or stop > self.data.size:
            return None
        return self.data[4 * first : stop].view(np.float32)

    def piece(self, number: int, length: int) -> Values | None:
        """Returns one chunk's values of at most `length`, as they lie there; None after the last one.

        Raises:
            BadChunk: the bytes are no whole elements.
        """
        step = tensors.payload_bytes(length, self.dtype)
        data = self.data[number * step : (number + 1) * step]
        return packed(data, self.dtype) if data.size else None

    def pieces(self, length: int) -> Iterator[Values]:
        """Yields its values, so many at a time, as they lie there.

        Raises:
            BadChunk: the last bytes are no whole elements.
        """
        number = 0
        while (values := self.piece(number, length)) is not None:
            yield values
            number += 1


def source(label: str, region: MappedRegion | None, chunk: ChunkView, shared: SharedRange, dtype: str) -> Source:
    """Returns where a chunk's values lie.

    Args:
        label: names step and bucket, for errors.
        region: the region that the chunk names; None where the worker has lent no such region.
        chunk: as it came.
        shared: its range.
        dtype: element type that contributions travel in.

    Raises:
        BadChunk: there is no such place, or it does not begin at a word or end with a whole element.
    """
    if region is None:
        raise _bad(label, "region", "one that the worker has lent", shared.region)
    if len(chunk.data):
        raise _bad(label, "data", "none beside `shared`", f"{len(chunk.data)} bytes")
    stop = shared.offset_bytes + shared.length_bytes
    if stop > region.size or not shared.length_bytes:
        raise _bad(label, "shared.length_bytes", f"1 to {region.size - shared.offset_bytes}", shared.length_bytes)
    size = tensors.itemsize(dtype)
    if shared.offset_bytes % _ALIGNMENT or shared.length_bytes % size:
        words = f"a multiple of {_ALIGNMENT}, and whole elements of {size} bytes"
        raise _bad(label, "shared.offset_bytes", words, f"{shared.offset_bytes} to {stop}")
    data = region.bytes[shared.offset_bytes : stop]
    return Source(region=region, generation=shared.generation, data=data, dtype=dtype)


def _bad(label: str, field: str, expected: object, received: object) -> BadChunk:
    return BadChunk(
        f"{label}: a chunk in shared memory has {field} {received}; expected {expected}",
        field=field,
        expected=expected,
        received=received,
        bucket=label,
    )
