"""What workers tell one another about themselves, as messages and back.  [shell]

Extents are put in order of axis name, so that equal parts of a model are equal values whoever wrote them.
"""

import zlib
from itertools import pairwise

from ayni.blocks.layout_messages import (
    MAX_NAME,
    VERSION,
    check_version,
    descriptor_message,
    descriptor_of,
    remote_layout_message,
    remote_layout_of,
)
from ayni.blocks.layouts import MAX_LAYOUTS, Axis, Tier
from ayni.blocks.messages import (
    AXES,
    MODES,
    check_unique,
    each,
    epoch_of,
    field,
    instance_id_of,
    optional_field,
    text_of,
)
from ayni.blocks.metadata import (
    EngineExport,
    ParallelismDescriptor,
    RemoteState,
    ResourceParallelism,
    WorkerMetadata,
)
from ayni.endpoints import parse_address
from ayni.errors import BadRequest, Checksum, TooLarge
from ayni.settings import SettingsError
from ayni.v1 import worker_pb2 as pb

MAX_ADDRESS = 256

_TIER_ORDER = {tier: place for place, tier in enumerate(Tier)}


def parallelism_of(message: pb.ParallelismDescriptor) -> ParallelismDescriptor:
    """Returns which part of a model a rank holds; what is possible at all, not what a gate asks for."""
    for name in ("tp_size", "pp_size"):
        if not getattr(message, name):
            raise BadRequest(f"{name} must be at least 1", field=name)
    if message.rank >= message.tp_size * message.pp_size:
        raise BadRequest(f"rank {message.rank} of {message.tp_size * message.pp_size} is impossible", field="rank")
    if message.layer_start >= message.layer_stop:
        layers = f"{message.layer_start}..{message.layer_stop}"
        raise BadRequest(f"the layers {layers} are empty or reversed", field="layer_stop")
    extents = each("global_extents", message.global_extents, _extent_of)
    check_unique("global_extents", (axis for axis, _ in extents))
    return ParallelismDescriptor(
        tp_size=message.tp_size,
        pp_size=message.pp_size,
        rank=message.rank,
        shard_axis=AXES.of(message.shard_axis, "shard_axis"),
        global_extents=tuple(sorted(extents, key=lambda extent: extent[0].name)),
        layer_start=message.layer_start,
        layer_stop=message.layer_stop,
    )


def parallelism_message(part: ParallelismDescriptor) -> pb.ParallelismDescriptor:
    """Returns which part of a model a rank holds, as a message."""
    return pb.ParallelismDescriptor(
        tp_size=part.tp_size,
        pp_size=part.pp_size,
        rank=part.rank,
        shard_axis=AXES.number(part.shard_axis),
        global_extents=[pb.AxisExtent(axis=AXES.number(axis), size=size) for axis, size in part.global_extents],
        layer_start=part.layer_start,
        layer_stop=part.layer_stop,
    )


def engine_of(message: pb.EngineExport) -> EngineExport:
    """Returns the offer of an engine.

    Raises:
        Checksum: its data are not those that were sent.
    """
    name = text_of(message.name, "name", MAX_NAME, required=True)
    crc32 = zlib.crc32(message.data)
    if crc32 != message.crc32:
        raise Checksum(
            f"the export of engine {name} has the CRC-32 {crc32:08x}, not {message.crc32:08x}; export it again",
            field="data",
            name=name,
            expected=f"{message.crc32:08x}",
            received=f"{crc32:08x}",
        )
    return EngineExport(name=name, version=message.version, data=message.data, crc32=message.crc32)


def engine_message(export: EngineExport) -> pb.EngineExport:
    """Returns the offer of an engine as a message."""
    return pb.EngineExport(name=export.name, version=export.version, data=export.data, crc32=export.crc32)


def metadata_of(message: pb.WorkerMetadata) -> WorkerMetadata:
    """Returns what a worker says about itself.

    Raises:
        Incompatible: its version, or that of a layout, is another one.
        Checksum: an engine's data are damaged.
        BadRequest: a field breaks its rule, or two contradict one another.
    """
    check_version(message.version)
    metadata = WorkerMetadata(
        instance_id=instance_id_of(message.instance_id),
        epoch=epoch_of(message.epoch),
        rank=message.rank,
        owner_id=message.owner_id,
        incarnation=message.incarnation,
        address=_address_of(message.address),
        layouts=each("layouts", message.layouts, descriptor_of),
        engines=each("engines", message.engines, engine_of),
        parallelism=optional_field(message, "parallelism", parallelism_of),
        resources=each("resources", message.resources, _resource_of),
        mode=MODES.or_none(message.mode, "mode"),
    )
    _check_layouts(metadata)
    _check_resources(metadata)
    check_unique("engines", (export.name for export in metadata.engines))
    return metadata


