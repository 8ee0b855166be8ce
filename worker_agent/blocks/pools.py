"""Host memory that peers on the same host can be lent.  [shell]

A pool is one piece of shared memory for all allocations of a layout, and a small one for its control; see
`pool_control`. Who writes blocks of a pool says so before and after, whatever it writes them with. Where the system
can't share memory a pool is ordinary memory, and there is nothing to lend.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import StorageKind
from ayni.shm.memory import can_share, map_shared, share
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.pool_control import PoolControl, control_bytes

_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFiles:
    """What a reader of a pool is given."""

    data_fd: int
    control_fd: int
    start: int
    """Where the first allocation begins in the data, in bytes."""


class PoolMemory(HostMemory):
    """The bytes of a layout in memory that can be lent to peers."""

    def __init__(self, geometry: Geometry) -> None:
        """Sets the memory aside, zeroed. Blocks the calling thread.

        Raises:
            TooLarge: so much memory is not available.
            StorageFailed: the system refuses.
        """
        self.files: PoolFiles | None = None
        """What a reader needs, until the pool is closed; None where memory can't be shared."""
        if can_share():
            buffers, control = self._share(geometry)
        else:
            buffers = allocate_host(geometry).buffers
            control = np.zeros(control_bytes(geometry.config.num_blocks), np.uint8)
        self.control = PoolControl(control)
        super().__init__(geometry, buffers, StorageKind.SYSTEM)

    def begin_write(self, blocks: Ids) -> None:
        """Says that blocks are being written from now on: what peers copy of them counts as failed."""
        self.control.begin_write(blocks)

    def end_write(self, blocks: Ids) -> None:
        """Says that no byte of the blocks changes any more, whether they were written or not."""
        self.control.end_write(blocks)

    def close(self) -> None:
        """Lends the pool no more and drops it; a second call does nothing. Peers keep what they have mapped."""
        self.control.withdraw()
        super().close()
        files, self.files = self.files, None
        if files is not None:
            os.close(files.data_fd)
            os.close(files.control_fd)

    def _share(self, geometry: Geometry) -> tuple[Sequence[Bytes], Bytes]:
        alignment = max(_PAGE_BYTES, geometry.config.alignment_bytes)
        with contextlib.ExitStack() as on_failure:
            # Memory begins at a page; what is aligned to more needs room to move up.
            data = share("ayni-blocks", _span(geometry) + alignment - _PAGE_BYTES)
            on_failure.callback(os.close, data.fd)
            control = share("ayni-block-control", control_bytes(geometry.config.num_blocks))
            on_failure.pop_all()
        start = -data.bytes.ctypes.data % alignment
        self.files = PoolFiles(data_fd=data.fd, control_fd=control.fd, start=start)
        return _split(geometry, data.bytes, start), control.bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedPool:
    """A peer's pool, read-only."""

    memory: HostMemory
    control: PoolControl

    def close(self) -> None:
        """Unmaps it; nobody reads it any more."""
        self.memory.close()
        self.control.close()


def map_pool(geometry: Geometry, files: PoolFiles, peer: str) -> MappedPool:
    """Maps a peer's pool, with all of its pages. Blocks the calling thread for about 0.1 s a GiB.

    Args:
        geometry: the layout, as its owner described it.
        files: descriptors of it; the caller closes them.
        peer: its name, for errors.

    Raises:
        PeerLost: the memory is not what it should be.
    """
    data = map_shared(files.data_fd, files.start + _span(geometry), peer)
    control = map_shared(files.control_fd, control_bytes(geometry.config.num_blocks), peer)
    memory = HostMemory(geometry, _split(geometry, data, files.start))
    return MappedPool(memory=memory, control=PoolControl(control))


def _step(geometry: Geometry) -> int:
    """Returns the bytes from the start of one allocation to the next one's; all are equally long."""
    alignment = max(_PAGE_BYTES, geometry.config.alignment_bytes)
    return -(-geometry.bytes_of_each // alignment) * alignment


def _span(geometry: Geometry) -> int:
    return geometry.num_allocations * _step(geometry)


def _split(geometry: Geometry, data: Bytes, start: int) -> list[Bytes]:
    step, size = _step(geometry), geometry.bytes_of_each
    return [data[start + i * step : start + i * step + size] for i in range(geometry.num_allocations)]
