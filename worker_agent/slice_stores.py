"""Where means of slices that this worker owns are put together, in memory that others of its host read.  [shell]

Legend: S elements in a slice, C elements in a chunk.

A store is a slice's as long as its attempt lasts, and another one's afterwards: whoever reads it too late finds another
generation in the region's header.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ayni import tensors
from ayni.errors import AyniError
from ayni.frames import SharedRange
from ayni.shm.regions import Region, Regions
from ayni.tensors import Bytes, Floats

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Store:
    """One slice's mean."""

    mean_S: Floats  # noqa: N815
    """Shape [S]."""
    dtype: str
    """Element type that the mean travels in."""
    region: Region | None = None
    """What the mean lies in as it travels, from its first byte on; None: only this process has it."""

    @property
    def kind(self) -> tuple[int, str, bool]:
        """What it can be used for."""
        return self.mean_S.size, self.dtype, self.region is not None

    def put(self, values_C: Floats, start: int) -> Bytes:
        """Takes a chunk of the mean, shape [C], as it is after a way over the wire; returns its bytes there."""
        size = tensors.itemsize(self.dtype)
        stop = start + values_C.size
        payload: Bytes = np.empty(values_C.size * size, np.uint8)
        if self.region:
            payload = self.region.bytes[start * size : stop * size]
        tensors.encode_into(values_C, self.dtype, payload)
        tensors.decode_into(payload.data, self.dtype, self.mean_S[start:stop])
        return payload

    def place(self, start: int, stop: int) -> SharedRange:
        """Returns where elements [start, stop) lie; there must be a region."""
        assert self.region, "a mean that only this process has lies nowhere for others"
        size = tensors.itemsize(self.dtype)
        return SharedRange(self.region.id, start * size, (stop - start) * size, self.region.generation)

    def renew(self) -> None:
        """Says that the mean is put together anew: whoever still reads it must not use what it reads."""
        if self.region:
            self.region.renew()


class Stores:
    """Stores of all slices; belongs to the event loop."""

    def __init__(self) -> None:
        """Has none; they are ordinary memory until `regions` is set."""
        self.regions: Regions | None = None
        """What this worker shares; None: nothing."""
        self._free: dict[tuple[int, str, bool], list[Store]] = {}

    def take(self, num_elements: int, dtype: str, is_near: bool) -> Store:
        """Returns a store that nobody uses.

        Args:
            num_elements: S.
            dtype: element type that the mean travels in.
            is_near: whether others can read it in place.
        """
        is_shared = is_near and self.regions is not None
        free = self._free.get((num_elements, dtype, is_shared))
        store = free.pop() if free else self._new(num_elements, dtype, is_shared)
        store.renew()
        return store

    def put_back(self, store: Store) -> None:
        """Takes a store that was not used after all."""
        self._free.setdefault(store.kind, []).append(store)

    def take_back(self, stores: Iterable[Store]) -> None:
        """Takes stores whose attempt is over; lets go of those that it did not need."""
        unused = [store for free in self._free.values() for store in free]
        self._free = {}
        for store in unused:
            if store.region and self.regions:
                self.regions.free(store.region)
        for store in stores:
            self.put_back(store)

    def _new(self, num_elements: int, dtype: str, is_shared: bool) -> Store:
        if is_shared and self.regions:
            try:
                region = self.regions.allocate(tensors.payload_bytes(num_elements, dtype))
            except AyniError as error:
                _log.warning("means of %d elements travel over gRPC: %s", num_elements, error)
            else:
                mean_S = region.bytes.view(np.float32) if dtype == "float32" else np.empty(num_elements, np.float32)
                return Store(mean_S=mean_S, dtype=dtype, region=region)
        return Store(mean_S=np.empty(num_elements, np.float32), dtype=dtype)
