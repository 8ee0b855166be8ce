"""Small values as messages and back, for both sides.  [shell]"""

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from ayni.buckets import FLAT, NON_BLOCK_COMPONENTS, Bucket
from ayni.errors import BadRequest
from ayni.shm.host import HostIdentity, SharedMemoryOffer
from ayni.step_values import ExchangeGroup, GroupMember, MicrobatchStats, Origin, SliceDigest, StepTimes
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2

_MAX_SECONDS = 1e9
_BUCKET_BYTES = 16 << 30
"""Longest bucket where a coordinator does not say it."""
_PARTS = ("compute", "exchange", "commit_wait", "update", "data")


def duration(seconds: float) -> Duration:
    """Returns seconds as a message."""
    result = Duration()
    result.FromTimedelta(timedelta(seconds=seconds))
    return result


def dtype_enum(name: str) -> "tensor_pb2.DType.ValueType":
    """Returns the enum value of an element type's name."""
    return tensor_pb2.DType.Value(f"DTYPE_{name.upper()}")


def dtype_name(value: int) -> str:
    """Returns the name of an element type; empty for one that this version does not know."""
    try:
        return tensor_pb2.DType.Name(value)[len("DTYPE_") :].lower()  # type: ignore[arg-type]
    except ValueError:
        return ""


def seconds_of(message: Duration) -> float:
    """Returns a length of time that was received, in seconds: 0 to 10^9, whatever was sent."""
    return min(max(message.seconds + message.nanos / 1e9, 0.0), _MAX_SECONDS)


def times_of(message: pb.StepTimes) -> StepTimes:
    """Returns where a worker's time went; see `seconds_of`."""
    return StepTimes(**{part: seconds_of(getattr(message, part)) for part in _PARTS})


def origin_of(message: pb.ShardAssignmentRequest | pb.HeartbeatRequest | pb.CommitStepRequest) -> Origin | None:
    """Returns where the caller's last update came from; None where it does not say."""
    if not message.HasField("origin"):
        return None
    return Origin(epoch=message.origin.epoch, attempt=message.origin.attempt)


def origin_message(origin: Origin | None) -> pb.StateOrigin | None:
    """Returns where the last update came from, as a message; None for not said."""
    return pb.StateOrigin(epoch=origin.epoch, attempt=origin.attempt) if origin else None


def times_message(times: StepTimes) -> pb.StepTimes:
    """Returns where a worker's time went, as a message."""
    return pb.StepTimes(**{part: duration(getattr(times, part)) for part in _PARTS})


def stats_message(stats: MicrobatchStats) -> pb.MicrobatchStats:
    """Returns what is known of a micro-batch, as a message."""
    return pb.MicrobatchStats(
        microbatch=stats.microbatch,
        weight=stats.weight,
        loss_sum=stats.loss_sum,
        num_correct=stats.num_correct,
        num_predictions=stats.num_predictions,
        non_finite=stats.non_finite,
    )


def stats_of(message: pb.MicrobatchStats) -> MicrobatchStats:
    """Returns what a worker says of a micro-batch, unchecked."""
    return MicrobatchStats(
        microbatch=message.microbatch,
        weight=message.weight,
        loss_sum=message.loss_sum if message.HasField("loss_sum") else None,
        num_correct=message.num_correct,
        num_predictions=message.num_predictions,
        non_finite=message.non_finite,
    )


def bucket_message(bucket: Bucket) -> pb.BucketName:
    """Returns the name of a bucket as a message."""
    if bucket.kind == "block":
        return pb.BucketName(block_index=bucket.index)
    if bucket.kind == "non_block":
        number = bucket.index + 1
        return pb.BucketName(component=pb.NonBlockComponent.Name(number))  # type: ignore[arg-type]
    return pb.BucketName(flat=True)


def bucket_of(message: pb.BucketName) -> Bucket:
    """Returns which bucket a message names.

    Raises:
        BadRequest: none, or a component that does not exist.
    """
    kind = message.WhichOneof("bucket")
    if kind == "block_index":
        return Bucket("block", message.block_index)
    if kind == "component" and 1 <= message.component <= len(NON_BLOCK_COMPONENTS):
        return Bucket("non_block", message.component - 1)
    if kind != "flat":
        named = f"component {message.component}" if kind else "nothing"
        raise BadRequest(f"{named} is no bucket", field="bucket")
    return FLAT


def shared_memory_message(offer: SharedMemoryOffer | None) -> pb.SharedMemoryOffer | None:
    """Returns where memory can be shared with a process as a message; None for nowhere."""
    if offer is None:
        return None
    return pb.SharedMemoryOffer(
        boot_id=offer.host.boot_id,
        pid_namespace=offer.host.pid_namespace,
        uid=offer.host.uid,
        folder=offer.folder,
        socket_name=offer.socket_name,
    )


def shared_memory_of(message: pb.SharedMemoryOffer) -> SharedMemoryOffer:
    """Returns where memory can be shared with a process; nothing of it was checked."""
    host = HostIdentity(boot_id=message.boot_id, pid_namespace=message.pid_namespace, uid=message.uid)
    return SharedMemoryOffer(host=host, folder=message.folder, socket_name=message.socket_name)


def group_message(group: ExchangeGroup) -> pb.ExchangeGroup:
    """Returns an exchange group as a message."""
    members = [
        pb.GroupMember(
            worker_id=member.worker_id,
            worker_name=member.worker_name,
            address=member.address,
            is_owner=member.is_owner,
            store_address=member.store_address,
            shared_memory=shared_memory_message(member.shared_memory),
        )
        for member in group.members
    ]
    return pb.ExchangeGroup(
        generation=group.generation,
        topology=group.topology,
        members=members,
        secret=group.secret,
        chunk_bytes=group.chunk_bytes,
        max_bucket_bytes=group.max_bucket_bytes,
    )


def group_of(message: pb.ExchangeGroup) -> ExchangeGroup:
    """Returns an exchange group."""
    members = tuple(
        GroupMember(
            worker_id=member.worker_id,
            worker_name=member.worker_name,
            address=member.address,
            is_owner=member.is_owner,
            store_address=member.store_address,
            shared_memory=shared_memory_of(member.shared_memory) if member.HasField("shared_memory") else None,
        )
        for member in message.members
    )
    return ExchangeGroup(
        generation=message.generation,
        topology=message.topology,
        members=members,
        secret=message.secret,
        chunk_bytes=message.chunk_bytes,
        max_bucket_bytes=message.max_bucket_bytes or _BUCKET_BYTES,
    )


def slice_message(taken: SliceDigest) -> pb.SliceDigest:
    """Returns what was taken down of a slice as a message."""
    return pb.SliceDigest(
        bucket=bucket_message(taken.bucket),
        first_element=taken.first_element,
        num_elements=taken.num_elements,
        digests=taken.digests,
        squares=taken.squares,
        bucket_elements=taken.bucket_elements,
    )


def slice_of(message: pb.SliceDigest) -> SliceDigest:
    """Returns what was taken down of a slice.

    Raises:
        BadRequest: it names no bucket.
    """
    return SliceDigest(
        bucket=bucket_of(message.bucket),
        first_element=message.first_element,
        num_elements=message.num_elements,
        digests=message.digests,
        squares=tuple(message.squares),
        bucket_elements=message.bucket_elements,
    )
