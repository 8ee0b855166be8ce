"""Reaching a peer through its socket: its process, and its pools, mapped and read once.  [shell]"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ayni.blocks.layouts import LayoutDescriptor
from ayni.errors import Deadline, PeerLost, Unsupported
from ayni.shm.folder import SocketFolder
from ayni.shm.sockets import credentials, receive, send
from worker_agent.blocks.engines.shm_link import ShmLink
from worker_agent.blocks.engines.shm_messages import PoolRequest, ShmExport, decode_answer, encode_request
from worker_agent.blocks.engines.shm_process import PeerProcess
from worker_agent.blocks.engines.shm_pull import Lent
from worker_agent.blocks.engines.warm_up import MOST_WARM_UP_BYTES
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import WHOLE
from worker_agent.blocks.pools import MappedPool, PoolFiles, map_pool


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialer:
    """Reaches one peer."""

    peer: str
    """Its name, for errors."""
    offer: ShmExport
    executor: Executor
    """Maps pools, and copies blocks later."""
    deadline: float
    """Moment on the loop's clock."""

    async def dial(self, layouts: Sequence[LayoutDescriptor]) -> ShmLink:
        """Asks a peer for its pools and maps them; layouts that it does not lend are left out.

        Raises:
            Unsupported: it lends none of them, or belongs to another user.
            PeerLost: it is gone.
            Deadline: it did not answer.
            AyniError: what it said.
        """
        wanted = [layout for layout in layouts if layout.handle in self.offer.layouts]
        if not wanted:
            detail = f"{self.peer} lends no layout"
            raise Unsupported(f"not through shared memory: {detail}", field="engine", detail=detail)
        with contextlib.ExitStack() as on_failure, self._connect() as connection:
            # Its answers come after its process was opened, so the process is the one that answers.
            process = PeerProcess(credentials(connection).pid, self.peer)
            on_failure.callback(process.close)
            lent = {layout.handle: await self._fetch(connection, layout, process) for layout in wanted}
            process.check()
            on_failure.pop_all()
        return ShmLink(self.peer, self.offer, process, lent, self.executor)

    def _connect(self) -> socket.socket:
        folder = SocketFolder(Path(self.offer.folder), make=False)
        with contextlib.closing(folder):
            return folder.dial(self.offer.socket_name)

    async def _fetch(self, connection: socket.socket, layout: LayoutDescriptor, process: PeerProcess) -> Lent:
        send(connection, encode_request(PoolRequest(incarnation=self.offer.incarnation, layout=layout.handle)))
        data, fds = await receive(connection, self.deadline)
        with contextlib.ExitStack() as files:
            for fd in fds:
                files.callback(os.close, fd)
            if not data:
                raise PeerLost(f"{self.peer} closed the connection", peer=self.peer, detail="closed")
            answer = decode_answer(data)
            if len(fds) != 2:
                raise PeerLost(f"{self.peer} sent {len(fds)} descriptors, not 2", peer=self.peer, detail="descriptors")
            found = PoolFiles(data_fd=fds[0], control_fd=fds[1], start=answer.start)
            mapping = self.executor.submit(_map_and_read, layout, found, self.peer)
            # The thread may still be at it when this is given up.
            owned = files.pop_all()
            mapping.add_done_callback(lambda _: owned.close())
        try:
            async with asyncio.timeout_at(self.deadline):
                pool = await asyncio.wrap_future(mapping)
        except TimeoutError:
            what = f"the memory of {self.peer} to be mapped"
            raise Deadline(f"waited in vain for {what}", waiting_for=what, timeout=0) from None
        lent = Lent(pool, process, self.offer.incarnation, answer.epoch)
        lent.check()
        return lent


def _map_and_read(layout: LayoutDescriptor, files: PoolFiles, peer: str) -> MappedPool:
    """Maps a pool and reads its first block, so that a link that exists works. All pages are there once mapped."""
    geometry = Geometry(config=layout.config, kind=layout.kind, axis_order=layout.axis_order)
    pool = map_pool(geometry, files, peer)
    if layout.config.block_bytes <= MOST_WARM_UP_BYTES:
        pool.memory.read(np.array([0]), WHOLE, np.empty((1, layout.config.block_bytes), np.uint8))
    return pool
