"""Generated messages to values and back.  [shell]

The rest of the worker knows the values only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from ayni.messages import (
    dtype_enum,
    dtype_name,
    origin_message,
    shared_memory_message,
    shared_memory_of,
    slice_message,
    stats_message,
    times_message,
)
from ayni.shm.host import SharedMemoryOffer
from ayni.step_values import Origin
from ayni.tensors import TensorSpec, scale_block_elements
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2
from worker_agent.artifact_names import Artifact
from worker_agent.assignment_frames import KINDS
from worker_agent.contributions import Offer
from worker_agent.session import Commit, Report, ShardAssignment


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What GetRun says."""

    run_id: str
    config_json: str
    artifacts: tuple[Artifact, ...]
    committed_steps: int = 0
    """Steps that were committed when it was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinFacts:
    """What a worker says of itself when it joins."""

    worker_name: str
    join_nonce: str
    backend: str
    gpu_count: int
    run_id: str = ""
    device_names: tuple[str, ...] = ()
    worker_address: str = ""
    wire_types: tuple[str, ...] = ("float32", "bfloat16", "float16")
    task_fingerprint: str = ""
    task_summary: str = ""
    dataset_fingerprint: str = ""
    dataset_summary: str = ""
    num_training_samples: int = 0
    num_evaluation_samples: int = 0
    elastic: bool = False
    max_microbatches: int = 0
    memory_bytes: int = 0
    peer_address: str = ""
    store_address: str = ""
    peer_shared_memory: SharedMemoryOffer | None = None
    topologies: tuple[str, ...] = ()
    follows_wire_type: bool = True
    """Whether it contributes in the type that each lease says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedOffer:
    """An offered state that could not be taken."""

    offer_id: int
    reason: str
    is_damaged: bool = False
    """Whether the state is stored and damaged, so that nobody can take it."""


NO_FAILURE = FailedOffer(offer_id=0, reason="")


@dataclass(frozen=True, kw_only=True, slots=True)
class SignOfLife:
    """What a heartbeat says."""

    epoch: int
    step: int
    activity: str
    published_steps: int = 0
    """Steps behind the train state that this worker's host tier holds."""
    completed_steps: int = 0
    """Updates that its parameters have had."""
    origin: Origin | None = None
    """Where the last of them came from."""
    failed_offer: FailedOffer = NO_FAILURE
    """Offer that it could not take."""
    generation: int = 0
    """Exchange group that the next two speak of; 0 for none."""
    contributed_leases: tuple[int, ...] = ()
    """Leases whose contributions have left whole."""
    lost_owners: tuple[int, ...] = ()
    """Owners that this worker could not reach."""
    failed_reduction: str = ""
    """Why a reduction of that group failed for good."""
    cpu_fallbacks: int = 0
    """Operations that its accelerator has given back to the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """What Join answers."""

    worker_id: int
    session: str
    total_workers: int
    run_id: str
    lease: timedelta
    heartbeat_interval: timedelta
    wire_type: str
    shared_memory: SharedMemoryOffer | None = None
    """Where memory can be shared with the coordinator; None where it can't."""
    chunk_bytes: int = 0
    """Length of chunks; 0 for not said, by a coordinator that knows no lanes."""
    topology: str = ""
    """How gradients are reduced; "auto" where that may change from step to step."""


def run(message: pb.GetRunResponse) -> Run:
    """Converts an answer to GetRun."""
    artifacts = (Artifact(name=a.name, sha256=a.sha256, size_bytes=a.size_bytes) for a in message.artifacts)
    return Run(
        run_id=message.run_id,
        config_json=message.config_json,
        artifacts=tuple(artifacts),
        committed_steps=message.snapshot.committed_steps,
    )


def join_request(facts: JoinFacts, protocol_version: int) -> pb.JoinRequest:
    """Builds a JoinRequest."""
    return pb.JoinRequest(
        protocol_version=protocol_version,
        run_id=facts.run_id,
        worker_name=facts.worker_name,
        join_nonce=facts.join_nonce,
        task_fingerprint=facts.task_fingerprint,
        dataset_fingerprint=facts.dataset_fingerprint,
        wire_types=[dtype_enum(name) for name in facts.wire_types],
        gpu_count=facts.gpu_count,
        backend=facts.backend,
        device_names=facts.device_names,
        worker_address=facts.worker_address,
        task_summary=facts.task_summary,
        dataset_summary=facts.dataset_summary,
        num_training_samples=facts.num_training_samples,
        num_evaluation_samples=facts.num_evaluation_samples,
        elastic=facts.elastic,
        max_microbatches=facts.max_microbatches,
        memory_bytes=facts.memory_bytes,
        peer_address=facts.peer_address,
        store_address=facts.store_address,
        peer_shared_memory=shared_memory_message(facts.peer_shared_memory),
        topologies=facts.topologies,
        follows_wire_type=facts.follows_wire_type,
    )


