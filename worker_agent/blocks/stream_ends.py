"""Where a stream's bytes come from and go to: parts of blocks in some memory.  [shell]

Copies: a source hands out views of host memory, which the joined frame copies once; a sink copies from the frame into
the block. Where the bytes are not in host memory, are not together, or change their order, there is one copy more,
made in a thread. A thread that has begun is waited for, even by a task that is cancelled: afterwards no byte can land.

Legend: N blocks of a run, P bytes of a part of one block.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder
from ayni.blocks.transfers import Failure
from ayni.errors import StorageFailed
from ayni.frames import Buffer
from worker_agent.blocks.frames import MAX_CHUNK_BYTES
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Bytes, Memory, Part
from worker_agent.blocks.plan import HOST
from worker_agent.blocks.stream_order import Run, reorder

MOST_RUNS = 1024
"""Runs of bytes of one chunk that are copied on the event loop; more of them go through a thread."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def in_thread(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Runs a function in a thread and returns only when it has ended, even when cancelled meanwhile."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                continue
        work.exception()
        raise


class _End:
    """A part of some blocks, and the order that its bytes have on the wire."""

    def __init__(self, memory: Memory, blocks: Ids, part: Part, wire_order: AxisOrder) -> None:
        self._memory, self._blocks, self._part = memory, blocks, part
        self._order = part.axis_order or memory.geometry.axis_order
        self._wire_order = wire_order
        self._is_straight = wire_order is self._order
        self._num_runs = _num_runs(memory.geometry, part, self._order)
        self._is_host = self._is_straight and memory.storage in HOST
        self._rows_BP = memory.rows(part) if self._is_host and self._num_runs == 1 else None
        self._block_bytes = memory.geometry.part_bytes(part.layers, part.slice, part.axis_order)
        self._staged_P: Bytes | None = None

    def _is_scattered(self, run: Run) -> bool:
        """Says whether the bytes of a run lie in too many pieces for the event loop."""
        return not self._is_host or run.count * self._num_runs > MOST_RUNS

    def _ids(self, run: Run) -> Ids:
        return self._blocks[run.index : run.index + run.count]


class Source(_End):
    """Bytes of blocks to send."""

    _listed: tuple[int, list[memoryview]] = (-1, [])
    """The block whose views were listed last, and those."""

    async def payload(self, run: Run) -> list[Buffer]:
        """Returns the bytes of a run, in pieces; they are good until the next call.

        Raises:
            StorageFailed: they can't be read.
        """
        if self._rows_BP is not None:
            rows_BP, start, stop = self._rows_BP, run.offset, run.offset + run.length // run.count
            return [rows_BP[block, start:stop].data for block in self._ids(run).tolist()]
        if not self._is_scattered(run):
            return [view for block in self._ids(run).tolist() for view in self._views(block, run)]
        if run.length == run.count * self._block_bytes:
            return [(await in_thread(self._read, self._ids(run))).reshape(-1).data]
        if run.offset == 0 or self._staged_P is None:
            self._staged_P = (await in_thread(self._read, self._ids(run)))[0]
        return [self._staged_P[run.offset : run.offset + run.length].data]

    def _views(self, block: int, run: Run) -> list[memoryview]:
        if self._listed[0] != block:
            listed = self._memory.views(block, self._part)
            assert listed is not None
            self._listed = block, listed
        views = self._listed[1]
        return views if run.length >= self._block_bytes else _between(views, run.offset, run.offset + run.length)

    def _read(self, blocks: Ids) -> Bytes:
        out_NP = np.empty((len(blocks), self._block_bytes), np.uint8)
        self._memory.read(blocks, self._part, out_NP)
        if self._is_straight:
            return out_NP
        return reorder(out_NP, self._memory.geometry, self._part, self._order, self._wire_order)


class Sink(_End):
    """Blocks that receive bytes."""

    async def place(self, run: Run, data: memoryview) -> dict[int, Failure]:
        """Writes the bytes of a run; returns which blocks could not be written, by place in the list, and why."""
        data_NP = np.frombuffer(data, np.uint8).reshape(run.count, -1)
        if self._rows_BP is not None:
            rows_BP, start, stop = self._rows_BP, run.offset, run.offset + data_NP.shape[1]
            for block, data_P in zip(self._ids(run).tolist(), data_NP, strict=True):
                rows_BP[block, start:stop] = data_P
            return {}
        if data_NP.shape[1] == self._block_bytes:
            return await self._write_or_name(run, data_NP)
        return await self._stage(run, data_NP[0])

    async def _stage(self, run: Run, data: Bytes) -> dict[int, Failure]:
        """Collects a block that comes in several chunks."""
        if self._staged_P is None:
            self._staged_P = np.empty(self._block_bytes, np.uint8)
        stop = run.offset + run.length
        self._staged_P[run.offset : stop] = data
        if stop < self._block_bytes:
            return {}
        return await self._write_or_name(run, self._staged_P[np.newaxis])

    async def _write_or_name(self, run: Run, data_NP: Bytes) -> dict[int, Failure]:
        try:
            await self._write(run, data_NP)
        except StorageFailed as error:
            if run.count == 1:
                return {run.index: Failure.of(error)}
            failures: dict[int, Failure] = {}
            for single, data_P in zip(run.singles(), data_NP, strict=True):
                failures |= await self._write_or_name(single, data_P[np.newaxis])
            return failures
        return {}

    async def _write(self, run: Run, data_NP: Bytes) -> None:
        if self._is_scattered(run) or data_NP.nbytes > MAX_CHUNK_BYTES:
            await in_thread(self._reorder_and_write, self._ids(run), data_NP)
        else:
            self._memory.write(self._ids(run), self._part, data_NP)

    def _reorder_and_write(self, blocks: Ids, data_NP: Bytes) -> None:
        if not self._is_straight:
            data_NP = reorder(data_NP, self._memory.geometry, self._part, self._wire_order, self._order)
        self._memory.write(blocks, self._part, data_NP)


def _num_runs(geometry: Geometry, part: Part, order: AxisOrder) -> int:
    """Returns into how many runs of bytes a part of one block falls, without listing them."""
    views = geometry.strided(part.layers, part.slice, part.axis_order)
    return sum(_runs_of(*view.nested(order)) for view in views)


def _runs_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    length, num_runs = 1, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if num_runs == 1 and (size == 1 or stride == length):
            length *= size
        else:
            num_runs *= size
    return num_runs


def _between(views: list[memoryview], start: int, stop: int) -> list[memoryview]:
    """Returns bytes `start` to `stop` of a string that is in pieces."""
    result, place = [], 0
    for view in views:
        first, last = max(start - place, 0), min(stop - place, len(view))
        if first < last:
            result.append(view[first:last])
        place += len(view)
    return result
