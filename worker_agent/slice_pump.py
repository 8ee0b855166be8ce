"""Adds contributions that lie in shared memory to one slice, chunk after chunk of all of them.  [shell]

All contributions are there at once, so they are added position by position: a chunk's numbers are still in the cache
when the mean of it is taken down and copied. What comes over the network besides has its own pace; the pump waits for
it. Others on the event loop have a turn between two bursts.

What is not finite is seen in the mean, and looked for in the contributions only then. A contribution whose worker has
given it up is found before anything of such a sum is told: the slice starts again.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ayni.errors import AyniError, NonFinite
from ayni.reduce.mean_writer import Reduced
from ayni.reduce.packed import Values, floats, is_finite
from ayni.reduce.refusals import SUM_OF_ALL, not_finite
from ayni.shm.sources import Source
from worker_agent.changes import Change

if TYPE_CHECKING:
    from worker_agent.slice_contribution import SliceContribution
    from worker_agent.slice_rounds import SliceRound

_BURST = 1 << 20
"""Elements that are added at a time: one or two milliseconds of the event loop."""
_RUN = 1 << 20
"""Elements that are added at once where all contributions are there."""
_HOT = 1 << 18
"""Elements that are added before they are copied: so many stay in the cache."""


@dataclass(slots=True, eq=False)
class _Feed:
    """A run of one part."""

    contribution: "SliceContribution"
    part: int
    offset: int
    """Element of the slice that is added next."""
    source: Source
    begin: int
    """Element of the slice that `source` begins with."""
    last: Values | None = None
    """What was added last."""


class SlicePump:
    """What lies in shared memory for one slice. Belongs to the event loop."""

    def __init__(self, live: "SliceRound") -> None:
        """Adds to a round; has nothing to add yet."""
        self._live = live
        self._feeds: list[_Feed] = []
        self._news = Change()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_intact(self) -> bool:
        """Whether everything that sums may contain is still what its worker has said."""
        return all(feed.source.is_intact for feed in self._feeds)

    def add(self, contribution: "SliceContribution", part: int, offset: int, source: Source) -> None:
        """Has a run of a part added, from element `offset` of the slice on."""
        self._feeds.append(_Feed(contribution, part, offset, source, offset))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self.wake()

    def drop(self, lease_id: int) -> None:
        """Forgets what a lease has brought that begins again; what was added of it the caller takes care of."""
        self._feeds = [feed for feed in self._feeds if feed.contribution.offer.lease_id != lease_id]

    def clear(self) -> None:
        """Lets go of everybody's memory: the mean is there, or nobody wants it any more."""
        self._feeds = []
        self.wake()

    def wake(self) -> None:
        """Looks again whether there is something to add."""
        self._news.announce()

    async def _run(self) -> None:
        try:
            while self._feeds:
                if not self._burst():
                    await self._news.wait()
                else:
                    await asyncio.sleep(0)
        finally:
            self._task = None

    def _burst(self) -> bool:
        """Adds a few chunks of everything that is due; returns whether there was any."""
        live, finished = self._live, list[Reduced]()
        first, did = live.round.emitted, False
        while live.round.emitted - first < _BURST:
            due = [feed for feed in self._feeds if feed.offset == live.round.emitted]
            if not finished and self._add_runs(due):
                did = True
                continue
            for feed in due:
                did = self._contribute(feed, finished) or did
            if not due:
                break
            if sum(chunk.values_C.size for chunk in finished) >= _HOT:
                live.publish(finished)
                finished = []
        live.publish(finished)
        return did

    def _add_runs(self, due: list[_Feed]) -> bool:
        """Adds several chunks of all parts at once, if it can be: between two chunks code leaves the cache, too."""
        live, round_ = self._live, self._live.round
        # A chunk at the end shows whether everybody has brought as much as there is to be.
        most = min(_RUN, round_.spec.num_elements - round_.emitted - 1)
        length = most // live.chunk_elements * live.chunk_elements
        parts = [(feed.contribution.offer.lease_id, feed.part) for feed in due]
        if length < 1 or not round_.is_due(parts):
            return False
        runs = [run for feed in due if (run := feed.source.run(feed.offset - feed.begin, length)) is not None]
        if len(runs) < len(due):
            return False
        for feed, run in zip(due, runs, strict=True):
            feed.last, feed.offset = run, feed.offset + length
        try:
            live.publish([round_.contribute_runs([(*part, run) for part, run in zip(parts, runs, strict=True)])])
        except NonFinite as error:
            self._refuse(error)
        return True

    def _contribute(self, feed: _Feed, finished: list[Reduced]) -> bool:
        """Adds a run's next chunk, if its contribution counts still; refuses it where it is none."""
        round_, lease_id = self._live.round, feed.contribution.offer.lease_id
        try:
            # Behind the last chunk, which may be short, there is none.
            number = -(-(feed.offset - feed.begin) // self._live.chunk_elements)
            values = feed.source.piece(number, self._live.chunk_elements)
            if values is None or feed not in self._feeds:
                feed.offset = -1
                return False
            feed.offset, feed.last, offset = feed.offset + values.size, values, feed.offset
            finished += round_.contribute(lease_id, feed.part, offset, values, check=False)
        except NonFinite as error:
            self._refuse(error)
        except AyniError as error:
            self.drop(lease_id)
            feed.contribution.fail(error)
        return True

    def _refuse(self, error: NonFinite) -> None:
        """Fails everybody, or has the slice start again where what was added had been given up by then."""
        named = self._named(error)
        if self.is_intact:  # Asked last: what was looked at may be torn, too.
            self._live.fail(named)
        else:
            self._live.start_again()

    def _named(self, error: NonFinite) -> NonFinite:
        """Returns the refusal of the contribution that made a sum not finite; of the sum, if none is to blame."""
        assert error.metadata["worker"] == SUM_OF_ALL
        position = self._live.round.emitted
        for feed in self._feeds:
            values = feed.last
            if values is not None and feed.offset - values.size == position and not is_finite(values):
                name = self._live.name_of(feed.contribution.offer.worker_id)
                return not_finite(self._live.round.label, name, position, floats(values))
        return error