def membership(message: pb.JoinResponse) -> Membership:
    """Converts an answer to Join."""
    return Membership(
        worker_id=message.worker_id,
        session=message.session,
        total_workers=message.total_workers,
        run_id=message.run_id,
        lease=message.lease.ToTimedelta(),
        heartbeat_interval=message.heartbeat_interval.ToTimedelta(),
        wire_type=dtype_name(message.wire_type),
        shared_memory=shared_memory_of(message.shared_memory) if message.HasField("shared_memory") else None,
        chunk_bytes=message.chunk_bytes,
        topology=message.topology,
    )


def begin_frame(worker_id: int, offer: Offer, spec: TensorSpec) -> bytes:
    """Returns the encoded first frame of a contribution."""
    bucket, assignment = offer.bucket, offer.assignment
    opening = pb.RoundBegin(
        worker_id=worker_id,
        epoch=assignment.epoch,
        step=assignment.step,
        attempt=assignment.attempt,
        lease_id=assignment.lease_id,
        tensor=tensor_pb2.TensorSpec(
            dtype=dtype_enum(spec.dtype),
            num_elements=spec.num_elements,
            component_sizes=spec.component_sizes,
            scale_block_elements=scale_block_elements(spec.dtype),
        ),
        microbatches=[stats_message(stats) for stats in offer.microbatches],
        num_buckets=offer.num_buckets,
    )
    if bucket.kind == "block":
        block = pb.BlockGradientBegin(round=opening, block_index=bucket.index, num_blocks=offer.num_blocks)
        return pb.BlockGradientRequest(begin=block).SerializeToString()
    if bucket.kind == "non_block":
        component = pb.NonBlockComponent.ValueType(bucket.index + 1)
        non_block = pb.NonBlockGradientBegin(round=opening, component=component)
        return pb.NonBlockGradientRequest(begin=non_block).SerializeToString()
    return pb.GradientRequest(begin=pb.GradientBegin(round=opening)).SerializeToString()


def commit_request(worker_id: int, assignment: ShardAssignment, report: Report) -> pb.CommitStepRequest:
    """Builds a CommitStepRequest."""
    kinds: Mapping[str, pb.StepKind.ValueType] = {name: value for value, name in KINDS.items()}
    return pb.CommitStepRequest(
        worker_id=worker_id,
        epoch=assignment.epoch,
        step=assignment.step,
        attempt=assignment.attempt,
        lease_id=assignment.lease_id,
        kind=kinds[assignment.kind],
        num_buckets=report.num_buckets,
        microbatches=[stats_message(stats) for stats in report.microbatches],
        parameters_sha256=report.parameters_sha256,
        times=times_message(report.times),
        following=report.following,
        square_sum=report.square_sum,
        origin=origin_message(report.origin),
        generation=report.generation,
        slices=[slice_message(taken) for taken in report.slices],
    )


def commit(message: pb.CommitStepResponse) -> Commit:
    """Converts an answer to CommitStep."""
    return Commit(
        step=message.step,
        attempt=message.attempt,
        total_weight=message.total_weight,
        global_loss=message.global_loss,
        gradient_norm=message.gradient_norm,
        num_correct=message.num_correct,
        num_predictions=message.num_predictions,
        learning_rate=message.learning_rate,
        clip_factor=message.clip_factor,
        best=message.best,
        checkpoint_writer=message.checkpoint_writer,
    )


def heartbeat_request(worker_id: int, sign: SignOfLife) -> pb.HeartbeatRequest:
    """Returns a heartbeat."""
    return pb.HeartbeatRequest(
        worker_id=worker_id,
        epoch=sign.epoch,
        step=sign.step,
        activity=sign.activity,
        published_steps=sign.published_steps,
        completed_steps=sign.completed_steps,
        origin=origin_message(sign.origin),
        failed_offer_id=sign.failed_offer.offer_id,
        failed_offer_reason=sign.failed_offer.reason,
        offered_state_is_damaged=sign.failed_offer.is_damaged,
        generation=sign.generation,
        contributed_leases=sign.contributed_leases,
        lost_owners=sign.lost_owners,
        failed_reduction=sign.failed_reduction,
        cpu_fallbacks=sign.cpu_fallbacks,
    )
