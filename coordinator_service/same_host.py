"""What the coordinator shares with workers of its host: regions that means are put together in.  [shell]

A region is taken for a bucket's mean when its round opens, and is free again when its attempt is over: by then every
worker whose lease counted holds the mean. Whoever is late finds another generation in the region's header.
"""

import logging
from collections.abc import Sequence

import numpy as np

from ayni import tensors
from ayni.errors import AyniError
from ayni.frames import SharedRange
from ayni.reduce.places import MeanPlace, Places
from ayni.reduce.thread_digest import digest_for
from ayni.shm.host import SharedMemoryOffer
from ayni.shm.regions import MappedRegion, Region
from ayni.tensors import Bytes, TensorSpec
from coordinator_service.shared_regions import SharedRegions

_log = logging.getLogger(__name__)


class SameHost:
    """The regions of one run."""

    def __init__(self, shared: SharedRegions | None = None) -> None:
        """Shares these; None: nothing, all memory is the coordinator's own."""
        self._shared = shared
        self._free: dict[int, list[Region]] = {}
        self._failed = False

    def offer(self) -> SharedMemoryOffer | None:
        """Returns how a worker of this host reaches this; None where nothing is shared."""
        return self._shared.offer() if self._shared else None

    def drop(self, worker_id: int) -> None:
        """Forgets a worker that is no member any more; what it has contributed stays."""
        if self._shared:
            self._shared.drop(worker_id)

    async def close(self) -> None:
        """Ends all connections, and gives the memory back."""
        if self._shared:
            await self._shared.close()

    def is_connected(self, worker_id: int) -> bool:
        """Returns whether a worker can be told where a mean lies."""
        return self._shared is not None and self._shared.is_connected(worker_id)

    def lent(self, worker_id: int, region_id: int) -> MappedRegion | None:
        """Returns a region that a worker has lent, or None."""
        return self._shared.lent(worker_id, region_id) if self._shared else None

    def places(self, chunks: Sequence[tuple[int, Bytes]]) -> list[tuple[int, SharedRange]] | None:
        """Returns where chunks of a mean lie, as few runs of (first element, place); None for ordinary memory.

        Args:
            chunks: first element of each, and its bytes as they travel.
        """
        runs: list[tuple[int, SharedRange]] = []
        for offset, data in chunks:
            found = self._find(data)
            if found is None:
                return None
            region, start = found
            last = runs[-1][1] if runs else None
            if last and (last.region, last.offset_bytes + last.length_bytes) == (region.id, start):
                grown = SharedRange(last.region, last.offset_bytes, last.length_bytes + data.nbytes, last.generation)
                runs[-1] = (runs[-1][0], grown)
            else:
                runs.append((offset, SharedRange(region.id, start, data.nbytes, region.generation)))
        return runs

    def renew(self, wire: Bytes | None) -> None:
        """Says that a mean is put together once more: whoever is still reading it must not use what it has read.

        Args:
            wire: where the mean lies as it travels; None for nowhere.
        """
        found = None if wire is None else self._find(wire)
        if found:
            found[0].renew()

    def take(self, num_bytes: int) -> Region | None:
        """Returns a region of that size which nobody uses, or None where there is none to be had."""
        if self._shared is None or self._failed or not self._shared.has_workers:
            return None
        free = self._free.get(num_bytes)
        try:
            region = free.pop() if free else self._shared.ours.allocate(num_bytes)
        except AyniError as error:
            _log.warning("means travel over gRPC from now on, also to workers of this host: %s", error)
            self._failed = True
            return None
        region.renew()
        return region

    def give_back(self, region: Region, num_bytes: int) -> None:
        """Takes a region that no round writes any more."""
        self._free.setdefault(num_bytes, []).append(region)

    def _find(self, data: Bytes) -> tuple[Region, int] | None:
        return self._shared.ours.find(data) if self._shared else None


class AttemptPlaces(Places):
    """Where the means of one attempt are put together."""

    def __init__(self, same_host: SameHost) -> None:
        """Takes regions of `same_host`."""
        self._same_host = same_host
        self._taken: list[tuple[Region, int]] = []

    def take(self, spec: TensorSpec) -> MeanPlace:
        """Returns the place for a bucket's mean."""
        new_digest = digest_for(spec.num_elements)
        dtype = tensors.mean_dtype(spec.dtype)
        num_bytes = tensors.payload_bytes(spec.num_elements, dtype)
        region = self._same_host.take(num_bytes)
        if region is None:
            return MeanPlace(new_digest=new_digest)
        self._taken.append((region, num_bytes))
        wire = region.bytes[:num_bytes]
        mean_N = wire.view(np.float32) if dtype == "float32" else None
        return MeanPlace(new_digest=new_digest, mean_N=mean_N, wire=wire)

    def close(self) -> None:
        """Gives the regions back; the attempt is over."""
        while self._taken:
            self._same_host.give_back(*self._taken.pop())
