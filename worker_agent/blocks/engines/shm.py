"""Engine "shm": peers of the same host and user read one another's host memory in place.  [shell]

A worker lends its pools (`worker_agent.blocks.pools`): a peer asks for them through a socket that only the user can
reach, maps them read-only and copies from them on a thread of its own, without the owner doing anything. So it can
pull and not push, and it must look for itself whether the owner lives, lends and writes; see `shm_pull`.

Nothing is left behind by a kill: the memory goes with its last user, and the socket's name is removed by the next
engine of the user that starts, or by a peer.
"""

import logging
import os
import secrets
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ayni.blocks.layouts import LayoutHandle, StorageKind
from ayni.blocks.metadata import EngineExport, WorkerMetadata
from ayni.errors import AyniError, StaleEpoch, UnknownLayout, Unsupported
from ayni.shm.folder import SocketFolder, default_folder
from ayni.shm.host import socket_name
from ayni.shm.json_messages import encode_refusal
from ayni.shm.sockets import SocketServer, answering
from ayni.shm.this_host import check_host, this_host
from worker_agent.blocks.engine import Capabilities
from worker_agent.blocks.engines.shm_dial import Dialer
from worker_agent.blocks.engines.shm_link import ShmLink
from worker_agent.blocks.engines.shm_messages import (
    PoolAnswer,
    ShmExport,
    decode_export,
    decode_request,
    encode_answer,
    encode_export,
)
from worker_agent.blocks.engines.shm_pull import NUM_THREADS
from worker_agent.blocks.memory import Memory
from worker_agent.blocks.pools import PoolFiles, PoolMemory

_log = logging.getLogger(__name__)


class ShmEngine:
    """Lends pools and pulls from those of peers; see `worker_agent.blocks.engine.Engine`."""

    name = "shm"
    version = 1
    capabilities = Capabilities(
        memory=frozenset(StorageKind),
        same_host_only=True,
        can_pull=True,
        can_push=False,
        cancel="drain",
        encrypted=False,
    )

    def __init__(self, folder: Path | None = None) -> None:
        """Lends nothing yet.

        Args:
            folder: where its socket is; None: the user's runtime folder.
        """
        self._path = folder or default_folder(os.environ.get("XDG_RUNTIME_DIR", ""))
        self._incarnation = secrets.randbits(64)
        self._lent: dict[LayoutHandle, tuple[PoolMemory, PoolFiles, int]] = {}
        self._folder: SocketFolder | None = None
        self._server: SocketServer | None = None
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ayni-shm")

    def register(self, handle: LayoutHandle, memory: Memory) -> None:
        """Lends a pool from the next export on; other memory can't be lent. A second time changes nothing."""
        if isinstance(memory, PoolMemory) and memory.files is not None and handle not in self._lent:
            self._lent[handle] = memory, memory.files, memory.control.lend(self._incarnation)

    def deregister(self, handle: LayoutHandle) -> None:
        """Lends a pool no more: what peers copy of it from now on counts as failed."""
        lent = self._lent.pop(handle, None)
        if lent is not None:
            lent[0].control.withdraw()

    def export(self) -> EngineExport | None:
        """Returns how peers ask for the pools; the first call with something to lend starts to listen, on this loop.

        None when there is nothing to lend, or no folder for the socket that only this user can enter.
        """
        if not self._lent or not self._listens():
            return None
        offer = ShmExport(
            host=this_host(), folder=str(self._path), incarnation=self._incarnation, layouts=tuple(self._lent)
        )
        data = encode_export(offer)
        return EngineExport(name=self.name, version=self.version, data=data, crc32=zlib.crc32(data))

    async def connect(self, peer: WorkerMetadata, export: EngineExport, deadline: float) -> ShmLink:
        """Maps the pools that a peer lends; see `worker_agent.blocks.engine.Engine`."""
        offer = decode_export(export.data)
        name = f"rank {peer.rank} of {peer.instance_id}"
        check_host(offer.host, name)
        dialer = Dialer(peer=name, offer=offer, executor=self._executor, deadline=deadline)
        return await dialer.dial(peer.layouts)

    async def close(self) -> None:
        """Lends nothing any more and stops to listen; a second call does nothing."""
        for handle in list(self._lent):
            self.deregister(handle)
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _listens(self) -> bool:
        """Says whether peers can ask; starts to listen."""
        if self._server is not None:
            return True
        try:
            self._folder = SocketFolder(self._path, make=True)
            self._folder.sweep()
            self._server = SocketServer(self._folder, socket_name(self._incarnation), answering(self._answer))
        except Unsupported as error:
            _log.warning("shared memory is not offered: %s", error)
            return False
        return True

    def _answer(self, data: bytes) -> tuple[bytes, Sequence[int]]:
        try:
            request = decode_request(data)
            if request.incarnation != self._incarnation:
                raise StaleEpoch(
                    "the engine that was asked for is gone; connect again",
                    epoch=f"{request.incarnation:016x}",
                    current_epoch=f"{self._incarnation:016x}",
                )
            if request.layout not in self._lent:
                raise UnknownLayout(f"layout {request.layout} is not lent any more", layout=request.layout)
        except AyniError as error:
            return encode_refusal(error), ()
        _, files, epoch = self._lent[request.layout]
        return encode_answer(PoolAnswer(epoch=epoch, start=files.start)), (files.data_fd, files.control_fd)
