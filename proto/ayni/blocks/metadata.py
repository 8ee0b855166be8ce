"""What workers tell one another about themselves, and what a leader adds.  [core]"""

from dataclasses import dataclass, field
from enum import Enum

from ayni.blocks.layouts import Axis, AxisOrder, LayoutDescriptor, LayoutHandle, LayoutKind, Tier
from ayni.blocks.objects import ObjectStoreConfig


class ParallelismMode(Enum):
    """How the ranks of a group share one model."""

    TENSOR_PARALLEL = "tensor_parallel"
    """Each rank holds its slice of the heads of every block."""
    REPLICATED_DATA = "replicated_data"
    """Each rank holds every block whole; puts are divided among the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismDescriptor:
    """Which part of a model a rank holds. Stamped by the leader: a worker does not know it."""

    tp_size: int
    pp_size: int = 1
    rank: int
    shard_axis: Axis = Axis.HEAD_COUNT
    global_extents: tuple[tuple[Axis, int], ...]
    """Undivided size of every axis but BLOCK, in order of axis name."""
    layer_start: int = 0
    layer_stop: int
    """One past the last layer that the rank holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceParallelism:
    """Which part of one resource a rank holds."""

    resource_id: int
    parallelism: ParallelismDescriptor


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineExport:
    """Offers one way to reach a worker's memory."""

    name: str
    version: int
    data: bytes
    """The engine's own; opaque to everybody else."""
    crc32: int
    """CRC-32 (ISO-HDLC) of `data`; checked before an engine reads it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMetadata:
    """What one worker tells another about itself."""

    instance_id: str
    """UUID of its group, 36 lower-case characters."""
    epoch: int
    rank: int
    owner_id: int
    """Owner id of all its layout handles."""
    incarnation: int
    """Random number of the process start, 64 bits."""
    address: str
    """Where its WorkerService listens, as host:port; empty when nobody can dial it."""
    layouts: tuple[LayoutDescriptor, ...] = ()
    """In order of resource and then of tier."""
    engines: tuple[EngineExport, ...] = ()
    """Ways to reach it, best first."""
    parallelism: ParallelismDescriptor | None = None
    """Of the primary resource; None before a leader stamped it."""
    resources: tuple[ResourceParallelism, ...] = ()
    """Of all resources, in order; empty when there is only the primary one."""
    mode: ParallelismMode | None = None
    """How its group shares the model; None: not said, which means tensor parallel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """Answer to an import."""

    layouts: tuple[LayoutHandle, ...]
    """In the order of the metadata."""
    engine: str
    """Engine that transfers with this worker will use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteLayout:
    """One entry of the map from (instance, remote rank, resource, tier) to layout handle."""

    remote_rank: int
    resource_id: int
    tier: Tier
    layout: LayoutHandle
    engine: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteState:
    """Whether a remote group is connected, that is, whether a transfer with it would be accepted now."""

    connected: bool
    remote_epoch: int = 0
    layouts: tuple[RemoteLayout, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRequest:
    """Asks for one layout in a lower tier, with the block shape of the resource's device layout."""

    tier: Tier
    """HOST or DISK."""
    num_blocks: int
    resource_id: int = 0
    kind: LayoutKind = LayoutKind.FULLY_CONTIGUOUS
    axis_order: AxisOrder | None = None
    """None: that of the device layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """Configures one worker of a group: its place, its lower tiers, its object store."""

    epoch: int
    instance_id: str
    rank: int
    world_size: int
    mode: ParallelismMode = ParallelismMode.TENSOR_PARALLEL
    layouts: tuple[LayoutRequest, ...] = ()
    disk_folder: str = ""
    """Relative to the root that the worker was started with."""
    object_store: ObjectStoreConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Configured:
    """Answer to a configuration."""

    metadata: tuple[WorkerMetadata, ...] = field(default=())
    """One for each rank, in rank order."""
    disk_recovered: bool = False
    """Whether earlier blocks of the disk layouts were found valid, on every rank that has some."""
