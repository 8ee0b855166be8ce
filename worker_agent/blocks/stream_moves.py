"""One stream of blocks on its way: chunk by chunk out of a source, chunk by chunk into a sink.  [shell]

What can't be read or written is named block by block and does not stop the others.
"""

from collections.abc import AsyncIterator

from ayni.blocks.transfers import Failure
from ayni.errors import AyniError, Checksum, StorageFailed
from worker_agent.blocks.frames import BlockChunk, encode_block_chunk
from worker_agent.blocks.stream_ends import Sink, Source
from worker_agent.blocks.stream_order import Arrivals, Run, StreamShape, cut, head_of

MOST_FAILURES = 1024
"""Blocks that one answer names; a stream with more of them is given up."""


class Sending:
    """The chunks of one stream on their way out."""

    def __init__(self, shape: StreamShape, source: Source, chunk_bytes: int, checksum: bool) -> None:
        """Sends all of `shape` from `source` in chunks of at most `chunk_bytes`."""
        self._shape, self._source = shape, source
        self._chunk_bytes, self._checksum = chunk_bytes, checksum
        self.sent_bytes = 0
        self.failures: dict[int, Failure] = {}
        """Blocks that could not be read, by place in the list. Their last bytes were not sent."""

    async def frames(self) -> AsyncIterator[bytes]:
        """Yields every chunk, encoded.

        Raises:
            StorageFailed: too many blocks can't be read to name them all.
        """
        for run in cut(self._shape, self._chunk_bytes):
            if run.index not in self.failures:
                async for frame in self._encoded(run):
                    yield frame

    async def _encoded(self, run: Run) -> AsyncIterator[bytes]:
        try:
            payload = await self._source.payload(run)
        except (Checksum, StorageFailed) as error:
            if run.count > 1:
                for single in run.singles():
                    async for frame in self._encoded(single):
                        yield frame
                return
            self.failures[run.index] = Failure.of(error)
            if len(self.failures) > MOST_FAILURES:
                raise
            return
        frame = encode_block_chunk(head_of(self._shape, run, self.sent_bytes), payload, self._checksum)
        self.sent_bytes += run.length
        yield frame


class Receiving:
    """The chunks of one stream on their way in."""

    def __init__(self, arrivals: Arrivals, sink: Sink) -> None:
        """Puts what arrives into a sink."""
        self._arrivals, self._sink = arrivals, sink
        self.failures: dict[int, Failure] = {}
        """Blocks that came and are no good, by place in the list."""

    async def take(self, chunk: BlockChunk) -> None:
        """Writes a chunk into its blocks.

        Raises:
            BadChunk: it is not what may come now.
            Checksum: it was damaged.
        """
        place = 0
        for run in self._arrivals.take(chunk):
            failures = await self._sink.place(run, chunk.data[place : place + run.length])
            self._arrivals.placed(run)
            if failures:
                self.drop(failures)
            place += run.length

    def drop(self, failures: dict[int, Failure]) -> None:
        """Says that what came of some blocks is no good."""
        self.failures |= failures
        self._arrivals.is_whole[list(failures)] = False

    def undone(self, why: AyniError) -> dict[int, Failure]:
        """Returns every block that is not whole: why by itself, or else because of `why`."""
        rest = Failure.of(why)
        return {index: self.failures.get(index, rest) for index in self._arrivals.missing()}
