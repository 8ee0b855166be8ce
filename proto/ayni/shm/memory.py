"""Memory of this process that another one may read and nothing else, and how much there is left.  [shell]

The memory is a file without a name (memfd) that goes with its last holder, so that nothing is left behind by a kill.
Seals keep whoever holds the descriptor from writing, growing or shrinking it; without the last one a reader of a
truncated file would be killed by a signal.
"""

import fcntl
import mmap
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ayni.errors import PeerLost, StorageFailed, TooLarge

Bytes = npt.NDArray[np.uint8]

_F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1; the standard library does not name it."""

_BLOCK = 512
"""Bytes of a block in `st_blocks`, on every system. Sealed memory has no new holes."""

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemory:
    """Memory that readers can be given, and the owner's own view of it."""

    fd: int
    bytes: Bytes
    """Shape [size], writable."""


def can_share() -> bool:
    """Says whether this system has sealed memory, descriptors of processes and the credentials of a socket's peer."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


def share(name: str, size: int) -> SharedMemory:
    """Makes memory of zeros, all of it there, and seals it. Blocks the calling thread for about 0.2 s a GiB.

    Raises:
        TooLarge: less is available.
        StorageFailed: the system refuses.
    """
    _check_available(name, size)
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, size)
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        detail = error.strerror or str(error)
        raise StorageFailed(
            f"could not set {size} bytes of memory aside for {name}: {detail}; ask for less",
            place=name,
            detail=detail,
        ) from error
    return SharedMemory(fd=fd, bytes=np.frombuffer(mapped, np.uint8))


def map_shared(fd: int, size: int, peer: str) -> Bytes:
    """Maps a peer's memory read-only, with all of its pages; shape [size]. The caller closes `fd` when it likes.

    Raises:
        PeerLost: it is smaller, not sealed, so that reading it could end this process, or not all there, so that
            reading it would take memory of this process.
    """
    wanted = fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE
    try:
        found, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        has = min(found.st_size, found.st_blocks * _BLOCK)
        if has < size or seals & wanted != wanted:
            raise _unusable(peer, f"its memory has {has} bytes of {size}, with seals {seals:#x}")
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    except OSError as error:
        raise _unusable(peer, error.strerror or str(error)) from error
    return np.frombuffer(mapped, np.uint8)


def available_bytes() -> int:
    """Returns how much memory this process can still get: of the machine, and of its control group if that is less."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    machine = int(found[1]) * 1024 if found else sys.maxsize
    return min(machine, _available_in_group())


def _available_in_group() -> int:
    try:
        group = re.search(r"^0::(/.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        folder = _CGROUP / group[1].lstrip("/") if group else _CGROUP
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return sys.maxsize
        used = int((folder / "memory.current").read_text())
        cached = re.findall(r"^(?:in)?active_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return sys.maxsize
    return int(limit) - used + sum(map(int, cached))


def _check_available(name: str, size: int) -> None:
    available = available_bytes()
    if size > available:
        raise TooLarge(
            f"{name} of {size} bytes does not fit into this process's memory: {available} bytes are available; ask "
            "for less",
            field="size",
            limit=available,
            received=size,
        )


def _unusable(peer: str, detail: str) -> PeerLost:
    return PeerLost(f"the shared memory of {peer} can't be used: {detail}", peer=peer, detail=detail)
