"""What transfers are asked for, as messages and back.  [shell]

A call's deadline is that of gRPC, and a transfer ends `ANSWER_MARGIN_S` before it, so that the answer still arrives.
Whoever calls through gRPC adds the margin to the time that the transfer shall have; `time_left` takes it off again.
"""

from google.protobuf.message import Message

from ayni.blocks.calls import LocalTransfer, Offload, Onboard, Pull
from ayni.blocks.layout_messages import MAX_NAME
from ayni.blocks.messages import (
    AXIS_ORDERS,
    TIERS,
    each,
    field,
    handle_message,
    handle_of,
    ids_message,
    instance_id_of,
    keys_message,
    layers_message,
    layers_of,
    layout_tier_of,
    listed_ids,
    object_keys_of,
    optional_field,
    place_message,
    place_of,
    seconds_of,
    slice_message,
    slice_of,
    text_of,
)
from ayni.blocks.transfers import (
    DEFAULT_DRAIN_S,
    DEFAULT_TIMEOUT_S,
    Bounce,
    ObjectKeys,
    PullPlan,
    PullShard,
    RemoteBlocks,
    RemoteDescriptor,
    TransferOptions,
)
from ayni.errors import BadRequest, Deadline
from ayni.messages import duration
from ayni.v1 import worker_pb2 as pb

ANSWER_MARGIN_S = 0.25
"""How long before its call's deadline a transfer ends."""

_LONGEST_S = 1e8


def time_left(remaining_s: float | None) -> float:
    """Returns the time that a call with so much time until its deadline has, in seconds; None means no deadline.

    Raises:
        Deadline: it has none.
    """
    if remaining_s is None:
        return DEFAULT_TIMEOUT_S
    if remaining_s <= 0:
        raise Deadline("the call came after its deadline", waiting_for="the start of the call", timeout=0)
    return min(max(remaining_s - ANSWER_MARGIN_S, remaining_s / 2), _LONGEST_S)


def options_of(message: pb.TransferOptions, timeout_s: float) -> TransferOptions:
    """Returns how a transfer is done that has so much time until its end.

    A call that came so late that no more than the drain is left is not refused: none of its copies is started.
    """
    drain_s = optional_field(message, "drain", seconds_of)
    return TransferOptions(
        layers=optional_field(message, "layers", layers_of),
        bounce=optional_field(message, "bounce", _bounce_of),
        source_axis_order=AXIS_ORDERS.or_none(message.source_axis_order, "source_axis_order"),
        destination_axis_order=AXIS_ORDERS.or_none(message.destination_axis_order, "destination_axis_order"),
        write_notification=message.write_notification if message.HasField("write_notification") else None,
        engine=text_of(message.engine, "engine", MAX_NAME),
        checksum=message.checksum,
        route=text_of(message.route, "route", MAX_NAME),
        timeout_s=timeout_s,
        drain_s=min(timeout_s / 2, DEFAULT_DRAIN_S) if drain_s is None else min(timeout_s * 0.999, drain_s),
    )


def options_message(options: TransferOptions) -> pb.TransferOptions:
    """Returns how a transfer is done, without its time, which is the call's deadline."""
    return pb.TransferOptions(
        layers=layers_message(options.layers) if options.layers else None,
        bounce=_bounce_message(options.bounce) if options.bounce else None,
        source_axis_order=AXIS_ORDERS.number(options.source_axis_order),
        destination_axis_order=AXIS_ORDERS.number(options.destination_axis_order),
        write_notification=options.write_notification,
        engine=options.engine,
        checksum=options.checksum,
        route=options.route,
        drain=duration(options.drain_s),
    )


def local_transfer_of(message: pb.ExecuteLocalTransferRequest, timeout_s: float) -> LocalTransfer:
    """Returns what to copy between two tiers."""
    return LocalTransfer(
        source=field(message, "source", place_of),
        destination=field(message, "destination", place_of),
        source_blocks=listed_ids(message, "source_blocks"),
        destination_blocks=listed_ids(message, "destination_blocks"),
        options=_options_of(message, timeout_s),
    )


def local_transfer_message(asked: LocalTransfer, epoch: int) -> pb.ExecuteLocalTransferRequest:
    """Returns what to copy between two tiers, as a message of the caller's epoch."""
    return pb.ExecuteLocalTransferRequest(
        epoch=epoch,
        source=place_message(asked.source),
        destination=place_message(asked.destination),
        source_blocks=ids_message(asked.source_blocks),
        destination_blocks=ids_message(asked.destination_blocks),
        options=options_message(asked.options),
    )


def onboard_of(message: pb.ExecuteRemoteOnboardRequest, timeout_s: float) -> Onboard:
    """Returns what to bring in."""
    return Onboard(
        source=field(message, "source", remote_of),
        destination=field(message, "destination", place_of),
        destination_blocks=listed_ids(message, "destination_blocks"),
        options=_options_of(message, timeout_s),
    )


