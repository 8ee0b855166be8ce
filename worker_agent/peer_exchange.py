"""Exchange among workers, each of which reduces a slice of every bucket: one bucket out, its mean in.  [shell]

Legend: N elements in a bucket, S elements in a slice.

One stream for each owner and bucket carries a lease's parts there and the mean back, with the frames and the code of a
stream to the coordinator. What this worker owns itself is added in place, without a stream. An owner that can't be
reached is tried again until the coordinator, which is told of it, has named other owners.

Copies: as for a stream to the coordinator. Of the own slice: none of a float32 part, one of the mean (into the prepared
vector).
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from grpc import aio

from ayni import failpoints, rpc, tensors
from ayni.channels import HeaderChannel
from ayni.errors import (
    AyniError,
    BadRequest,
    Deadline,
    PeerLost,
    RoundRestarted,
    StaleEpoch,
    TokenRefused,
    TooLarge,
    Unsupported,
)
from ayni.settings import SettingsError
from ayni.shm.regions import Regions
from ayni.shm.sources import Source
from ayni.slices import slice_bounds
from ayni.step_values import GroupMember, SliceDigest
from ayni.tensors import Floats, TensorSpec, position_bytes
from worker_agent.backoff import delays
from worker_agent.chunks import slices
from worker_agent.exchange import Contribution, Outcome, Traffic, exchange
from worker_agent.faults import TransportBroken
from worker_agent.group_exchange import Brought, OnLost
from worker_agent.host_calls import HostPeers
from worker_agent.peer_messages import begin_frame, slice_offer
from worker_agent.session import ExchangeTimes
from worker_agent.slice_offers import GROUP_HEADER, Moment, SliceOffer, Terms
from worker_agent.slice_rounds import SliceContribution, SliceRounds

_log = logging.getLogger(__name__)

METHOD = "/ayni.v1.PeerService/ReduceSlice"

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_TRIES = 3
"""Tries that must fail, in so many seconds, before an owner is said to be lost."""
_TRYING_S = 0.5
_BURST = 4
"""Own chunks that are added at a time."""

Dial = Callable[[str], HeaderChannel]
"""Opens a channel to an address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slice:
    """One slice of what a lease brings."""

    owner: GroupMember
    offer: SliceOffer
    contribution: Contribution
    on_sent: Callable[[], None]


