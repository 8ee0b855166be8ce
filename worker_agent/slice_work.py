"""What a lease brings to a bucket, cut into what each owner reduces.  [shell]

Legend: S elements in a slice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ayni.slices import slice_bounds
from ayni.step_values import GroupMember
from ayni.tensors import TensorSpec
from worker_agent.exchange import Contribution, Outcome
from worker_agent.group_exchange import Brought
from worker_agent.peer_messages import begin_frame, slice_offer
from worker_agent.session import ExchangeTimes
from worker_agent.slice_offers import SliceOffer, Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceWork:
    """One slice of what a lease brings."""

    owner: GroupMember
    offer: SliceOffer
    contribution: Contribution
    on_sent: Callable[[], None]
    is_wanted: Callable[[], bool]
    """See `Brought.is_wanted`."""


class Watched:
    """A call that says when everything was written."""

    def __init__(self, call: Any, on_sent: Callable[[], None]) -> None:
        self._call = call
        self._on_sent = on_sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def done_writing(self) -> None:
        """See `aio.StreamStreamCall.done_writing`."""
        await self._call.done_writing()
        self._on_sent()


class _Countdown:
    """Calls back when all of several things have happened."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._missing = set(range(count))
        self._then = then

    def note(self, number: int) -> None:
        self._missing.discard(number)
        if not self._missing:
            self._then()


def cut(brought: Brought, terms: Terms) -> list[SliceWork]:
    """Returns what goes to each owner; views of the parts, no copies."""
    offer = brought.offer
    spec = TensorSpec(dtype=terms.wire_type, num_elements=offer.out.size, component_sizes=offer.component_sizes)
    takes_mean = not offer.assignment.extra and not brought.has_mean
    owners = terms.group.owners
    bounds = slice_bounds(spec.num_elements, len(owners), offer.bucket)
    pairs = [(owner, one) for owner, one in zip(owners, bounds, strict=True) if one[0] < one[1]]
    countdown = _Countdown(len(pairs), brought.on_sent)
    work = []
    for number, (owner, (start, stop)) in enumerate(pairs):
        said = replace(slice_offer(terms.worker_id, offer, spec, terms.moment, (start, stop)), takes_mean=takes_mean)
        contribution = Contribution(
            name=f"{said.name} (reduced by worker {owner.worker_name})",
            begin=begin_frame(said),
            spec=TensorSpec(dtype=spec.dtype, num_elements=stop - start),
            parts=[None if part is None else part[start:stop] for part in offer.parts],
            out=offer.out[start:stop] if takes_mean else None,
        )
        on_sent = _noting(countdown, number)
        work.append(
            SliceWork(owner=owner, offer=said, contribution=contribution, on_sent=on_sent, is_wanted=brought.is_wanted)
        )
    return work


def _noting(countdown: _Countdown, number: int) -> Callable[[], None]:
    return lambda: countdown.note(number)


def joined(outcomes: list[Outcome]) -> Outcome:
    """Returns the outcome of a bucket, of which each slice has one."""
    times = [outcome.times for outcome in outcomes]
    return replace(
        outcomes[0],
        times=ExchangeTimes(
            begun=min(one.begun for one in times),
            accepted=max(one.accepted for one in times),
            sent=max(one.sent for one in times),
            first=min((one.first for one in times if one.first), default=0.0),
            last=max(one.last for one in times),
        ),
    )


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the earliest error of a group."""
    error = group.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error
