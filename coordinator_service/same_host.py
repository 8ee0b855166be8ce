"""What the coordinator shares with workers of its host: regions that means are put together in.  [shell]

A region is taken for a bucket's mean when its round opens, and is free again when its attempt is over: by then every
worker whose lease counted holds the mean. Whoever is late finds another generation in the region's header.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np

from ayni.errors import AyniError
from ayni.frames import SharedRange
from ayni.shm.host import SharedMemoryOffer
from ayni.shm.regions import MappedRegion, Region
from ayni.tensors import Floats, TensorSpec
from coordinator_service.digest import MeanDigest
from coordinator_service.places import MeanPlace, Places
from coordinator_service.reduction import Reduced
from coordinator_service.shared_regions import SharedRegions

_log = logging.getLogger(__name__)

_THREAD_FROM = 1 << 20
"""Elements of a mean from which on a thread digests it beside the sums; below, handing over costs more."""


class ThreadDigest(MeanDigest):
    """A digest that another thread makes; whoever reads it waits for that."""

    def __init__(self) -> None:
        """Starts empty."""
        super().__init__()
        self._pending: list[Future[None]] = []

    def add(self, mean_C: Floats) -> None:
        """Has the next chunk taken; it must not change afterwards."""
        self._pending.append(_thread().submit(super().add, mean_C))

    def hexdigest(self) -> str:
        """See `MeanDigest.hexdigest`."""
        self._join()
        return super().hexdigest()

    def square_sum(self) -> float:
        """See `MeanDigest.square_sum`."""
        self._join()
        return super().square_sum()

    def _join(self) -> None:
        while self._pending:
            self._pending.pop(0).result()


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

    def places(self, reduced: Sequence[Reduced]) -> list[tuple[int, SharedRange]] | None:
        """Returns where chunks of a mean lie, as few runs of (first element, place); None for ordinary memory."""
        runs: list[tuple[int, SharedRange]] = []
        for chunk in reduced:
            found = self._find(chunk.values_C)
            if found is None:
                return None
            region, start = found
            last = runs[-1][1] if runs else None
            if last and (last.region, last.offset_bytes + last.length_bytes) == (region.id, start):
                grown = SharedRange(
                    last.region, last.offset_bytes, last.length_bytes + chunk.values_C.nbytes, last.generation
                )
                runs[-1] = (runs[-1][0], grown)
            else:
                runs.append((chunk.offset, SharedRange(region.id, start, chunk.values_C.nbytes, region.generation)))
        return runs

    def renew(self, mean_N: Floats | None) -> None:
        """Says that a mean is put together once more: whoever is still reading it must not use what it has read."""
        found = None if mean_N is None else self._find(mean_N)
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

    def _find(self, mean_C: Floats) -> tuple[Region, int] | None:
        return self._shared.ours.find(mean_C) if self._shared else None


class AttemptPlaces(Places):
    """Where the means of one attempt are put together."""

    def __init__(self, same_host: SameHost) -> None:
        """Takes regions of `same_host`."""
        self._same_host = same_host
        self._taken: list[tuple[Region, int]] = []

    def take(self, spec: TensorSpec) -> MeanPlace:
        """Returns the place for a bucket's mean."""
        new_digest = ThreadDigest if spec.num_elements >= _THREAD_FROM else MeanDigest
        region = self._same_host.take(spec.num_bytes) if spec.dtype == "float32" else None
        if region is None:
            return MeanPlace(new_digest=new_digest)
        self._taken.append((region, spec.num_bytes))
        return MeanPlace(new_digest=new_digest, mean_N=region.bytes[: spec.num_bytes].view(np.float32))

    def close(self) -> None:
        """Gives the regions back; the attempt is over."""
        while self._taken:
            self._same_host.give_back(*self._taken.pop())


@lru_cache(maxsize=1)
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="ayni-digest")
