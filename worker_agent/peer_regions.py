"""Regions of other workers of this host, each mapped once, whichever connection it came through.  [shell]"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ayni.errors import TooLarge
from ayni.shm.mapping import map_beside
from ayni.shm.region_messages import Lend
from ayni.shm.regions import MappedRegion

_MOST_REGIONS = 1024
"""Regions of one worker; as many as a coordinator takes."""
_IDLE_TERMS = 3
"""Exchange groups after which a region is let go that none of them has used."""

_Key = tuple[int, int, int]
"""Worker, region, inode of its memory."""


@dataclass(slots=True)
class _Entry:
    region: MappedRegion
    used: int


class PeerRegions:
    """What others have lent to this worker. Belongs to the event loop."""

    def __init__(self) -> None:
        """Has nothing."""
        self._entries: dict[_Key, _Entry] = {}
        self._terms = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ayni-peers")

    def enter(self, worker_ids: set[int]) -> None:
        """Notes that another group, or attempt, is in force: what its members don't lend is let go."""
        self._terms += 1
        self._entries = {
            key: entry
            for key, entry in self._entries.items()
            if key[0] in worker_ids and self._terms - entry.used <= _IDLE_TERMS
        }

    async def map(self, worker_id: int, lend: Lend, fd: int) -> MappedRegion:
        """Returns a region, mapped.

        Args:
            worker_id: whose it is.
            lend: what was said of it.
            fd: its descriptor, which is closed.

        Raises:
            TooLarge: the worker lends too many.
            PeerLost: it is not what it should be.
        """
        try:
            key = (worker_id, lend.region, os.fstat(fd).st_ino)
            found = self._entries.get(key)
            if found is not None and found.region.size == lend.size:
                found.used = self._terms
                return found.region
            self._check_room(worker_id)
            fd, mapping = -1, map_beside(self._executor, fd, lend.region, lend.size, f"worker {worker_id}")
        finally:
            if fd >= 0:
                os.close(fd)
        region = await mapping
        self._entries[key] = _Entry(region, self._terms)
        return region

    def close(self) -> None:
        """Lets go of all."""
        self._entries = {}
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _check_room(self, worker_id: int) -> None:
        count = sum(key[0] == worker_id for key in self._entries)
        if count >= _MOST_REGIONS:
            raise TooLarge(
                f"worker {worker_id} lends {count} regions to this one, and may lend {_MOST_REGIONS}; the rest of its "
                "gradients travels over gRPC",
                field="regions",
                limit=_MOST_REGIONS,
                received=count + 1,
            )
