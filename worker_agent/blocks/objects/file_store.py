"""Objects as files in a folder: the store that is always there.  [shell]

An object is written beside the others first and then linked to its name, so that it appears whole or not at all, and
only where there is none. A replacement is renamed over the old file while a lock is held, since no system call compares
before it renames. The last folder on the way to an object is one of 256, so that none grows huge.

Page cache: a put returns before the bytes reach the disk unless the store was opened with `sync`. After a loss of power
an object may be cut short then, which every reader notices.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import xxhash

from ayni.errors import BadRequest
from worker_agent.blocks.objects.file_locks import Staging, locked
from worker_agent.blocks.objects.store import Stored, storage_failed, too_large

_OWN = ".ayni"
"""Folder of what is not an object."""
_PAGE_BYTES = 1 << 20


class FileStore:
    """A folder of objects; many processes may share it."""

    def __init__(self, root: Path, *, sync: bool = False, timeout_s: float = 30.0) -> None:
        """Opens the store, making its folder if it is not there.

        Args:
            root: the folder.
            sync: writes every object to the disk before it appears.
            timeout_s: longest wait for another process that is replacing an object.

        Raises:
            StorageFailed: the folder can't be made or written.
        """
        self.root = root
        self._folder = str(root)
        self._sync = sync
        self._timeout_s = timeout_s
        self._locks = root / _OWN / "locks"
        with self._failing("open the store"):
            self._locks.mkdir(parents=True, exist_ok=True)
            self._staging = Staging(root / _OWN / "staging", timeout_s)

    def has(self, name: str) -> int | None:
        """See ObjectStore."""
        path = self._path(name)
        with self._failing(f"look for {name}"), suppress(FileNotFoundError):
            return os.stat(path).st_size
        return None

    def put_if_absent(self, name: str, data: memoryview) -> bool:
        """See ObjectStore."""
        path = self._path(name)
        with self._failing(f"store {name}"), suppress(FileExistsError):
            if os.path.exists(path):
                return False
            with self._staged(data) as staged:
                _in_folder_of(path, lambda: os.link(staged, path))
            self._sync_folder_of(path)
            return True
        return False

    def put_if_match(self, name: str, data: memoryview, version: str) -> bool:
        """See ObjectStore."""
        path = self._path(name)
        with self._failing(f"replace {name}"), self._locked(name):
            if _version_of(path) != version:
                return False
            with self._staged(data) as staged:
                os.replace(staged, path)
            self._sync_folder_of(path)
            return True

    def get(self, name: str, buffer: memoryview) -> Stored | None:
        """See ObjectStore."""
        path = self._path(name)
        with self._failing(f"read {name}"), suppress(FileNotFoundError), _opened(path, os.O_RDONLY) as file:
            size = os.fstat(file).st_size
            if size > len(buffer):
                raise too_large(name, size, len(buffer))
            return Stored(data=buffer[: _read(file, buffer[:size])])
        return None

    def delete(self, name: str) -> None:
        """See ObjectStore."""
        path = self._path(name)
        with self._failing(f"delete {name}"), self._locked(name), suppress(FileNotFoundError):
            os.unlink(path)

    def close(self) -> None:
        """See ObjectStore."""
        self._staging.close()

    def _path(self, name: str) -> str:
        """Returns where an object lies; never outside the root."""
        *folders, last = parts = name.split("/")
        if "\0" in name or any(part in ("", ".", "..") for part in parts) or parts[0] == _OWN:
            raise BadRequest(f"{name!r} can't be the name of an object in {self.root}", field="keys")
        return os.path.join(self._folder, *folders, f"{_spread(name):02x}", last)

    @contextmanager
    def _staged(self, data: memoryview) -> Iterator[str]:
        """Writes bytes to a file of no name that readers know; the file is gone afterwards unless it was renamed."""
        path = self._staging.new_path()
        try:
            with _opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as file:
                _write(file, data)
                if self._sync:
                    os.fdatasync(file)
            yield path
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def _locked(self, name: str) -> AbstractContextManager[None]:
        return locked(self._locks / f"{_spread(name):02x}", self._timeout_s)

    def _sync_folder_of(self, path: str) -> None:
        if self._sync:
            with _opened(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY) as folder:
                os.fsync(folder)

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_failed(str(self.root), doing, error.strerror or error) from error


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _read(file: int, buffer: memoryview) -> int:
    """Reads until the buffer is full or the file ends; returns how many bytes came."""
    done = 0
    while done < len(buffer) and (count := os.readv(file, [buffer[done:]])):
        done += count
    return done


def _write(file: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(file, data[done:])


def _spread(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) & 0xFF


def _in_folder_of(path: str, act: Callable[[], None]) -> None:
    """Does something to a path, making its folder first if need be."""
    try:
        act()
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        act()


def _version_of(path: str) -> str | None:
    with suppress(FileNotFoundError), open(path, "rb") as file:
        digest = xxhash.xxh3_128()
        while page := file.read(_PAGE_BYTES):
            digest.update(page)
        return digest.hexdigest()
    return None
