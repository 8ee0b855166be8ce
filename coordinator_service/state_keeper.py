"""Has the workers' published train state stored as objects: the leader's work inside the coordinator.  [shell]

When every member's host tier holds the state behind the same step, and that step is one to be stored, the group of all
members puts the blocks, each member its part, and block 0 last: a state without block 0 is not there. Members keep what
they published until they hear that it is settled, so that no object can come from another step.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.metadata import GroupConfig, ParallelismMode
from ayni.blocks.objects import KeyReport, ObjectStoreConfig, OutcomeState, PresenceReport, PresenceState
from ayni.blocks.state_keys import state_keys
from ayni.errors import AyniError
from ayni.settings import SettingsError
from coordinator_service.epochs import Seat
from coordinator_service.leader import SpmdParallelWorkers
from coordinator_service.run import Run
from coordinator_service.worker_stub import GrpcBlockWorker

_log = logging.getLogger(__name__)

STATE = LocalLayout(tier=Tier.HOST)
"""Where every training worker publishes its state."""

Dial = Callable[[str, int], GrpcBlockWorker]
"""Returns a stub of the worker at an address, given its rank."""


class StateKeeper:
    """Stores what the members publish."""

    def __init__(self, run: Run, dial: Dial) -> None:
        """Watches a run; `dial` reaches its workers."""
        self._run = run
        self._dial = dial
        self._config = run.file.state
        self._instance_id = str(uuid.uuid4())
        self._members: tuple[int, ...] = ()
        self._workers: list[GrpcBlockWorker] = []
        self._group = SpmdParallelWorkers(())
        self._epoch = 0

    async def keep(self) -> None:
        """Stores every state that is due, for ever. A state that can't be stored is given up; the run goes on."""
        while True:
            if steps := self._missed():
                _log.error("the state behind step %d was not stored: a worker could not publish it", steps)
                self._settle(steps)
            elif steps := self._due():
                await self._store(steps)
            else:
                await self._run.changed.wait()

    async def settle(self, steps: int) -> None:
        """Waits until the last state that is due by a step is stored or given up."""
        if not self._config.store_every:
            return
        due = steps - steps % self._config.store_every
        if self._run.progress.settled_steps >= due:
            return
        timeout = self._run.file.timeouts.store.total_seconds()
        _log.info("waiting for the state behind step %d to be stored", due)
        try:
            async with asyncio.timeout(timeout):
                while self._run.progress.settled_steps < due and self._run.epochs.seats:
                    await self._run.changed.wait()
        except TimeoutError:
            _log.error("the state behind step %d was not stored within %g s", due, timeout)

    async def close(self) -> None:
        """Ends the connections to the workers."""
        workers, self._workers, self._members = self._workers, [], ()
        await asyncio.gather(*(worker.close() for worker in workers))

    def _due(self) -> int:
        """Returns the step whose state all members hold and that is to be stored; 0 for none."""
        seats = self._seats()
        held = {seat.published_steps for seat in seats}
        if len(held) != 1 or not self._config.store_every:
            return 0
        steps = held.pop()
        is_new = steps > max(self._run.progress.settled_steps, self._run.progress.first_step)
        return steps if is_new and steps % self._config.store_every == 0 else 0

    def _missed(self) -> int:
        """Returns the newest due step that a member has gone past without having published it; 0 for none.

        A member that has published a step waits until that is settled; one that is past it skipped it, and the others
        must not wait for what can't come.
        """
        every = self._config.store_every
        newest = max((seat.published_steps for seat in self._seats()), default=0)
        missed = (newest - 1) // every * every if every and newest else 0
        return missed if missed > max(self._run.progress.settled_steps, self._run.progress.first_step) else 0

    def _settle(self, steps: int) -> None:
        """Lets the workers replace what they published."""
        self._run.progress.settled_steps = steps
        self._run.changed.notify()

    def _seats(self) -> list[Seat]:
        return [seat for _, seat in sorted(self._run.epochs.seats.items()) if seat.member.ready]

    async def _store(self, steps: int) -> None:
        progress, began = self._run.progress, time.monotonic()
        timeout = self._run.file.timeouts.store.total_seconds()
        try:
            async with asyncio.timeout(timeout):
                size = await self._put(steps, timeout)
            progress.stored_steps = steps
            seconds = time.monotonic() - began
            _log.info("stored the state behind step %d: %.1f MB in %.1f s", steps, size / 1e6, seconds)
        except TimeoutError:
            _log.error("the state behind step %d was not stored within %g s", steps, timeout)
        except (AyniError, OSError, SettingsError) as error:
            _log.error("the state behind step %d was not stored: %s", steps, error)
        except Exception:
            _log.exception("the state behind step %d was not stored", steps)
        finally:
            self._settle(steps)

    async def _put(self, steps: int, timeout_s: float) -> int:
        """Puts all blocks, block 0 last; returns their bytes."""
        await self._lead()
        metadata = await self._group.export_metadata()
        counts = {layout.config.num_blocks for one in metadata for layout in one.layouts if layout.place == STATE}
        if len(counts) != 1:
            raise OSError(f"the workers' states differ in size: {sorted(counts)} blocks")
        count = counts.pop()
        keys = state_keys(self._run.file.run_id, steps, range(count))
        size = _stored(await self._group.put_blocks(STATE, range(1, count), keys[1:], timeout_s=timeout_s), 1)
        _check_shared(await self._group.has_blocks(STATE, keys[1:], timeout_s))
        return size + _stored(await self._group.put_blocks(STATE, [0], keys[:1], timeout_s=timeout_s), 0)

    async def _lead(self) -> None:
        """Makes the group of the present members."""
        seats = self._seats()
        members = tuple(seat.member.worker_id for seat in seats)
        if members == self._members:
            return
        for seat in seats:
            if not seat.member.applicant.address:
                raise OSError(f"worker {seat.member.name} can't be dialled: it joined without an address")
        await self.close()
        self._workers = [self._dial(seat.member.applicant.address, rank) for rank, seat in enumerate(seats)]
        self._group = SpmdParallelWorkers(self._workers)
        self._epoch += 1
        await self._group.configure_layouts(
            GroupConfig(
                epoch=self._epoch,
                instance_id=self._instance_id,
                rank=0,
                world_size=len(self._workers),
                mode=ParallelismMode.REPLICATED_DATA,
                object_store=_store_config(self._run),
            )
        )
        self._members = members


def _store_config(run: Run) -> ObjectStoreConfig:
    store = run.file.state.store
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
        OSError: a block was not, or one of another state is in its place.
    """
    for block, outcome in enumerate(report.outcomes, first):
        if not outcome.is_success:
            raise OSError(f"block {block} was not stored: {outcome.failure or outcome.state.value}")
        if outcome.state is OutcomeState.ALREADY_PRESENT:
            raise OSError(
                f"block {block} is there already, from another run with this run_id or from an earlier try; "
                "give another run_id, state.store.prefix or bucket, or remove what is there"
            )
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
