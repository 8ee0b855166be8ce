"""The train state as a block layout in the host tier: published for others, stored, restored.  [shell]

Called on the training thread, between two steps. The layout is made at the first publication, because only then the
optimizer has its arrays. What was published is not replaced before the coordinator has stored it, where it is due.
"""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.metadata import GroupConfig, ParallelismMode
from ayni.blocks.objects import ObjectStoreConfig
from ayni.blocks.state_keys import state_keys, state_name
from ayni.errors import Incompatible, UnknownObject
from ayni.run_config import StateConfig
from worker_agent import train_state_format as fmt
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.worker import LocalBlockWorker
from worker_agent.bridge import Bridge

_log = logging.getLogger(__name__)

PLACE = LocalLayout(tier=Tier.HOST)
"""Where the train state lies: the primary resource of an agent that trains."""

_TRANSFER_S = 600.0
_HELD_S = 30.0
"""Longest wait for readers of the state before; training waits meanwhile."""


class TrainState:
    """Moves a trainer's state into and out of blocks."""

    def __init__(self, network: Bridge, worker: LocalBlockWorker, config: StateConfig, run_id: str) -> None:
        """Takes the block half of this agent and what the run says about its state."""
        self._network = network
        self._worker = worker
        self._config = config
        self._run_id = run_id
        self._num_blocks = 0
        self.published_steps = 0
        """Steps behind the state that the host tier holds."""

    def is_due(self, completed_steps: int) -> bool:
        """Says whether the state after so many steps is to be published."""
        every = self._config.publish_every
        return every > 0 and completed_steps % every == 0

    @property
    def is_awaiting_store(self) -> bool:
        """Whether what is published now must be stored before it may be replaced."""
        every = self._config.store_every
        return every > 0 and self.published_steps > 0 and self.published_steps % every == 0

    def publish(self, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
        """Copies a state into the host tier, where others can read it.

        Raises:
            AyniError: there is no memory, or a reader held the blocks for too long.
        """
        arrays = [
            (name, str(value.dtype).removeprefix("torch."), tuple(value.shape), _bytes_of(value))
            for name, value in sorted(tensors.items())
        ]
        blocks = fmt.pack(arrays, facts, self._config.block_bytes)
        self._make_layout(len(blocks))
        writing = self._worker.write(PLACE, as_ids(range(len(blocks))), blocks, _HELD_S)
        self._network.wait(writing, _TRANSFER_S, "the train state's blocks")
        self.published_steps = int(facts["completed_steps"])
        _log.debug("published the state behind %d steps: %d blocks", self.published_steps, len(blocks))

    def load(self) -> None:
        """Loads the stored state that the run goes on from into the host tier.

        Raises:
            UnknownObject: it is not stored, or not whole.
            AyniError: it can't be read, or is no train state.
        """
        run_id, steps = self._config.resume_run_id or self._run_id, self._config.resume_step
        self._configure_alone()
        self._get(run_id, steps, range(1))
        self._get(run_id, steps, range(self._count(run_id, steps)))

    def unpack(self, completed_steps: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns the state that the host tier holds now, as copies; it counts as published then.

        Raises:
            Checksum: it is damaged, or mixed from two states.
            Incompatible: it is the state behind another step.
        """
        manifest, views = fmt.unpack(self._read(self._num_blocks))
        found = int(manifest.facts["completed_steps"])
        if found != completed_steps:
            raise Incompatible(
                f"the run goes on from the state behind step {completed_steps}, but what was loaded is the one behind "
                f"step {found}",
                field="completed_steps",
                coordinator=completed_steps,
                worker=found,
            )
        tensors = {entry.name: _tensor_of(view, entry) for entry, view in zip(manifest.tensors, views, strict=True)}
        self.published_steps = found
        return tensors, dict(manifest.facts)

    def use_layout(self, num_blocks: int) -> None:
        """Makes the layout for a state of so many blocks, so that others may fill it."""
        self._make_layout(num_blocks)

    def _count(self, run_id: str, steps: int) -> int:
        """Returns how many blocks a stored state has, given that its first one is loaded."""
        size = self._config.block_bytes
        length = fmt.manifest_bytes(self._read(1).reshape(-1)[:16].tobytes())
        manifest_blocks = -(-length // size)
        if manifest_blocks > 1:
            self._get(run_id, steps, range(manifest_blocks))
        manifest = fmt.decode_manifest(self._read(manifest_blocks).reshape(-1)[:length].tobytes())
        return fmt.split(length, manifest.payload_bytes, size).num_blocks

    def _get(self, run_id: str, steps: int, blocks: range) -> None:
        """Loads blocks 0 upwards into a layout of as many."""
        self._make_layout(len(blocks))
        name, keys = state_name(run_id, steps), state_keys(run_id, steps, blocks)
        getting = self._worker.get_blocks(keys, PLACE, blocks, timeout_s=_TRANSFER_S)
        report = self._network.wait(getting, _TRANSFER_S, f"the stored {name}")
        failed = [(b, o) for b, o in zip(blocks, report.outcomes, strict=True) if not o.is_success]
        if failed:
            block, outcome = failed[0]
            size = self._config.block_bytes
            why = outcome.failure.message if outcome.failure else f"there is no such object of {size} bytes"
            raise UnknownObject(
                f"{len(failed)} of {len(keys)} blocks of the {name} can't be loaded, the first is block {block}: {why} "
                "(state.block_bytes must be that of the run that stored it)",
                key=name,
                detail=why,
            )

    def _read(self, num_blocks: int) -> Bytes:
        reading = self._worker.read(PLACE, as_ids(range(num_blocks)), _TRANSFER_S)
        return self._network.wait(reading, _TRANSFER_S, "the train state's blocks")

    def _make_layout(self, num_blocks: int) -> None:
        if num_blocks == self._num_blocks:
            return
        geometry = Geometry(config=fmt.config_of(num_blocks, self._config.block_bytes))
        self._network.wait(self._replace_layout(geometry), _TRANSFER_S, "memory for the train state")
        self._num_blocks = num_blocks

    async def _replace_layout(self, geometry: Geometry) -> None:
        if self._num_blocks:
            await self._worker.release(PLACE, _TRANSFER_S)
        await self._worker.allocate(PLACE, geometry)

    def _configure_alone(self) -> None:
        """Opens the object store as a group of one; the coordinator's leader configures again later."""
        config = GroupConfig(
            epoch=0,
            instance_id=self._worker.instance_id,
            rank=0,
            world_size=1,
            mode=ParallelismMode.REPLICATED_DATA,
            object_store=_store(self._config),
        )
        self._network.wait(self._worker.configure_layouts(config), _TRANSFER_S, "the object store")


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


def _bytes_of(value: Tensor) -> Bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)


def _tensor_of(data: Bytes, entry: fmt.TensorEntry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    return torch.from_numpy(data.copy()).view(dtype).reshape(entry.shape)
