"""A snapshot on the wire as a view.  [shell]"""

from collections.abc import Iterable

from ayni.messages import dtype_name, seconds_of, times_of
from ayni.step_values import StepTimes
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.watch.view import (
    Event,
    Phases,
    Point,
    RunView,
    WorkerView,
    seconds_left,
    state_of,
    tiers_of,
    transfers_of,
)


def view_of(run_id: str, snapshot: pb.RunSnapshot) -> RunView:
    """Returns the view of a snapshot; curves and events are there if it was asked for with its history."""
    workers = tuple(_worker(worker, snapshot) for worker in snapshot.workers)
    training = tuple(_points(snapshot.points, pb.STEP_KIND_TRAIN))
    committed, stored = snapshot.committed_steps, snapshot.stored_steps
    return RunView(
        run_id=run_id,
        unix_time=snapshot.unix_time,
        state=pb.RunState.Name(snapshot.state).removeprefix("RUN_STATE_").lower(),
        sentence=snapshot.waiting.reason,
        epoch=snapshot.epoch,
        step=snapshot.step,
        attempt=snapshot.attempt,
        kind="evaluate" if snapshot.kind == pb.STEP_KIND_EVALUATE else "train",
        committed_steps=committed,
        num_steps=snapshot.num_steps,
        elapsed=seconds_of(snapshot.elapsed),
        step_elapsed=seconds_of(snapshot.step_elapsed) if snapshot.HasField("step_elapsed") else None,
        step_took=seconds_of(snapshot.step_took),
        num_committed=sum(worker.is_committed for worker in workers),
        loss=snapshot.loss if snapshot.HasField("loss") else None,
        evaluation_loss=snapshot.evaluation_loss if snapshot.HasField("evaluation_loss") else None,
        evaluation_accuracy=snapshot.evaluation_accuracy if snapshot.HasField("evaluation_accuracy") else None,
        samples_per_second=snapshot.samples_per_second,
        seconds_left=seconds_left(training, committed, snapshot.num_steps),
        wire_type=dtype_name(snapshot.wire_type) if snapshot.wire_type else "",
        topology=snapshot.topology,
        generation=snapshot.generation,
        received_bytes=snapshot.received_bytes,
        sent_bytes=snapshot.sent_bytes,
        reducer_bytes=snapshot.reducer_bytes,
        reducer_peak_bytes=snapshot.reducer_peak_bytes,
        stored_steps=stored,
        storing_steps=snapshot.storing_steps,
        extra_leases=snapshot.extra_leases,
        skipped_microbatches=snapshot.skipped_microbatches,
        norm_alarms=snapshot.norm_alarms,
        divergences=snapshot.divergences,
        regroups=snapshot.regroups,
        voided_attempts=snapshot.voided_attempts,
        checkpoint_refusal=snapshot.checkpoint_refusal,
        workers=workers,
        tiers=tiers_of(workers, committed, stored, snapshot.checkpoint_refusal),
        transfers=transfers_of(workers, snapshot.storing_steps),
        training=training,
        evaluations=tuple(_points(snapshot.points, pb.STEP_KIND_EVALUATE)),
        events=tuple(_event(event) for event in snapshot.events),
    )


def _worker(worker: pb.WorkerSnapshot, snapshot: pb.RunSnapshot) -> WorkerView:
    lag = max(0, snapshot.committed_steps - worker.completed_steps) if worker.following else 0
    return WorkerView(
        worker_id=worker.worker_id,
        name=worker.worker_name,
        backend=worker.backend,
        devices=tuple(worker.device_names),
        peer=worker.peer,
        state=state_of(
            activity=_activity(worker, is_open=snapshot.HasField("step_elapsed")),
            is_committed=worker.committed,
            is_following=worker.following,
            is_draining=worker.draining,
        ),
        is_committed=worker.committed,
        is_draining=worker.draining,
        share=worker.share,
        share_reason=worker.share_reason,
        samples_per_second=worker.samples_per_second,
        lag_steps=max(1, lag) if worker.following else 0,
        silence=seconds_of(worker.last_seen),
        so_far=_phases(times_of(worker.so_far)),
        last=_phases(times_of(worker.times)),
        route="shm" if worker.shares_memory else "grpc" if snapshot.topology in ("", "star") else "peers",
        is_attached=worker.attached,
        received_bytes=worker.received_bytes,
        sent_bytes=worker.sent_bytes,
        memory_bytes=worker.memory_bytes,
        strikes=worker.strikes,
        cpu_fallbacks=worker.cpu_fallbacks,
        owns_slices=worker.owns_slices,
        published_steps=worker.published_steps,
        waiting_for=worker.waiting_for,
    )


def _activity(worker: pb.WorkerSnapshot, *, is_open: bool) -> str:
    """Returns what a worker does; where all it said was about the step before, what the coordinator sees of it."""
    if worker.activity != "waiting" or not is_open or worker.committed:
        return worker.activity
    return "exchanging" if seconds_of(worker.so_far.exchange) else "computing"


def _phases(times: StepTimes) -> Phases:
    return Phases(compute=times.compute + times.data, send=times.exchange, wait=times.commit_wait, apply=times.update)


def _points(points: Iterable[pb.CurvePoint], kind: "pb.StepKind.ValueType") -> Iterable[Point]:
    for point in points:
        if point.kind == kind:
            yield Point(
                step=point.step,
                unix_time=point.unix_time,
                loss=point.loss if point.HasField("loss") else None,
                samples_per_second=point.samples_per_second if point.HasField("samples_per_second") else None,
                accuracy=point.accuracy if point.HasField("accuracy") else None,
            )


def _event(event: pb.RunEvent) -> Event:
    return Event(
        unix_time=event.unix_time, level=event.level, sentence=event.sentence, committed_steps=event.committed_steps
    )
