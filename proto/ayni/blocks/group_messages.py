"""Configuration and connection of a worker, as messages and back.  [shell]"""

from ayni.blocks.calls import Connect
from ayni.blocks.layout_messages import MAX_NAME, remote_layout_message, remote_layout_of
from ayni.blocks.layouts import LayoutKind, Tier
from ayni.blocks.messages import (
    AXIS_ORDERS,
    LAYOUT_KINDS,
    MODES,
    TIERS,
    check_unique,
    each,
    epoch_of,
    field,
    handle_message,
    handle_of,
    instance_id_of,
    optional_field,
    seconds_of,
    text_of,
)
from ayni.blocks.metadata import Configured, GroupConfig, Imported, LayoutRequest, RemoteLayout
from ayni.blocks.metadata_messages import metadata_message, metadata_of
from ayni.blocks.objects import ObjectStoreConfig
from ayni.errors import BadRequest
from ayni.messages import duration
from ayni.v1 import worker_pb2 as pb

MAX_TEXT = 1024
STORE_KINDS = ("file", "s3", "gcs", "azure")

_DEFAULT_STORE = ObjectStoreConfig(kind="file", bucket="")


def config_of(message: pb.ConfigureLayoutsRequest) -> GroupConfig:
    """Returns the configuration of one worker.

    Raises:
        BadRequest: a field breaks its rule.
    """
    if message.rank >= message.world_size:
        raise BadRequest(f"rank {message.rank} of {message.world_size} workers is impossible", field="rank")
    layouts = each("layouts", message.layouts, _layout_of)
    check_unique("layouts", ((layout.tier.value, layout.resource_id) for layout in layouts))
    return GroupConfig(
        epoch=epoch_of(message.epoch),
        instance_id=instance_id_of(message.instance_id),
        rank=message.rank,
        world_size=message.world_size,
        mode=MODES.of(message.mode, "mode"),
        layouts=layouts,
        disk_folder=_folder_of(message.disk_folder),
        object_store=optional_field(message, "object_store", _store_of),
    )


def config_message(config: GroupConfig) -> pb.ConfigureLayoutsRequest:
    """Returns the configuration of one worker as a message."""
    return pb.ConfigureLayoutsRequest(
        epoch=config.epoch,
        instance_id=config.instance_id,
        rank=config.rank,
        world_size=config.world_size,
        mode=MODES.number(config.mode),
        layouts=map(_layout_message, config.layouts),
        disk_folder=config.disk_folder,
        object_store=_store_message(config.object_store) if config.object_store else None,
    )


def configured_of(message: pb.ConfigureLayoutsResponse) -> Configured:
    """Returns the answer of one worker to its configuration."""
    metadata = field(message, "metadata", metadata_of)
    return Configured(metadata=(metadata,), disk_recovered=message.disk_recovered)


def configured_message(configured: Configured) -> pb.ConfigureLayoutsResponse:
    """Returns the answer of one worker to its configuration as a message."""
    (metadata,) = configured.metadata
    return pb.ConfigureLayoutsResponse(metadata=metadata_message(metadata), disk_recovered=configured.disk_recovered)


def imported_of(message: pb.ImportMetadataResponse) -> Imported:
    """Returns the answer to an import."""
    return Imported(layouts=tuple(map(handle_of, message.layouts)), engine=text_of(message.engine, "engine", MAX_NAME))


def imported_message(imported: Imported) -> pb.ImportMetadataResponse:
    """Returns the answer to an import as a message."""
    return pb.ImportMetadataResponse(layouts=map(handle_message, imported.layouts), engine=imported.engine)


def group_of(message: pb.DisconnectRemoteRequest | pb.HasRemoteMetadataRequest) -> str:
    """Returns which group is meant."""
    return instance_id_of(message.instance_id)


