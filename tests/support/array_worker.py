"""A worker whose layouts are numpy arrays and whose peers are in the same process: small, for tests of what drives it.

It keeps to everything that a BlockWorker promises, so that faces, stubs and groups can be tested without engines. Its
copies stop while `go` is cleared.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.layouts import (
    LayoutConfig,
    LocalLayout,
    Tier,
)
from ayni.blocks.notifications import Event
from ayni.blocks.objects import KeyOutcome, KeyReport, OutcomeState, Presence, PresenceReport, PresenceState
from ayni.blocks.transfers import (
    DEFAULT_OPTIONS,
    BlockFailure,
    Failure,
    PullPlan,
    RemoteBlocks,
    RemoteDescriptor,
    TransferOptions,
    TransferOutcome,
    TransferResult,
    refused,
)
from ayni.blocks.worker import Notification
from ayni.errors import (
    AyniError,
    BadRequest,
    BlockBusy,
    Cancelled,
    Deadline,
    IncompatibleLayout,
    UnknownObject,
    UnknownPeer,
)
from tests.support.array_layouts import Array, ArrayLayouts, World, check_lengths, check_range

Claim = tuple[int, LocalLayout, int]
"""Owner, layout and id of a block that is written."""
Copy = Callable[[int], None]
"""Copies pair i."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    destination_blocks: Ids
    copy: Copy
    claims: frozenset[Claim] = frozenset()
    block_bytes: int


