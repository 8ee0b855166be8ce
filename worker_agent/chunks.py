"""What one bucket's stream sends, and what it must receive.  [core]

Legend: N elements in a bucket, C elements in a chunk.

Theory of operation. A contribution has one vector of N elements for each part that has weight. `slices` says in which
order they leave: chunk by chunk, and within a chunk part by part, so that the coordinator can add the parts of a
chunk as soon as they are there. `MeanBuffer` takes the chunks of the mean, which must come in offset order without a
gap, and knows when it has all of them: the end is counted, not inferred from the end of the stream.

Neither knows frames, streams or time.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ayni import tensors
from ayni.errors import BadChunk, BadRequest, Checksum
from ayni.frames import ChunkView

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of one part, and where their bytes lie on the wire."""

    part: int
    offset_bytes: int
    start: int
    stop: int


def slices(num_elements: int, dtype: str, chunk_bytes: int, parts: Sequence[int]) -> Iterator[Slice]:
    """Yields what to send, in order.

    Args:
        num_elements: N.
        dtype: element type on the wire.
        chunk_bytes: length of every chunk but the last of a part; chosen by the coordinator. With int8 it is counted
            as if the elements were float32, and so are offsets.
        parts: numbers of the parts that have weight, in order.

    Raises:
        BadRequest: `chunk_bytes` does not hold whole elements, or blocks of them that share a scale.
    """
    size = tensors.position_bytes(dtype)
    block = tensors.scale_block_elements(dtype)
    if chunk_bytes < size or chunk_bytes % (size * (block or 1)):
        raise BadRequest(
            f"the coordinator asks for chunks of {chunk_bytes} bytes, which do not hold whole "
            f"{f'blocks of {block} ' if block else ''}{dtype} elements",
            field="chunk_bytes",
        )
    step = chunk_bytes // size
    for start in range(0, num_elements, step):
        for part in parts:
            yield Slice(part, start * size, start, min(start + step, num_elements))


class MeanBuffer:
    """Receives the chunks of one bucket's mean into a prepared vector."""

    def __init__(self, name: str, dtype: str, out_N: Vector) -> None:
        """Takes what contributions travel in, and the vector that the mean is written to, shape [N], float32."""
        self._name = name
        self._dtype = tensors.mean_dtype(dtype)
        self._out_N = out_N
        self._size = tensors.itemsize(self._dtype)
        self._received = 0

    @property
    def received_bytes(self) -> int:
        """Bytes that have come."""
        return self._received

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole mean."""
        return self._out_N.size * self._size

    def add(self, chunk: ChunkView) -> None:
        """Writes one chunk (one copy).

        Raises:
            BadChunk: it does not follow the one before, or is too long.
            Checksum: it carries a CRC-32 that is not its own.
        """
        if chunk.part or chunk.offset_bytes != self._received:
            raise self._bad("offset", self._received, f"{chunk.offset_bytes} of part {chunk.part}")
        if chunk.offset_bytes + len(chunk.data) > self.total_bytes:
            raise self._bad("length", f"at most {self.total_bytes - self._received}", len(chunk.data))
        if chunk.crc32 is not None and zlib.crc32(chunk.data) != chunk.crc32:
            raise Checksum(f"a chunk of the mean of {self._name} was damaged on its way", name=self._name)
        if len(chunk.data) % self._size:
            raise self._bad("length", f"a multiple of {self._size}", len(chunk.data))
        start = self._received // self._size
        tensors.decode_into(chunk.data, self._dtype, self._out_N[start : start + len(chunk.data) // self._size])
        self._received += len(chunk.data)

    def finish(self, total_weight: int) -> None:
        """Confirms that nothing is missing. A mean over a total weight of 0 is not sent; it is zeros.

        Raises:
            BadChunk: bytes are missing.
        """
        if total_weight == 0 and self._received == 0:
            self._out_N.fill(0)
        elif self._received != self.total_bytes:
            raise self._bad("length", f"{self.total_bytes} in all", self._received)

    def _bad(self, field: str, expected: object, received: object) -> BadChunk:
        return BadChunk(
            f"the coordinator's mean of {self._name} has a wrong {field}: expected {expected}, received {received}",
            field=field,
            expected=expected,
            received=received,
            bucket=self._name,
        )
