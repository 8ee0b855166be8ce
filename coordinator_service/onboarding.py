"""Has followers handed the run's state while the others keep training.  [shell]

Each follower has at most one offer out. A new one is made when the worker that serves it is gone, when the follower
says that it failed, or when it takes too long; `offers` decides from whom.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ayni import failpoints
from ayni.errors import AyniError
from ayni.settings import SettingsError
from ayni.step_values import Origin
from coordinator_service import offers
from coordinator_service.asking import Asking
from coordinator_service.attachments import Attachments
from coordinator_service.epochs import Seat
from coordinator_service.offers import STORE, Failures, Holder, Route
from coordinator_service.run import Run
from coordinator_service.values import PeerState, StateOffer
from coordinator_service.worker_stub import GrpcBlockWorker

_log = logging.getLogger(__name__)

Dial = Callable[[Seat, int], GrpcBlockWorker]
"""Returns a stub of a member, given the rank that answers are to have."""

_TICK_S = 1.0
"""Longest time between two looks, so that nothing that ends by the clock is missed."""
_EXPORT_S = 10.0
"""Longest wait for what a worker says about itself."""


@dataclass(kw_only=True, slots=True)
class _Out:
    """An offer that is out, or is being made."""

    route: Route
    steps: int
    began: float
    said: tuple[int, Origin | None]
    """What the follower had said of its parameters before."""
    offer_id: int = 0
    """0 until it is made."""
    making: "asyncio.Task[None] | None" = None


@dataclass(kw_only=True, slots=True)
class _Follower:
    name: str
    failures: Failures = field(default_factory=Failures)
    out: _Out | None = None
    waiting_for: str = ""


class Onboarding:
    """Makes offers. Belongs to the event loop."""

    def __init__(
        self, run: Run, attachments: Attachments, dial: Dial, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watches a run; `dial` reaches its workers."""
        self._run = run
        self._attachments = attachments
        self._dial = dial
        self._clock = clock
        self._followers: dict[int, _Follower] = {}
        self._asking = Asking(run, clock)
        self._last_offer = 0

    async def keep(self) -> None:
        """Looks after every follower, for ever."""
        while True:
            self._look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._run.changed.wait()

    async def close(self) -> None:
        """Gives up the offers that are being made."""
        tasks = [one.out.making for one in self._followers.values() if one.out and one.out.making]
        self._followers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def waiting_for(self, worker_id: int) -> str:
        """Returns what a follower waits for, in words; empty when it is none."""
        follower = self._followers.get(worker_id)
        return follower.waiting_for if follower else ""

    def _look(self) -> None:
        seats = self._run.epochs.seats
        following = {number: seat for number, seat in seats.items() if _can_be_helped(seat)}
        for number in [known for known in self._followers if known not in following]:
            self._forget(number)
        self._note_refusals()
        for number, seat in following.items():
            follower = self._followers.setdefault(number, _Follower(name=seat.member.name))
            self._check(follower, seat)
            if follower.out is None:
                self._help(follower, seat)
            seat.waiting_for = follower.waiting_for
        if not following:
            self._asking.take_back()

    def _forget(self, worker_id: int) -> None:
        """Drops a follower that is up to date, or gone."""
        follower, seat = self._followers.pop(worker_id), self._run.epochs.seats.get(worker_id)
        if follower.out and follower.out.making:
            follower.out.making.cancel()
        if seat is None:
            return
        self._run.stored_problem = seat.waiting_for = ""
        took = f" after {self._clock() - follower.out.began:.1f} s" if follower.out else ""
        source = f", {self._source(follower.out)}" if follower.out else ""
        _log.info("worker %s is up to date%s%s", follower.name, took, source, extra={"worker": follower.name})

    def _check(self, follower: _Follower, seat: Seat) -> None:
        """Ends an offer that is of no use any more."""
        out = follower.out
        if out is None:
            return
        limit = self._run.file.timeouts.onboard.total_seconds()
        source = self._run.epochs.seats.get(out.route.worker_id)
        if out.offer_id and seat.failed_offer[0] == out.offer_id:
            self._failed(follower, out, seat.failed_offer[1] or "it did not say why")
        elif out.route.worker_id != STORE and (source is None or source.following or source.dismissed):
            self._failed(follower, out, "the worker that has it left or fell behind")
        elif out.offer_id and _said(seat) != out.said and not self._run.states.is_ours(seat):
            self._failed(follower, out, "what it took is not of the commits that count")
        elif self._clock() - out.began > limit:
            self._failed(follower, out, f"it took more than {limit:g} s (timeouts.onboard)")

    def _failed(self, follower: _Follower, out: _Out, reason: str) -> None:
        if out.making:
            out.making.cancel()
        follower.out = None
        follower.failures.note(self._clock(), out.route)
        _log.warning(
            "worker %s did not get the state behind step %d, %s: %s",
            follower.name,
            out.steps,
            self._source(out),
            reason,
            extra={"worker": follower.name},
        )
        if out.route.worker_id == STORE:
            problem = f"worker {follower.name} could not load the one that is stored behind step {out.steps}: {reason}"
            self._run.stored_problem = problem
            self._run.epochs.changed.notify()

    def _help(self, follower: _Follower, seat: Seat) -> None:
        """Makes an offer, or has somebody asked."""
        stored = self._run.stored_source
        decision = offers.choose(
            self._clock(), self._needs(seat), self._holders(), follower.failures, stored[1] if stored else None
        )
        if isinstance(decision, offers.Offer):
            follower.out = out = _Out(route=decision.route, steps=decision.steps, began=self._clock(), said=_said(seat))
            follower.waiting_for = f"fetching the state behind step {out.steps}, {self._source(out)}"
            source = self._run.epochs.seats.get(decision.route.worker_id)
            out.making = asyncio.create_task(self._make(follower, seat, out, source))
        elif isinstance(decision, offers.Ask):
            name = self._asking.ask(decision.worker_id)
            follower.waiting_for = f"waiting for worker {name} to publish its state"
        else:
            follower.waiting_for = decision.reason

    def _needs(self, seat: Seat) -> int:
        """Returns the fewest steps behind a state that is of use to a follower.

        One that keeps no means yet begins with the next step; the one in progress is lost to it.
        """
        if seat.follow_from is not None:
            return seat.follow_from
        live, committed = self._run.live, self._run.progress.committed_steps
        return committed + 1 if live and live.core.kind == "train" else committed

    def _note_refusals(self) -> None:
        """Counts it as a failure of its routes where a worker was asked to publish and did not."""
        for number in self._asking.let_pass():
            for follower in self._followers.values():
                for relayed in (False, True):
                    follower.failures.note(self._clock(), Route(worker_id=number, relayed=relayed))

    def _holders(self) -> list[Holder]:
        readers = [one.out.route.worker_id for one in self._followers.values() if one.out]
        return [
            Holder(
                worker_id=number,
                name=seat.member.name,
                published_steps=seat.published_steps,
                speed=seat.speed,
                has_address=bool(seat.member.applicant.address),
                is_attached=self._attachments.is_attached(number),
                num_readers=readers.count(number),
                is_asked=self._asking.is_asked(number),
                may_be_asked=self._asking.may_ask(seat),
            )
            for number, seat in ((seat.member.worker_id, seat) for seat in self._run.epochs.able)
        ]

    async def _make(self, follower: _Follower, seat: Seat, out: _Out, holder: Seat | None) -> None:
        """Sends an offer of what a worker holds; None: of what is stored."""
        try:
            async with asyncio.timeout(_EXPORT_S):
                source = await self._peer_state(holder, out.route) if holder else self._stored()
        except TimeoutError:
            self._not_made(follower, out, f"it said nothing within {_EXPORT_S:g} s")
        except (AyniError, ConnectionError, SettingsError) as error:
            self._not_made(follower, out, str(error))
        except Exception as error:
            _log.exception("no offer could be made for worker %s", follower.name)
            self._not_made(follower, out, repr(error))
        else:
            out.making = None
            self._last_offer = out.offer_id = self._last_offer + 1
            seat.outbox.put_nowait(StateOffer(offer_id=out.offer_id, completed_steps=out.steps, source=source))
            _log.info("offered worker %s the state behind step %d, %s", follower.name, out.steps, self._source(out))
            failpoints.hit("coordinator.offer.sent")

    def _not_made(self, follower: _Follower, out: _Out, reason: str) -> None:
        out.making = None
        self._failed(follower, out, reason)
        self._run.changed.notify()

    async def _peer_state(self, holder: Seat, route: Route) -> PeerState:
        stub = self._dial(holder, 0)
        try:
            (metadata,) = await stub.export_metadata()
        finally:
            await stub.close()
        member = holder.member
        return PeerState(worker_id=member.worker_id, worker_name=member.name, metadata=metadata, relayed=route.relayed)

    def _stored(self) -> str:
        assert self._run.stored_source, "a stored state is offered only where there is one"
        return self._run.stored_source[0]

    def _source(self, out: _Out) -> str:
        if out.route.worker_id == STORE:
            return "from the object store"
        seat = self._run.epochs.seats.get(out.route.worker_id)
        name = seat.member.name if seat else f"{out.route.worker_id}, which left"
        return f"from worker {name}{' through the coordinator' if out.route.relayed else ''}"


def _said(seat: Seat) -> tuple[int, Origin | None]:
    return seat.completed_steps, seat.origin


def _can_be_helped(seat: Seat) -> bool:
    return seat.following and seat.member.ready and seat.elastic and not seat.dismissed
