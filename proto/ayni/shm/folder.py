"""The folder of the sockets through which processes of one user reach one another.  [shell]

Each listens on its own socket in a folder that only its user can enter. A socket that nobody listens on was left
behind by a kill; any process that starts to listen, and any peer that finds one, removes it. Sockets are named
through the folder's descriptor: the folder that was checked is the one that is used, and the length of its path does
not matter.
"""

import contextlib
import os
import socket
import stat
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from ayni.errors import PeerLost, Unsupported
from ayni.shm.host import is_socket_name

_BACKLOG = 1024
"""Peers that may wait until they are let in: as many as start at once on one host."""
_UNFINISHED = ".new"
_UNFINISHED_SECONDS = 60.0
"""Age at which a socket that nobody listens on yet was left behind."""


def default_folder(runtime_folder: str = "") -> Path:
    """Returns the folder of this user's sockets: below its runtime folder, or else below the temporary one."""
    return Path(runtime_folder, "ayni") if runtime_folder else Path(tempfile.gettempdir(), f"ayni-{os.getuid()}")


class SocketFolder:
    """A folder that only this user can enter, open."""

    def __init__(self, path: Path, *, make: bool) -> None:
        """Opens the folder and checks it; `make` makes it when it is not there.

        Raises:
            Unsupported: it is not there, or another user could enter it.
        """
        self.path = path
        try:
            if make:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from error
        found = os.fstat(self._fd)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() or mode & 0o077:
            os.close(self._fd)
            raise _unusable(path, f"it belongs to user {found.st_uid} with mode {mode:o}, not to this user with 700")

    def listen(self, name: str) -> socket.socket:
        """Returns a socket that listens under a name. Nobody sees the name before it listens."""
        with ExitStack() as stack:
            try:
                listener = stack.enter_context(_new_socket())
                listener.bind(self._place(name + _UNFINISHED))
                listener.listen(_BACKLOG)
                os.rename(name + _UNFINISHED, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except OSError as error:
                raise _unusable(self.path, error.strerror or str(error)) from error
            stack.pop_all()
        return listener

    def dial(self, name: str) -> socket.socket:
        """Returns a socket connected to a name; one that nobody listens on is removed.

        Raises:
            PeerLost: nobody listens, too many wait already, or this process is out of descriptors.
        """
        with ExitStack() as stack:
            try:
                dialed = stack.enter_context(_new_socket())
                dialed.connect(self._place(name))
            except OSError as error:
                if isinstance(error, ConnectionRefusedError):
                    self.remove(name)
                detail = error.strerror or str(error)
                raise PeerLost(f"nobody answers at {self.path / name}: {detail}", peer=name, detail=detail) from error
            stack.pop_all()
        return dialed

    def sweep(self) -> None:
        """Removes the sockets that killed processes left behind."""
        for name in os.listdir(self._fd):
            if is_socket_name(name):
                with contextlib.suppress(PeerLost):
                    self.dial(name).close()
            elif is_socket_name(name.removesuffix(_UNFINISHED)) and self._age(name) > _UNFINISHED_SECONDS:
                self.remove(name)

    def remove(self, name: str) -> None:
        """Removes a name, which may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def close(self) -> None:
        """Closes the folder."""
        os.close(self._fd)

    def _place(self, name: str) -> str:
        return f"/proc/self/fd/{self._fd}/{name}"

    def _age(self, name: str) -> float:
        try:
            return time.time() - os.stat(name, dir_fd=self._fd).st_mtime
        except FileNotFoundError:
            return 0.0


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _unusable(path: Path, detail: str) -> Unsupported:
    return Unsupported(
        f"shared memory needs a folder that only this user can enter, and {path} is none: {detail}",
        field="engine",
        detail=detail,
    )