def connect_of(message: pb.ConnectRemoteRequest) -> Connect:
    """Returns whom to connect with.

    Raises:
        BadRequest: no rank is given, or one twice, or one of another group or epoch.
    """
    asked = Connect(
        instance_id=instance_id_of(message.instance_id),
        metadata=each("ranks", message.ranks, metadata_of),
        engines=each("engines", message.engines, lambda name: text_of(name, "name", MAX_NAME, required=True)),
    )
    if not asked.metadata:
        raise BadRequest(f"at least one rank of group {asked.instance_id} is needed", field="ranks")
    check_unique("ranks", (f"rank {one.rank}" for one in asked.metadata))
    for place, one in enumerate(asked.metadata):
        if (one.instance_id, one.epoch) != (asked.instance_id, message.remote_epoch):
            raise BadRequest(
                f"rank {one.rank} belongs to group {one.instance_id} and epoch {one.epoch}, not to "
                f"{asked.instance_id} and {message.remote_epoch}; export all ranks again",
                field=f"ranks[{place}]",
            )
    return asked


def connect_message(asked: Connect, epoch: int) -> pb.ConnectRemoteRequest:
    """Returns whom to connect with, as a message of the caller's epoch."""
    return pb.ConnectRemoteRequest(
        epoch=epoch,
        instance_id=asked.instance_id,
        remote_epoch=asked.metadata[0].epoch if asked.metadata else 0,
        ranks=map(metadata_message, asked.metadata),
        engines=asked.engines,
    )


def connected_of(message: pb.ConnectRemoteResponse) -> tuple[RemoteLayout, ...]:
    """Returns what a worker remembers of a group."""
    return each("layouts", message.layouts, remote_layout_of)


def connected_message(layouts: tuple[RemoteLayout, ...]) -> pb.ConnectRemoteResponse:
    """Returns what a worker remembers of a group as a message."""
    return pb.ConnectRemoteResponse(layouts=map(remote_layout_message, layouts))


def _layout_of(message: pb.LayoutRequest) -> LayoutRequest:
    tier = TIERS.of(message.tier, "tier")
    if tier not in (Tier.HOST, Tier.DISK):
        raise BadRequest(f"a {tier.value} layout can't be created; only HOST and DISK can", field="tier")
    if not message.num_blocks:
        raise BadRequest("num_blocks must be at least 1", field="num_blocks")
    return LayoutRequest(
        tier=tier,
        num_blocks=message.num_blocks,
        resource_id=message.resource_id,
        kind=LAYOUT_KINDS.or_none(message.kind, "kind") or LayoutKind.FULLY_CONTIGUOUS,
        axis_order=AXIS_ORDERS.or_none(message.axis_order, "axis_order"),
    )


def _layout_message(request: LayoutRequest) -> pb.LayoutRequest:
    return pb.LayoutRequest(
        tier=TIERS.number(request.tier),
        num_blocks=request.num_blocks,
        resource_id=request.resource_id,
        kind=LAYOUT_KINDS.number(request.kind),
        axis_order=AXIS_ORDERS.number(request.axis_order),
    )


def _folder_of(text: str, field: str = "disk_folder") -> str:
    text_of(text, field, MAX_TEXT)
    if text.startswith("/") or ".." in text.split("/"):
        raise BadRequest(f"{text!r} must stay below the worker's root: no leading slash, no '..'", field=field)
    return text


def _store_of(message: pb.ObjectStore) -> ObjectStoreConfig:
    if message.kind not in STORE_KINDS:
        raise BadRequest(f"{message.kind[:64]!r} is none of {', '.join(STORE_KINDS)}", field="kind")
    timeout_s = optional_field(message, "request_timeout", seconds_of)
    return ObjectStoreConfig(
        kind=message.kind,
        bucket=_folder_of(message.bucket, "bucket"),
        prefix=text_of(message.prefix, "prefix", MAX_TEXT),
        endpoint=text_of(message.endpoint, "endpoint", MAX_TEXT),
        region=text_of(message.region, "region", MAX_NAME),
        path_style=message.path_style,
        max_requests=message.max_requests or _DEFAULT_STORE.max_requests,
        request_timeout_s=_DEFAULT_STORE.request_timeout_s if timeout_s is None else timeout_s,
    )


def _store_message(store: ObjectStoreConfig) -> pb.ObjectStore:
    return pb.ObjectStore(
        kind=store.kind,
        bucket=store.bucket,
        prefix=store.prefix,
        endpoint=store.endpoint,
        region=store.region,
        path_style=store.path_style,
        max_requests=store.max_requests,
        request_timeout=duration(store.request_timeout_s),
    )
