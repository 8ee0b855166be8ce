"""Blocks that are held by transfers: nobody else writes what is read, nobody else touches what is written.  [shell]

Belongs to the event loop. Pools that peers of the same host map have to be told as well, since those peers copy
without asking.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ayni.blocks.ids import Ids
from ayni.errors import BlockBusy, Deadline
from worker_agent.blocks.memory import Memory
from worker_agent.blocks.occupancy import Occupancy
from worker_agent.blocks.pools import PoolMemory
from worker_agent.blocks.registry import Entry

Held = tuple[Entry, Ids]
"""A layout, and ids of its blocks, shape [N]."""

Release = Callable[[], None]


class Holds:
    """Who holds which blocks of which layouts."""

    def __init__(self) -> None:
        """Knows no layouts."""
        self._occupancy = Occupancy()
        self._changed = asyncio.Event()

    def add(self, entry: Entry) -> None:
        """Takes a layout in; all its blocks are free."""
        self._occupancy.add(_Key(entry), entry.descriptor.config.num_blocks)

    def remove(self, entry: Entry) -> None:
        """Forgets a layout.

        Raises:
            BlockBusy: some of its blocks are held.
        """
        self._occupancy.remove(_Key(entry))

    def take(self, reads: Sequence[Held] = (), writes: Sequence[Held] = ()) -> Release:
        """Takes blocks, all or none; returns what gives them back, once.

        Raises:
            BlockBusy: a block to write is held, or a block to read is being written.
            UnknownLayout: a layout is gone.
        """
        claim = self._occupancy.claim(
            [(_Key(entry), ids) for entry, ids in reads], [(_Key(entry), ids) for entry, ids in writes]
        )
        pools = [(entry.memory, ids) for entry, ids in writes if isinstance(entry.memory, PoolMemory)]
        for pool, ids in pools:
            pool.begin_write(ids)

        def release() -> None:
            for pool, ids in pools:
                pool.end_write(ids)
            self._occupancy.release(claim)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

        return release

    @contextmanager
    def held(self, reads: Sequence[Held] = (), writes: Sequence[Held] = ()) -> Iterator[None]:
        """Holds blocks as long as the context lasts; raises as `take`."""
        release = self.take(reads, writes)
        try:
            yield
        finally:
            release()

    async def taken(self, timeout_s: float, reads: Sequence[Held] = (), writes: Sequence[Held] = ()) -> Release:
        """Takes blocks as soon as they are free.

        Raises:
            Deadline: they were held for all of the time.
        """
        busy: BlockBusy | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return self.take(reads, writes)
                    except BlockBusy as error:
                        busy = error
                    await self._changed.wait()
        except TimeoutError:
            raise Deadline(
                f"waited {timeout_s:g} s in vain for blocks: {busy}", waiting_for=str(busy), timeout=timeout_s
            ) from None

    async def idle(self, entry: Entry, timeout_s: float) -> None:
        """Waits until no block of a layout is held.

        Raises:
            Deadline: some were held for all of the time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._occupancy.is_idle(_Key(entry)):
                    await self._changed.wait()
        except TimeoutError:
            what = f"transfers with the {entry.place} to end"
            raise Deadline(f"waited {timeout_s:g} s in vain for {what}", waiting_for=what, timeout=timeout_s) from None


class _Key:
    """Names a layout by its memory, which stays the same when its handle changes."""

    def __init__(self, entry: Entry) -> None:
        self._memory: Memory = entry.memory
        self._text = f"the {entry.place} (layout {entry.handle})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other._memory is self._memory

    def __hash__(self) -> int:
        return id(self._memory)

    def __str__(self) -> str:
        return self._text
