"""What a move through NIXL consists of: straight from memory to memory, or through a buffer.  [shell]

A buffer is needed where local memory has no addresses, as on a disk, and where the axes change their order. It holds
strings in the order that the peer's blocks have. Everything here runs on the agent's thread.

Legend: N blocks of a request, P bytes of a part.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder
from ayni.blocks.transfers import Failure
from ayni.errors import StorageFailed
from worker_agent.blocks.engine import Move
from worker_agent.blocks.engines.nixl_descriptors import Copies, side_of, strings_of
from worker_agent.blocks.engines.nixl_envelope import Regions
from worker_agent.blocks.engines.nixl_requests import Batch
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.stream_order import check_reorder, reorder

BUFFER_BYTES = 16 << 20


def orders_of(move: Move) -> tuple[AxisOrder, AxisOrder]:
    """Returns the orders that the remote and the local bytes of a move have, or are taken to have."""
    return (
        move.remote_part.axis_order or move.remote.axis_order,
        move.local_part.axis_order or move.local.geometry.axis_order,
    )


class Straight:
    """Batches that need no buffer."""

    most_under_way = 2
    failures: dict[int, Failure] = {}  # noqa: RUF012 -- stays empty

    def __init__(self, move: Move, remote: Regions, local: Regions) -> None:
        """Takes a move between memories with addresses and with axes in the same order."""
        self._move, self.remote, self.local = move, remote, local
        self._copies = Copies(
            side_of(geometry_of(move), move.remote_part, remote),
            side_of(move.local.geometry, move.local_part, local),
        )

    def places(self) -> Sequence[Ids]:
        """Returns which pairs go with each request."""
        return _divided(len(self._move.local_blocks), self._copies.num_blocks)

    def begin(self, places: Ids) -> Batch:
        """Returns a request's copies."""
        return Batch(
            places=places,
            local=self._copies.local(self._move.local_blocks[places]),
            remote=self._copies.remote(self._move.remote_blocks[places]),
        )

    def end(self, batch: Batch) -> Ids:
        """Returns the places of the blocks that are done: all of them."""
        return batch.places


class Buffered:
    """Batches that pass through a buffer, one at a time."""

    most_under_way = 1

    def __init__(self, move: Move, remote: Regions, is_pull: bool) -> None:
        """Takes any move.

        Raises:
            IncompatibleLayout: the order can't be changed.
        """
        self._move, self.remote, self._is_pull = move, remote, is_pull
        self._remote_order, self._local_order = orders_of(move)
        check_reorder(move.local.geometry, self._remote_order, self._local_order)
        part = move.local_part
        self._block_bytes = move.local.geometry.part_bytes(part.layers, part.slice, part.axis_order)
        self._num_blocks = max(1, BUFFER_BYTES // self._block_bytes)
        self.buffer = np.empty((min(self._num_blocks, len(move.local_blocks)), self._block_bytes), np.uint8)
        """To be registered before the first batch begins."""
        self.local = Regions(is_device=False, allocations=((self.buffer.ctypes.data, self.buffer.nbytes),))
        self._copies = Copies(
            side_of(geometry_of(move), move.remote_part, remote), strings_of(self._block_bytes, self.local)
        )
        self.failures: dict[int, Failure] = {}

    def places(self) -> Sequence[Ids]:
        """Returns which pairs go with each request."""
        return _divided(len(self._move.local_blocks), min(self._num_blocks, self._copies.num_blocks))

    def begin(self, places: Ids) -> Batch:
        """Returns a request's copies; for a push, of the blocks that could be read."""
        if not self._is_pull:
            places = self._fill(places)
        return Batch(
            places=places,
            local=self._copies.local(np.arange(len(places))),
            remote=self._copies.remote(self._move.remote_blocks[places]),
        )

    def end(self, batch: Batch) -> Ids:
        """Returns the places of the blocks that are done; for a pull, of those that could be written."""
        return self._empty(batch.places) if self._is_pull else batch.places

    def _fill(self, places: Ids) -> Ids:
        try:
            self._read(places, self.buffer[: len(places)])
            return places
        except StorageFailed:
            return self._one_by_one(places, lambda place, row, _: self._read(place, row))

    def _empty(self, places: Ids) -> Ids:
        try:
            self._write(places, self.buffer[: len(places)])
            return places
        except StorageFailed:
            return self._one_by_one(places, lambda place, _, row: self._write(place, row))

    def _one_by_one(self, places: Ids, copy: Callable[[Ids, Bytes, Bytes], None]) -> Ids:
        """Copies blocks one by one, given the next free row of the buffer and their own; returns those that work."""
        good: list[int] = []
        for index, place in enumerate(places.tolist()):
            free, own = len(good), index
            try:
                copy(np.array([place]), self.buffer[free : free + 1], self.buffer[own : own + 1])
                good.append(place)
            except StorageFailed as error:
                self.failures[place] = Failure.of(error)
        return np.array(good, np.int64)

    def _read(self, places: Ids, rows: Bytes) -> None:
        move = self._move
        move.local.read(move.local_blocks[places], move.local_part, rows)
        if self._remote_order is not self._local_order:
            rows[:] = reorder(rows, move.local.geometry, move.local_part, self._local_order, self._remote_order)

    def _write(self, places: Ids, rows: Bytes) -> None:
        move = self._move
        if self._remote_order is not self._local_order:
            rows = reorder(rows, move.local.geometry, move.local_part, self._remote_order, self._local_order)
        move.local.write(move.local_blocks[places], move.local_part, rows)


def geometry_of(move: Move) -> Geometry:
    """Returns the remote layout's geometry."""
    return Geometry(config=move.remote.config, kind=move.remote.kind, axis_order=move.remote.axis_order)


def _divided(total: int, step: int) -> list[Ids]:
    return [np.arange(start, min(start + step, total)) for start in range(0, total, step)]
