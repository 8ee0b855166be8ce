"""An open slab file: made whole or recovered, locked, read and written at offsets.  [shell]

The lock is the system's (flock): it ends with the process that holds it, however that ends.
"""

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from ayni.errors import StorageFailed
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.slab_header import PAGE_BYTES, SLOT, SlabHeader, Slots, check_same, decode, encode, refused

_LOOK_BYTES = 1 << 20
_NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


class SlabFile:
    """One slab, open and locked by this process."""

    def __init__(self, path: Path, header: SlabHeader, size: int) -> None:
        """Recovers the slab at `path`, or makes it, with all of its bytes set aside.

        Args:
            path: the file; folders on the way are made.
            header: whose blocks, of which shape.
            size: bytes of the file.

        Raises:
            StorageFailed: there is no room, the file can't be opened, another process has it, or it holds other blocks.
        """
        self.path = path
        self._header = header
        with self._named("open it"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._lock()
            found = self._find(size)
            self.recovered = found is not None
            """Whether the file was there."""
            if found is None:
                self._make(size)
            self.mark(clean=False)
            if found is None:
                # Blocks behind a header that a power cut took away could not be told from another program's file.
                with self._named("sync its header"):
                    os.fsync(self._fd)
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """Fills buffers with what begins at an offset.

        Raises:
            StorageFailed: the bytes can't be read, or the file ends before.
        """
        views = [buffer.data for buffer in buffers]
        wanted = sum(map(len, views))
        while wanted:
            try:
                done = os.preadv(self._fd, views, offset)
            except OSError as error:
                raise self._failed(error, f"read {wanted} bytes at {offset}") from error
            if not done:
                size = os.fstat(self._fd).st_size
                raise refused(str(self.path), f"it was cut short to {size} bytes; block bytes at {offset} are gone")
            offset, wanted = offset + done, wanted - done
            views = _rest(views, done) if wanted else []

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """Writes buffers from an offset on.

        Raises:
            StorageFailed: they can't be written.
        """
        views = [buffer.data for buffer in buffers]
        wanted = sum(map(len, views))
        while wanted:
            try:
                done = os.pwritev(self._fd, views, offset)
            except OSError as error:
                raise self._failed(error, f"write {wanted} bytes at {offset}") from error
            offset, wanted = offset + done, wanted - done
            views = _rest(views, done) if wanted else []

    def read_slots(self) -> Slots:
        """Returns all slots."""
        slots = np.zeros(self._header.num_blocks, SLOT)
        self.read(PAGE_BYTES, [slots.view(np.uint8)])
        return slots

    def mark(self, *, clean: bool) -> None:
        """Writes the header."""
        page = np.frombuffer(encode(replace(self._header, clean=clean)), np.uint8)
        self.write(0, [page])

    def sync(self) -> None:
        """Waits until everything written is on the disk."""
        with self._named("sync it"):
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Closes the file and gives its lock up."""
        os.close(self._fd)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refused(str(self.path), "a live process has it", "end that process") from None
        with self._named("look at it"):
            is_same = os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        if not is_same:
            raise refused(str(self.path), "it was replaced while it was opened", "try again")

    def _find(self, size: int) -> SlabHeader | None:
        with self._named("read its header"):
            page = os.pread(self._fd, PAGE_BYTES, 0)
        found = decode(page, str(self.path))
        if found is None:
            self._check_zeros()
            return None
        if replace(found, clean=False) != replace(self._header, clean=False) and self._is_blank(found):
            # Made for another configuration and never written: there is nothing to keep.
            with self._named("empty it"):
                os.ftruncate(self._fd, 0)
            return None
        check_same(found, self._header, str(self.path))
        has = os.fstat(self._fd).st_size
        if has < size:
            raise refused(str(self.path), f"it was cut short: it has {has} bytes, its blocks need {size}")
        return found

    def _is_blank(self, found: SlabHeader) -> bool:
        """Says whether no block of a slab was ever written."""
        size = found.num_blocks * SLOT.itemsize
        if os.fstat(self._fd).st_size < PAGE_BYTES + size:
            return False
        with self._named("read its slots"):
            slots = os.pread(self._fd, size, PAGE_BYTES)
        return len(slots) == size and not any(slots)

    def _check_zeros(self) -> None:
        """Refuses a file without a header that holds anything: the making of a slab leaves nothing but zeros."""
        size, offset = os.fstat(self._fd).st_size, 0
        with self._named("read it"):
            while offset < size:
                try:
                    offset = os.lseek(self._fd, offset, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # nothing but holes from here on
                        return
                    raise
                found = os.pread(self._fd, _LOOK_BYTES, offset)
                if found.count(0) != len(found):
                    raise refused(str(self.path), "it holds bytes, but not the header of a slab file")
                offset += len(found) or size

    def _make(self, size: int) -> None:
        """Sets all bytes aside now, so that a full disk is told here and not in the middle of a transfer."""
        with self._named("ask how much room is left"):
            free = _free_bytes(self._fd)
        try:
            if size > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._fd, 0)
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise StorageFailed(
                f"there is no room for the slab file {self.path}: it needs {size} bytes, {free} are free "
                f"({error.strerror}); ask for fewer disk blocks, or use another folder",
                place=self.path,
                detail=error.strerror,
                wanted=size,
                free=free,
            ) from error

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(error, doing) from error

    def _failed(self, error: OSError, doing: str) -> StorageFailed:
        why = "no room is left" if error.errno in _NO_SPACE else error.strerror or str(error)
        message = f"the slab file {self.path} failed: could not {doing}: {why}"
        return StorageFailed(message, place=self.path, detail=why)


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Returns what is left of buffers after their first `done` bytes."""
    rest = []
    for view in views:
        if done < view.nbytes:
            rest.append(view[done:])
        done = max(0, done - view.nbytes)
    return rest


def _free_bytes(fd: int) -> int:
    """Returns what a file can grow to."""
    free = os.fstatvfs(fd)
    return free.f_bavail * free.f_frsize + os.fstat(fd).st_blocks * 512
