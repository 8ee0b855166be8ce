"""Slices that this worker reduces for its exchange group, in the newest attempt that it was told of.  [shell]

Legend: S elements in a slice, C elements in a chunk.

One `SliceRound` reduces one slice of one bucket, with the coordinator's reducer. The mean is put together in a *store*,
where it stays until the attempt is over: whoever takes it reads on from where it is, so a slow reader costs no memory
and delays nobody, and one whose stream broke reads again from the start. A contribution is read no further while it is
`window` chunks ahead of the mean, or its worker fills its budget; one chunk of each is always admitted, so the budget
can't deadlock.

A new group, or a new attempt, ends all rounds: `open` takes back the stores, and whoever contributes is refused. A
contribution under a group that this worker was not told of yet waits, with a deadline. A lease that begins again takes
the place of its stream before; what had come whole stays, what had come in part makes the slice start again.

Belongs to the event loop.
"""

import asyncio
import logging
from collections.abc import Sequence

from ayni import frames, tensors
from ayni.buckets import Bucket
from ayni.errors import AyniError, Deadline, RoundRestarted, StaleEpoch, TooLarge, WeightMismatch
from ayni.reduce.digest import MeanDigest
from ayni.reduce.mean_writer import Reduced
from ayni.reduce.places import MeanPlace
from ayni.reduce.reduction import Fate, Round
from ayni.reduce.thread_digest import digest_for
from ayni.step_values import MicrobatchStats, SliceDigest
from ayni.tensors import Bytes, Floats, TensorSpec
from worker_agent.changes import Change
from worker_agent.slice_budget import Budget, exact_sum
from worker_agent.slice_contribution import SliceContribution
from worker_agent.slice_offers import SliceOffer, Terms, check, check_secret, duplicate, mismatch
from worker_agent.slice_pump import SlicePump
from worker_agent.slice_stores import Store, Stores

_log = logging.getLogger(__name__)

_TORN = "a contribution in shared memory was given up before it was added everywhere"
_FRAMES = 8
"""Frames of a mean that are kept for the next who takes it."""
_MOST_BUCKETS = 1 << 16
"""Of which slices are reduced in one attempt."""
_WAIT_S = 120.0
"""How long a contribution waits for the coordinator to tell this worker of its group."""