def metadata_message(metadata: WorkerMetadata) -> pb.WorkerMetadata:
    """Returns what a worker says about itself, as a message."""
    resources = (
        pb.ResourceParallelism(resource_id=one.resource_id, parallelism=parallelism_message(one.parallelism))
        for one in metadata.resources
    )
    return pb.WorkerMetadata(
        version=VERSION,
        instance_id=metadata.instance_id,
        epoch=metadata.epoch,
        rank=metadata.rank,
        owner_id=metadata.owner_id,
        incarnation=metadata.incarnation,
        address=metadata.address,
        layouts=map(descriptor_message, metadata.layouts),
        engines=map(engine_message, metadata.engines),
        parallelism=parallelism_message(metadata.parallelism) if metadata.parallelism else None,
        resources=resources,
        mode=MODES.number(metadata.mode),
    )


def remote_state_of(message: pb.HasRemoteMetadataResponse) -> RemoteState:
    """Returns whether a group is connected."""
    return RemoteState(
        connected=message.connected,
        remote_epoch=epoch_of(message.remote_epoch, "remote_epoch"),
        layouts=each("layouts", message.layouts, remote_layout_of),
    )


def remote_state_message(state: RemoteState) -> pb.HasRemoteMetadataResponse:
    """Returns whether a group is connected, as a message."""
    return pb.HasRemoteMetadataResponse(
        connected=state.connected,
        remote_epoch=state.remote_epoch,
        layouts=map(remote_layout_message, state.layouts),
    )


def _extent_of(message: pb.AxisExtent) -> tuple[Axis, int]:
    axis = AXES.of(message.axis, "axis")
    if axis is Axis.BLOCK:
        raise BadRequest("each group has its own number of blocks, so it is no extent of the model", field="axis")
    if not message.size:
        raise BadRequest(f"the extent of {axis.value} must be at least 1", field="size")
    return axis, message.size


def _resource_of(message: pb.ResourceParallelism) -> ResourceParallelism:
    parallelism = field(message, "parallelism", parallelism_of)
    return ResourceParallelism(resource_id=message.resource_id, parallelism=parallelism)


def _address_of(text: str) -> str:
    text_of(text, "address", MAX_ADDRESS)
    try:
        if text:
            parse_address(text)
    except SettingsError as error:
        raise BadRequest(str(error), field="address") from None
    return text


def _check_layouts(metadata: WorkerMetadata) -> None:
    layouts = metadata.layouts
    if len(layouts) > MAX_LAYOUTS:
        raise TooLarge(
            f"a worker has at most {MAX_LAYOUTS} layouts", field="layouts", limit=MAX_LAYOUTS, received=len(layouts)
        )
    places = [(layout.resource_id, _TIER_ORDER[layout.tier]) for layout in layouts]
    if any(one >= other for one, other in pairwise(places)):
        raise BadRequest("layouts must come in order of resource and then of tier, each once", field="layouts")
    check_unique("layouts", (layout.handle for layout in layouts))
    for place, layout in enumerate(layouts):
        if layout.handle.owner_id != metadata.owner_id:
            raise BadRequest(
                f"layout {layout.handle} is not one of worker {metadata.owner_id:016x}",
                field=f"layouts[{place}].handle",
            )


def _check_resources(metadata: WorkerMetadata) -> None:
    own, resources = metadata.parallelism, metadata.resources
    if any(one.resource_id != place for place, one in enumerate(resources)):
        ids = ", ".join(str(one.resource_id) for one in resources[:16])
        raise BadRequest(f"resources must be 0, 1, 2, ... in order; got {ids}", field="resources")
    if resources and resources[0].parallelism != own:
        raise BadRequest("resource 0 and `parallelism` must say the same: both are the primary one", field="resources")
    for part in (*([own] if own else []), *(one.parallelism for one in resources)):
        if part.rank != metadata.rank:
            raise BadRequest(f"rank {metadata.rank} holds the part of rank {part.rank}", field="parallelism.rank")
