"""Connects a group of workers with remote groups: on all ranks or on none.  [shell]

What is published works: a remote group counts only after every rank of this group connected. When one can't, those that
had connected are disconnected again. Calls for one remote group run one after another; equal calls at one time share
one attempt, which goes on when those who wait for it give up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from ayni.blocks.layouts import LayoutHandle, Tier
from ayni.blocks.metadata import ParallelismDescriptor, RemoteLayout, RemoteState, WorkerMetadata
from ayni.blocks.worker import RankWorker
from ayni.errors import AyniError, Deadline, Fault, StaleEpoch, UnknownPeer, Unsupported
from coordinator_service.admission import ConnectRules, admit
from coordinator_service.aggregation import joined_error
from coordinator_service.fan_out import ask_all
from coordinator_service.remote_groups import LocalGroup, RemoteGroup

_log = logging.getLogger(__name__)

_TIERS = tuple(Tier)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    metadata: tuple[WorkerMetadata, ...]
    engines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Connected:
    wanted: _Wanted
    group: RemoteGroup
    layouts: tuple[RemoteLayout, ...]


class Connections:
    """All remote groups that a group of workers is connected with."""

    def __init__(self, workers: Sequence[RankWorker], rules: ConnectRules, timeout_s: float) -> None:
        """Starts with none; `timeout_s` bounds each call to the workers."""
        self._workers = workers
        self._rules = rules
        self._timeout_s = timeout_s
        self._connected: dict[str, _Connected] = {}
        self._attempts: dict[str, tuple[_Wanted, asyncio.Task[tuple[RemoteLayout, ...]]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def connect(
        self,
        instance_id: str,
        metadata: Sequence[WorkerMetadata],
        engines: Sequence[str],
        local: Callable[[], Awaitable[LocalGroup]],
    ) -> tuple[RemoteLayout, ...]:
        """Connects all ranks; see BlockWorker.connect_remote.

        Args:
            instance_id: the remote group.
            metadata: of its ranks.
            engines: that may be used, best first; empty: all.
            local: says what is known of this group now.

        Raises:
            StaleEpoch: a newer epoch of the group is connected.
            BadRequest, IncompatibleLayout: the group is not admitted; no worker was asked.
            AyniError, ConnectionError: some ranks failed; nothing is connected, and the error names all of them.
        """
        wanted = _Wanted(metadata=tuple(metadata), engines=tuple(engines))
        known, attempt = self._attempts.get(instance_id, (None, None))
        if attempt is None or known != wanted:
            attempt = asyncio.create_task(self._attempt(instance_id, wanted, local))
            self._attempts[instance_id] = wanted, attempt
            self._tasks.add(attempt)
            attempt.add_done_callback(partial(self._forget, instance_id))
            attempt.add_done_callback(self._end)
        return await asyncio.shield(attempt)

    async def disconnect(self, instance_id: str) -> bool:
        """Disconnects all ranks; says whether any was connected. Goes on when the caller gives up.

        Raises:
            AyniError, ConnectionError: some ranks failed; the group counts as disconnected, and calling again is safe.
        """
        self._attempts.pop(instance_id, None)
        # A task of its own, as an attempt to connect is: calls are served in the order in which they were made.
        task = asyncio.create_task(self._disconnect(instance_id))
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return await asyncio.shield(task)

    async def state(self, instance_id: str) -> RemoteState:
        """Says whether a transfer with a group would be accepted on every rank now."""
        known = self._connected.get(instance_id)
        if known is None:
            return RemoteState(connected=False)
        calls = [partial(worker.has_remote_metadata, instance_id) for worker in self._workers]
        states = await ask_all(f"asking for the state of group {instance_id}", calls, self._timeout_s)
        epoch = known.group.epoch
        connected = bool(known.layouts) and all(
            isinstance(state, RemoteState) and state.connected and state.remote_epoch == epoch for state in states
        )
        return RemoteState(connected=connected, remote_epoch=epoch, layouts=known.layouts if connected else ())

    def group(self, instance_id: str) -> RemoteGroup:
        """Returns a connected group.

        Raises:
            UnknownPeer: it is not connected.
        """
        if instance_id not in self._connected:
            message = f"group {instance_id} is not connected; call connect_remote with its metadata first"
            raise UnknownPeer(message, instance_id=instance_id, rank="")
        return self._connected[instance_id].group

    def descriptors(self, instance_id: str) -> tuple[ParallelismDescriptor, ...] | None:
        """Returns the stamps of a connected group, by remote rank; None when it is not connected."""
        known = self._connected.get(instance_id)
        return known.group.descriptors if known else None

    def counterparts(self, handle: LayoutHandle) -> tuple[LayoutHandle, ...] | None:
        """Returns the layout that each local rank must use where a caller named a layout of one remote rank.

        Returns:
            One handle for each local rank; None when no connected group has the layout.

        Raises:
            Unsupported: the group has other parts of the blocks on each rank than this one.
            UnknownLayout: a rank exported no such layout.
        """
        for known in self._connected.values():
            for (_, _, place), its_handle in known.group.handles.items():
                if its_handle == handle:
                    ranks = [known.group.counterpart(rank) for rank in range(len(self._workers))]
                    return tuple(known.group.handle(_paired(known.group, rank), place) for rank in ranks)
        return None

    async def close(self) -> None:
        """Gives up what is under way; workers keep what they have."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _disconnect(self, instance_id: str) -> bool:
        async with self._lock(instance_id):
            known = self._connected.pop(instance_id, None)
            answers = await self._ask_to_disconnect(instance_id, range(len(self._workers)))
        if errors := _errors(answers):
            raise joined_error(f"disconnecting from group {instance_id}", errors)
        return known is not None or any(answers.values())

    async def _attempt(
        self, instance_id: str, wanted: _Wanted, local: Callable[[], Awaitable[LocalGroup]]
    ) -> tuple[RemoteLayout, ...]:
        async with self._lock(instance_id):
            known = self._connected.get(instance_id)
            if known and wanted.metadata:
                _check_epoch(instance_id, known.group.epoch, wanted.metadata[0].epoch)
            if known and known.wanted == wanted and (await self.state(instance_id)).connected:
                return known.layouts
            group = admit(instance_id, wanted.metadata, await local(), self._rules)
            layouts = await self._connect_all(group, wanted.engines)
            self._connected[instance_id] = _Connected(wanted=wanted, group=group, layouts=layouts)
        _log.info(
            "connected to group %s, epoch %d: %d ranks, %s",
            instance_id,
            group.epoch,
            group.tp_size,
            group.strategy.value,
        )
        return layouts

    async def _connect_all(self, group: RemoteGroup, engines: tuple[str, ...]) -> tuple[RemoteLayout, ...]:
        what = f"connecting to group {group.instance_id}"
        calls = [
            partial(worker.connect_remote, group.instance_id, group.reached_by(rank), engines)
            for rank, worker in enumerate(self._workers)
        ]
        answers = dict(enumerate(await ask_all(what, calls, self._timeout_s)))
        if errors := _errors(answers):
            await self._roll_back(group.instance_id, errors)
            raise joined_error(what, errors)
        told = [layout for answer in answers.values() if not isinstance(answer, Exception) for layout in answer]
        return _layouts(group, told)

    async def _roll_back(self, instance_id: str, errors: dict[int, Exception]) -> None:
        """Makes all ranks forget a group that some could not connect to. Nothing changes when nothing had changed."""
        refused = {rank for rank, error in errors.items() if _is_refusal(error)}
        changed = [rank for rank in range(len(self._workers)) if rank not in refused]
        if not changed:
            return
        known = self._connected.pop(instance_id, None)
        ranks = range(len(self._workers)) if known else changed
        failed = _errors(await self._ask_to_disconnect(instance_id, ranks))
        for rank, error in failed.items():
            _log.warning("rank %d may still be connected to group %s: %s", rank, instance_id, error)

    async def _ask_to_disconnect(self, instance_id: str, ranks: Sequence[int]) -> dict[int, bool | Exception]:
        calls = [partial(self._workers[rank].disconnect_remote, instance_id) for rank in ranks]
        answers = await ask_all(f"disconnecting from group {instance_id}", calls, self._timeout_s)
        return dict(zip(ranks, answers, strict=True))

    def _forget(self, instance_id: str, attempt: asyncio.Task[tuple[RemoteLayout, ...]]) -> None:
        if self._attempts.get(instance_id, (None, None))[1] is attempt:
            del self._attempts[instance_id]

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever waited has it; nobody may be waiting any more.

    def _lock(self, instance_id: str) -> asyncio.Lock:
        lock = self._locks.get(instance_id)
        if lock is None:
            lock = self._locks[instance_id] = asyncio.Lock()
        return lock


