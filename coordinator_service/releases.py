"""Gives micro-batches of dead and late workers to others, in the middle of a step.  [shell]

The core says which micro-batches are orphans; here is who can take them, and when a worker is late. Nobody is late
while nobody else is done. A late worker that has not begun to send gets rivals; one that has begun and stands still
loses its leases. Where workers reduce among themselves there are no rivals: a late one loses its leases, and the others
form another group. Late is then who has not contributed; who is kept from it by others says that it is exchanging.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from ayni import failpoints
from coordinator_service import plan
from coordinator_service.config import RunFile
from coordinator_service.epochs import Epochs, Seat
from coordinator_service.leases import Lease
from coordinator_service.live import LiveStep
from coordinator_service.orphans import Grant, Taker, split_orphans
from coordinator_service.peer_steps import PeerStep
from coordinator_service.progress import Progress
from coordinator_service.regrouping import Regrouping
from coordinator_service.stragglers import Arrivals
from coordinator_service.values import Revoked

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 1.0
_SHORTEST_PAUSE_S = 0.05
_EXCHANGES = ("exchanging", "waiting")
"""What a worker that has computed its leases says that it is doing."""
_NEW = 4.0
"""Times the deadline, for a worker whose speed is not known yet."""


class Releases:
    """Leases again what is lost or late."""

    def __init__(self, file: RunFile, epochs: Epochs, progress: Progress, regrouping: Regrouping) -> None:
        """Starts without knowing how fast workers are."""
        self._regrouping = regrouping
        self._file = file
        self._epochs = epochs
        self._progress = progress
        self._arrivals = Arrivals()
        self._next_lease = 0
        self._moved: dict[int, int] = {}
        """Bytes that had gone to and from each late worker when it was looked at last."""
        self._arrived: set[int] = set()

    def open(self, live: LiveStep) -> None:
        """Takes care of a new attempt."""
        self._moved, self._arrived = {}, set()
        live.on_ended = lambda leases: self._tell(live, leases)

    def take_lease_id(self) -> int:
        """Returns a lease id that was not used before."""
        self._next_lease += 1
        return self._next_lease

    def lose(self, live: LiveStep, worker_id: int, reason: str) -> None:
        """Ends a worker's leases: it is gone. The attempt is given up where the others can't take its place."""
        leases = live.core.leases_of(worker_id)
        if not leases or live.ended.done() or live.all_committed.is_set():
            return
        if self._can_recover(live, without=worker_id):
            live.end(leases, reason)
        elif live.needs(worker_id):
            live.void(reason)
        else:
            live.end(leases, reason)

    def _settle(self, live: LiveStep) -> None:
        """Leases all orphans again."""
        if live.ended.done() or live.all_committed.is_set():
            return
        orphans = live.core.orphans()
        if not orphans:
            if not live.core.live:
                live.void("no worker of it is left")
            return
        takers = self._takers(live)
        if not takers:
            live.void("nobody is left who could compute what is missing")
            return
        for grant in self._share_out(orphans, takers):
            self._grant(live, grant.worker_id, (grant.start, grant.stop), None)

    def note_sent(self, live: LiveStep, worker_id: int) -> None:
        """Notes that a worker's contribution or commit came, which may have been its last."""
        if worker_id in self._arrived:
            return
        leases = live.core.leases_of(worker_id)
        primary = next((lease for lease in leases if not lease.is_extra), None)
        if primary is None or primary.start == primary.stop:
            return
        if live.core.has_sent(primary):
            self._arrived.add(worker_id)
            self._arrivals.note(live.core.kind, time.monotonic() - live.opened)

    async def watch(self, live: LiveStep) -> None:
        """Looks after late workers until the attempt is over."""
        committed = asyncio.create_task(live.all_committed.wait())
        try:
            while not (live.ended.done() or live.all_committed.is_set()):
                pause = self._look(live)
                await asyncio.wait({committed}, timeout=pause)
        finally:
            committed.cancel()

    def _look(self, live: LiveStep) -> float:
        """Acts on late workers; returns seconds until it is worth looking again."""
        bounds = self._file.stragglers
        deadline = self._arrivals.deadline(
            live.core.kind, bounds.shortest.total_seconds(), bounds.longest.total_seconds(), bounds.mad_factor
        )
        now = time.monotonic()
        limits = {x.lease_id: self._limit(x.worker_id, deadline) for x in live.core.uncommitted}
        due = [max(live.since[x.lease_id], live.regrouped) + limits[x.lease_id] - now for x in live.core.uncommitted]
        late = {x.worker_id: limits[x.lease_id] for x, left in zip(live.core.uncommitted, due, strict=True) if left < 0}
        if live.peers:
            self._leave_behind(live, live.peers, late)
        else:
            for worker_id in sorted(late):
                self._chase(live, worker_id, late[worker_id])
        ahead = min((seconds for seconds in due if seconds > 0), default=bounds.shortest.total_seconds() / 2)
        return min(max(ahead, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)

    def _limit(self, worker_id: int, deadline: float) -> float:
        """Returns when a worker is late: one whose speed is not known yet gets more time, to show it."""
        seat = self._epochs.seats.get(worker_id)
        is_new = seat is not None and seat.speed == 0
        return min(deadline * _NEW, self._file.stragglers.longest.total_seconds()) if is_new else deadline

    def _chase(self, live: LiveStep, worker_id: int, deadline: float) -> None:
        seat = self._epochs.seats.get(worker_id)
        takers = [taker for taker in self._takers(live) if taker.worker_id != worker_id and taker.free_in == 0]
        if seat is None or not seat.elastic or not takers or not self._can_recover(live, without=worker_id):
            return
        unbegun = [x for x in live.core.leases_of(worker_id) if not live.core.has_begun(x) and x.start < x.stop]
        raced = {lease.rival_of for lease in live.core.live}
        for lease in unbegun:
            if lease.lease_id not in raced:
                self._race(live, lease, takers, deadline)
        if not unbegun and self._stands_still(live, seat):
            seconds = time.monotonic() - live.opened
            reason = f"it stood still: {live.core.label} has taken {seconds:.1f} s, late is {deadline:.1f} s"
            _log.warning("the step goes on without worker %s: %s", seat.member.name, reason)
            live.end(live.core.leases_of(worker_id), reason)

    def _leave_behind(self, live: LiveStep, peers: PeerStep, late: dict[int, float]) -> None:
        """Ends the leases of those who keep a group waiting, if others can go on."""
        blamed = self._blamed(live, peers, late)
        others = [taker for taker in self._takers(live) if taker.worker_id not in blamed]
        if not blamed or not any(self._has_computed(peers, taker.worker_id) for taker in others):
            return
        leases = [lease for worker_id in blamed for lease in peers.leases_of(worker_id)]
        names = ", ".join(dict.fromkeys(lease.worker_name for lease in leases))
        seconds = time.monotonic() - live.opened
        deadline = min(late[worker_id] for worker_id in blamed)
        reason = f"{names} kept the others waiting: {peers.label} has taken {seconds:.1f} s, late is {deadline:.1f} s"
        _log.warning("the step goes on without %s", reason)
        live.end(leases, reason)

    def _blamed(self, live: LiveStep, peers: PeerStep, late: dict[int, float]) -> list[int]:
        """Returns which late workers keep a group waiting.

        Those that have not computed their leases; if there are none and nothing has moved for long, those that have not
        contributed though somebody has, or have not committed though somebody has.
        """
        computing = [worker for worker in sorted(late) if not self._has_computed(peers, worker)]
        if computing or not late or time.monotonic() - live.moved < min(late.values()):
            return computing
        owing = [w for w in sorted(late) if not all(peers.has_contributed(x) for x in _filled(peers, w))]
        if owing:
            return owing if any(peers.has_contributed(x) for x in peers.live if x.start < x.stop) else []
        return sorted(late) if peers.committed else []

    def _has_computed(self, peers: PeerStep, worker_id: int) -> bool:
        seat = self._epochs.seats.get(worker_id)
        says_so = seat is not None and seat.member.activity in _EXCHANGES
        return says_so or all(peers.has_sent(lease) for lease in _filled(peers, worker_id))

    def _race(self, live: LiveStep, lease: Lease, takers: Sequence[Taker], deadline: float) -> None:
        _log.warning(
            "worker %s is late with micro-batches [%d, %d) of %s (late is %.1f s): leased to others as well",
            lease.worker_name,
            lease.start,
            lease.stop,
            live.core.label,
            deadline,
        )
        for grant in self._share_out([(lease.start, lease.stop)], takers):
            self._grant(live, grant.worker_id, (grant.start, grant.stop), lease.lease_id)

    def _share_out(self, ranges: Sequence[tuple[int, int]], takers: Sequence[Taker]) -> list[Grant]:
        """Returns who takes what. With local updates a range is one worker's inner steps, and is not divided."""
        if not self._file.local_update.enabled:
            return split_orphans(ranges, takers)
        return [Grant(worker_id=_quickest(takers, stop - start), start=start, stop=stop) for start, stop in ranges]

    def _stands_still(self, live: LiveStep, seat: Seat) -> bool:
        """Returns whether nothing has moved since the last look, and it is the worker's turn."""
        worker_id = seat.member.worker_id
        moved = seat.flow.received_bytes + seat.flow.sent_bytes
        before, self._moved[worker_id] = self._moved.get(worker_id), moved
        exchanges = live.exchanges_of(worker_id)
        owes = any(not live.core.has_sent(x) for x in live.core.uncommitted if x.worker_id == worker_id)
        # Without a stream it has the whole mean, and has only to say so.
        is_its_turn = owes or not exchanges or any(exchange.is_standing for exchange in exchanges)
        return before == moved and is_its_turn

    def _takers(self, live: LiveStep) -> list[Taker]:
        """Returns who can take more micro-batches of the attempt, and when."""
        takers = []
        for worker_id in live.epoch.workers:
            seat, leases = self._epochs.seats.get(worker_id), live.core.leases_of(worker_id)
            if seat and seat.elastic and not seat.following and any(not lease.is_extra for lease in leases):
                takers.append(self._taker(live, seat, leases))
        return takers

    def _taker(self, live: LiveStep, seat: Seat, leases: Sequence[Lease]) -> Taker:
        samples = live.layout.num_samples / max(1, live.layout.num_microbatches)
        held = sum(lease.stop - lease.start for lease in leases)
        pending = sum(live.samples_of(lease) for lease in leases if not live.core.has_sent(lease))
        elapsed = time.monotonic() - live.opened
        left = max(0.001, pending / seat.speed - elapsed) if pending and seat.speed else 0.001 if pending else 0.0
        cap = seat.member.applicant.max_microbatches
        return Taker(
            worker_id=seat.member.worker_id,
            speed=seat.speed / max(samples, 1e-9),
            free_in=left,
            room=max(0, cap - held) if cap else -1,
        )

    def _grant(self, live: LiveStep, worker_id: int, span: tuple[int, int], rival_of: int | None) -> None:
        seat = self._epochs.seats[worker_id]
        lease = Lease(
            lease_id=self.take_lease_id(),
            worker_id=worker_id,
            worker_name=seat.member.name,
            start=span[0],
            stop=span[1],
            is_extra=True,
            rival_of=rival_of,
        )
        live.add(lease)
        self._progress.extra_leases += 1
        _log.info("%s: micro-batches [%d, %d) go to worker %s", live.core.label, *span, lease.worker_name)
        failpoints.hit("coordinator.extra.leased")
        seat.outbox.put_nowait(live.assignment(lease))

    def _tell(self, live: LiveStep, leases: Sequence[Lease]) -> None:
        """Tells members that leases of theirs are over, and gives others what they leave."""
        for lease in leases:
            if seat := self._epochs.seats.get(lease.worker_id):
                seat.outbox.put_nowait(Revoked(lease_id=lease.lease_id, reason=live.core.ended[lease.lease_id]))
                if not lease.is_extra:
                    seconds = time.monotonic() - live.since[lease.lease_id]
                    seat.speed = plan.slowed(seat.speed, live.samples_of(lease), seconds)
        if leases:
            self._regrouping.again(live, live.core.ended[leases[0].lease_id])
        self._settle(live)

    def _can_recover(self, live: LiveStep, *, without: int) -> bool:
        """Returns whether all other workers of the attempt can contribute again and take extra leases."""
        others = {lease.worker_id for lease in live.core.live} - {without}
        seats = [self._epochs.seats.get(worker_id) for worker_id in others]
        return bool(seats) and all(seat is not None and seat.elastic for seat in seats)


def _filled(peers: PeerStep, worker_id: int) -> list[Lease]:
    """Returns a worker's leases in force that have micro-batches."""
    return [lease for lease in peers.leases_of(worker_id) if lease.start < lease.stop]


def _quickest(takers: Sequence[Taker], count: int) -> int:
    """Returns the worker that would be done with so many micro-batches first."""
    return min(takers, key=lambda taker: (taker.free_in + count / max(taker.speed, 1e-9), taker.worker_id)).worker_id
