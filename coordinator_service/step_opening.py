"""Opens an attempt at a step: who computes what, and what each member is told.  [shell]"""

from collections.abc import Sequence

from ayni import failpoints
from ayni.logs import set_fields
from ayni.tensors import position_bytes
from coordinator_service import plan
from coordinator_service.epochs import Seat
from coordinator_service.leases import Lease
from coordinator_service.live import LiveStep, Surroundings
from coordinator_service.membership import Epoch
from coordinator_service.run import Run
from coordinator_service.shards import Bid
from coordinator_service.watch.step_spans import StepSpans

_Members = tuple[tuple[int, bool], ...]
"""Worker ids by rank, and whether each follows."""

_FORGET_AFTER = 20
"""Steps without a share after which a worker's speed counts as unknown, so that it is measured again."""


class StepOpening:
    """Cuts each step among the members of its epoch."""

    def __init__(self, run: Run, spans: StepSpans) -> None:
        """Opens steps of a run, and their spans."""
        self._run = run
        self._spans = spans
        self._shares: dict[str, tuple[_Members, tuple[tuple[int, int], ...]]] = {}
        """For each kind of step, the members and their shares in the last one."""

    def open(self, kind: str, step: int, attempt: int, epoch: Epoch, evaluation_samples: int) -> LiveStep:
        """Opens the attempt and tells every member its lease."""
        run = self._run
        seats = [run.epochs.seats[worker] for worker in epoch.workers]
        bids = [_bid(seat) for seat in seats]
        layout = plan.lay_out(run.file, kind, step, evaluation_samples, bids, self._before(kind, seats))
        self._shares[kind] = (_members(seats), tuple((share.start, share.stop) for share in layout.shares))
        leases = [self._lease(seat, share.start, share.stop) for seat, share in zip(seats, layout.shares, strict=True)]
        wire_type = run.wire_types.at(step)
        chunk_elements = run.file.chunk_bytes // position_bytes(wire_type)
        around = Surroundings(
            chunk_elements=chunk_elements,
            on_change=run.changed,
            same_host=run.same_host,
            group=run.regrouping.first(kind, epoch, run.same_host),
        )
        live = LiveStep(layout, attempt, epoch, leases, around)
        live.update, live.wire_type = run.update_mode, wire_type
        live.traceparent = self._spans.opened(kind, step, attempt, epoch.number)
        run.live = live
        run.releases.open(live)
        run.progress.open(step, attempt, kind)
        set_fields(epoch=epoch.number, step=step)
        for seat, lease, share in zip(seats, leases, layout.shares, strict=True):
            _tell(live, seat, lease, share.reason)
        run.changed.notify()
        return live

    def _lease(self, seat: Seat, start: int, stop: int) -> Lease:
        return Lease(
            lease_id=self._run.releases.take_lease_id(),
            worker_id=seat.member.worker_id,
            worker_name=seat.member.name,
            start=start,
            stop=stop,
        )

    def _before(self, kind: str, seats: Sequence[Seat]) -> tuple[tuple[int, int], ...] | None:
        """Returns the shares of the last step of this kind, if the members are the same."""
        members, shares = self._shares.get(kind, ((), ()))
        return shares if shares and members == _members(seats) else None


def _tell(live: LiveStep, seat: Seat, lease: Lease, reason: str) -> None:
    """Puts a member's lease in its outbox, with what else it has to know for this step."""
    is_training = live.core.kind == "train"
    seat.share = (lease.stop - lease.start) / max(1, live.layout.num_microbatches)
    seat.share_reason = reason
    if is_training and seat.following and seat.follow_from is None:
        seat.follow_from = live.core.step
    seat.idle_steps = 0 if lease.stop > lease.start else seat.idle_steps + 1
    if seat.idle_steps > _FORGET_AFTER:
        seat.speed = 0.0
    if live.peers:
        seat.member.activity = "computing"  # Until it says more: what it said before was about another step.
    publishes = is_training and seat.publish_requested
    if publishes:
        live.publishers.add(lease.worker_id)
    seat.outbox.put_nowait(live.assignment(lease, publish_state=publishes, discard_state=seat.tainted))
    failpoints.hit("coordinator.assignment.sent")


def _bid(seat: Seat) -> Bid:
    return Bid(speed=seat.speed, cap=seat.member.applicant.max_microbatches, following=seat.following)


def _members(seats: Sequence[Seat]) -> _Members:
    return tuple((seat.member.worker_id, seat.following) for seat in seats)
