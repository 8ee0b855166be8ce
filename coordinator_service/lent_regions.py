"""The regions that one worker has lent, mapped.  [shell]"""

import socket
from collections.abc import Callable
from concurrent.futures import Executor

from ayni.errors import BadRequest, TooLarge
from ayni.shm.mapping import map_beside
from ayni.shm.region_messages import Lend
from ayni.shm.regions import MappedRegion

MAX_REGIONS = 1024
"""Regions of one worker; each keeps a descriptor open."""


class LentRegions:
    """What one worker lends over one connection."""

    def __init__(self, worker_id: int, connection: socket.socket, check_bytes: Callable[[int], None]) -> None:
        """Has none. `check_bytes` refuses so many more bytes where all workers would lend too many."""
        self.worker_id, self.connection = worker_id, connection
        self.num_bytes = 0
        """Payloads of all, also of those that are being mapped."""
        self._check_bytes = check_bytes
        self._regions: dict[int, MappedRegion | None] = {}
        """None: it is being mapped."""

    def get(self, region_id: int) -> MappedRegion | None:
        """Returns a region; None when there is none that could be read."""
        return self._regions.get(region_id)

    def check(self, lend: Lend) -> None:
        """Refuses a region before anything is done for it.

        Raises:
            BadRequest: it is lent already.
            TooLarge: it would be one too many, or too many bytes.
        """
        if lend.region in self._regions:
            raise BadRequest(f"region {lend.region:x} is lent already; lend it once", field="region")
        if len(self._regions) >= MAX_REGIONS:
            raise TooLarge(
                f"a worker may lend {MAX_REGIONS} regions at a time, and lends so many; take others back first",
                field="regions",
                limit=MAX_REGIONS,
                received=len(self._regions) + 1,
            )
        self._check_bytes(lend.size)

    async def add(self, lend: Lend, fd: int, executor: Executor) -> None:
        """Maps a region that passed `check`; closes its descriptor. Raises PeerLost when it can't be mapped."""
        self._regions[lend.region] = None
        self.num_bytes += lend.size
        try:
            peer = f"worker {self.worker_id}"
            self._regions[lend.region] = await map_beside(executor, fd, lend.region, lend.size, peer)
        except BaseException:
            del self._regions[lend.region]
            self.num_bytes -= lend.size
            raise

    def remove(self, region_id: int) -> None:
        """Forgets a region; raises BadRequest when it is not lent."""
        region = self._regions.pop(region_id, None)
        if region is None:
            raise BadRequest(f"region {region_id:x} is not lent", field="region")
        self.num_bytes -= region.size

    def clear(self) -> None:
        """Forgets all; what is being mapped is forgotten once it is."""
        for region_id in [key for key, region in self._regions.items() if region is not None]:
            self.remove(region_id)
