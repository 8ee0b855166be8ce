"""Curves, events and the step in progress as parts of a snapshot.  [shell]"""

import time

from ayni.messages import duration
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.live import LiveStep
from coordinator_service.watch.history import History
from coordinator_service.watch.view import Point


def add_history(message: pb.RunSnapshot, history: History) -> None:
    """Adds what happened so far."""
    for kind, curve in ((pb.STEP_KIND_TRAIN, history.training), (pb.STEP_KIND_EVALUATE, history.evaluations)):
        message.points.extend(_point(point, kind) for point in curve.points())
    message.events.extend(
        pb.RunEvent(
            unix_time=event.unix_time,
            level=event.level,
            sentence=event.sentence,
            committed_steps=event.committed_steps,
        )
        for event in history.events
    )


def so_far(live: LiveStep | None, worker_id: int) -> pb.StepTimes:
    """Returns where a worker's time has gone in the step in progress, as the coordinator sees it."""
    if live is None or worker_id not in live.epoch.workers:
        return pb.StepTimes()
    now = time.monotonic()
    done = live.done_at.get(worker_id, now)
    sent = min(live.first_sent.get(worker_id, done), done)
    return pb.StepTimes(
        compute=duration(sent - live.opened), exchange=duration(done - sent), commit_wait=duration(now - done)
    )


def _point(point: Point, kind: "pb.StepKind.ValueType") -> pb.CurvePoint:
    return pb.CurvePoint(
        step=point.step,
        unix_time=point.unix_time,
        kind=kind,
        loss=point.loss,
        samples_per_second=point.samples_per_second,
        accuracy=point.accuracy,
    )
