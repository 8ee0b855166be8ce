"""Messages to values and back. Generated classes stop here and in `service`.  [shell]"""

import math
from collections.abc import Sequence
from functools import lru_cache

from ayni.blocks import metadata_messages
from ayni.buckets import BLOCK_COMPONENTS, FLAT, NON_BLOCK_COMPONENTS, Bucket
from ayni.errors import BadRequest, SpecMismatch, TooLarge
from ayni.messages import (
    dtype_enum,
    dtype_name,
    group_message,
    origin_of,
    shared_memory_message,
    shared_memory_of,
    slice_of,
    stats_of,
    times_of,
)
from ayni.shm.host import SharedMemoryOffer
from ayni.step_values import Commit, ExchangeGroup, MicrobatchStats, Report
from ayni.tensors import WIRE_DTYPES, TensorSpec, position_bytes, scale_block_elements
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2
from coordinator_service import values
from coordinator_service.leases import Key, Moment, Totals
from coordinator_service.membership import Applicant

_MAX_MICROBATCHES = 1 << 16
_MAX_COMPONENTS = 1 << 16
_MAX_SAMPLES = 1 << 48
_MAX_BUCKETS = 1 << 20
_MAX_REPORTED = 1 << 16
_MAX_SENTENCE = 512
_MAX_MEASURED = 1 << 20
_TOPOLOGIES = ("sharded", "torch")
_KINDS = {"train": pb.STEP_KIND_TRAIN, "evaluate": pb.STEP_KIND_EVALUATE}

Begin = pb.GradientBegin | pb.BlockGradientBegin | pb.NonBlockGradientBegin


def applicant(request: pb.JoinRequest, session: str, peer: str) -> Applicant:
    """Returns who asks to join.

    Raises:
        BadRequest: a required field is missing or too long.
    """
    _require_text("worker_name", request.worker_name, 128)
    _require_text("join_nonce", request.join_nonce, 64)
    _require_text("backend", request.backend, 64)
    agreements = {
        "task_fingerprint": request.task_fingerprint,
        "dataset_fingerprint": request.dataset_fingerprint,
        "num_training_samples": str(request.num_training_samples or ""),
        "num_evaluation_samples": str(request.num_evaluation_samples or ""),
    }
    for name, value in agreements.items():
        _limit(name, len(value), 128)
    for name in ("num_training_samples", "num_evaluation_samples"):
        if not 0 <= getattr(request, name) <= _MAX_SAMPLES:
            raise BadRequest(f"{name} is {getattr(request, name)}; it must be 0 to {_MAX_SAMPLES}", field=name)
    return Applicant(
        name=request.worker_name,
        nonce=request.join_nonce,
        session=session,
        peer=peer,
        backend=request.backend,
        gpu_count=request.gpu_count,
        device_names=tuple(one_line(name[:64]) for name in request.device_names[:16]),
        address=request.worker_address[:256],
        peer_address=request.peer_address[:256],
        store_address=request.store_address[:256],
        shared_memory=_peer_memory(request),
        topologies=tuple(name for name in _TOPOLOGIES if name in request.topologies),
        elastic=request.elastic,
        max_microbatches=request.max_microbatches,
        memory_bytes=request.memory_bytes,
        wire_types=tuple(dtype_name(value) for value in request.wire_types[:16]) or ("float32",),
        follows_wire_type=request.follows_wire_type,
        agreements=agreements,
        summaries={
            "task_fingerprint": one_line(request.task_summary[:256]),
            "dataset_fingerprint": one_line(request.dataset_summary[:256]),
        },
    )


def bucket(begin: Begin) -> Bucket:
    """Returns which reduction a contribution belongs to.

    Raises:
        BadRequest: the block or component is impossible.
    """
    if isinstance(begin, pb.BlockGradientBegin):
        if 0 < begin.num_blocks <= begin.block_index:
            raise BadRequest(f"block {begin.block_index} of {begin.num_blocks} is impossible", field="block_index")
        return Bucket("block", begin.block_index)
    if isinstance(begin, pb.NonBlockGradientBegin):
        if not 1 <= begin.component <= len(NON_BLOCK_COMPONENTS):
            raise BadRequest(f"component {begin.component} is not known", field="component")
        return Bucket("non_block", begin.component - 1)
    return FLAT


