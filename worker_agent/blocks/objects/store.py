"""What a store of objects can do: five calls, whatever is behind them.  [shell]

All calls block, may come from any thread, and end within the time that the store was opened with. They know names and
bytes, not blocks. A name that is not there is an answer, never an error; an error means that the store could not say.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import xxhash

from ayni.errors import StorageFailed, TooLarge


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One object as it was read."""

    data: memoryview
    """In the buffer that was lent, or in memory of its own; not to be written."""
    tag: str = ""
    """The store's own word for this version; empty where it has none."""

    @property
    def version(self) -> str:
        """What `put_if_match` compares: equal versions have equal bytes."""
        return self.tag or xxhash.xxh3_128_hexdigest(self.data)


class ObjectStore(Protocol):
    """A store of objects. Every call may raise StorageFailed: not there, refused, full, or too slow."""

    def has(self, name: str) -> int | None:
        """Returns an object's size in bytes; None when there is none."""

    def put_if_absent(self, name: str, data: memoryview) -> bool:
        """Stores a whole object if there is none; says whether it did. `data` is free again afterwards.

        Among callers at the same time, one gets True. After a lost answer it may say False although it did store.
        """

    def put_if_match(self, name: str, data: memoryview, version: str) -> bool:
        """Replaces an object if it still has this version; says whether it did. Otherwise as `put_if_absent`."""

    def get(self, name: str, buffer: memoryview) -> Stored | None:
        """Reads an object; None when there is none.

        Args:
            name: of the object.
            buffer: at least as long as the object may be; may be written to.

        Raises:
            TooLarge: the object is longer than the buffer; nothing was read.
        """

    def delete(self, name: str) -> None:
        """Removes an object; does nothing when there is none."""

    def close(self) -> None:
        """Gives everything back; no call follows."""


class StoreFailed(StorageFailed):
    """A call of the store itself failed, and not what was done with its answer."""


class Asked:
    """A store whose failures are StoreFailed, so that they are not taken for those of the memory of blocks."""

    def __init__(self, store: ObjectStore) -> None:
        """Takes a store, which stays its opener's."""
        self._store = store

    def has(self, name: str) -> int | None:
        """See ObjectStore."""
        with _told_apart():
            return self._store.has(name)

    def put_if_absent(self, name: str, data: memoryview) -> bool:
        """See ObjectStore."""
        with _told_apart():
            return self._store.put_if_absent(name, data)

    def put_if_match(self, name: str, data: memoryview, version: str) -> bool:
        """See ObjectStore."""
        with _told_apart():
            return self._store.put_if_match(name, data, version)

    def get(self, name: str, buffer: memoryview) -> Stored | None:
        """See ObjectStore."""
        with _told_apart():
            return self._store.get(name, buffer)

    def delete(self, name: str) -> None:
        """See ObjectStore."""
        with _told_apart():
            self._store.delete(name)

    def close(self) -> None:
        """Does nothing: the opener closes the store."""


@contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except StorageFailed as error:
        raise StoreFailed(error.message, **error.metadata) from error


def too_large(name: str, size: int, limit: int) -> TooLarge:
    """Returns the refusal to read an object that is longer than what it is read into."""
    return TooLarge(f"the object {name} has {size} bytes; at most {limit}", field=name, limit=limit, received=size)


def storage_failed(place: str, doing: str, why: object) -> StorageFailed:
    """Returns the error of a store that could not do something.

    Args:
        place: which store or file.
        doing: as it ends "could not".
        why: what the store says.
    """
    return StorageFailed(f"could not {doing} in {place}: {why}", place=place, detail=why)
