"""Live membership: ticks the clock, keeps one outbox for each member, tells when somebody goes.  [shell]"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from ayni.errors import AyniError, UnknownWorker
from ayni.step_values import Origin, StepTimes
from coordinator_service.audit import compare_hashes
from coordinator_service.membership import Applicant, Epoch, Member, Membership
from coordinator_service.rounds import Flow
from coordinator_service.signals import Signal
from coordinator_service.values import Assignment, Regroup, Revoked, Shutdown, StateOffer, Waiting

_log = logging.getLogger(__name__)

Frame = Assignment | Regroup | Waiting | Revoked | StateOffer | Shutdown | AyniError


@dataclass(kw_only=True, slots=True)
class Seat:
    """What the shell keeps of a member."""

    member: Member
    flow: Flow
    outbox: asyncio.Queue[Frame] = field(default_factory=asyncio.Queue)
    share: float = 0.0
    speed: float = 0.0
    times: StepTimes = field(default_factory=StepTimes)
    published_steps: int = 0
    """Steps behind the train state that its host tier holds; 0 for none."""
    completed_steps: int = 0
    """Updates that its parameters have had, as far as it has said."""
    origin: Origin | None = None
    """Where the last of them came from; None for not said."""
    follow_from: int | None = None
    """First step whose mean a follower keeps: a state behind this step or a later one is of use to it. None before."""
    publish_requested: bool = False
    """Whether the next assignment asks it to publish its state."""
    failed_offer: tuple[int, str] = (0, "")
    """Offer that it could not take, and why."""
    damaged_offers: int = 0
    """How often the stored state that it was offered was damaged, since the run went back to that state."""
    share_reason: str = ""
    """Why it has its share, for people."""
    cpu_fallbacks: int = 0
    """Operations that its accelerator has given back to its CPU, as it says."""
    waiting_for: str = ""
    """What it waits for while its parameters lag behind, for people."""
    draining: bool = False
    """Whether it is let go of after the step in progress, at the operator's wish."""
    beats: int = 0
    """Heartbeats of it so far."""
    tainted: bool = False
    """Whether its parameters were found to differ from the others', and it has not said yet that it threw them away."""
    unproven: bool = False
    """Whether it was found to differ and has not been offered another state since."""
    idle_steps: int = 0
    """Steps in a row without a share: its speed is forgotten in the end, so that it is measured again."""
    dismissed: bool = False
    """Whether its last frame (shutdown or error) is in the outbox."""

    @property
    def following(self) -> bool:
        """Whether its parameters lag behind the run."""
        return self.member.following

    @property
    def elastic(self) -> bool:
        """Whether it takes extra leases and can be handed the run's state."""
        return self.member.applicant.elastic

    def follow(self, *, tainted: bool = False) -> None:
        """Notes that its parameters lag behind the run, or differ from it."""
        self.member.following, self.follow_from, self.tainted, self.unproven = True, None, tainted, tainted

    def lead(self) -> None:
        """Notes that its parameters are those of the run."""
        self.member.following, self.follow_from, self.tainted, self.unproven = False, None, False, False


