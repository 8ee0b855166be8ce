"""The workers that hold a train state, as one group that stores it as objects and removes older ones.  [shell]

Each worker puts its part of the blocks, and block 0 comes last: a state without block 0 is not there.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence

from ayni import failpoints
from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.metadata import GroupConfig, ParallelismMode
from ayni.blocks.objects import KeyReport, ObjectStoreConfig, OutcomeState, PresenceReport, PresenceState
from ayni.blocks.state_keys import state_keys
from ayni.run_config import StateStoreConfig
from ayni.settings import SettingsError
from coordinator_service.epochs import Seat
from coordinator_service.leader import SpmdParallelWorkers
from coordinator_service.worker_stub import GrpcBlockWorker

_log = logging.getLogger(__name__)

STATE = LocalLayout(tier=Tier.HOST)
"""Where every training worker publishes its state."""

Dial = Callable[[Seat, int], GrpcBlockWorker]
"""Returns a stub of a member, given its rank."""


class Foreign(OSError):
    """Blocks of another run are in a state's place; they are not this run's to remove."""

    def __init__(self, block: int) -> None:
        """Says what to do."""
        super().__init__(
            f"block {block} is there already, from another run with this run_id; give another run_id, "
            "state.store.prefix or bucket, or remove what is there"
        )


class StateGroup:
    """Leads the workers that hold a state."""

    def __init__(self, run_id: str, store: StateStoreConfig, dial: Dial) -> None:
        """Stores states of a run; `dial` reaches its workers."""
        self._run_id = run_id
        self._store = _store_config(store)
        self._dial = dial
        self._instance_id = str(uuid.uuid4())
        self._members: tuple[int, ...] = ()
        self._workers: list[GrpcBlockWorker] = []
        self._group = SpmdParallelWorkers(())
        self._epoch = 0

    async def lead(self, seats: Sequence[Seat]) -> None:
        """Makes the group of these members, unless it is that already.

        Raises:
            OSError: one of them can't be dialled.
            AyniError, ConnectionError: one of them refused, or is gone.
        """
        members = tuple(seat.member.worker_id for seat in seats)
        if members == self._members:
            return
        await self.close()
        self._workers = [self._reach(seat, rank) for rank, seat in enumerate(seats)]
        self._group = SpmdParallelWorkers(self._workers)
        # A coordinator before this one may have led them already, in epochs that are over now.
        known = await asyncio.gather(*(worker.export_metadata() for worker in self._workers))
        self._epoch = max(self._epoch, *(one.epoch for (one,) in known)) + 1
        await self._group.configure_layouts(
            GroupConfig(
                epoch=self._epoch,
                instance_id=self._instance_id,
                rank=0,
                world_size=len(self._workers),
                mode=ParallelismMode.REPLICATED_DATA,
                object_store=self._store,
            )
        )
        self._members = members

    async def num_blocks(self) -> int:
        """Returns how many blocks the members' states have."""
        metadata = await self._group.export_metadata()
        counts = {layout.config.num_blocks for one in metadata for layout in one.layouts if layout.place == STATE}
        if len(counts) != 1:
            raise OSError(f"the workers' states differ in size: {sorted(counts)} blocks")
        return counts.pop()

    async def check_place(self, steps: int, timeout_s: float) -> None:
        """Looks whether a state's place is free.

        Raises:
            Foreign: another run's state is there.
            OSError: that is not known.
        """
        report = await self._group.has_blocks(STATE, state_keys(self._run_id, steps, range(1)), timeout_s)
        (found,) = report.presences
        if found.state is PresenceState.PRESENT:
            raise Foreign(0)
        if found.state is PresenceState.UNKNOWN:
            raise OSError(f"it is not known whether block 0 is there already: {found.failure}")

    async def put(self, steps: int, num_blocks: int, timeout_s: float) -> int:
        """Puts all blocks, block 0 last; returns their bytes.

        Raises:
            Foreign: a block of another run is there; what was put beside it is removed again.
            OSError: a block was not stored.
        """
        keys = state_keys(self._run_id, steps, range(num_blocks))
        stored = await self._group.put_blocks(STATE, range(1, num_blocks), keys[1:], timeout_s=timeout_s)
        await self._give_way(keys[1:], stored, timeout_s)
        size = _stored(stored, 1)
        _check_shared(await self._group.has_blocks(STATE, keys[1:], timeout_s))
        failpoints.hit("coordinator.state.blocks_put")
        size += _stored(await self._group.put_blocks(STATE, [0], keys[:1], timeout_s=timeout_s), 0)
        failpoints.hit("coordinator.state.stored")
        return size

    async def _give_way(self, keys: Sequence[bytes], report: KeyReport, timeout_s: float) -> None:
        """Takes back what was put between blocks of another run, if there are any."""
        states = [outcome.state for outcome in report.outcomes]
        if OutcomeState.ALREADY_PRESENT not in states:
            return
        ours = [key for key, state in zip(keys, states, strict=True) if state is OutcomeState.DONE]
        if ours:
            await self._group.remove_blocks(STATE, ours, timeout_s)
        raise Foreign(1 + states.index(OutcomeState.ALREADY_PRESENT))

    async def remove(self, steps: int, num_blocks: int, timeout_s: float) -> None:
        """Removes a stored state, or what is there of it; block 0 first, so that a part of it is never taken for it.

        Raises:
            OSError: a block could not be removed.
        """
        keys = state_keys(self._run_id, steps, range(num_blocks))
        for some in (keys[:1], keys[1:]):
            report = await self._group.remove_blocks(STATE, some, timeout_s)
            for outcome in report.outcomes:
                if not outcome.is_success:
                    raise OSError(f"a block was not removed: {outcome.failure}")

    async def close(self) -> None:
        """Ends the connections to the workers."""
        workers, self._workers, self._members = self._workers, [], ()
        await asyncio.gather(*(worker.close() for worker in workers))

    def _reach(self, seat: Seat, rank: int) -> GrpcBlockWorker:
        try:
            return self._dial(seat, rank)
        except SettingsError as error:
            raise OSError(
                f"worker {seat.member.name} can't be dialled at {seat.member.applicant.address!r}: {error}; start it "
                "with --attach always"
            ) from None


def _store_config(store: StateStoreConfig) -> ObjectStoreConfig:
    return ObjectStoreConfig(
        kind=store.kind,
        bucket=store.bucket,
        prefix=store.prefix,
        endpoint=store.endpoint,
        region=store.region,
        path_style=store.path_style,
    )


def _stored(report: KeyReport, first: int) -> int:
    """Returns the bytes that were stored.

    Raises:
        Foreign: one of another run is in a block's place.
        OSError: a block was not stored.
    """
    for block, outcome in enumerate(report.outcomes, first):
        if not outcome.is_success:
            raise OSError(f"block {block} was not stored: {outcome.failure or outcome.state.value}")
        if outcome.state is OutcomeState.ALREADY_PRESENT:
            raise Foreign(block)
    return sum(outcome.size_bytes for outcome in report.outcomes)


def _check_shared(report: PresenceReport) -> None:
    """Refuses stores that are not one: every worker must see what all of them have stored."""
    for rank, presences in enumerate(report.by_rank):
        missing = sum(presence.state is not PresenceState.PRESENT for presence in presences)
        if missing:
            raise OSError(
                f"the worker of rank {rank} does not see {missing} of {len(presences)} blocks that the others stored: "
                "with state.store.kind file all workers must share the folder (blocks.root); or use a service"
            )
