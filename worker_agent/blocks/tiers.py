"""Memory for a layout in each tier.  [shell]"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from ayni.blocks.layouts import LocalLayout, Tier
from ayni.errors import StorageFailed
from worker_agent.blocks.folders import folder_under
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Memory
from worker_agent.blocks.pools import PoolMemory
from worker_agent.blocks.slab import Fsync, SlabMemory, SlabOptions
from worker_agent.blocks.slab_header import SlabHeader

_log = logging.getLogger(__name__)

_CUDA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""What the driver makes: on Linux itself, and inside Windows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskPlace:
    """Where slabs lie and whose they are."""

    root: Path
    folder: str = ""
    """Below the root."""
    fsync: Fsync = Fsync.CLOSE
    instance_id: str
    rank: int
    fingerprint: str
    """Of the layout's blocks."""


def make_memory(place: LocalLayout, geometry: Geometry, disk: DiskPlace) -> Memory:
    """Returns memory of a tier, zeroed; a slab that is there already is recovered. Blocks the calling thread.

    Raises:
        TooLarge, StorageFailed: there is not enough of it.
        IncompatibleLayout: a slab that is there is of another shape.
    """
    count, size = geometry.config.num_blocks, geometry.config.total_bytes / 1e6
    _log.info("making the %s: %d block%s, %.1f MB", place, count, "s" if count != 1 else "", size)
    if place.tier is Tier.DISK:
        return _slab(place, geometry, disk)
    if has_cuda():
        return _for_cuda(place.tier, geometry)
    return PoolMemory(geometry)


def has_cuda() -> bool:
    """Says whether this machine has a CUDA device that torch can use."""
    if sys.platform == "linux" and not any(Path(name).exists() for name in _CUDA_DEVICES):
        # Without a driver there is nothing to ask torch for, which takes seconds to load.
        return False
    import torch

    return torch.cuda.is_available()


def _slab(place: LocalLayout, geometry: Geometry, disk: DiskPlace) -> SlabMemory:
    folder = folder_under(disk.root, disk.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise StorageFailed(f"the folder {folder} can't be made: {why}", place=folder, detail=why) from error
    header = SlabHeader.of(geometry, disk.fingerprint, disk.instance_id, disk.rank)
    path = folder / f"rank{disk.rank}-resource{place.resource_id}.slab"
    memory = SlabMemory(path, geometry, header, SlabOptions(fsync=disk.fsync))
    if memory.recovered:
        _log.info("the %s was recovered from %s: %d blocks hold data", place, path, len(memory.written_blocks()))
    return memory


def _for_cuda(tier: Tier, geometry: Geometry) -> Memory:
    import torch

    from worker_agent.blocks.device_memory import DeviceMemory
    from worker_agent.blocks.host_memory import allocate_host

    if tier is Tier.DEVICE:
        sizes = geometry.allocation_bytes
        return DeviceMemory(geometry, [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes])
    return allocate_host(geometry, pinned=True)