def tensor(message: tensor_pb2.TensorSpec, which: Bucket, wire_type: str, max_bytes: int) -> TensorSpec:
    """Returns the tensor of a contribution.

    Raises:
        SpecMismatch: another element type than the run's, blocks of another length with one scale, or component sizes
            that do not add up.
        TooLarge: longer than `max_bytes`. Nothing was allocated.
    """
    name = dtype_name(message.dtype)
    if name != wire_type or name not in WIRE_DTYPES:
        raise _mismatch("dtype", wire_type, name or f"unknown ({message.dtype})", which)
    if message.scale_block_elements != scale_block_elements(name):
        expected = scale_block_elements(name)
        raise _mismatch("scale_block_elements", expected, message.scale_block_elements, which)
    spec = TensorSpec(dtype=name, num_elements=message.num_elements, component_sizes=_components(message, which))
    if not 0 < spec.num_bytes <= max_bytes:
        raise TooLarge(
            f"{which} has {spec.num_elements} elements; 1 to {max_bytes // position_bytes(name)} are taken "
            "(max_bucket_bytes)",
            field="num_elements",
            limit=max_bytes,
            received=spec.num_bytes,
        )
    return spec


def _components(message: tensor_pb2.TensorSpec, which: Bucket) -> tuple[int, ...]:
    _limit("component_sizes", len(message.component_sizes), _MAX_COMPONENTS)
    sizes = tuple(message.component_sizes)
    if which.kind == "block" and len(sizes) != len(BLOCK_COMPONENTS):
        raise _mismatch("component_sizes", f"nine ({', '.join(BLOCK_COMPONENTS)})", len(sizes), which)
    if sizes and sum(sizes) != message.num_elements:
        raise _mismatch("component_sizes", f"a sum of {message.num_elements}", sum(sizes), which)
    return sizes


def stats(messages: Sequence[pb.MicrobatchStats]) -> list[MicrobatchStats]:
    """Returns what a worker says of its micro-batches."""
    _limit("microbatches", len(messages), _MAX_MICROBATCHES)
    return [stats_of(message) for message in messages]


def num_buckets(message: pb.RoundBegin) -> int:
    """Returns how many buckets a worker says that it contributes to; 0 for not said."""
    _limit("num_buckets", message.num_buckets, _MAX_BUCKETS)
    return message.num_buckets


def key(message: pb.RoundBegin | pb.CommitStepRequest) -> Key:
    """Returns which attempt of which step a worker speaks of."""
    moment = Moment(epoch=message.epoch, step=message.step, attempt=message.attempt)
    return Key(moment=moment, lease_id=message.lease_id)


def kind_name(value: int) -> str:
    """Returns "train" or "evaluate".

    Raises:
        BadRequest: neither.
    """
    for name, number in _KINDS.items():
        if number == value:
            return name
    raise BadRequest(f"step kind {value} is not known", field="kind")


def report(request: pb.CommitStepRequest) -> Report:
    """Returns what a worker says when it has done its lease.

    Raises:
        BadRequest: a slice names no bucket.
    """
    _limit("slices", len(request.slices), _MAX_BUCKETS)
    return Report(
        num_buckets=request.num_buckets,
        microbatches=stats(request.microbatches),
        parameters_sha256=request.parameters_sha256[:64],
        times=times_of(request.times),
        following=request.following,
        square_sum=request.square_sum if math.isfinite(request.square_sum) else 0.0,
        origin=origin_of(request),
        generation=request.generation,
        slices=tuple(slice_of(message) for message in request.slices),
    )


def exchange_news(request: pb.HeartbeatRequest) -> values.ExchangeNews:
    """Returns what a worker says of its exchange group."""
    _limit("contributed_leases", len(request.contributed_leases), _MAX_REPORTED)
    _limit("lost_owners", len(request.lost_owners), _MAX_REPORTED)
    return values.ExchangeNews(
        generation=request.generation,
        contributed=tuple(request.contributed_leases),
        lost=tuple(request.lost_owners),
        failed=one_line(request.failed_reduction[:_MAX_SENTENCE]),
    )


def measured_bytes(request: pb.MeasureLinkRequest) -> int:
    """Returns how many bytes a measurement is answered with.

    Raises:
        TooLarge: it asks for, or carries, more than is measured at a time.
    """
    _limit("padding", len(request.padding), _MAX_MEASURED)
    _limit("answer_bytes", request.answer_bytes, _MAX_MEASURED)
    return request.answer_bytes


Frame = values.Assignment | values.Regroup | values.Waiting | values.Revoked | values.StateOffer | values.Shutdown


def assignment_frame(frame: Frame) -> pb.ShardAssignmentResponse:
    """Returns a frame of the assignment stream."""
    if isinstance(frame, values.Revoked):
        return pb.ShardAssignmentResponse(revoked=pb.Revoked(lease_id=frame.lease_id, reason=frame.reason))
    if isinstance(frame, values.Regroup):
        return pb.ShardAssignmentResponse(regroup=_regroup(frame))
    if isinstance(frame, values.StateOffer):
        return pb.ShardAssignmentResponse(offer=_offer(frame))
    if isinstance(frame, values.Waiting):
        waiting = pb.Waiting(reason=frame.reason, worker_names=frame.worker_names)
        return pb.ShardAssignmentResponse(waiting=waiting)
    if isinstance(frame, values.Shutdown):
        return pb.ShardAssignmentResponse(
            shutdown=pb.Shutdown(
                reason=frame.reason,
                finished=frame.finished,
                committed_steps=frame.committed_steps,
                checkpoint_writer=frame.checkpoint_writer,
                drained=frame.drained,
            )
        )
    return pb.ShardAssignmentResponse(assignment=_assignment(frame))