def _check_epoch(instance_id: str, current: int, offered: int) -> None:
    if offered < current:
        message = (
            f"group {instance_id} was exported in epoch {offered}, but epoch {current} is connected; export it again"
        )
        raise StaleEpoch(message, epoch=offered, current_epoch=current)


def _is_refusal(error: Exception) -> bool:
    """Says whether a worker answered that it changed nothing; one that can't be reached may have changed something."""
    return isinstance(error, AyniError) and not isinstance(error, Deadline | Fault)


def _errors(answers: Mapping[int, object]) -> dict[int, Exception]:
    return {rank: answer for rank, answer in answers.items() if isinstance(answer, Exception)}


def _layouts(group: RemoteGroup, told: Sequence[RemoteLayout]) -> tuple[RemoteLayout, ...]:
    """Returns the group's layouts by remote rank, resource and tier, with the engine that the lowest rank uses."""
    engines: dict[LayoutHandle, str] = {}
    for layout in told:
        engines.setdefault(layout.layout, layout.engine)
    layouts = [
        RemoteLayout(
            remote_rank=rank,
            resource_id=place.resource_id,
            tier=place.tier,
            layout=handle,
            engine=engines.get(handle, ""),
        )
        for (_, rank, place), handle in group.handles.items()
    ]
    return tuple(sorted(layouts, key=lambda one: (one.remote_rank, one.resource_id, _TIERS.index(one.tier))))


def _paired(group: RemoteGroup, rank: int | None) -> int:
    if rank is None:
        message = (
            f"group {group.instance_id} has {group.tp_size} ranks and this group {group.local.num_ranks}, so its "
            "layouts have no counterpart on each rank; use execute_remote_onboard_for_instance, which joins the parts"
        )
        raise Unsupported(message, field="layout", detail="group sizes differ")
    return rank