class SliceRound:
    """One slice of one bucket, and everybody who contributes to it."""

    def __init__(self, terms: Terms, offer: SliceOffer, store: Store) -> None:
        """Opens it for a first contribution, whose tensor all others must have; the mean goes to `store`."""
        self.bucket = offer.bucket
        self.start = offer.start
        self.whole = offer.spec
        self.store, self.store_S = store, store.mean_S
        self.pump = SlicePump(self)
        """Adds what lies in shared memory."""
        self.contributions: dict[int, SliceContribution] = {}
        """The stream of each lease, which may have ended."""
        self.name_of = terms.name_of
        self.change = Change()
        """Announced when there is more of the mean, and when nobody needs to wait for it any more."""
        self.chunk_elements = terms.chunk_elements
        self.round = Round(
            label=offer.name,
            spec=TensorSpec(dtype=terms.wire_type, num_elements=self.store_S.size),
            num_microbatches=terms.num_microbatches,
            chunk_elements=self.chunk_elements,
            expected=(),
            place=MeanPlace(
                new_digest=MeanDigest if store.region else digest_for(self.store_S.size),
                mean_N=self.store_S if terms.wire_type == "float32" else None,
            ),
        )
        is_exact = self.round.mean_N is not None
        self.homes: list[Floats] = self.round.mean.copies if is_exact else []
        """Where this very worker wants the mean; good as far as it was told. Unless it is rounded, the round copies it
        while it is in the cache."""
        self._dtype = tensors.mean_dtype(terms.wire_type)
        self._stats: dict[int, MicrobatchStats] = {}
        self._frames: dict[int, bytes] = {}
        self.emitted = 0
        """Elements of the mean that are there."""

    def begin(self, offer: SliceOffer, name: str, budget: Budget) -> "SliceContribution":
        """Opens a lease's contribution, for the first time or again.

        Raises:
            SpecMismatch, Duplicate: see `Round.check`. Nothing has changed.
        """
        if offer.spec != self.whole:
            raise mismatch(offer, "tensor", self.whole, offer.spec)
        before = self.contributions.get(offer.lease_id)
        if before and before.offer.worker_id != offer.worker_id:
            raise duplicate(offer, f"lease {offer.lease_id} is worker {before.offer.worker_id}'s")
        is_held = self.round.has_begun(offer.lease_id) and self.round.finished_sending(offer.lease_id)
        if not is_held:
            self.round.check(offer.lease_id, name, self.round.spec, offer.weights)
        if before:
            before.fail(self._restarted("its worker has begun again"))
        reduced: Sequence[Reduced] = ()
        if not is_held:
            self.take_back(offer.lease_id)
            reduced = self.round.begin(offer.lease_id, name, self.round.spec, offer.weights)
            self._stats.update({stats.microbatch: stats for stats in offer.stats})
        found = SliceContribution(self, offer, budget, is_held=is_held)
        self.contributions[offer.lease_id] = found
        self.publish(reduced)
        return found

    def publish(self, reduced: Sequence[Reduced]) -> None:
        """Takes finished chunks into the store, as they travel, and wakes whoever waits."""
        if reduced and not self.pump.is_intact:
            self.start_again()
            return
        for chunk in reduced:
            assert chunk.offset == self.emitted, "chunks of a mean come in order"
            stop = chunk.offset + chunk.values_C.size
            if self.round.mean_N is None:
                self._keep(chunk.offset, self.store.put(chunk.values_C, chunk.offset))
                for home_S in self.homes:
                    home_S[chunk.offset : stop] = self.store_S[chunk.offset : stop]
            self.emitted = stop
        if self.round.complete:
            self.pump.clear()
        if reduced or self.round.complete:
            self.pump.wake()
            self.change.announce()
            for contribution in self.contributions.values():
                contribution.budget.changed.announce()

    def frame(self, start: int, stop: int) -> bytes:
        """Returns a chunk of the mean as it is sent (one copy, which all who read at the same pace share)."""
        found = self._frames.get(start)
        return found or self._framed(start, tensors.encode(self.store_S[start:stop], self._dtype))

    def totals(self) -> tuple[float | None, int, int]:
        """Returns the loss over all micro-batches (None where one is not known), correct ones and predictions."""
        stats = [self._stats[microbatch] for microbatch in sorted(self._stats)]
        losses = [one.loss_sum for one in stats if one.loss_sum is not None]
        weight = self.round.total_weight
        loss = (exact_sum(losses) / weight if weight else 0.0) if len(losses) == len(stats) else None
        return loss, sum(one.num_correct for one in stats), sum(one.num_predictions for one in stats)

    def digest(self) -> SliceDigest:
        """Returns what was taken down of the mean so far; zeros count where nobody had weight."""
        taken = self.round.taken_down()
        return SliceDigest(
            bucket=self.bucket,
            first_element=self.start,
            num_elements=taken.num_elements,
            digests=b"".join(taken.digests()),
            squares=tuple(taken.square_expansion()),
            bucket_elements=self.whole.num_elements,
        )

    def fail(self, error: AyniError) -> None:
        """Ends every contribution with an error."""
        self._frames.clear()
        self.pump.clear()
        self.homes.clear()
        for contribution in list(self.contributions.values()):
            contribution.fail(error)

    def forget_frames(self) -> None:
        """Lets go of frames that nobody takes any more."""
        if not any(one.offer.takes_mean and one.is_open for one in self.contributions.values()):
            self._frames.clear()

    def take_back(self, lease_id: int) -> None:
        """Takes out what had come of a lease in part, or all where that can't be."""
        self.pump.drop(lease_id)
        if not self.round.has_begun(lease_id):
            return
        fate, _ = self.round.drop(lease_id, is_over=False)
        if fate is Fate.PARTIAL:
            self.start_again("a part of another contribution was lost")

    def _keep(self, start: int, payload: Bytes) -> None:
        """Keeps a chunk of the mean as it is sent, which it is now: it need not be rounded again for who takes it."""
        if any(one.offer.takes_mean and one.is_open and not one.is_home for one in self.contributions.values()):
            self._framed(start, payload.data)

    def _framed(self, start: int, payload: memoryview) -> bytes:
        found = frames.encode_chunk(frames.CHUNK_FIELD, start * tensors.itemsize(self._dtype), 0, payload)
        self._frames[start] = found
        if len(self._frames) > _FRAMES:
            del self._frames[next(iter(self._frames))]
        return found

    def start_again(self, detail: str = _TORN) -> None:
        """Has everybody contribute again: what was added can't be taken out of a sum."""
        self.round.restart(())
        self.emitted = 0
        self.store.renew()
        self.fail(self._restarted(detail))
        self.contributions.clear()
        self._stats.clear()

    def _restarted(self, detail: str) -> RoundRestarted:
        sentence = f"{self.round.label} starts again: {detail}"
        return RoundRestarted(sentence, bucket=self.bucket, detail=detail)


