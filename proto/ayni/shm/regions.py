"""Regions: memory of this process that another one maps read-only, and what a reader makes of one.  [shell]

    page 0       generation, magic, size of the payload; 64 bits each, little-endian
    from 4096    payload

Only the owner writes. It adds one to the generation before it writes a region anew; a reader looks at the generation
after it has copied or added, and does not use what it read under another one than it was told. Every value is one
aligned store. Between a copy and the look at the generation lie many instructions and the interpreter's lock, so that
processors that reorder reads don't matter.

A region's memory is there for as long as an array looks at it, whatever became of the region, and then goes back to
the system. Each mapping keeps a descriptor open: two for a region of one's own, one for a mapped one.
"""

import bisect
import os
import secrets
import threading
import weakref

import numpy as np
import numpy.typing as npt

from ayni.errors import PeerLost, TooLarge
from ayni.shm.memory import Bytes, map_shared, share

_HEADER_BYTES = 4096
_MAGIC = int.from_bytes(b"AYNIRGN1", "little")
_WORD = np.dtype("<u8")


class Region:
    """A region of this process.

    Attributes:
        id: random, 63 bits.
        fd: what a reader needs; open until the region is freed.
        bytes: the payload, shape [size], writable, beginning at a page.
        size: of the payload, in bytes.
        is_kept: whether somebody may have it until it is withdrawn, so that it can't be freed before.
    """

    __slots__ = ("__weakref__", "_words", "bytes", "close_fd", "fd", "id", "is_kept", "size")

    def __init__(self, size: int) -> None:
        """Sets memory of zeros aside. Blocks the calling thread for about 0.2 s a GiB; see `share`."""
        assert size > 0, f"a region of {size} bytes"
        shared = share("ayni-region", _HEADER_BYTES + size)
        self.id, self.fd, self.size = secrets.randbits(63), shared.fd, size
        self.bytes, self.is_kept = shared.bytes[_HEADER_BYTES:], False
        self._words = _words(shared.bytes)
        self._words[1:] = (_MAGIC, size)
        self.close_fd = weakref.finalize(self, os.close, shared.fd)
        """Closes the descriptor, once. A region that nobody freed closes it when nobody has the region any more."""

    @property
    def generation(self) -> int:
        """How often it was renewed."""
        return int(self._words[0])

    def renew(self) -> int:
        """Says that the payload is written anew from now on; returns the new generation."""
        self._words[0] += 1
        return self.generation


class Regions:
    """The regions of this process. Methods may be called from any thread."""

    def __init__(self) -> None:
        """Has none."""
        self._lock = threading.Lock()
        self._by_id: dict[int, Region] = {}
        self._starts: list[int] = []
        """Addresses of the payloads, sorted."""
        self._by_start: dict[int, Region] = {}
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Payloads of all regions that were not freed."""
        return self._total_bytes

    def allocate(self, num_bytes: int, limit: int | None = None) -> Region:
        """Returns a new region of zeros. Blocks the calling thread for about 0.2 s a GiB.

        Args:
            num_bytes: size of its payload.
            limit: what all regions may have together, in bytes.

        Raises:
            TooLarge: it would be more than the limit, or than this machine has left.
            StorageFailed: the system refuses.
        """
        self._reserve(num_bytes, limit)
        try:
            region = Region(num_bytes)
        except BaseException:
            self._reserve(-num_bytes, None)
            raise
        start = _address(region.bytes)
        with self._lock:
            self._by_id[region.id] = self._by_start[start] = region
            bisect.insort(self._starts, start)
        return region

    def vector(self, num_elements: int) -> npt.NDArray[np.float32]:
        """Returns zeros in a region of their own, shape [num_elements]; see `allocate`. `find` says which region."""
        return self.allocate(4 * num_elements).bytes.view(np.float32)

    def free(self, region: Region) -> None:
        """Forgets a region and closes its descriptor; nobody may be lending it meanwhile. A second time does nothing.

        Arrays that look at it stay valid. Whoever has mapped it keeps the memory until it lets go as well.
        """
        with self._lock:
            if self._by_id.pop(region.id, None) is None:
                return
            start = _address(region.bytes)
            del self._by_start[start]
            self._starts.pop(bisect.bisect_left(self._starts, start))
            self._total_bytes -= region.size
        region.close_fd()

    def get(self, region_id: int) -> Region | None:
        """Returns the region with this id; None when there is none, or none any more."""
        return self._by_id.get(region_id)

    def find(self, array: npt.NDArray[np.generic]) -> tuple[Region, int] | None:
        """Returns the region that an array lies in, and where in its payload the array begins, in bytes.

        None when it lies elsewhere, is empty, or is not one run of bytes in the order of its elements. O(log n).
        """
        if not array.nbytes or not array.flags.c_contiguous:
            return None
        address = _address(array)
        with self._lock:
            i = bisect.bisect_right(self._starts, address)
            if not i:
                return None
            start = self._starts[i - 1]
            region, offset = self._by_start[start], address - start
        return (region, offset) if offset + array.nbytes <= region.size else None

    def close(self) -> None:
        """Frees all; a second call does nothing."""
        for region in list(self._by_id.values()):
            self.free(region)

    def _reserve(self, num_bytes: int, limit: int | None) -> None:
        with self._lock:
            total = self._total_bytes + num_bytes
            if limit is not None and total > limit:
                raise TooLarge(
                    f"a region of {num_bytes} bytes is too large: all regions of this process would have {total} "
                    f"bytes, and may have {limit}; free others, or set a higher limit",
                    field="num_bytes",
                    limit=limit,
                    received=total,
                )
            self._total_bytes = total


class MappedRegion:
    """Another process's region, read-only; its memory is there for as long as an array looks at it.

    Attributes:
        id: as the owner gave it.
        bytes: the payload, shape [size], read-only.
        size: of the payload, in bytes.
    """

    __slots__ = ("_words", "bytes", "id", "size")

    def __init__(self, region_id: int, mapped: Bytes) -> None:
        """Takes a whole region, its header with it; see `map_region`."""
        self.id, self.bytes, self.size = region_id, mapped[_HEADER_BYTES:], len(mapped) - _HEADER_BYTES
        self._words = _words(mapped)

    @property
    def generation(self) -> int:
        """How often the owner has renewed it by now."""
        return int(self._words[0])

    def check(self, peer: str) -> None:
        """Refuses memory that is no region of this size; raises PeerLost."""
        _, magic, size = self._words.tolist()
        if (magic, size) != (_MAGIC, self.size):
            detail = f"no region of {self.size} bytes: its header says {magic:#x}, {size} bytes"
            raise PeerLost(f"what {peer} lends can't be used: {detail}", peer=peer, detail=detail)


def map_region(fd: int, region_id: int, size: int, peer: str) -> MappedRegion:
    """Maps a region of another process, with all of its pages. Blocks the calling thread for about 0.1 s a GiB.

    Args:
        fd: its descriptor; the caller closes it.
        region_id: how its owner calls it.
        size: of its payload, in bytes; whether that is not too much was checked.
        peer: the owner's name, for errors.

    Raises:
        PeerLost: the memory is not what it should be.
    """
    assert size > 0, f"a region of {size} bytes"
    region = MappedRegion(region_id, map_shared(fd, _HEADER_BYTES + size, peer))
    region.check(peer)
    return region


def _words(memory: Bytes) -> npt.NDArray[np.uint64]:
    """Returns the header: generation, magic, size."""
    return memory[:24].view(_WORD)


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])
