"""The blocks of the train state in the host tier: written, pulled from a peer, loaded from the object store.  [shell]

Belongs to the event loop. One of these happens at a time: who fills the blocks is not overtaken by who publishes.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ayni.blocks.ids import as_ids
from ayni.blocks.metadata import GroupConfig, ParallelismMode, WorkerMetadata
from ayni.blocks.objects import ObjectStoreConfig
from ayni.blocks.state_keys import state_keys, state_name
from ayni.errors import Checksum, StorageFailed, UnknownObject
from ayni.run_config import StateConfig
from worker_agent import train_state_format as fmt
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.worker import LocalBlockWorker
from worker_agent.state_pull import PLACE, StatePull, state_layout

__all__ = ["PLACE", "StateBlocks", "is_damage"]

_T = TypeVar("_T")

_HELD_S = 30.0
"""Longest wait for readers of the state before; training waits meanwhile."""
_READ_S = 600.0
_NOT_SEEN = "not seen"
"""Detail of an absent state that may well be there, in the folder of another machine."""


class StateBlocks:
    """The layout that holds a train state, whole or while it is filled."""

    def __init__(self, worker: LocalBlockWorker, config: StateConfig) -> None:
        """Takes the block half of this agent and what the run says about its state."""
        self._worker = worker
        self._config = config
        self._num_blocks = 0
        self.lock = asyncio.Lock()
        """Held while the layout is made, filled or overwritten."""

    async def write(self, blocks: Bytes) -> None:
        """Overwrites the state, once nobody reads it; `blocks` has shape [num_blocks, block_bytes].

        Raises:
            AyniError: there is no memory, or a reader held the blocks for too long.
        """
        async with self.lock:
            await self.make(len(blocks))
            await self._worker.write(PLACE, as_ids(range(len(blocks))), blocks, _HELD_S)

    async def read(self, num_blocks: int = 0) -> Bytes:
        """Returns copies of the first blocks; 0 for all."""
        return await self._worker.read(PLACE, as_ids(range(num_blocks or self._num_blocks)), _READ_S)

    async def make(self, num_blocks: int, *, afresh: bool = False) -> None:
        """Makes the layout for a state of so many blocks.

        Args:
            num_blocks: of the state.
            afresh: a new layout even where the size is right, so that nobody who reads the old one gets a mixture.
        """
        if num_blocks == self._num_blocks and not afresh:
            return
        if self._num_blocks:
            await self._worker.release(PLACE, _HELD_S)
            self._num_blocks = 0
        await self._worker.allocate(PLACE, Geometry(config=fmt.config_of(num_blocks, self._config.block_bytes)))
        self._num_blocks = num_blocks

    async def pull(
        self, metadata: WorkerMetadata, peer: str, timeout_s: float, unpack: Callable[[Bytes], _T]
    ) -> tuple[_T, str]:
        """Fills the layout with a peer's state. Whoever calls holds the lock.

        Args:
            metadata: what the peer exported.
            peer: its name, for people.
            timeout_s: time for all of it.
            unpack: makes a value of all blocks, on a thread; raises what is wrong with them.

        Returns:
            The value, and the engine that the blocks came through.

        Raises:
            AyniError: the peer can't be reached, has no state of this run's shape, or did not give all of it.
        """
        layout = state_layout(metadata, self._config.block_bytes, peer)
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self.make(layout.config.num_blocks, afresh=True)
        await self._worker.import_metadata([metadata])
        pull = StatePull(self._worker, layout, peer, deadline)
        try:
            return await pull.run(self.read, unpack)
        finally:
            await self._worker.disconnect_remote(metadata.instance_id)

    async def load(self, run_id: str, steps: int) -> None:
        """Fills the layout with a stored state. Whoever calls holds the lock.

        Raises:
            UnknownObject: it is not stored, or not whole.
            AyniError: it can't be read, or is no train state.
        """
        await self._open_store()
        await self._get(run_id, steps, range(1))
        await self._get(run_id, steps, range(await self._count(run_id, steps)))

    async def _count(self, run_id: str, steps: int) -> int:
        """Returns how many blocks a stored state has, given that its first one is loaded."""
        size = self._config.block_bytes
        length = fmt.manifest_bytes((await self.read(1)).reshape(-1)[:16].tobytes())
        manifest_blocks = -(-length // size)
        if manifest_blocks > 1:
            await self._get(run_id, steps, range(manifest_blocks))
        manifest = fmt.decode_manifest((await self.read(manifest_blocks)).reshape(-1)[:length].tobytes())
        return fmt.split(length, manifest.payload_bytes, size).num_blocks

    async def _get(self, run_id: str, steps: int, blocks: range) -> None:
        """Loads blocks 0 upwards into a layout of as many."""
        await self.make(len(blocks), afresh=True)
        name, keys = state_name(run_id, steps), state_keys(run_id, steps, blocks)
        report = await self._worker.get_blocks(keys, PLACE, blocks, timeout_s=_READ_S)
        failed = [(b, o) for b, o in zip(blocks, report.outcomes, strict=True) if not o.is_success]
        if failed:
            block, outcome = failed[0]
            if block == 0 and not outcome.failure:
                detail = _NOT_SEEN if self._config.store.kind == "file" else "absent"
                raise UnknownObject(_nothing_stored(run_id, steps, self._config), key=name, detail=detail)
            why = outcome.failure.message if outcome.failure else "there is no such object"
            count = f"{len(failed)} of {len(keys)} block{'s' if len(keys) > 1 else ''}"
            sentence = f"{count} of the {name} can't be loaded, the first is block {block}: {why}"
            if outcome.failure and outcome.failure.reason != UnknownObject.reason:
                raise StorageFailed(sentence, place=self._config.store.bucket, detail=why)
            raise UnknownObject(sentence, key=name, detail=why)

    async def _open_store(self) -> None:
        """Opens the object store as a group of one, unless the coordinator's leader has opened it already."""
        if self._worker.has_object_store:
            return
        await self._worker.configure_layouts(
            GroupConfig(
                epoch=0,
                instance_id=self._worker.instance_id,
                rank=0,
                world_size=1,
                mode=ParallelismMode.REPLICATED_DATA,
                object_store=_store(self._config),
            )
        )


def is_damage(error: Exception) -> bool:
    """Says whether a stored state could not be loaded because a part of it is damaged or missing."""
    if isinstance(error, UnknownObject):
        return error.metadata.get("detail") != _NOT_SEEN
    return isinstance(error, Checksum)


def _nothing_stored(run_id: str, steps: int, config: StateConfig) -> str:
    """Returns what may be wrong where a state's first block is not there; objects of other blocks have other names."""
    store = config.store
    place = "blocks.root another folder" if store.kind == "file" else "the bucket, prefix or endpoint another one"
    return (
        f"no state behind step {steps} of run {run_id} is stored in {store.bucket}, in blocks of {config.block_bytes} "
        f"bytes: was it removed by state.keep, or is {place}, or state.block_bytes another size, than when it was "
        "stored?"
    )


def _store(config: StateConfig) -> ObjectStoreConfig:
    store = config.store
    return ObjectStoreConfig(
        kind=store.kind,
        bucket=store.bucket,
        prefix=store.prefix,
        endpoint=store.endpoint,
        region=store.region,
        path_style=store.path_style,
    )
