"""Layouts in the memory of an accelerator, through torch.  [shell]

Parts are gathered and put in order on the device, so that bytes cross to the host once and in one piece. Copies: `read`
and `write` make two, one of them on the device.

Whoever starts a transfer has waited for the kernels that write its source blocks; the copies themselves are done when
a method returns.

Legend: N ids, P bytes of a part.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder, StorageKind
from ayni.errors import BadRequest
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import check_sizes
from worker_agent.blocks.memory import Bytes, Part
from worker_agent.blocks.pairs import from_string, to_string
from worker_agent.blocks.tensor_copy import copy_blocks, wait

if TYPE_CHECKING:
    # Loaded by whoever has tensors: workers without an accelerator start without it.
    import torch


class DeviceMemory:
    """The bytes of a layout on a device; see `worker_agent.blocks.memory.Memory`."""

    storage = StorageKind.DEVICE

    def __init__(self, geometry: Geometry, buffers: "Sequence[torch.Tensor]", keep: object = None) -> None:
        """Takes memory that is there.

        Args:
            geometry: the layout.
            buffers: its allocations: flat tensors of bytes, on one device.
            keep: what owns the memory; is kept until the layout is closed.

        Raises:
            BadRequest: there are too few or too many buffers, one is too small, or they are on several devices.
        """
        check_sizes(geometry, [buffer.nbytes for buffer in buffers])
        devices = {buffer.device for buffer in buffers}
        if len(devices) != 1:
            raise BadRequest(f"a layout lies on one device; these buffers are on {sorted(map(str, devices))}")
        self.geometry = geometry
        self.buffers = tuple(buffers)
        """The allocations."""
        self.device = devices.pop()
        self._keep = keep

    def rows(self, part: Part) -> Bytes | None:
        """Returns None: nothing of it is in host memory."""
        return None

    def views(self, block: int, part: Part) -> list[memoryview] | None:
        """Returns None: nothing of it is in host memory."""
        return None

    def read(self, blocks: Ids, part: Part, out: Bytes, order: AxisOrder | None = None) -> None:
        """Copies parts of blocks out; see `Memory.read`.

        Args:
            blocks: shape [N].
            part: what of each block.
            out: shape [N, P], contiguous.
            order: order of the axes in `out`; None: that of the part.
        """
        import torch

        pairs = to_string(self.geometry, part, order or part.axis_order or self.geometry.axis_order)
        strings = torch.empty(out.size, dtype=torch.uint8, device=self.device)
        copy_blocks(pairs, self.buffers, [strings], blocks, np.arange(len(blocks)))
        torch.from_numpy(out.reshape(-1)).copy_(strings)

    def write(self, blocks: Ids, part: Part, data: Bytes, order: AxisOrder | None = None) -> None:
        """Copies parts of blocks in; otherwise as `read`."""
        import torch

        pairs = from_string(self.geometry, part, order or part.axis_order or self.geometry.axis_order)
        strings = torch.from_numpy(_writable(data.reshape(-1))).to(self.device)
        copy_blocks(pairs, [strings], self.buffers, np.arange(len(blocks)), blocks)
        wait(self.device)

    def close(self) -> None:
        """Drops the memory."""
        self.buffers = ()
        self._keep = None


def _writable(data: Bytes) -> Bytes:
    """Returns the same bytes as an array that torch takes without a warning; nobody writes through it."""
    if data.flags.writeable or not data.size:
        return data
    interface = {**data.__array_interface__, "data": (data.ctypes.data, False)}
    holder = type("Holder", (), {"__array_interface__": interface, "owner": data})()
    return np.asarray(holder)
