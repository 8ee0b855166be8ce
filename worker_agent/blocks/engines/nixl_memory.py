"""Memory of a layout as NIXL sees it: addresses.  [shell]"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ayni.blocks.layouts import StorageKind
from worker_agent.blocks.engines.nixl_envelope import Regions
from worker_agent.blocks.memory import Memory
from worker_agent.blocks.plan import HOST


@dataclass(frozen=True, slots=True)
class Addressed:
    """Memory with addresses. As long as this is held the memory stays where it is, even when the layout is closed."""

    regions: Regions
    buffers: Sequence[Any]


def addressed(memory: Memory) -> Addressed | None:
    """Returns the addresses of a layout; None where it has none, as on a disk."""
    buffers: Sequence[Any] | None = getattr(memory, "buffers", None)
    if not buffers or memory.storage not in {*HOST, StorageKind.DEVICE}:
        return None
    if memory.storage is StorageKind.DEVICE:
        ordinal = int(buffers[0].device.index or 0)
        allocations = tuple((int(buffer.data_ptr()), int(buffer.nbytes)) for buffer in buffers)
        return Addressed(Regions(is_device=True, ordinal=ordinal, allocations=allocations), buffers)
    allocations = tuple((int(buffer.ctypes.data), int(buffer.nbytes)) for buffer in buffers)
    return Addressed(Regions(is_device=False, allocations=allocations), buffers)