class SliceRounds:
    """All slices that this worker owns in one attempt."""

    def __init__(self, wait_s: float = _WAIT_S) -> None:
        """Starts without a group; contributions wait so long for one that was not told yet."""
        self.terms: Terms | None = None
        self._wait_s = wait_s
        self._rounds: dict[Bucket, SliceRound] = {}
        self._budgets: dict[int, Budget] = {}
        self._weights: dict[int, int] = {}
        self._told = Change()
        self.stores = Stores()
        """Where means are put together."""

    def open(self, terms: Terms) -> None:
        """Ends what came before; contributions under these terms are taken from now on."""
        self.end(f"{terms.moment} is in force now")
        self.terms = terms
        self._told.announce()

    def end(self, why: str) -> None:
        """Ends all rounds and refuses what comes for them; their memory is used again by the next ones."""
        terms, self.terms = self.terms, None
        generation = terms.moment.generation if terms else 0
        for live in self._rounds.values():
            live.fail(StaleEpoch(f"{live.round.label}: {why}", epoch=generation, current_epoch=generation))
        self.stores.take_back([live.store for live in self._rounds.values()])
        self._rounds.clear()
        self._budgets.clear()
        self._weights.clear()

    async def admit(self, offer: SliceOffer, secret: str) -> SliceContribution:
        """Begins a contribution that came over the network; waits for the word of its group.

        Raises:
            Deadline: the word did not come.
            TokenRefused: the caller is in another group.
            AyniError: see `begin`.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                while self.terms is None or offer.moment > self.terms.moment:
                    await self._told.wait()
        except TimeoutError:
            what = f"the coordinator's word of {offer.moment}"
            sentence = f"{offer.name}: this worker waited {self._wait_s:g} s in vain for {what}"
            raise Deadline(sentence, waiting_for=what, timeout=self._wait_s) from None
        if offer.moment == self.terms.moment:
            check_secret(secret, self.terms)
        return self.begin(offer)

    def begin(self, offer: SliceOffer) -> SliceContribution:
        """Begins a contribution.

        Raises:
            TooLarge: there are too many buckets.
            AyniError: see `slice_offers.check` and `SliceRound.begin`. Nothing has changed.
        """
        terms = self.terms
        if terms is None:
            sentence = f"{offer.name}: this worker is in no exchange group at the moment"
            raise StaleEpoch(sentence, epoch=offer.moment.generation, current_epoch=0)
        check(offer, terms)
        self._check_weights(offer)
        live = self._rounds.get(offer.bucket) or self._new(terms, offer)
        budget = self._budgets.get(offer.worker_id) or Budget()
        try:
            found = live.begin(offer, terms.name_of(offer.worker_id), budget)
        except AyniError:
            if offer.bucket not in self._rounds:
                self.stores.put_back(live.store)
            raise
        self._rounds[offer.bucket], self._budgets[offer.worker_id] = live, budget
        self._weights.update(offer.weights)
        return found

    def digests(self) -> tuple[SliceDigest, ...]:
        """Returns what was taken down of all slices, by bucket."""
        return tuple(self._rounds[bucket].digest() for bucket in sorted(self._rounds))

    def _new(self, terms: Terms, offer: SliceOffer) -> SliceRound:
        if len(self._rounds) >= _MOST_BUCKETS:
            sentence = f"{offer.name}: there are {_MOST_BUCKETS} buckets, and no more are taken"
            raise TooLarge(sentence, field="bucket", limit=_MOST_BUCKETS, received=_MOST_BUCKETS + 1)
        is_near = self._is_near(terms)
        store = self.stores.take(offer.stop - offer.start, tensors.mean_dtype(terms.wire_type), is_near)
        return SliceRound(terms, offer, store)

    def _check_weights(self, offer: SliceOffer) -> None:
        for microbatch, weight in offer.weights.items():
            known = self._weights.get(microbatch, weight)
            if known != weight:
                sentence = f"{offer.name}: micro-batch {microbatch} has weight {weight}; another bucket said {known}"
                raise WeightMismatch(sentence, microbatch=microbatch, expected=known, received=weight)

    @staticmethod
    def _is_near(terms: Terms) -> bool:
        """Returns whether any other member can read a mean where it is put together."""
        return any(terms.is_near(member) for member in terms.group.members if member.worker_id != terms.worker_id)
