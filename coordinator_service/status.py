"""The run as status shows it: snapshots for GetRun and WatchRun.  [shell]"""

import json
import time
from collections.abc import Container
from dataclasses import fields

from ayni import PROTOCOL_VERSION
from ayni.messages import dtype_enum, duration, times_message
from ayni.run_config import RunConfig
from ayni.settings import to_mapping
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.artifacts import Artifacts
from coordinator_service.epochs import Seat
from coordinator_service.run import Run
from coordinator_service.watch.history_messages import add_history, so_far
from coordinator_service.watch.operator import checkpoint_refusal

_STATES = {
    "waiting": pb.RUN_STATE_WAITING,
    "running": pb.RUN_STATE_RUNNING,
    "finished": pb.RUN_STATE_FINISHED,
    "halted": pb.RUN_STATE_HALTED,
    "paused": pb.RUN_STATE_PAUSED,
    "suspended": pb.RUN_STATE_PAUSED,
}


def describe(run: Run, artifacts: Artifacts, *, with_history: bool = False) -> pb.GetRunResponse:
    """Returns the run with its configuration, files and state."""
    return pb.GetRunResponse(
        run_id=run.file.run_id,
        protocol_version=PROTOCOL_VERSION,
        config_json=json.dumps(shared_config(run)),
        artifacts=[pb.Artifact(name=f.name, sha256=f.sha256, size_bytes=f.size_bytes) for f in artifacts.files],
        snapshot=snapshot(run, with_history=with_history),
    )


def shared_config(run: Run) -> dict[str, object]:
    """Returns the part of the run file that workers get, with the wire type of now."""
    return {**config_of(run.file), "wire_type": run.wire_types.now}


def config_of(file: RunConfig) -> dict[str, object]:
    """Returns everything of a run file but what concerns the coordinator's own machine."""
    shared = {field.name for field in fields(RunConfig)}
    return {name: value for name, value in to_mapping(file).items() if name in shared}


def snapshot(run: Run, *, with_history: bool = False) -> pb.RunSnapshot:
    """Returns the state at this moment, with the run's curves and events where they are asked for."""
    progress = run.progress
    held = run.live.core.held_bytes if run.live else 0
    group, owners = run.regrouping.group, run.regrouping.owners
    message = pb.RunSnapshot(
        state=_STATES[progress.state],
        epoch=run.epochs.core.epoch.number,
        committed_steps=progress.committed_steps,
        num_steps=run.file.num_steps,
        attempt=progress.attempt,
        kind=pb.STEP_KIND_TRAIN if progress.kind == "train" else pb.STEP_KIND_EVALUATE,
        samples_per_second=progress.samples_per_second,
        received_bytes=run.epochs.received_bytes,
        sent_bytes=run.epochs.sent_bytes,
        workers=[_worker(run, seat, owners) for _, seat in sorted(run.epochs.seats.items())],
        waiting=_waiting(run),
        elapsed=duration(time.monotonic() - progress.started),
        reducer_bytes=held,
        reducer_peak_bytes=progress.peak_reducer_bytes,
        stored_steps=progress.stored_steps,
        extra_leases=progress.extra_leases,
        skipped_microbatches=progress.skipped_microbatches,
        norm_alarms=progress.norm_alarms,
        divergences=progress.divergences,
        topology=run.regrouping.topology,
        generation=group.generation if group else 0,
        regroups=progress.regroups,
        wire_type=dtype_enum(run.wire_types.now),
        step=progress.step,
        step_elapsed=duration(time.monotonic() - run.live.opened) if run.live else None,
        step_took=duration(progress.step_seconds),
        voided_attempts=progress.voided_attempts,
        storing_steps=progress.storing_steps,
        checkpoint_refusal=checkpoint_refusal(run),
        unix_time=time.time(),
    )
    if with_history:
        add_history(message, progress.history)
    for name in ("loss", "evaluation_loss", "evaluation_accuracy"):
        if (value := getattr(progress, name)) is not None:
            setattr(message, name, value)
    return message


def _worker(run: Run, seat: Seat, owners: Container[int]) -> pb.WorkerSnapshot:
    member = seat.member
    return pb.WorkerSnapshot(
        worker_id=member.worker_id,
        worker_name=member.name,
        backend=member.applicant.backend,
        device_names=member.applicant.device_names,
        share=seat.share,
        samples_per_second=seat.speed,
        activity=member.activity,
        last_seen=duration(run.epochs.silence(member)),
        times=times_message(seat.times),
        peer=member.applicant.peer,
        committed=bool(run.live and run.live.core.has_committed(member.worker_id)),
        received_bytes=seat.flow.received_bytes,
        sent_bytes=seat.flow.sent_bytes,
        share_reason=seat.share_reason,
        following=seat.following,
        strikes=run.epochs.core.strikes[member.name],
        memory_bytes=member.applicant.memory_bytes,
        shares_memory=run.same_host.is_connected(member.worker_id),
        owns_slices=member.worker_id in owners,
        cpu_fallbacks=seat.cpu_fallbacks,
        completed_steps=seat.completed_steps,
        published_steps=seat.published_steps,
        attached=not member.applicant.address,
        draining=seat.draining,
        so_far=so_far(run.live, member.worker_id),
        waiting_for=seat.waiting_for if seat.following else "",
    )


def _waiting(run: Run) -> pb.Waiting | None:
    if run.progress.state == "halted":
        return pb.Waiting(reason=run.progress.detail)
    if run.progress.waiting:
        return pb.Waiting(reason=run.progress.waiting.reason, worker_names=run.progress.waiting.worker_names)
    if run.live is None or run.live.core.done:
        return None
    leases = run.live.core.uncommitted
    doing = [f"{lease.worker_name} ({_activity(run, lease.worker_id)})" for lease in leases]
    return pb.Waiting(
        reason=f"{run.live.core.label} waits for {', '.join(dict.fromkeys(doing))}",
        worker_names=list(dict.fromkeys(lease.worker_name for lease in leases)),
    )


def _activity(run: Run, worker_id: int) -> str:
    seat = run.epochs.seats.get(worker_id)
    return seat.member.activity if seat else "gone"
