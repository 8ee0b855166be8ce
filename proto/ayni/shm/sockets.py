"""Messages and descriptors between processes of one user, and the side that is dialed.  [shell]

Both sides check who is on the other side.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ayni.errors import AyniError, Deadline, PeerLost, Unsupported
from ayni.shm.folder import SocketFolder
from ayni.shm.json_messages import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)

_MAX_FDS = 2
_ANSWER_SECONDS = 10.0
"""Longest time for all requests of one peer that only asks."""
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_RESUME_SECONDS = 1.0

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """Who is on the other side of a socket, as the system says."""

    pid: int
    uid: int


def credentials(connection: socket.socket) -> Credentials:
    """Returns who is on the other side.

    Raises:
        Unsupported: it is another user.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise Unsupported(
            f"shared memory is for one user: the other side is user {uid}, this one is user {os.geteuid()}",
            field="engine",
            detail=f"uid {uid}",
        )
    return Credentials(pid=pid, uid=uid)


async def receive(connection: socket.socket, deadline: float | None) -> tuple[bytes, list[int]]:
    """Returns the next message and its descriptors, which the caller closes; no bytes at the end.

    Raises:
        Deadline: nothing came until `deadline`, a moment on the loop's clock; None: never.
        PeerLost: the connection broke.
    """
    await _ready(connection, deadline)
    try:
        data, fds, flags, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise _broken(error) from error
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        close_all(fds)
        raise PeerLost("a message of shared memory is too long", peer="", detail="message was cut off")
    return data, fds


def send(connection: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Sends one message.

    Raises:
        PeerLost: the connection broke, or the other side reads nothing.
    """
    try:
        socket.send_fds(connection, [data], list(fds))
    except OSError as error:
        raise _broken(error) from error


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)


Converse = Callable[[socket.socket], Awaitable[None]]
"""Talks with one peer until either has said all. Whoever is called closes nothing but what it received."""
Answer = Callable[[bytes], tuple[bytes, Sequence[int]]]
"""Answers a request with a message and descriptors."""


def answering(answer: Answer) -> Converse:
    """Returns how to talk with a peer that only asks: it gets one answer for each request, and must be quick."""

    async def converse(connection: socket.socket) -> None:
        deadline = asyncio.get_running_loop().time() + _ANSWER_SECONDS
        while True:
            data, fds = await receive(connection, deadline)
            close_all(fds)
            if not data:
                return
            send(connection, *answer(data))

    return converse


class SocketServer:
    """Talks with the peers that dial one socket, on the running loop."""

    def __init__(self, folder: SocketFolder, name: str, converse: Converse, max_peers: int = 64) -> None:
        """Starts to listen; at most `max_peers` are talked with at a time, and the others turned away."""
        self._folder, self._name, self._converse, self._max_peers = folder, name, converse, max_peers
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = folder.listen(name)
        self._resume: asyncio.TimerHandle | None = None
        self._listen()

    async def close(self) -> None:
        """Listens no more and ends what is under way."""
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._folder.remove(self._name)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                _log.warning("out of file descriptors: peers on this host have to wait")
                self._loop.remove_reader(self._listener)
                self._resume = self._loop.call_later(_RESUME_SECONDS, self._listen)
            return
        if len(self._tasks) >= self._max_peers:
            connection.close()
            return
        task = self._loop.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Here, because a task that is cancelled before it began closes nothing itself.
        task.add_done_callback(lambda _: connection.close())

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # What a peer does wrong is the peer's: it sees its connection end.
        with contextlib.suppress(AyniError):
            credentials(connection)
            await self._converse(connection)


async def _ready(connection: socket.socket, deadline: float | None) -> None:
    """Waits until there is something to read."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection, wake)
    try:
        async with asyncio.timeout_at(deadline):
            await ready
    except TimeoutError:
        message = "the peer did not answer on its socket in time"
        raise Deadline(message, waiting_for="shared memory", timeout=0) from None
    finally:
        loop.remove_reader(connection)


def _broken(error: OSError) -> PeerLost:
    detail = error.strerror or str(error)
    return PeerLost(f"the connection for shared memory broke: {detail}", peer="", detail=detail)
