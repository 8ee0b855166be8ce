"""One lease's contribution to one slice, over the network or from this very worker.  [shell]

Legend: S elements in a slice, C elements in a chunk.
"""

import asyncio
from typing import TYPE_CHECKING

from ayni import tensors
from ayni.errors import AyniError, NonFinite
from ayni.reduce.chunks import arrived
from ayni.reduce.packed import Values
from ayni.reduce.refusals import SUM_OF_ALL
from ayni.shm.sources import Source
from ayni.tensors import Floats
from worker_agent.slice_budget import Budget
from worker_agent.slice_offers import SliceOffer

if TYPE_CHECKING:
    from worker_agent.slice_rounds import SliceRound

WINDOW_CHUNKS = 8
"""Chunks of one contribution that wait in memory before its worker is slowed down."""


class SliceContribution:
    """One lease's contribution to one slice, over the network or from this very worker."""

    def __init__(self, live: "SliceRound", offer: SliceOffer, budget: Budget, *, is_held: bool) -> None:
        """Registers with its worker's budget; `is_held` says that all of it is here already."""
        self.live = live
        self.offer = offer
        self.is_held = is_held
        self.is_open = True
        """Whether it is served still."""
        self.failure: asyncio.Future[AyniError] = asyncio.get_running_loop().create_future()
        """Done when the contribution was refused or given up."""
        self.budget = budget
        self._position = 0
        self._home: Floats | None = None
        budget.contributions.add(self)

    @property
    def failed(self) -> bool:
        """Whether the contribution was refused or given up."""
        return self.failure.done()

    @property
    def is_home(self) -> bool:
        """Whether it is this very worker's, which takes the mean where it is put together."""
        return self._home is not None

    @property
    def chunk_bytes(self) -> int:
        """Length of every chunk but the last; see `RoundAccepted`."""
        return self.live.chunk_elements * tensors.position_bytes(self.live.round.spec.dtype)

    @property
    def backlog(self) -> int:
        """Chunk positions ahead of the mean."""
        return 0 if self.failed else self.live.round.backlog(self.offer.lease_id)

    def arrive(self, frame: bytes) -> None:
        """Adds the chunk in a frame.

        Raises:
            BadChunk, NonFinite, BadRequest, Checksum: the frame is refused; nothing of it was added.
        """
        live = self.live
        chunk = arrived(frame, live.round.label, live.round.spec.dtype, live.chunk_elements)
        self.add(chunk.part, chunk.offset, chunk.values_C)

    def add(self, part: int, offset: int, values_C: Values) -> None:
        """Adds a chunk, C elements, which must not change afterwards; see `Round.contribute`."""
        live = self.live
        try:
            live.publish(live.round.contribute(self.offer.lease_id, part, offset, values_C))
        except NonFinite as error:
            if error.metadata["worker"] == SUM_OF_ALL:
                live.fail(error)
            raise

    def lend(self, part: int, offset: int, source: Source) -> None:
        """Has chunks added where they lie, from element `offset` of a part on; see `SlicePump`.

        Nothing happens where the contribution has failed: its slice may have begun anew, or be over and its store
        another one's.
        """
        if not self.failed:
            self.live.pump.add(self, part, offset, source)

    def take_home(self, out_S: Floats) -> None:
        """Has the mean copied to a vector of this very worker, shape [S], as it is made."""
        out_S[: self.live.emitted] = self.live.store_S[: self.live.emitted]
        self.live.homes.append(out_S)
        self._home = out_S

    async def room(self) -> None:
        """Waits until the next chunk may be read. Ends at once when the contribution failed."""
        while not self.failed and not self._has_room():
            await self.budget.changed.wait()

    async def next_chunk(self, *, is_run: bool = False) -> tuple[int, int] | None:
        """Waits for the next chunk [start, stop) of the mean in the store, `is_run`: for all there is; None at the end.

        Raises:
            AyniError: the contribution was refused or given up.
        """
        live = self.live
        while not self.failed:
            if self._position < live.emitted and self.offer.takes_mean:
                start = self._position
                self._position = live.emitted if is_run else min(start + live.chunk_elements, live.store_S.size)
                return start, self._position
            if live.round.complete:
                return None
            await live.change.wait()
        raise self.failure.result()

    def take_back(self) -> None:
        """Takes out what was added, or has the slice start again: the parts may be written to from now on."""
        if self.live.contributions.get(self.offer.lease_id) is self and not self.live.round.complete:
            self.live.take_back(self.offer.lease_id)

    def fail(self, error: AyniError) -> None:
        """Ends the contribution. The first error counts."""
        if not self.failed:
            self.failure.set_result(error)
        self.live.change.announce()
        self.budget.changed.announce()

    def close(self) -> None:
        """Leaves the worker's budget: nobody serves it any more."""
        self.is_open = False
        self.live.homes[:] = [home_S for home_S in self.live.homes if home_S is not self._home]
        self.budget.contributions.discard(self)
        self.live.forget_frames()
        self.budget.changed.announce()

    def _has_room(self) -> bool:
        ahead = self.backlog
        return ahead == 0 or (ahead < WINDOW_CHUNKS and not self.budget.is_full)
