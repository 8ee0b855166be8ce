"""Which host, process namespace and user a process belongs to, and where its shared memory is asked for.  [core]

Both come from another process, which may say anything: `check` refuses what would lead out of the folder.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from ayni.errors import BadRequest

_SOCKET_SUFFIX = ".sock"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostIdentity:
    """What two processes have in common that can share memory with one another."""

    boot_id: str
    pid_namespace: int
    uid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemoryOffer:
    """Where a coordinator's shared memory is asked for."""

    host: HostIdentity
    folder: str
    """Absolute path of the folder of its socket."""
    socket_name: str
    """Name of its socket inside the folder."""

    def check(self) -> None:
        """Refuses an offer that names no socket in a folder; raises BadRequest."""
        try:
            check_folder(self.folder)
            # It travels as text: what is left of a name that is none can't.
            self.folder.encode()
            if not is_socket_name(self.socket_name):
                raise ValueError(f"{self.socket_name!r} is no name of a socket")
        except ValueError as error:
            raise BadRequest(f"the offer of shared memory can't be used: {error}", field="shared_memory") from None


def socket_name(incarnation: int) -> str:
    """Returns the name of the socket of a random number of 64 bits."""
    return f"shm-{incarnation:016x}{_SOCKET_SUFFIX}"


def is_socket_name(name: str) -> bool:
    """Says whether a file is such a socket."""
    middle = name.removeprefix("shm-").removesuffix(_SOCKET_SUFFIX)
    return name == f"shm-{middle}{_SOCKET_SUFFIX}" and len(middle) == 16 and set(middle) <= set("0123456789abcdef")


def check_folder(folder: str) -> None:
    """Refuses text that can be no absolute path; raises ValueError."""
    # A lone surrogate can't be encoded, which is a ValueError as well.
    if b"\0" in os.fsencode(folder):
        raise ValueError(f"folder {folder!r} has a zero in it")
    if not Path(folder).is_absolute():
        raise ValueError(f"folder {folder!r} is not absolute")