@lru_cache(maxsize=2)
def _group(group: ExchangeGroup) -> pb.ExchangeGroup:
    """Returns a group as a message; made once for all members, who may be many."""
    return group_message(group)


def _regroup(frame: values.Regroup) -> pb.Regroup:
    group = _group(frame.group)
    return pb.Regroup(step=frame.step, attempt=frame.attempt, group=group, reason=frame.reason)


def _offer(frame: values.StateOffer) -> pb.StateOffer:
    message = pb.StateOffer(offer_id=frame.offer_id, completed_steps=frame.completed_steps)
    if isinstance(frame.source, str):
        message.stored.run_id = frame.source
        return message
    message.peer.worker_id = frame.source.worker_id
    message.peer.worker_name = frame.source.worker_name
    message.peer.relayed = frame.source.relayed
    message.peer.metadata.CopyFrom(metadata_messages.metadata_message(frame.source.metadata))
    return message


def _assignment(frame: values.Assignment) -> pb.Assignment:
    return pb.Assignment(
        epoch=frame.epoch,
        step=frame.step,
        attempt=frame.attempt,
        kind=_KINDS[frame.kind],
        lease_id=frame.lease_id,
        microbatch_start=frame.microbatch_start,
        microbatch_stop=frame.microbatch_stop,
        num_microbatches=frame.num_microbatches,
        position=frame.position,
        num_samples=frame.num_samples,
        rank=frame.rank,
        world_size=frame.world_size,
        update=frame.update,
        shard_start=frame.shard_start,
        shard_stop=frame.shard_stop,
        extra=frame.extra,
        publish_state=frame.publish_state,
        discard_state=frame.discard_state,
        group=_group(frame.group) if frame.group else None,
        wire_type=dtype_enum(frame.wire_type or "unspecified"),
        traceparent=frame.traceparent,
    )


def committed(told: Commit) -> pb.CommitStepResponse:
    """Returns a commit as a message."""
    return pb.CommitStepResponse(
        step=told.step,
        attempt=told.attempt,
        total_weight=told.total_weight,
        global_loss=told.global_loss,
        gradient_norm=told.gradient_norm,
        num_correct=told.num_correct,
        num_predictions=told.num_predictions,
        learning_rate=told.learning_rate,
        clip_factor=told.clip_factor,
        best=told.best,
        checkpoint_writer=told.checkpoint_writer,
    )


def complete(totals: Totals, num_contributors: int) -> pb.RoundComplete:
    """Returns the last frame's content of a reduction."""
    message = pb.RoundComplete(
        num_contributors=num_contributors,
        total_weight=totals.total_weight,
        num_correct=totals.num_correct,
        num_predictions=totals.num_predictions,
    )
    if totals.global_loss is not None:
        message.global_loss = totals.global_loss
    return message


def one_line(text: str) -> str:
    """Returns text for logs and terminals: what can't be printed becomes a question mark."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _require_text(field: str, value: str, limit: int) -> None:
    if not value.strip():
        raise BadRequest(f"{field} is required", field=field)
    if not value.isprintable():
        raise BadRequest(f"{field} {value!r} has characters that can't be printed", field=field)
    _limit(field, len(value.encode()), limit)


def _limit(field: str, received: int, limit: int) -> None:
    if received > limit:
        raise TooLarge(
            f"{field} is {received} long; at most {limit} is taken", field=field, limit=limit, received=received
        )


def _mismatch(field: str, expected: object, received: object, which: Bucket) -> SpecMismatch:
    return SpecMismatch(
        f"{which}: {field} is {received}; this run takes {expected}",
        field=field,
        expected=expected,
        received=received,
        bucket=which,
    )


def shared_memory(offer: SharedMemoryOffer | None) -> pb.SharedMemoryOffer | None:
    """Builds where memory can be shared with the coordinator; None for nowhere."""
    return shared_memory_message(offer)


def _peer_memory(request: pb.JoinRequest) -> SharedMemoryOffer | None:
    if not request.HasField("peer_shared_memory"):
        return None
    _limit("boot_id", len(request.peer_shared_memory.boot_id), 64)
    _limit("folder", len(request.peer_shared_memory.folder), 4096)
    offer = shared_memory_of(request.peer_shared_memory)
    offer.check()
    return offer
