"""What the assignment stream says, as values.  [shell]"""

from dataclasses import dataclass, replace

from ayni.blocks.metadata import WorkerMetadata
from ayni.blocks.metadata_messages import metadata_of
from ayni.errors import AyniError
from ayni.messages import dtype_name, group_of
from ayni.step_values import ExchangeGroup
from ayni.v1 import coordinator_pb2 as pb
from worker_agent.session import ShardAssignment

KINDS = {pb.STEP_KIND_TRAIN: "train", pb.STEP_KIND_EVALUATE: "evaluate"}
"""Kinds of steps, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regroup:
    """Others reduce the gradients of an attempt among themselves from now on."""

    step: int
    attempt: int
    group: ExchangeGroup
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """There is nothing to do yet."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Revoked:
    """A lease is taken back."""

    lease_id: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StateOffer:
    """Where the train state that this worker lacks can be had."""

    offer_id: int
    completed_steps: int
    """Steps behind the state."""
    worker_id: int = 0
    """Who has it, when `metadata` is given."""
    worker_name: str = ""
    metadata: WorkerMetadata | None = None
    """What the worker that has it exported; None: it is stored as objects."""
    relayed: bool = False
    """Whether the worker's blocks are read from the coordinator's address, because nobody can dial it."""
    run_id: str = ""
    """Run that stored it, when it is stored as objects."""
    problem: str = ""
    """Why the offer makes no sense; empty: it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """The run is over."""

    reason: str
    finished: bool
    checkpoint_writer: str = ""
    """Name of the worker that writes the last checkpoint."""
    drained: bool = False
    """Whether the run goes on, without this worker: its operator wished so."""


Frame = ShardAssignment | Waiting | Shutdown | Revoked | StateOffer | Regroup
"""What the assignment stream says."""


def assignment_frame(message: pb.ShardAssignmentResponse) -> Frame:
    """Converts one frame of the assignment stream."""
    if message.HasField("assignment"):
        return _assignment(message.assignment)
    if message.HasField("revoked"):
        return Revoked(lease_id=message.revoked.lease_id, reason=message.revoked.reason)
    if message.HasField("offer"):
        return _offer(message.offer)
    if message.HasField("regroup"):
        return _regroup(message.regroup)
    if message.HasField("shutdown"):
        said, writer = message.shutdown, message.shutdown.checkpoint_writer
        return Shutdown(reason=said.reason, finished=said.finished, checkpoint_writer=writer, drained=said.drained)
    return Waiting(reason=message.waiting.reason)


def _regroup(message: pb.Regroup) -> Regroup:
    return Regroup(step=message.step, attempt=message.attempt, group=group_of(message.group), reason=message.reason)


def _offer(message: pb.StateOffer) -> StateOffer:
    offer = StateOffer(offer_id=message.offer_id, completed_steps=message.completed_steps)
    if not message.HasField("peer"):
        return replace(offer, run_id=message.stored.run_id)
    peer = message.peer
    offer = replace(offer, worker_id=peer.worker_id, worker_name=peer.worker_name, relayed=peer.relayed)
    try:
        return replace(offer, metadata=metadata_of(peer.metadata))
    except AyniError as error:
        return replace(offer, problem=f"what is said about worker {peer.worker_name} makes no sense: {error}")


def _assignment(message: pb.Assignment) -> ShardAssignment:
    return ShardAssignment(
        step=message.step,
        attempt=message.attempt,
        epoch=message.epoch,
        kind=KINDS.get(message.kind, f"unknown kind {message.kind}"),
        lease_id=message.lease_id,
        microbatch_start=message.microbatch_start,
        microbatch_stop=message.microbatch_stop,
        num_microbatches=message.num_microbatches,
        position=message.position,
        num_samples=message.num_samples,
        shard_start=message.shard_start,
        shard_end=message.shard_stop,
        rank=message.rank,
        world_size=message.world_size,
        update=message.update,
        extra=message.extra,
        publish_state=message.publish_state,
        discard_state=message.discard_state,
        group=group_of(message.group) if message.HasField("group") else None,
        wire_type=dtype_name(message.wire_type) if message.wire_type else "",
        traceparent=message.traceparent[:128],
    )
