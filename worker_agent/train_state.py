"""The train state as a block layout in the host tier: published for others, stored, restored.  [shell]

`publish`, `load` and `unpack` are called on the training thread, between two steps; `onboard` and `fetch` run on the
event loop while training goes on. The layout is made at the first publication, because only then the optimizer has its
arrays. What was published is not replaced before the coordinator has stored it, where it is due.
"""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ayni import failpoints
from ayni.errors import Incompatible
from ayni.run_config import StateConfig
from worker_agent import train_state_format as fmt
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.worker import LocalBlockWorker
from worker_agent.bridge import Bridge
from worker_agent.state_blocks import PLACE, StateBlocks
from worker_agent.state_schedule import StateSchedule

if TYPE_CHECKING:
    from ayni.blocks.metadata import WorkerMetadata

__all__ = ["PLACE", "Loaded", "TrainState", "steps_of"]

_log = logging.getLogger(__name__)

_TRANSFER_S = 600.0

Loaded = tuple[dict[str, Tensor], dict[str, str]]
"""A train state: tensors by name, and facts about it."""


class TrainState:
    """Moves a trainer's state into and out of blocks."""

    def __init__(self, network: Bridge, worker: LocalBlockWorker, config: StateConfig, run_id: str) -> None:
        """Takes the block half of this agent and what the run says about its state."""
        self._network = network
        self._config = config
        self._run_id = run_id
        self._blocks = StateBlocks(worker, config)
        self.schedule = StateSchedule(config)
        """When to publish."""

    @property
    def published_steps(self) -> int:
        """Steps behind the state that the host tier holds; 0 for none."""
        return self.schedule.published_steps

    def is_due(self, completed_steps: int) -> bool:
        """Says whether the run file asks for the state after so many steps to be published."""
        return self.schedule.is_due(completed_steps)

    @property
    def is_awaiting_store(self) -> bool:
        """Whether what is published now must be stored before it may be replaced."""
        return self.schedule.is_to_be_stored(self.published_steps)

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
        self._network.wait(self._blocks.write(blocks), _TRANSFER_S, "the train state's blocks")
        self.schedule.published(int(facts["completed_steps"]))
        _log.debug("published the state behind %d steps: %d blocks", self.published_steps, len(blocks))
        failpoints.hit("worker.state.published")

    def load(self) -> None:
        """Loads the stored state that the run goes on from into the host tier.

        Raises:
            UnknownObject: it is not stored, or not whole.
            AyniError: it can't be read, or is no train state.
        """
        run_id, steps = self._config.resume_run_id or self._run_id, self._config.resume_step
        self._network.wait(self._blocks.load(run_id, steps), 3 * _TRANSFER_S, "the stored train state")

    def unpack(self, completed_steps: int) -> Loaded:
        """Returns the state that the host tier holds now, as copies; it counts as published then.

        Raises:
            Checksum: it is damaged, or mixed from two states.
            Incompatible: it is the state behind another step.
        """
        return self._network.wait(self._unpacked(completed_steps), _TRANSFER_S, "the train state's blocks")

    def use_layout(self, num_blocks: int) -> None:
        """Makes the layout for a state of so many blocks, so that others may fill it."""
        self._network.wait(self._blocks.make(num_blocks), _TRANSFER_S, "memory for the train state")

    async def onboard(self, metadata: "WorkerMetadata", peer: str, completed_steps: int, timeout_s: float) -> Loaded:
        """Pulls the state that a peer has published and returns it; it counts as published here then.

        Args:
            metadata: what the peer exported.
            peer: its name, for people.
            completed_steps: steps behind the state; a later one that the peer has published meanwhile does as well.
            timeout_s: time for the transfer.

        Raises:
            AyniError: the peer can't be reached, did not give all of the state, or gave another one.
        """
        unpack = partial(_unpacked, completed_steps=completed_steps, or_later=True)
        async with self._blocks.lock:
            self.schedule.published(0)
            loaded, engine = await self._blocks.pull(metadata, peer, timeout_s, unpack)
            self.schedule.published(steps := steps_of(loaded))
        _log.info("got the state behind step %d from worker %s through %s", steps, peer, engine)
        return loaded

    async def fetch(self, run_id: str, completed_steps: int) -> Loaded:
        """Loads a stored state and returns it; it counts as published here then.

        Raises:
            UnknownObject: it is not stored, or not whole.
            AyniError: it can't be read, or is not the state behind this step.
        """
        async with self._blocks.lock:
            self.schedule.published(0)
            await self._blocks.load(run_id, completed_steps)
            loaded = await self._unpacked(completed_steps)
        _log.info("loaded the state behind step %d that run %s has stored", completed_steps, run_id)
        return loaded

    async def _unpacked(self, completed_steps: int) -> Loaded:
        loaded = await asyncio.to_thread(_unpacked, await self._blocks.read(), completed_steps)
        self.schedule.published(completed_steps)
        return loaded


def steps_of(loaded: Loaded) -> int:
    """Returns the steps behind a state."""
    return int(loaded[1]["completed_steps"])


def _unpacked(blocks: Bytes, completed_steps: int, or_later: bool = False) -> Loaded:
    manifest, views = fmt.unpack(blocks)
    found = int(manifest.facts["completed_steps"])
    if found < completed_steps or (found > completed_steps and not or_later):
        raise Incompatible(
            f"the run goes on from the state behind step {completed_steps}, but what was loaded is the one behind "
            f"step {found}",
            field="completed_steps",
            coordinator=completed_steps,
            worker=found,
        )
    tensors = {entry.name: _tensor_of(view, entry) for entry, view in zip(manifest.tensors, views, strict=True)}
    return tensors, dict(manifest.facts)


def _bytes_of(value: Tensor) -> Bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)


def _tensor_of(data: Bytes, entry: fmt.TensorEntry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    return torch.from_numpy(data.copy()).view(dtype).reshape(entry.shape)