class ShardedExchange:
    """This worker's part in sharded groups."""

    def __init__(
        self, rounds: SliceRounds, dial: Dial, traffic: Traffic, on_lost: OnLost, near: HostPeers | None = None
    ) -> None:
        """Takes what outlives a group.

        Args:
            rounds: of the slices that this worker owns; others reach them through a server.
            dial: opens channels, which are kept as long as their peer is in the group.
            traffic: is added to.
            on_lost: is told of owners that can't be reached.
            near: reaches owners of this host through shared memory; None: gradients travel to them, too.
        """
        self.rounds = rounds
        self._dial = dial
        self._traffic = traffic
        self._on_lost = on_lost
        self._near = near
        self._far: set[int] = set()
        """Owners of this host that can't share memory after all, in the group of now."""
        self._terms: Terms | None = None
        self._channels: dict[str, HeaderChannel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def regroup(self, terms: Terms) -> None:
        """See `GroupExchange.regroup`."""
        self._terms = terms
        self.rounds.open(terms)
        self._far.clear()
        if self._near:
            self._near.enter(terms)
        known = {member.address for member in terms.group.members}
        for address in self._channels.keys() - known:
            self._hang_up(address)

    def end(self, why: str) -> None:
        """See `GroupExchange.end`."""
        self._terms = None
        self.rounds.end(why)

    def slices(self, moment: Moment) -> tuple[SliceDigest, ...]:
        """See `GroupExchange.slices`."""
        assert self._terms is not None, "nothing is committed without terms"
        assert self._terms.moment == moment, "slices are those of the group in force"
        return self.rounds.digests()

    async def close(self) -> None:
        """See `GroupExchange.close`."""
        self.end("this worker has left")
        if self._near:
            self._near.close()
        for address in list(self._channels):
            self._hang_up(address)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def reduce(self, brought: Brought) -> Outcome:
        """See `GroupExchange.reduce`."""
        terms = self._terms
        if terms is None:
            raise StaleEpoch("this worker is in no exchange group at the moment", epoch=0, current_epoch=0)
        work = _cut(brought, terms)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._reduce_slice(terms, one)) for one in work]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return _joined([task.result() for task in tasks])

    async def _reduce_slice(self, terms: Terms, work: _Slice) -> Outcome:
        if work.owner.worker_id == terms.worker_id:
            return await self._at_home(terms, work)
        return await self._abroad(terms, work)

    async def _at_home(self, terms: Terms, work: _Slice) -> Outcome:
        while True:
            if self._terms is not terms:
                raise _over(terms)
            contribution = self.rounds.begin(work.offer)
            try:
                return await _carry(contribution, work, self.rounds.stores.regions)
            except RoundRestarted as error:
                _log.debug("contributing to %s again: %s", work.contribution.name, error)
            except BaseException:
                contribution.take_back()
                raise
            finally:
                contribution.close()

    async def _abroad(self, terms: Terms, work: _Slice) -> Outcome:
        began, failures = 0.0, 0
        for delay in delays(random.random, _FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            if self._terms is not terms:
                raise _over(terms)
            try:
                outcome = await (
                    self._call_near(terms, work) if self._is_near(terms, work) else self._call(terms, work)
                )
                work.on_sent()
                return outcome
            except RoundRestarted as error:
                _log.debug("contributing to %s again: %s", work.contribution.name, error)
                continue
            except (Deadline, StaleEpoch) as error:
                # Either side has not heard yet what the coordinator says of the group.
                _log.debug("contributing to %s again: %s", work.contribution.name, error)
            except (TransportBroken, TokenRefused) as error:
                failures, began = failures + 1, began or _now()
                _log.debug("contributing to %s again: %s", work.contribution.name, error)
                if failures >= _TRIES and _now() - began >= _TRYING_S:
                    self._on_lost(terms.moment.generation, [work.owner.worker_id])
            await asyncio.sleep(delay)
        raise AssertionError("there is always another delay")

    def _is_near(self, terms: Terms, work: _Slice) -> bool:
        owner = work.owner
        if self._near is None or owner.worker_id in self._far or not terms.is_near(owner):
            return False
        return self._near.has_room(owner)

    async def _call_near(self, terms: Terms, work: _Slice) -> Outcome:
        """Makes one call through shared memory, or over gRPC where that is not possible.

        Raises:
            AyniError: the owner refused.
            TransportBroken: nobody decided anything.
        """
        assert self._near
        chunk_bytes = terms.chunk_elements * position_bytes(terms.wire_type)
        try:
            call = await self._near.call(work.owner, terms.group.secret, chunk_bytes, work.on_sent)
            try:
                return await exchange(call.without, work.contribution, self._traffic, call, chunk_bytes)
            finally:
                call.cancel()
        except (Unsupported, TooLarge, PeerLost, BadRequest) as error:
            _log.info("%s: its bytes travel: %s", work.contribution.name, error)
            self._far.add(work.owner.worker_id)
        return await self._call(terms, work)

    async def _call(self, terms: Terms, work: _Slice) -> Outcome:
        """Makes one call.

        Raises:
            AyniError: the owner refused.
            TransportBroken: nobody decided anything.
        """
        channel = self._channel(work.owner)
        call = channel.stream_stream(METHOD)(metadata=((GROUP_HEADER, terms.group.secret),))
        watched: Any = _Watched(call, work.on_sent)
        try:
            return await exchange(lambda part_bytes: watched, work.contribution, self._traffic)
        except aio.AioRpcError as error:
            raise _verdict(error, work) from error

    def _channel(self, owner: GroupMember) -> HeaderChannel:
        if owner.address not in self._channels:
            try:
                self._channels[owner.address] = self._dial(owner.address)
            except SettingsError as error:
                raise TransportBroken(f"worker {owner.worker_name} can't be dialed: {error}") from error
        return self._channels[owner.address]

    def _hang_up(self, address: str) -> None:
        closing = asyncio.ensure_future(self._channels.pop(address).close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _over(terms: Terms) -> StaleEpoch:
    """Returns what ends work under terms that are not in force any more, where its cancellation got lost."""
    generation = terms.moment.generation
    return StaleEpoch(f"generation {generation} is over", epoch=generation, current_epoch="a newer one")


class _Watched:
    """A call that says when everything was written."""

    def __init__(self, call: Any, on_sent: Callable[[], None]) -> None:
        self._call = call
        self._on_sent = on_sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def done_writing(self) -> None:
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


def _cut(brought: Brought, terms: Terms) -> list[_Slice]:
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
        work.append(_Slice(owner=owner, offer=said, contribution=contribution, on_sent=_noting(countdown, number)))
    return work


def _noting(countdown: _Countdown, number: int) -> Callable[[], None]:
    return lambda: countdown.note(number)


async def _carry(contribution: SliceContribution, work: _Slice, regions: Regions | None) -> Outcome:
    """Contributes to a slice of this very worker, and takes its mean."""
    begun = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(_send(contribution, work, regions))
            taking = group.create_task(_take(contribution, work))
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    first, last = taking.result()
    reduction = contribution.live.round
    loss, num_correct, num_predictions = contribution.live.totals()
    return Outcome(
        num_contributors=reduction.num_contributors,
        total_weight=reduction.total_weight,
        global_loss=loss,
        num_correct=num_correct,
        num_predictions=num_predictions,
        times=ExchangeTimes(begun=begun, accepted=begun, sent=sending.result(), first=first, last=last),
    )


async def _send(contribution: SliceContribution, work: _Slice, regions: Regions | None) -> float:
    """Adds the parts, chunk by chunk; returns when that was done."""
    spec, parts = work.contribution.spec, work.contribution.parts
    if spec.dtype == "float32" and not contribution.is_held:
        return _lend(contribution, work, regions)
    numbers = [] if contribution.is_held else [index for index, part in enumerate(parts) if part is not None]
    pieces = list(slices(spec.num_elements, spec.dtype, contribution.chunk_bytes, numbers))
    for index, piece in enumerate(pieces):
        if index == len(pieces) // 2:
            failpoints.hit("worker.contribution.half")
        if contribution.failed:
            return 0.0
        part_S = parts[piece.part]
        assert part_S is not None
        contribution.add(piece.part, piece.start, _as_received(part_S[piece.start : piece.stop], spec.dtype))
        await contribution.room()
        if index % _BURST == _BURST - 1:
            await asyncio.sleep(0)
    failpoints.hit("worker.contribution.sent")
    work.on_sent()
    return time.perf_counter()


def _lend(contribution: SliceContribution, work: _Slice, regions: Regions | None) -> float:
    """Has the parts added where they lie; returns when that was said."""
    for part, part_S in enumerate(work.contribution.parts):
        if part_S is not None:
            region, _ = (regions.find(part_S) if regions else None) or (None, 0)
            generation, data = region.generation if region else 0, part_S.view(np.uint8)
            # Or else sums would be formed in it, and it could not be contributed again.
            data.flags.writeable = False
            found = Source(region=region, generation=generation, data=data, dtype="float32")
            contribution.lend(part, 0, found)
    failpoints.hit("worker.contribution.half")
    failpoints.hit("worker.contribution.sent")
    work.on_sent()
    return time.perf_counter()


async def _take(contribution: SliceContribution, work: _Slice) -> tuple[float, float]:
    """Copies the mean as it is made; returns when that began and ended."""
    out_S, live = work.contribution.out, contribution.live
    first = last = 0.0
    while (chunk := await contribution.next_chunk(is_run=True)) is not None:
        assert out_S is not None
        start, stop = chunk
        out_S[start:stop] = live.store_S[start:stop]
        last = time.perf_counter()
        first = first or last
    if out_S is not None and live.round.total_weight == 0:
        out_S.fill(0)
    return first, last


def _as_received(values_C: Floats, dtype: str) -> Floats:
    """Returns values as they are after a way over the wire; a view that can't be written to for float32."""
    if dtype != "float32":
        return tensors.decode(tensors.encode(values_C, dtype), dtype)
    view_C = values_C.view()
    view_C.flags.writeable = False
    return view_C


def _joined(outcomes: list[Outcome]) -> Outcome:
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


def _verdict(error: aio.AioRpcError, work: _Slice) -> AyniError | TransportBroken:
    """Returns what the status of a call means."""
    refusal = rpc.error_from(error)
    if refusal is not None:
        return refusal
    code = error.code().name
    sentence = f"the stream of {work.contribution.name} at {work.owner.address} broke: {code}, {error.details()}"
    return TransportBroken(sentence, code)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _now() -> float:
    return asyncio.get_running_loop().time()
