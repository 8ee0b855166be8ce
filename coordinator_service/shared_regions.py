"""Regions of workers on this host, and those of the coordinator that they read.  [shell]

A worker connects once for each membership, over a socket that only this user can reach, and stays connected: the end
of its connection is the end of all that it lent. Nothing but descriptors and sizes goes over the socket.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ayni.errors import AyniError, BadRequest, TooLarge, UnknownWorker, Unsupported
from ayni.shm.folder import SocketFolder, default_folder
from ayni.shm.host import SharedMemoryOffer, socket_name
from ayni.shm.json_messages import encode_refusal
from ayni.shm.memory import can_share
from ayni.shm.region_messages import Borrow, Hello, Lend, RegionAnswer, Withdraw, decode_request, encode_answer
from ayni.shm.regions import MappedRegion, Regions
from ayni.shm.sockets import SocketServer, close_all, receive, send
from ayni.shm.this_host import this_host
from coordinator_service.lent_regions import LentRegions

_log = logging.getLogger(__name__)

MAX_WORKERS = 256
"""Workers that can be connected at a time; the others' gradients travel over gRPC."""
_MAX_STRANGERS = 64
"""Connections beyond that, of those who have yet to say who they are."""
_HELLO_SECONDS = 10.0
_NUM_THREADS = 2


class SharedRegions:
    """Gradients in shared memory, the coordinator's side. Methods may be called on the loop only, but for `ours`."""

    def __init__(self, folder: Path | None, find_worker: Callable[[str], int | None], limit_bytes: int) -> None:
        """Listens to nobody yet.

        Args:
            folder: where its socket is; None: the user's runtime folder.
            find_worker: returns the id of the live worker that has a session.
            limit_bytes: what all workers may lend together.
        """
        self.ours = Regions()
        self._path = (folder or default_folder(os.environ.get("XDG_RUNTIME_DIR", ""))).absolute()
        self._find_worker, self._limit_bytes = find_worker, limit_bytes
        self._workers: dict[int, LentRegions] = {}
        self._may_listen = True
        self._offer: SharedMemoryOffer | None = None
        self._folder: SocketFolder | None = None
        self._server: SocketServer | None = None
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ayni-regions")

    @property
    def has_workers(self) -> bool:
        """Whether any worker is connected."""
        return bool(self._workers)

    def offer(self) -> SharedMemoryOffer | None:
        """Returns how workers reach this; the first call starts to listen, on the running loop.

        None where memory can't be shared, or there is no folder for the socket that only this user can enter.
        """
        if self._offer is None and self._may_listen:
            try:
                self._offer = self._listen()
            except (AyniError, OSError) as error:
                self._may_listen = False
                _log.warning("gradients of workers on this host travel over gRPC too: %s", error)
        return self._offer

    def is_connected(self, worker_id: int) -> bool:
        """Says whether a worker can be told where bytes lie."""
        return worker_id in self._workers

    def lent(self, worker_id: int, region_id: int) -> MappedRegion | None:
        """Returns a worker's region, mapped; None when it lends no such region."""
        worker = self._workers.get(worker_id)
        return worker.get(region_id) if worker else None

    def drop(self, worker_id: int) -> None:
        """Ends a worker's connection and forgets its regions, if it has any: its membership is over."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            with contextlib.suppress(OSError):
                worker.connection.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Listens no more, ends all connections and frees all regions; a second call does nothing."""
        self._may_listen, self._offer = False, None
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.ours.close()

    def _listen(self) -> SharedMemoryOffer:
        if not can_share():
            raise Unsupported("this system can't share memory", field="gradients", detail="system")
        name = socket_name(secrets.randbits(64))
        offer = SharedMemoryOffer(host=this_host(), folder=str(self._path), socket_name=name)
        offer.check()
        self._folder = SocketFolder(self._path, make=True)
        self._folder.sweep()
        self._server = SocketServer(self._folder, name, self._converse, MAX_WORKERS + _MAX_STRANGERS)
        return offer

    async def _converse(self, connection: socket.socket) -> None:
        worker = await self._meet(connection)
        try:
            send(connection, encode_answer(RegionAnswer()))
            while True:
                data, fds = await receive(connection, None)
                if not data:
                    return
                send(connection, *await self._answer(worker, data, fds))
        finally:
            # Its place may be another's by now: of the same worker, connected again.
            if self._workers.get(worker.worker_id) is worker:
                del self._workers[worker.worker_id]
            worker.clear()

    async def _meet(self, connection: socket.socket) -> LentRegions:
        data, fds = await receive(connection, asyncio.get_running_loop().time() + _HELLO_SECONDS)
        close_all(fds)
        try:
            worker_id = self._admit(data)
        except AyniError as error:
            send(connection, encode_refusal(error))
            raise
        self.drop(worker_id)
        worker = self._workers[worker_id] = LentRegions(worker_id, connection, self._check_bytes)
        return worker

    def _admit(self, data: bytes) -> int:
        hello = decode_request(data)
        if not isinstance(hello, Hello):
            raise BadRequest("the first message has to say which session this is", field="session")
        worker_id = self._find_worker(hello.session)
        if worker_id is None:
            raise UnknownWorker("no live worker has this session; join first", worker_id="")
        if len(self._workers) >= MAX_WORKERS and worker_id not in self._workers:
            raise TooLarge(
                f"{MAX_WORKERS} workers of this host are connected already; let this one's gradients travel over gRPC",
                field="workers",
                limit=MAX_WORKERS,
                received=MAX_WORKERS + 1,
            )
        return worker_id

    async def _answer(self, worker: LentRegions, data: bytes, fds: list[int]) -> tuple[bytes, Sequence[int]]:
        with contextlib.ExitStack() as unused:
            unused.callback(close_all, fds)
            try:
                match decode_request(data):
                    case Lend() as lend if len(fds) == 1:
                        worker.check(lend)
                        unused.pop_all()
                        await worker.add(lend, fds[0], self._executor)
                    case Withdraw(region=region_id):
                        worker.remove(region_id)
                    case Borrow(region=region_id):
                        return self._borrowed(region_id)
                    case _:
                        raise BadRequest(f"a request that does not fit here, with {len(fds)} descriptors", field="ask")
            except AyniError as error:
                return encode_refusal(error), ()
        return encode_answer(RegionAnswer()), ()

    def _borrowed(self, region_id: int) -> tuple[bytes, Sequence[int]]:
        region = self.ours.get(region_id)
        if region is None:
            raise BadRequest(f"the coordinator has no region {region_id:x}, or none any more", field="region")
        return encode_answer(RegionAnswer(size=region.size)), (region.fd,)

    def _check_bytes(self, size: int) -> None:
        total = size + sum(worker.num_bytes for worker in self._workers.values())
        if total > self._limit_bytes:
            raise TooLarge(
                f"workers of this host would lend {total} bytes, and may lend {self._limit_bytes}; let this worker's "
                "gradients travel over gRPC, or raise the coordinator's limit",
                field="size",
                limit=self._limit_bytes,
                received=total,
            )
