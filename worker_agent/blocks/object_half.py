"""The worker's side of the object tier: one store, and one namespace of keys for each shape of block.  [shell]

Under tensor parallelism every rank has its own objects; replicas share them, so that any number of replicas can put
and get the same keys.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ayni.blocks.metadata import GroupConfig, ParallelismMode
from ayni.blocks.objects import KeyOutcome, ObjectStoreConfig, OutcomeState, Presence, PresenceState
from ayni.blocks.transfers import Failure
from ayni.errors import Unsupported
from worker_agent.blocks.making import made
from worker_agent.blocks.objects.keys import Shelf
from worker_agent.blocks.objects.opening import open_store
from worker_agent.blocks.objects.store import ObjectStore
from worker_agent.blocks.objects.tier import ObjectTier
from worker_agent.blocks.registry import Entry

_FILE_REQUESTS = 2
"""Keys of a store of files that are worked on at a time: more threads wait for one another inside the kernel."""


class ObjectHalf:
    """Opens and closes the store, and finds the tier of a layout."""

    def __init__(self, root: Path) -> None:
        """Has no store yet; local stores lie below `root`."""
        self._root = root
        self._config: ObjectStoreConfig | None = None
        self._store: ObjectStore | None = None
        self._tiers: dict[str, ObjectTier] = {}
        self._rank = 0
        self._instance_id = ""

    @property
    def is_open(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    @asynccontextmanager
    async def opened(self, config: ObjectStoreConfig | None) -> AsyncIterator[ObjectStore | None]:
        """Opens the store of a configuration, unless it is the present one; closes it again if the context fails.

        Raises:
            StorageFailed: it can't be reached.
            Unsupported: it can't do what claims to keys need, or its kind is not known or not installed.
        """
        if config == self._config:
            yield self._store
            return
        store = await made(open_store, config, self._root) if config else None
        old = self._store
        try:
            yield store
        except BaseException:
            old = store
            raise
        finally:
            if old:
                await asyncio.to_thread(old.close)

    def adopt(self, store: ObjectStore | None, config: GroupConfig) -> None:
        """Uses an opened store from now on, for a worker with this place in its group."""
        self._close_tiers()
        self._config, self._store = config.object_store, store
        self._instance_id = config.instance_id
        self._rank = 0 if config.mode is ParallelismMode.REPLICATED_DATA else config.rank

    def tier(self, entry: Entry) -> ObjectTier | None:
        """Returns the tier for blocks of a layout's shape; None without a store."""
        if self._store is None or self._config is None:
            return None
        fingerprint = entry.descriptor.fingerprint
        if fingerprint not in self._tiers:
            self._tiers[fingerprint] = ObjectTier(
                self._store,
                Shelf(prefix=self._config.prefix, fingerprint=fingerprint, rank=self._rank),
                entry.descriptor.config.block_bytes,
                self._instance_id,
                min(self._config.max_requests, _FILE_REQUESTS)
                if self._config.kind == "file"
                else self._config.max_requests,
            )
        return self._tiers[fingerprint]

    async def close(self) -> None:
        """Closes the store."""
        store, self._store, self._config = self._store, None, None
        self._close_tiers()
        if store:
            await asyncio.to_thread(store.close)

    def _close_tiers(self) -> None:
        for tier in self._tiers.values():
            tier.close()
        self._tiers.clear()


def unknown(count: int) -> list[Presence]:
    """Returns the answer of a worker without a store: it does not know."""
    return [Presence(state=PresenceState.UNKNOWN, failure=_no_store())] * count


def failed(count: int) -> list[KeyOutcome]:
    """Returns the answer of a worker without a store: nothing was stored or loaded."""
    return [KeyOutcome(state=OutcomeState.FAILED, failure=_no_store())] * count


def _no_store() -> Failure:
    sentence = "this worker has no object store: configure one with ConfigureLayouts (object_store)"
    return Failure.of(Unsupported(sentence, field="object_store", detail="none"))