class ArrayWorker(ArrayLayouts):
    """One worker; see `ayni.blocks.worker.RankWorker` for its methods."""

    def __init__(self, world: World, shape: LayoutConfig) -> None:
        super().__init__(world, shape)
        self._busy: set[Claim] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stops the copies that are under way."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def execute_local_transfer(
        self,
        source: LocalLayout,
        destination: LocalLayout,
        source_blocks: Iterable[int],
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        sources, ids = as_ids(source_blocks), as_ids(destination_blocks)

        def job() -> _Job:
            return self._between((self, source), sources, (self, destination), ids, options)

        return self._start("execute_local_transfer", ids, job, options)

    def execute_remote_onboard(
        self,
        source: RemoteDescriptor,
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        ids = as_ids(destination_blocks)

        def job() -> _Job:
            if isinstance(source, RemoteBlocks):
                return self._between(self.named(source.layout), source.blocks, (self, destination), ids, options)
            keys, array = source.keys, self.writable(destination, ids, len(source.keys))

            def copy(index: int) -> None:
                array[ids[index]] = self._stored(destination, keys[index])

            return _Job(
                destination_blocks=ids,
                copy=copy,
                claims=self._claims(self, destination, ids),
                block_bytes=array.shape[1],
            )

        return self._start("execute_remote_onboard", ids, job, options)

    def execute_remote_offload(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        destination: RemoteDescriptor,
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        sources = as_ids(source_blocks)
        ids = destination.blocks if isinstance(destination, RemoteBlocks) else as_ids([0] * len(destination.keys))

        def job() -> _Job:
            if isinstance(destination, RemoteBlocks):
                return self._between((self, source), sources, self.named(destination.layout), ids, options)
            array = self.array_at(source)
            check_range(array, sources)
            check_lengths(sources, ids)

            def copy(index: int) -> None:
                self.world.objects[self._key(source, destination.keys[index])] = array[sources[index]].tobytes()

            return _Job(destination_blocks=ids, copy=copy, block_bytes=array.shape[1])

        return self._start("execute_remote_offload", ids, job, options)

    def execute_remote_onboard_for_instance(
        self,
        instance_id: str,
        remote_tier: Tier,
        source_blocks: Iterable[int],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        plan = PullPlan(
            instance_id=instance_id,
            remote_tier=remote_tier,
            source_blocks=as_ids(source_blocks),
            destination=destination,
            destination_blocks=as_ids(destination_blocks),
            shards=(),
        )
        return self.execute_remote_pull(plan, options)

    def execute_remote_pull(self, plan: PullPlan, options: TransferOptions = DEFAULT_OPTIONS) -> Notification:
        place = LocalLayout(tier=plan.remote_tier, resource_id=plan.destination.resource_id)

        def job() -> _Job:
            rank = plan.shards[0].remote_rank if plan.shards else self.config.rank
            for one in self._groups.get(plan.instance_id, ()):
                if one.rank == rank:
                    remote = self.world.workers[one.owner_id], place
                    to = self, plan.destination
                    return self._between(remote, plan.source_blocks, to, plan.destination_blocks, options)
            raise UnknownPeer("not connected", instance_id=plan.instance_id, rank=rank)

        return self._start("execute_remote_pull", plan.destination_blocks, job, options)

    async def has_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> PresenceReport:
        self.calls.append("has_blocks")
        self.array_at(layout)
        sizes = [len(self.world.objects.get(self._key(layout, key), b"")) for key in keys]
        states = (PresenceState.PRESENT if size else PresenceState.ABSENT for size in sizes)
        presences = tuple(Presence(state=state, size_bytes=size) for state, size in zip(states, sizes, strict=True))
        return PresenceReport(presences=presences, by_rank=(presences,))

    async def put_blocks(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        keys: Sequence[bytes],
        lock_validity_s: float | None = None,
        timeout_s: float = 60.0,
    ) -> KeyReport:
        self.calls.append("put_blocks")
        array, ids = self.array_at(source), as_ids(source_blocks)
        check_range(array, ids)
        check_lengths(ids, keys)

        def put(index: int) -> KeyOutcome:
            name = self._key(source, keys[index])
            if name in self.world.objects:
                return KeyOutcome(state=OutcomeState.ALREADY_PRESENT)
            self.world.objects[name] = array[ids[index]].tobytes()
            return KeyOutcome(state=OutcomeState.DONE, size_bytes=array.shape[1])

        return await self._keys(put, len(keys), timeout_s)

    async def get_blocks(
        self,
        keys: Sequence[bytes],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        timeout_s: float = 60.0,
    ) -> KeyReport:
        self.calls.append("get_blocks")
        ids = as_ids(destination_blocks)
        array = self.writable(destination, ids, len(keys))

        def get(index: int) -> KeyOutcome:
            try:
                array[ids[index]] = self._stored(destination, keys[index])
            except AyniError:
                return KeyOutcome(state=OutcomeState.ABSENT)
            return KeyOutcome(state=OutcomeState.DONE, size_bytes=array.shape[1])

        return await self._keys(get, len(keys), timeout_s)

    async def remove_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> KeyReport:
        self.calls.append("remove_blocks")
        self.array_at(layout)

        def remove(index: int) -> KeyOutcome:
            self.world.objects.pop(self._key(layout, keys[index]), None)
            return KeyOutcome(state=OutcomeState.DONE)

        return await self._keys(remove, len(keys), timeout_s)

    async def _keys(self, one: Callable[[int], KeyOutcome], count: int, timeout_s: float) -> KeyReport:
        late = Failure.of(Deadline("too late", waiting_for="keys", timeout=timeout_s))
        outcomes = (KeyOutcome(state=OutcomeState.FAILED, failure=late),) * count
        if await _before(asyncio.get_running_loop().time() + timeout_s, self.go.wait()):
            outcomes = tuple(one(index) for index in range(count))
        return KeyReport(outcomes=outcomes, by_rank=(outcomes,))

    def _start(self, call: str, blocks: Ids, make: Callable[[], _Job], options: TransferOptions) -> Notification:
        self.calls.append(call)
        self.options = options
        event = Event(call)
        try:
            job = make()
            if busy := job.claims & self._busy:
                raise BlockBusy("being written", layout=min(busy, key=str)[1], block=min(busy, key=str)[2])
        except AyniError as error:
            event.trigger(TransferResult(outcomes=(refused(self.config.rank, blocks.tolist(), error),)))
            return event.notification
        self._busy |= job.claims
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(job, options, event))
        # A task that is cancelled before its first step would tell nobody.
        event.notification.on_cancel = lambda: _soon(loop, task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return event.notification

    async def _run(self, job: _Job, options: TransferOptions, event: Event) -> None:
        loop = asyncio.get_running_loop()
        stop_at = loop.time() + options.timeout_s - options.drain_s
        errors: dict[int, AyniError] = {}
        rest: AyniError = Deadline("too late", waiting_for="copies", timeout=options.timeout_s)
        count, next_ = len(job.destination_blocks), 0
        try:
            while next_ < count and await _before(stop_at, self.go.wait()):
                try:
                    job.copy(next_)
                except AyniError as error:
                    errors[next_] = error
                next_ += 1
        except asyncio.CancelledError:
            rest = Cancelled("given up")
        errors |= dict.fromkeys(range(next_, count), rest)
        done = count - len(errors)
        failures = (
            BlockFailure(index=index, block=int(job.destination_blocks[index]), failure=Failure.of(error))
            for index, error in errors.items()
        )
        self._busy -= job.claims
        outcome = TransferOutcome(
            rank=self.config.rank,
            num_done=done,
            failures=tuple(failures),
            transferred_bytes=done * job.block_bytes,
            elapsed_s=0.001,
            engines=("array",),
        )
        event.trigger(TransferResult(outcomes=(outcome,)))

    def _between(
        self,
        source: tuple["ArrayWorker", LocalLayout],
        source_blocks: Ids,
        destination: tuple["ArrayWorker", LocalLayout],
        ids: Ids,
        options: TransferOptions,
    ) -> _Job:
        from_, to = source[0].array_at(source[1]), destination[0].writable(destination[1], ids, len(source_blocks))
        check_range(from_, source_blocks)
        if source == destination and set(source_blocks.tolist()) & set(ids.tolist()):
            raise BadRequest("overlap", field="destination_blocks")
        layer_bytes = self.shape.block_bytes // self.shape.num_layers
        first, stop = options.layers or (0, self.shape.num_layers)
        if stop > self.shape.num_layers:
            raise IncompatibleLayout("no such layer", field="layers", source=stop, destination=stop)
        part = slice(first * layer_bytes, stop * layer_bytes)

        def copy(index: int) -> None:
            to[ids[index], part] = from_[source_blocks[index], part]

        return _Job(
            destination_blocks=ids,
            copy=copy,
            claims=self._claims(destination[0], destination[1], ids),
            block_bytes=part.stop - part.start,
        )

    def _claims(self, owner: "ArrayWorker", place: LocalLayout, ids: Ids) -> frozenset[Claim]:
        return frozenset((owner.owner_id, place, block) for block in ids.tolist())

    def _stored(self, place: LocalLayout, key: bytes) -> Array:
        data = self.world.objects.get(self._key(place, key))
        if data is None:
            raise UnknownObject("no such object", key=key.hex(), detail="absent")
        return np.frombuffer(data, np.uint8)

    def _key(self, place: LocalLayout, key: bytes) -> tuple[str, int, bytes]:
        return self.descriptor(place).fingerprint, self.config.rank, bytes(key)


def _soon(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    loop.call_soon(task.cancel)


async def _before(moment: float, awaitable: Awaitable[object]) -> bool:
    """Waits, at most until a moment; says whether it was in time."""
    try:
        async with asyncio.timeout_at(moment):
            await awaitable
    except TimeoutError:
        return False
    return True
