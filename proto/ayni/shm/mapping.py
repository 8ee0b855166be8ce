"""Mapping regions beside an event loop.  [shell]"""

import asyncio
import os
from concurrent.futures import Executor

from ayni.shm.regions import MappedRegion, map_region


async def map_beside(executor: Executor, fd: int, region_id: int, size: int, peer: str) -> MappedRegion:
    """Maps a region on a thread, because a large one takes long.

    Args:
        executor: whose thread.
        fd: its descriptor; closed when the thread is through, also when this is given up.
        region_id: how its owner calls it.
        size: of its payload, in bytes; whether that is not too much was checked.
        peer: the owner's name, for errors.

    Raises:
        PeerLost: the memory is not what it should be.
    """
    mapping = executor.submit(map_region, fd, region_id, size, peer)
    mapping.add_done_callback(lambda _: os.close(fd))
    try:
        return await asyncio.wrap_future(mapping)
    finally:
        # An error that holds this frame, which holds the error, would keep what was mapped until the next collection.
        del mapping
