"""Regions of this worker that the coordinator reads, and those of the coordinator.  [shell]"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ayni.shm.folder import SocketFolder
from ayni.shm.host import SharedMemoryOffer
from ayni.shm.mapping import map_beside
from ayni.shm.region_messages import Borrow, Hello, Lend, Withdraw
from ayni.shm.regions import MappedRegion, Region, Regions
from ayni.shm.sockets import credentials
from ayni.shm.this_host import check_host
from worker_agent.region_calls import COORDINATOR, RegionCalls

T = TypeVar("T")
_REQUEST_SECONDS = 10.0


class SharedRegions:
    """Gradients in shared memory, the worker's side, for one membership.

    Methods may be called on the loop only, but for those of `ours`. Who gives up waiting stops nothing: what was asked
    for is done all the same, once.

    Attributes:
        ours: what this worker can lend; outlives the connection.
    """

    def __init__(self, calls: RegionCalls, ours: Regions) -> None:
        """Uses a connection over which nothing was lent yet; see `connect`."""
        self.ours = ours
        self.name = COORDINATOR
        self._calls = calls
        self._lent: dict[int, asyncio.Task[None]] = {}
        self._borrowed: dict[int, asyncio.Task[MappedRegion]] = {}
        self._asking: set[asyncio.Task[Any]] = set()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ayni-regions")

    @classmethod
    async def connect(
        cls, offer: SharedMemoryOffer, session: str, deadline_s: float, ours: Regions | None = None
    ) -> "SharedRegions":
        """Reaches the coordinator.

        Args:
            offer: what it said when this worker joined.
            session: of the membership.
            deadline_s: how long it may take, in seconds.
            ours: regions of this worker; None: it has none so far.

        Raises:
            Unsupported: the coordinator is elsewhere, or its folder can't be entered.
            BadRequest: the offer names no socket.
            PeerLost: nobody answers.
            Deadline: nobody answered in time.
            AyniError: what the coordinator said.
        """
        offer.check()
        check_host(offer.host, COORDINATOR)
        with contextlib.closing(SocketFolder(Path(offer.folder), make=False)) as folder:
            calls = RegionCalls(folder.dial(offer.socket_name))
        try:
            credentials(calls.connection)
            await calls.ask(Hello(session=session), deadline_s)
        except BaseException:
            await calls.close()
            raise
        return cls(calls, Regions() if ours is None else ours)

    @property
    def is_open(self) -> bool:
        """Whether the coordinator is still there."""
        return self._calls.is_open

    async def lend(self, region: Region) -> None:
        """Returns once the coordinator has mapped a region; asks it once. The region must not be freed meanwhile.

        Raises:
            TooLarge: the coordinator takes no more.
            PeerLost, Deadline: it is gone.
        """
        assert self.ours.get(region.id) is region, "a region is lent that was freed, or is another's"
        region.is_kept = True
        await self._once(self._lent, region.id, lambda: self._lend(region))

    async def withdraw(self, region: Region) -> None:
        """Has the coordinator forget a region, if it was lent; who frees one does this first. See `lend` for errors."""
        lending = self._lent.get(region.id)
        if lending is None or not self.is_open:
            return
        await asyncio.wait([lending])
        # Not there any more: it was not lent after all, or another call withdraws it.
        if self._lent.pop(region.id, None) is not None:
            await asyncio.shield(self._start(self._calls.ask(Withdraw(region=region.id), _REQUEST_SECONDS)))

    async def borrow(self, region_id: int) -> MappedRegion:
        """Returns a region of the coordinator, mapped; asks it once.

        Raises:
            BadRequest: it has no such region any more.
            PeerLost, Deadline: it is gone, or its memory is not what it should be.
        """
        return await self._once(self._borrowed, region_id, lambda: self._borrow(region_id))

    def forget(self, region_id: int) -> None:
        """Lets go of a region of the coordinator; its memory is there for as long as an array looks at it."""
        self._borrowed.pop(region_id, None)

    async def close(self) -> None:
        """Ends the connection and lets go of the coordinator's regions, but not of `ours`. May be called again."""
        await self._calls.close()
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        self._lent.clear()
        self._borrowed.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _once(
        self, tasks: dict[int, asyncio.Task[T]], key: int, start: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Returns what a task gives that is started once for each key, and again after it failed."""
        self._calls.check_open()
        task = tasks.get(key)
        if task is None:
            task = tasks[key] = self._start(start())
            task.add_done_callback(lambda done: _drop_failed(tasks, key, done))
        return await asyncio.shield(task)

    def _start(self, asking: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(asking)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _lend(self, region: Region) -> None:
        await self._calls.ask(Lend(region=region.id, size=region.size), _REQUEST_SECONDS, [region.fd])

    async def _borrow(self, region_id: int) -> MappedRegion:
        size, fd = await self._calls.ask_for_one(Borrow(region=region_id), _REQUEST_SECONDS)
        return await map_beside(self._executor, fd, region_id, size, COORDINATOR)


def _drop_failed(tasks: dict[int, asyncio.Task[T]], key: int, task: asyncio.Task[T]) -> None:
    # Looks at the error, too: whoever waited for it may have given up.
    if (task.cancelled() or task.exception()) and tasks.get(key) is task:
        del tasks[key]
