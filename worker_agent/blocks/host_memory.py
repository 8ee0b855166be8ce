"""Layouts in host memory: views and copies of any part of any block.  [shell]

Copies: `read` and `write` make one, `rows` and `views` none.

Legend: B blocks, N ids, P bytes of a part.
"""

from collections.abc import Sequence

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder, StorageKind
from ayni.errors import BadRequest
from worker_agent.blocks.array_copy import copy_blocks
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Bytes, Part
from worker_agent.blocks.pairs import from_string, to_string
from worker_agent.blocks.plan import chunk_table


class HostMemory:
    """The bytes of a layout in this process; see `worker_agent.blocks.memory.Memory`."""

    def __init__(
        self,
        geometry: Geometry,
        buffers: Sequence[Bytes],
        storage: StorageKind = StorageKind.SYSTEM,
        keep: object = None,
    ) -> None:
        """Takes memory that is there.

        Args:
            geometry: the layout.
            buffers: its allocations, flat; they may be larger than needed.
            storage: SYSTEM or PINNED.
            keep: what owns the memory; is kept until the layout is closed.

        Raises:
            BadRequest: there are too few or too many buffers, or one is too small.
        """
        check_sizes(geometry, [buffer.nbytes for buffer in buffers])
        self.geometry = geometry
        self.storage = storage
        self.buffers = tuple(buffers)
        """The allocations."""
        self._keep = keep
        self._memoryviews = tuple(buffer.data for buffer in buffers)

    def rows(self, part: Part) -> Bytes | None:
        """Returns a view, shape [B, P], where each block's part is one run of bytes."""
        table = chunk_table(self.geometry, 0, part.layers, part.slice, part.axis_order)
        if len(table) != 1:
            return None
        allocation, offset, length = table[0].tolist()
        shape = (self.geometry.config.num_blocks, length)
        strides = (self.geometry.block_stride, 1)
        return np.ndarray(shape, np.uint8, self.buffers[allocation], offset, strides)

    def views(self, block: int, part: Part) -> list[memoryview]:
        """Returns a block's part as runs of bytes, in order."""
        table = chunk_table(self.geometry, block, part.layers, part.slice, part.axis_order)
        return [
            self._memoryviews[allocation][offset : offset + length] for allocation, offset, length in table.tolist()
        ]

    def read(self, blocks: Ids, part: Part, out: Bytes, order: AxisOrder | None = None) -> None:
        """Copies parts of blocks out; see `Memory.read`.

        Args:
            blocks: shape [N].
            part: what of each block.
            out: shape [N, P], contiguous.
            order: order of the axes in `out`; None: that of the part.
        """
        pairs = to_string(self.geometry, part, order or part.axis_order or self.geometry.axis_order)
        copy_blocks(pairs, self.buffers, [out.reshape(-1)], blocks, np.arange(len(blocks)))

    def write(self, blocks: Ids, part: Part, data: Bytes, order: AxisOrder | None = None) -> None:
        """Copies parts of blocks in; otherwise as `read`."""
        pairs = from_string(self.geometry, part, order or part.axis_order or self.geometry.axis_order)
        copy_blocks(pairs, [data.reshape(-1)], self.buffers, np.arange(len(blocks)), blocks)

    def close(self) -> None:
        """Drops the memory; views that were handed out keep theirs."""
        self.buffers = ()
        self._memoryviews = ()
        self._keep = None


def check_sizes(geometry: Geometry, sizes: Sequence[int]) -> None:
    """Refuses allocations that a layout does not fit into.

    Raises:
        BadRequest: names how many or how large they have to be, and are.
    """
    required = geometry.allocation_bytes
    if len(sizes) != len(required):
        message = f"a {geometry.kind.value} layout of {geometry.config.num_layers} layers needs {len(required)}"
        raise BadRequest(f"{message} allocations; got {len(sizes)}", field="allocations")
    for i, (size, least) in enumerate(zip(sizes, required, strict=True)):
        if size < least:
            raise BadRequest(f"allocation {i} needs {least} bytes; it has {size}", field="allocations")


def allocate_host(geometry: Geometry, *, pinned: bool = False) -> HostMemory:
    """Returns a layout in new memory, all zero and aligned as its configuration says.

    Args:
        geometry: the layout.
        pinned: page-locked where there is an accelerator that gains by it; pageable otherwise.
    """
    storage = StorageKind.PINNED if pinned and _can_pin() else StorageKind.SYSTEM
    alignment = geometry.config.alignment_bytes
    buffers = [new_buffer(size, alignment, pinned=pinned) for size in geometry.allocation_bytes]
    return HostMemory(geometry, buffers, storage)


def new_buffer(size: int, alignment: int = 1, *, pinned: bool = False) -> Bytes:
    """Returns new memory, flat, zero and aligned; page-locked if wanted and possible."""
    # Zeros, so that a block that nobody wrote never shows a peer what was in this memory before.
    new = _pinned_zeros if pinned and _can_pin() else _system_zeros
    buffer = new(size + alignment - 1)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + size]


def _system_zeros(size: int) -> Bytes:
    return np.zeros(size, np.uint8)


def _pinned_zeros(size: int) -> Bytes:
    # Here, because nothing else needs torch where memory is not pinned, and it takes seconds to load.
    import torch

    buffer: Bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()
    return buffer


def _can_pin() -> bool:
    import torch

    return torch.cuda.is_available()
