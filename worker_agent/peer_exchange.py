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
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from grpc import aio

from ayni import rpc
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
from ayni.step_values import GroupMember, SliceDigest
from ayni.tensors import position_bytes
from worker_agent.backoff import delays
from worker_agent.exchange import Outcome, Traffic, exchange
from worker_agent.faults import TransportBroken
from worker_agent.group_exchange import Brought, OnLost
from worker_agent.host_calls import HostPeers
from worker_agent.slice_home import carry
from worker_agent.slice_offers import GROUP_HEADER, Moment, Terms
from worker_agent.slice_rounds import SliceRounds
from worker_agent.slice_work import SliceWork, Watched, cut, first_of, joined

_log = logging.getLogger(__name__)

METHOD = "/ayni.v1.PeerService/ReduceSlice"

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_TRIES = 3
"""Tries that must fail, in so many seconds, before an owner is said to be lost."""
_TRYING_S = 0.5

Dial = Callable[[str], HeaderChannel]
"""Opens a channel to an address."""


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
        tasks: list[asyncio.Task[Outcome]] = []

        def is_wanted() -> bool:
            # Where one slice has failed, nobody wants the others either; their cancellations, too, may get lost.
            return brought.is_wanted() and not any(map(_has_failed, tasks))

        work = cut(replace(brought, is_wanted=is_wanted), terms)
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(self._reduce_slice(terms, one)) for one in work]
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        return joined([task.result() for task in tasks])

    async def _reduce_slice(self, terms: Terms, work: SliceWork) -> Outcome:
        if work.owner.worker_id == terms.worker_id:
            return await self._at_home(terms, work)
        return await self._abroad(terms, work)

    async def _at_home(self, terms: Terms, work: SliceWork) -> Outcome:
        while True:
            self._check(terms, work)
            contribution = self.rounds.begin(work.offer)
            try:
                return await carry(contribution, work, self.rounds.stores.regions)
            except RoundRestarted as error:
                _log.debug("contributing to %s again: %s", work.contribution.name, error)
            except BaseException:
                contribution.take_back()
                raise
            finally:
                contribution.close()

    async def _abroad(self, terms: Terms, work: SliceWork) -> Outcome:
        began, failures = 0.0, 0
        for delay in delays(random.random, _FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            self._check(terms, work)
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

    def _check(self, terms: Terms, work: SliceWork) -> None:
        """Ends work that goes on only because its cancellation got lost.

        Raises:
            StaleEpoch: the terms are not in force any more, or nobody wants it.
        """
        if self._terms is not terms or not work.is_wanted():
            generation = terms.moment.generation
            sentence = f"{work.contribution.name}: work under generation {generation} is over"
            raise StaleEpoch(sentence, epoch=generation, current_epoch="a newer one")

    def _is_near(self, terms: Terms, work: SliceWork) -> bool:
        owner = work.owner
        if self._near is None or owner.worker_id in self._far or not terms.is_near(owner):
            return False
        return self._near.has_room(owner)

    async def _call_near(self, terms: Terms, work: SliceWork) -> Outcome:
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
        except TransportBroken:
            # Its socket, or its memory, may be what is wrong, and not the owner: the next try takes the other way.
            self._far.add(work.owner.worker_id)
            raise
        return await self._call(terms, work)

    async def _call(self, terms: Terms, work: SliceWork) -> Outcome:
        """Makes one call.

        Raises:
            AyniError: the owner refused.
            TransportBroken: nobody decided anything.
        """
        channel = self._channel(work.owner)
        call = channel.stream_stream(METHOD)(metadata=((GROUP_HEADER, terms.group.secret),))
        watched: Any = Watched(call, work.on_sent)
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


def _has_failed(task: "asyncio.Task[Outcome]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _verdict(error: aio.AioRpcError, work: SliceWork) -> AyniError | TransportBroken:
    """Returns what the status of a call means."""
    refusal = rpc.error_from(error)
    if refusal is not None:
        return refusal
    code = error.code().name
    sentence = f"the stream of {work.contribution.name} at {work.owner.address} broke: {code}, {error.details()}"
    return TransportBroken(sentence, code)


def _now() -> float:
    return asyncio.get_running_loop().time()
