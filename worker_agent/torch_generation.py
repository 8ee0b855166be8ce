"""This worker's part in one generation of a torch group, from the event loop's side.  [shell]

Legend: C elements in a piece of a bucket.

A generation lasts as long as its members are the same and all goes well: one attempt after the other. Work that is
cancelled in the middle of a bucket ends it, because the others wait in a collective that this worker does not enter.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ayni.buckets import Bucket
from ayni.errors import PeerLost, RoundRestarted
from ayni.reduce.digest import MeanDigest
from ayni.reduce.sums import divide
from ayni.step_values import ExchangeGroup, SliceDigest
from worker_agent.contributions import Offer
from worker_agent.torch_collectives import Collectives
from worker_agent.torch_group import TorchGroup
from worker_agent.torch_rounds import Rounds, Total
from worker_agent.torch_store import LeaseCount
from worker_agent.torch_sums import AttemptKey, Sums, Tally, check_finite, key_of, pieces

T = TypeVar("T")


class Generation:
    """One group and the attempts that it reduced."""

    def __init__(
        self, group: ExchangeGroup, torch: TorchGroup, leases: LeaseCount, writing: asyncio.Lock, worker_name: str
    ) -> None:
        """Takes what reduces and counts.

        Args:
            group: as the coordinator said.
            torch: is building, or built, what reduces.
            leases: counts what the members have begun.
            writing: held while a mean is written, so that one that was given up is not written over its successor.
            worker_name: for errors.
        """
        self.group = group
        self.torch = torch
        self.replaced = asyncio.Event()
        """Set once it was given up for another one, or for none."""
        self._worker_name = worker_name
        self._leases = leases
        self._writing = writing
        self._rounds: Rounds | None = None
        self._taken: dict[Bucket, SliceDigest] = {}

    @property
    def is_idle(self) -> bool:
        """Whether it can go on with another attempt: nothing is under way, and nothing broke."""
        is_done = self._rounds is None or self._rounds.is_done
        return self.torch.why_ended is None and is_done and not self._writing.locked()

    async def total(self, offer: Offer, on_sent: Callable[[], None]) -> Total:
        """Brings what a lease has to one bucket and waits for the sum of all.

        Args:
            offer: what is brought.
            on_sent: is called when nothing but the others is waited for.

        Raises:
            RoundRestarted: the group broke, or was given up.
            AyniError: what this worker brings is wrong.
        """
        rounds = self._rounds_of(offer)
        total, tally = rounds.bring(offer)
        try:
            if tally and tally.count:
                await self._count(rounds, tally)
            on_sent()
            return await asyncio.shield(_waited_for(total))
        except asyncio.CancelledError:
            if not total.done():
                self._spoil(f"{offer.name} was given up before it was reduced")
            raise

    async def take(self, offer: Offer, total: Total) -> None:
        """Writes the mean to where the offer wants it; on one worker it is taken down too. Not left half done.

        Raises:
            NonFinite: the sum of all is beyond float32.
        """
        async with self._writing:
            await _to_its_end(asyncio.to_thread(self._write, offer, total))

    def slices(self, attempt: AttemptKey) -> tuple[SliceDigest, ...]:
        """Returns what was taken down of an attempt's means, by bucket."""
        if self._rounds is None or self._rounds.attempt != attempt:
            return ()
        return tuple(self._taken[bucket] for bucket in sorted(self._taken))

    def hand_over(self) -> Collectives | None:
        """Ends the generation and returns what it was built of; None where that can't go on, and has to be given up."""
        collectives = self.torch.hand_over() if self.is_idle else None
        if collectives:
            self.replaced.set()
        return collectives

    def give_up(self, why: str) -> None:
        """Ends the group, without a wait: whatever is under way fails with `RoundRestarted`."""
        self.torch.abort(RoundRestarted(f"generation {self.group.generation} of the torch group is over: {why}"))
        self._wake()
        self.replaced.set()

    def _spoil(self, why: str) -> None:
        """Ends the group as one that broke: this worker does not enter a collective that the others are in."""
        self.torch.fail(RoundRestarted(f"generation {self.group.generation} of the torch group is over: {why}"))
        self._wake()

    def _wake(self) -> None:
        if self._rounds:
            self._rounds.wake()

    def _rounds_of(self, offer: Offer) -> Rounds:
        """Returns the rounds of the offer's attempt; a new attempt ends the one before."""
        attempt = key_of(offer)
        if self._rounds is None or self._rounds.attempt < attempt:
            if self._rounds and not self._rounds.is_done:
                self._spoil(f"step {self._rounds.attempt[1]} was given up")
            sums = Sums(self._worker_name, offer.assignment.num_microbatches)
            self._rounds, self._taken = Rounds(attempt, sums, self.torch, self._leases), {}
        if self._rounds.attempt != attempt:
            raise RoundRestarted(f"{offer.name}: the torch group has gone on to step {self._rounds.attempt[1]}")
        return self._rounds

    async def _count(self, rounds: Rounds, tally: Tally) -> None:
        try:
            await asyncio.to_thread(rounds.count, tally)
        except (PeerLost, RuntimeError) as error:
            self._spoil(f"its leases could not be counted: {str(error).splitlines()[0]}")

    def _write(self, offer: Offer, total: Total) -> None:
        digest = MeanDigest() if self.torch.plan.rank == 0 else None
        for piece in pieces(offer.out.size):
            mean_C = offer.out[piece]
            if total.weight:
                divide(total.total_N[piece], total.weight, mean_C)
            else:
                mean_C.fill(0)
            check_finite(offer, "(sum of all)", mean_C, piece.start)
            if digest:
                digest.add(mean_C)
        if digest:
            self._taken[offer.bucket] = _taken_down(offer.bucket, offer.out.size, digest)


def _taken_down(bucket: Bucket, num_elements: int, digest: MeanDigest) -> SliceDigest:
    return SliceDigest(
        bucket=bucket,
        first_element=0,
        num_elements=digest.num_elements,
        digests=b"".join(digest.digests()),
        squares=tuple(digest.square_expansion()),
        bucket_elements=num_elements,
    )


def _waited_for(total: "Future[Total]") -> "asyncio.Future[Total]":
    """Returns the same for the event loop; an error that nobody waits for any more is nobody's."""
    future = asyncio.wrap_future(total)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Waits until work has ended, also when the caller is cancelled: it writes to a vector of the caller's."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.exception()
        raise