def onboard_message(asked: Onboard, epoch: int) -> pb.ExecuteRemoteOnboardRequest:
    """Returns what to bring in, as a message of the caller's epoch."""
    return pb.ExecuteRemoteOnboardRequest(
        epoch=epoch,
        source=remote_message(asked.source),
        destination=place_message(asked.destination),
        destination_blocks=ids_message(asked.destination_blocks),
        options=options_message(asked.options),
    )


def offload_of(message: pb.ExecuteRemoteOffloadRequest, timeout_s: float) -> Offload:
    """Returns what to bring out."""
    return Offload(
        source=field(message, "source", place_of),
        source_blocks=listed_ids(message, "source_blocks"),
        destination=field(message, "destination", remote_of),
        options=_options_of(message, timeout_s),
    )


def offload_message(asked: Offload, epoch: int) -> pb.ExecuteRemoteOffloadRequest:
    """Returns what to bring out, as a message of the caller's epoch."""
    return pb.ExecuteRemoteOffloadRequest(
        epoch=epoch,
        source=place_message(asked.source),
        source_blocks=ids_message(asked.source_blocks),
        destination=remote_message(asked.destination),
        options=options_message(asked.options),
    )


def pull_of(message: pb.ExecuteRemoteOnboardForInstanceRequest, timeout_s: float) -> Pull:
    """Returns what to pull from a connected group."""
    plan = PullPlan(
        instance_id=instance_id_of(message.instance_id),
        remote_tier=layout_tier_of(message.remote_tier, "remote_tier"),
        source_blocks=listed_ids(message, "source_blocks"),
        destination=field(message, "destination", place_of),
        destination_blocks=listed_ids(message, "destination_blocks"),
        shards=each("shards", message.shards, _shard_of),
    )
    return Pull(plan=plan, options=_options_of(message, timeout_s))


def pull_message(asked: Pull, epoch: int) -> pb.ExecuteRemoteOnboardForInstanceRequest:
    """Returns what to pull from a connected group, as a message of the caller's epoch."""
    plan = asked.plan
    return pb.ExecuteRemoteOnboardForInstanceRequest(
        epoch=epoch,
        instance_id=plan.instance_id,
        remote_tier=TIERS.number(plan.remote_tier),
        source_blocks=ids_message(plan.source_blocks),
        destination=place_message(plan.destination),
        destination_blocks=ids_message(plan.destination_blocks),
        shards=map(_shard_message, plan.shards),
        options=options_message(asked.options),
    )


def remote_of(message: pb.RemoteDescriptor) -> RemoteDescriptor:
    """Returns blocks outside a worker.

    Raises:
        BadRequest: it says neither which blocks nor which objects.
    """
    blocks = optional_field(message, "blocks", _remote_blocks_of)
    objects = optional_field(message, "objects", object_keys_of)
    if blocks is not None:
        return blocks
    if objects is not None:
        return objects
    raise BadRequest("name blocks of an imported layout, or objects", field="descriptor")


def remote_message(remote: RemoteDescriptor) -> pb.RemoteDescriptor:
    """Returns blocks outside a worker as a message."""
    if isinstance(remote, ObjectKeys):
        return pb.RemoteDescriptor(objects=keys_message(remote.keys))
    blocks = pb.RemoteBlocks(layout=handle_message(remote.layout), blocks=ids_message(remote.blocks))
    return pb.RemoteDescriptor(blocks=blocks)


def _options_of(message: Message, timeout_s: float) -> TransferOptions:
    options = optional_field(message, "options", lambda options: options_of(options, timeout_s))
    return options or options_of(pb.TransferOptions(), timeout_s)


def _bounce_of(message: pb.BounceBuffer) -> Bounce:
    blocks = listed_ids(message, "blocks")
    if not len(blocks):
        raise BadRequest("at least one block must be lent", field="blocks")
    return Bounce(layout=field(message, "layout", handle_of), blocks=blocks)


def _bounce_message(bounce: Bounce) -> pb.BounceBuffer:
    return pb.BounceBuffer(layout=handle_message(bounce.layout), blocks=ids_message(bounce.blocks))


def _remote_blocks_of(message: pb.RemoteBlocks) -> RemoteBlocks:
    return RemoteBlocks(layout=field(message, "layout", handle_of), blocks=listed_ids(message, "blocks"))


def _shard_of(message: pb.PullShard) -> PullShard:
    return PullShard(
        remote_rank=message.remote_rank,
        source_slice=optional_field(message, "source_slice", slice_of),
        destination_slice=optional_field(message, "destination_slice", slice_of),
    )


def _shard_message(shard: PullShard) -> pb.PullShard:
    return pb.PullShard(
        remote_rank=shard.remote_rank,
        source_slice=slice_message(shard.source_slice) if shard.source_slice else None,
        destination_slice=slice_message(shard.destination_slice) if shard.destination_slice else None,
    )
