"""Messages and descriptors between workers of one user, and the engine's side that answers them.  [shell]

Both sides check who is on the other side.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ayni.errors import AyniError, Deadline, PeerLost, Unsupported
from worker_agent.blocks.engines.shm_folder import SocketFolder
from worker_agent.blocks.engines.shm_messages import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)

_MAX_FDS = 2
_SERVE_SECONDS = 10.0
"""Longest time for all requests of one peer."""
_MAX_PEERS = 64
"""Peers that are served at a time."""
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


async def receive(connection: socket.socket, deadline: float) -> tuple[bytes, list[int]]:
    """Returns the next message and its descriptors; no bytes at the end.

    Raises:
        Deadline: nothing came until `deadline`, a moment on the loop's clock.
        PeerLost: the connection broke.
    """
    await _ready(connection, deadline)
    try:
        data, fds, flags, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise _broken(error) from error
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        for fd in fds:
            os.close(fd)
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


Answer = Callable[[bytes], tuple[bytes, Sequence[int]]]
"""Answers a request with a message and descriptors."""


class SocketServer:
    """Answers peers on one socket, on the running loop."""

    def __init__(self, folder: SocketFolder, name: str, answer: Answer) -> None:
        """Starts to listen; `answer` is called on the loop."""
        self._folder, self._name, self._answer = folder, name, answer
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
        if len(self._tasks) >= _MAX_PEERS:
            connection.close()
            return
        task = self._loop.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Here, because a task that is cancelled before it began closes nothing itself.
        task.add_done_callback(lambda _: connection.close())

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        deadline = self._loop.time() + _SERVE_SECONDS
        # What a peer does wrong is the peer's: it sees its connection end.
        with contextlib.suppress(AyniError):
            credentials(connection)
            while True:
                data, fds = await receive(connection, deadline)
                for fd in fds:
                    os.close(fd)
                if not data:
                    return
                send(connection, *self._answer(data))


async def _ready(connection: socket.socket, deadline: float) -> None:
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
