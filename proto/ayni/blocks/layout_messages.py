"""Layouts as messages and back.  [shell]"""

from ayni.blocks.layouts import LayoutConfig, LayoutDescriptor
from ayni.blocks.messages import (
    AXIS_ORDERS,
    LAYOUT_KINDS,
    STORAGE_KINDS,
    TIERS,
    field,
    handle_message,
    handle_of,
    layout_tier_of,
    text_of,
    unnamed,
)
from ayni.blocks.metadata import RemoteLayout
from ayni.errors import Incompatible
from ayni.v1 import worker_pb2 as pb

VERSION = 1
"""Of LayoutDescriptor and of WorkerMetadata."""

MAX_NAME = 64
MAX_FINGERPRINT = 128


def config_of(message: pb.LayoutConfig) -> LayoutConfig:
    """Returns a shape; it checks itself."""
    with unnamed():
        return LayoutConfig(
            num_blocks=message.num_blocks,
            num_layers=message.num_layers,
            outer_dim=message.outer_dim,
            page_size=message.page_size,
            inner_dim=message.inner_dim,
            num_heads=message.num_heads,
            dtype_width_bytes=message.dtype_width_bytes,
            alignment_bytes=message.alignment_bytes or 1,
        )


def config_message(config: LayoutConfig) -> pb.LayoutConfig:
    """Returns a shape as a message."""
    return pb.LayoutConfig(
        num_blocks=config.num_blocks,
        num_layers=config.num_layers,
        outer_dim=config.outer_dim,
        page_size=config.page_size,
        inner_dim=config.inner_dim,
        num_heads=config.num_heads,
        dtype_width_bytes=config.dtype_width_bytes,
        alignment_bytes=config.alignment_bytes,
    )


def descriptor_of(message: pb.LayoutDescriptor) -> LayoutDescriptor:
    """Returns the description of a layout.

    Raises:
        Incompatible: its version is another one.
        BadRequest: a field breaks its rule.
    """
    check_version(message.version)
    return LayoutDescriptor(
        handle=field(message, "handle", handle_of),
        tier=layout_tier_of(message.tier, "tier"),
        resource_id=message.resource_id,
        config=field(message, "config", config_of),
        kind=LAYOUT_KINDS.of(message.kind, "kind"),
        axis_order=AXIS_ORDERS.of(message.axis_order, "axis_order"),
        storage=STORAGE_KINDS.of(message.storage, "storage"),
        device_ordinal=message.device_ordinal,
        fingerprint=text_of(message.fingerprint, "fingerprint", MAX_FINGERPRINT, required=True),
    )


def descriptor_message(descriptor: LayoutDescriptor) -> pb.LayoutDescriptor:
    """Returns the description of a layout as a message."""
    return pb.LayoutDescriptor(
        version=VERSION,
        handle=handle_message(descriptor.handle),
        tier=TIERS.number(descriptor.tier),
        resource_id=descriptor.resource_id,
        config=config_message(descriptor.config),
        kind=LAYOUT_KINDS.number(descriptor.kind),
        axis_order=AXIS_ORDERS.number(descriptor.axis_order),
        storage=STORAGE_KINDS.number(descriptor.storage),
        device_ordinal=descriptor.device_ordinal,
        fingerprint=descriptor.fingerprint,
    )


def remote_layout_of(message: pb.RemoteLayout) -> RemoteLayout:
    """Returns an entry of the map of remote layouts."""
    return RemoteLayout(
        remote_rank=message.remote_rank,
        resource_id=message.resource_id,
        tier=layout_tier_of(message.tier, "tier"),
        layout=field(message, "layout", handle_of),
        engine=text_of(message.engine, "engine", MAX_NAME),
    )


def remote_layout_message(entry: RemoteLayout) -> pb.RemoteLayout:
    """Returns an entry of the map of remote layouts as a message."""
    return pb.RemoteLayout(
        remote_rank=entry.remote_rank,
        resource_id=entry.resource_id,
        tier=TIERS.number(entry.tier),
        layout=handle_message(entry.layout),
        engine=entry.engine,
    )


def check_version(received: int) -> None:
    """Raises Incompatible unless this version of a description is the one that is known here."""
    if received != VERSION:
        raise Incompatible(
            f"version {received} is not known here, only {VERSION}; run the same release on both sides",
            field="version",
            coordinator=VERSION,
            worker=received,
        )