class Epochs:
    """Drives `Membership`. Call from the event loop only."""

    def __init__(
        self,
        membership: Membership,
        *,
        flow_limit: int,
        on_gone: Callable[[Member, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without members.

        Args:
            membership: decides.
            flow_limit: chunks that a worker may have in flight.
            on_gone: told of each member that goes, with the reason.
            clock: seconds on a steady clock.
        """
        self.core = membership
        self.seats: dict[int, Seat] = {}
        self.changed = Signal()
        """Notified when members or their readiness change."""
        self.heard = Signal()
        """Notified at each heartbeat."""
        self.final_hashes: dict[str, str] = {}
        """Parameter hash that each worker gave when it left."""
        self._initial_hashes: dict[str, str] = {}
        self._past_bytes = [0, 0]
        self._flow_limit = flow_limit
        self._on_gone = on_gone
        self._clock = clock

    @property
    def received_bytes(self) -> int:
        """Gradient bytes that came from all workers, those that left included."""
        return self._past_bytes[0] + sum(seat.flow.received_bytes for seat in self.seats.values())

    @property
    def sent_bytes(self) -> int:
        """Gradient bytes that went to all workers, those that left included."""
        return self._past_bytes[1] + sum(seat.flow.sent_bytes for seat in self.seats.values())

    def join(self, applicant: Applicant) -> Member:
        """Admits a worker; see `Membership.admit`."""
        known = set(self.core.members)
        member = self.core.admit(self._clock(), applicant)
        if member.worker_id not in known:
            self.seats[member.worker_id] = Seat(member=member, flow=Flow(self._flow_limit))
            _log.info(
                "worker %s joined as %d from %s (%s)",
                member.name,
                member.worker_id,
                applicant.peer,
                ", ".join((applicant.backend, *applicant.device_names)),
                extra={"worker": member.name},
            )
            self.changed.notify()
        return member

    def seat(self, worker_id: int, session: str) -> Seat:
        """Returns a live member's seat and notes the sign of life; see `Membership.member`."""
        member = self.core.member(worker_id, session)
        self.core.renew(self._clock(), member.worker_id)
        return self.seats[worker_id]

    def renew(self, worker_id: int, activity: str) -> None:
        """Notes a heartbeat."""
        self.core.renew(self._clock(), worker_id, activity)
        self.seats[worker_id].beats += 1
        self.heard.notify()

    def ready(self, seat: Seat, parameters_sha256: str) -> None:
        """Makes a member ready to compute.

        Raises:
            Diverged: its parameters are not those of the members that are ready already.
        """
        name = seat.member.name
        compare_hashes("before the first step", self._initial_hashes | {name: parameters_sha256})
        self._initial_hashes[name] = parameters_sha256
        seat.member.ready = True
        self.changed.notify()

    def forget_initial_hashes(self) -> None:
        """Parameters are about to change; what they were at the start says nothing about later members."""
        self._initial_hashes.clear()

    def leave(self, worker_id: int, reason: str, parameters_sha256: str = "") -> None:
        """Ends a membership at the worker's wish; nothing happens when it has ended."""
        self._end(worker_id, reason, Shutdown(reason=reason, finished=False, committed_steps=0), parameters_sha256)

    def expel(self, worker_id: int, reason: str, error: AyniError | None = None) -> None:
        """Ends a membership against the worker's wish, and says so on its stream if anybody still listens."""
        sentence = f"worker {worker_id} is no member any more: {reason}; join again"
        self._end(worker_id, reason, error or UnknownWorker(sentence, worker_id=worker_id), "")

    def has_session(self, session: str) -> bool:
        """Returns whether a live member has this session."""
        return self.find(session) is not None

    def find(self, session: str) -> int | None:
        """Returns the live member that has this session, or None."""
        members = self.core.members.values()
        return next((m.worker_id for m in members if secrets.compare_digest(m.applicant.session, session)), None)

    @property
    def able(self) -> list[Seat]:
        """Ready members whose parameters are those of the run, by id."""
        return [s for _, s in sorted(self.seats.items()) if s.member.ready and not s.following and not s.dismissed]

    def writer(self, worker_ids: Iterable[int]) -> str:
        """Returns the name of the first of these workers that has the run's parameters; empty where none has."""
        able = {seat.member.worker_id: seat.member.name for seat in self.able}
        return next((able[worker] for worker in worker_ids if worker in able), "")

    def _end(self, worker_id: int, reason: str, last: Frame, parameters_sha256: str) -> None:
        member = self.core.remove(worker_id)
        if member is None:
            return
        seat = self.seats.pop(worker_id)
        self._past_bytes[0] += seat.flow.received_bytes
        self._past_bytes[1] += seat.flow.sent_bytes
        self._initial_hashes.pop(member.name, None)
        if parameters_sha256 and not seat.following:
            self.final_hashes[member.name] = parameters_sha256
        log = _log.info if seat.dismissed else _log.warning
        log("worker %s left: %s", member.name, reason, extra={"worker": member.name})
        seat.outbox.put_nowait(last)
        self._on_gone(member, reason)
        self.changed.notify()

    def form_epoch(self) -> tuple[Epoch | None, str]:
        """See `Membership.form_epoch`."""
        return self.core.form_epoch()

    def broadcast(self, frame: Frame) -> None:
        """Puts a frame in every ready member's outbox."""
        for seat in self.seats.values():
            if seat.member.ready and not seat.dismissed:
                seat.outbox.put_nowait(frame)

    def dismiss(self, frame: Shutdown | AyniError) -> None:
        """Puts the last frame in every outbox."""
        for seat in self.seats.values():
            if not seat.dismissed:
                seat.dismissed = True
                seat.outbox.put_nowait(frame)

    def let_go(self, committed_steps: int, *, needed: int, in_step: Container[int] = ()) -> None:
        """Says goodbye to the members that are to leave between two steps, at the operator's wish.

        A member stays where others have gone since that wish: its parameters may be the only ones.

        Args:
            committed_steps: steps behind the run.
            needed: members that must be left with the run's parameters.
            in_step: members whose step is in progress; they leave after it.
        """
        wishes = [(one, seat) for one, seat in self.seats.items() if seat.draining and not seat.dismissed]
        for seat in [seat for one, seat in wishes if one not in in_step]:
            rest = [other for other in self.able if other is not seat and not other.draining]
            if not seat.following and len(rest) < needed:
                seat.draining = False
                _log.warning("worker %s is not drained: others have gone, and the run needs it", seat.member.name)
                continue
            seat.dismissed, seat.member.ready = True, False
            reason = "the operator drained this worker"
            told = Shutdown(reason=reason, finished=False, committed_steps=committed_steps, drained=True)
            seat.outbox.put_nowait(told)
            self.changed.notify()

    async def watch_leases(self, interval: float) -> None:
        """Ends leases that run out, for ever."""
        while True:
            await asyncio.sleep(interval)
            for member in self.core.expired(self._clock()):
                silence = self._clock() - member.last_seen
                self.expel(member.worker_id, f"its lease ended: nothing was heard of it for {silence:.1f} s")

    def silence(self, member: Member) -> float:
        """Returns the seconds since a member's last sign of life."""
        return self._clock() - member.last_seen


def new_session() -> str:
    """Returns a secret for one membership."""
    return secrets.token_hex(16)
