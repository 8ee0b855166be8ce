"""The TCP connections of this process, also those that libraries hold.  [shell]

Looks through /proc; finds nothing where there is none.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

Place = tuple[str, int]
"""Numeric host and port."""

_DESCRIPTORS = Path("/proc/self/fd")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def listening() -> set[Place]:
    """Returns where this process listens."""
    return {_place(own.getsockname()) for own in _sockets() if _is_listening(own)}


def dialled(port: int) -> set[Place]:
    """Returns the own ends of all connections that lead to a port, on whichever host."""
    found = set()
    for own in _sockets():
        # One that is not connected has no other end.
        with contextlib.suppress(OSError):
            if not _is_listening(own) and _place(own.getpeername())[1] == port:
                found.add(_place(own.getsockname()))
    return found


def shut_down(places: set[Place]) -> int:
    """Shuts down all connections from, or to, one of some places; returns how many. Whoever reads them sees the end."""
    count = 0
    for own in _sockets():
        # One that is not connected, or was closed meanwhile, needs no shutting down.
        with contextlib.suppress(OSError):
            if not _is_listening(own) and {_place(own.getsockname()), _place(own.getpeername())} & places:
                own.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _sockets() -> Iterator[socket.socket]:
    """Yields this process's TCP sockets, each by a copy of its descriptor that is closed before the next one."""
    if not _DESCRIPTORS.is_dir():
        return
    for name in os.listdir(_DESCRIPTORS):
        # The number may be another file by now; what is looked at is the copy.
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(copy).st_mode):
                os.close(copy)
                continue
            with closing(socket.socket(fileno=copy)) as own:
                if own.family in _FAMILIES and own.type == socket.SOCK_STREAM:
                    yield own


def _is_listening(own: socket.socket) -> bool:
    return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _place(address: tuple[object, ...]) -> Place:
    host, port = address[0], address[1]
    assert isinstance(host, str)
    assert isinstance(port, int)
    return host, port
