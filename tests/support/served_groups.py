"""Groups of agents in processes of their own, driven by a leader in this one, and what their blocks must hold."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np

from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.layouts import AxisOrder, LayoutDescriptor, LocalLayout, Tier
from ayni.blocks.metadata import GroupConfig, LayoutRequest, WorkerMetadata
from ayni.blocks.objects import ObjectStoreConfig
from ayni.blocks.transfers import TransferOptions, TransferOutcome, TransferResult
from ayni.blocks.worker import Notification
from ayni.channels import open_channel
from coordinator_service.leader import GroupSettings, SpmdParallelWorkers
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.support.block_groups import soon
from tests.support.coordinator import TOKEN
from tests.support.serve_agents import SOON_S, Crew, ServeAgent, crew
from worker_agent.blocks.engine import Move
from worker_agent.blocks.engines.grpc_link import GrpcLink
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory
from worker_agent.blocks.memory import Bytes

HOST, DISK, DEVICE = (LocalLayout(tier=tier) for tier in (Tier.HOST, Tier.DISK, Tier.DEVICE))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

LATE_S = 1.0
"""How much after its deadline a group's result may come."""
BUSY_S = 1.0
"""How much more for all that, since this machine may have other work."""


class ServedGroup:
    """A configured group. Ranks are agents; each has a host layout, and a disk layout where one is asked for."""

    def __init__(self, agents: Sequence[ServeAgent], config: GroupConfig) -> None:
        self.agents, self.config = list(agents), config
        self.ranks = [GrpcBlockWorker.dial(agent.address, TOKEN, rank) for rank, agent in enumerate(agents)]
        self.leader = self._lead()
        self._given_up: list[GrpcBlockWorker] = []
        self.metadata: tuple[WorkerMetadata, ...] = ()

    @property
    def instance_id(self) -> str:
        return self.config.instance_id

    async def configure(self, **changes: object) -> bool:
        """Configures all ranks; says whether disk layouts were recovered."""
        self.config = replace(self.config, **changes)  # type: ignore[arg-type]
        configured = await soon(self.leader.configure_layouts(self.config), "configuring")
        self.metadata = configured.metadata
        return configured.disk_recovered

    def with_disk(self, disk_blocks: int) -> tuple[LayoutRequest, ...]:
        """The layouts of the group with another disk layout."""
        host = [request for request in self.config.layouts if request.tier is Tier.HOST]
        return (*host, LayoutRequest(tier=Tier.DISK, num_blocks=disk_blocks))

    async def connect(self, other: "ServedGroup", *engines: str) -> None:
        metadata = await soon(other.leader.export_metadata(), "exporting")
        await soon(self.leader.connect_remote(other.instance_id, metadata, engines), "connecting")

    def layout(self, rank: int, place: LocalLayout = HOST) -> LayoutDescriptor:
        return next(layout for layout in self.metadata[rank].layouts if layout.place == place)

    def view(self, rank: int) -> np.ndarray:
        """The host blocks of a rank as they are now, shape [B, n]; see `ServeAgent.view`."""
        return self.agents[rank].view(geometry_of(self.layout(rank)))

    def content(self, label: int, rank: int) -> np.ndarray:
        """What `fill` writes into the host blocks of a rank, shape [B, n]: no 8 bytes come twice under any label."""
        config = self.layout(rank).config
        words = np.arange(config.total_bytes // 8, dtype=np.uint64)
        words += np.uint64((label << 8 | rank) << 32)
        words *= _GOLDEN
        return words.view(np.uint8).reshape(config.num_blocks, config.block_bytes)

    async def fill(self, label: int) -> None:
        """Writes all host blocks of all ranks."""
        await asyncio.gather(
            *(self.write(rank, range(len(self.view(rank))), self.content(label, rank)) for rank in range(self.size))
        )

    async def write(self, rank: int, ids: Iterable[int], rows: Bytes, place: LocalLayout = HOST) -> None:
        """Writes blocks through the agent's service; raises TransferProblem with what it refuses."""
        await self._move(rank, place, as_ids(ids), rows, "push")

    async def read(self, rank: int, ids: Iterable[int], place: LocalLayout = HOST) -> Bytes:
        """Reads blocks through the agent's service, shape [N, n]; raises as `write`."""
        blocks = as_ids(ids)
        rows = np.zeros((len(blocks), self.layout(rank, place).config.block_bytes), np.uint8)
        await self._move(rank, place, blocks, rows, "pull")
        return rows

    @property
    def size(self) -> int:
        return len(self.agents)

    async def dial_again(self, rank: int) -> None:
        """Takes an agent that was started again for a new one, as whoever it registers with does.

        The connection to the old one stays open: nobody has told that it is of no use.
        """
        self._given_up.append(self.ranks[rank])
        self.ranks[rank] = GrpcBlockWorker.dial(self.agents[rank].address, TOKEN, rank)
        await self.leader.close()
        self.leader = self._lead()

    async def close(self) -> None:
        await self.leader.close()
        for rank in [*self.ranks, *self._given_up]:
            await rank.close()

    def _lead(self) -> SpmdParallelWorkers:
        return SpmdParallelWorkers(self.ranks, settings=GroupSettings(call_timeout_s=10))

    async def _move(self, rank: int, place: LocalLayout, blocks: Ids, rows: Bytes, way: str) -> None:
        remote = self.layout(rank, place)
        link = GrpcLink(open_channel(self.agents[rank].address, TOKEN), self.metadata[rank].incarnation, "the agent")
        config = replace(remote.config, num_blocks=len(blocks), alignment_bytes=1)
        local = HostMemory(Geometry(config=config, axis_order=remote.axis_order), [rows.reshape(-1)])
        move = Move(
            remote=remote,
            remote_blocks=blocks,
            local=local,
            local_blocks=as_ids(range(len(blocks))),
            deadline=asyncio.get_running_loop().time() + SOON_S,
        )
        try:
            ticket = link.pull(move) if way == "pull" else link.push(move)
            await ticket.quiesced
            if failures := ticket.outcome.result().failures:
                raise BlocksRefused({index: failure.reason for index, failure in failures})
        finally:
            await link.close()


class BlocksRefused(Exception):
    """Blocks could not be read or written."""

    def __init__(self, failures: dict[int, str]) -> None:
        """`failures` has the reason of each block, by place in the list."""
        super().__init__(f"{len(failures)} blocks: {set(failures.values())}")
        self.failures = failures


def geometry_of(layout: LayoutDescriptor) -> Geometry:
    return Geometry(config=layout.config, kind=layout.kind, axis_order=layout.axis_order)


@asynccontextmanager
async def served(
    shared: Crew,
    agents: Sequence[ServeAgent],
    *,
    host_blocks: int,
    disk_blocks: int = 0,
    order: AxisOrder | None = None,
    store: ObjectStoreConfig | None = None,
) -> AsyncIterator[ServedGroup]:
    """Opens a group of running agents as a new instance in a new epoch."""
    wanted = {Tier.HOST: host_blocks, Tier.DISK: disk_blocks}
    config = GroupConfig(
        epoch=shared.next_epoch(),
        instance_id=str(uuid.uuid4()),
        rank=0,
        world_size=len(agents),
        layouts=tuple(
            LayoutRequest(tier=tier, num_blocks=blocks, axis_order=order) for tier, blocks in wanted.items() if blocks
        ),
        object_store=store,
    )
    group = ServedGroup(agents, config)
    try:
        await group.configure()
        yield group
    finally:
        for agent in agents:
            agent.go_on()
        await group.close()
    for agent in agents:
        agent.check_log()


@asynccontextmanager
async def joined_groups(
    num_blocks: int,
    label: int,
    *engines: str,
    order: AxisOrder | None = None,
    halves: bool = False,
    disk: bool = False,
) -> AsyncIterator[tuple[ServedGroup, ServedGroup]]:
    """Opens two groups: one that is filled, and one that is connected to it and holds zeros.

    Args:
        num_blocks: in each host layout, and in each disk layout of the second group where there is one.
        label: content of the first group.
        engines: that may be used.
        order: axis order of the second group's blocks.
        halves: groups of one agent each, both with half of the heads, instead of four and two.
        disk: the second group has a disk layout.
    """
    shared = crew()
    ours = shared.halves()
    theirs, ours = ([ours[0]], [ours[1]]) if halves else (shared.quarters(), ours)
    async with (
        served(shared, theirs, host_blocks=num_blocks) as far,
        served(shared, ours, host_blocks=num_blocks, disk_blocks=num_blocks * disk, order=order) as near,
    ):
        await far.fill(label)
        await near.connect(far, *engines)
        yield far, near


def pull(near: ServedGroup, far: ServedGroup, sources: Ids, ids: Ids, timeout_s: float) -> Notification:
    """Starts a pull of host blocks by all ranks."""
    return near.leader.execute_remote_onboard_for_instance(
        far.instance_id, Tier.HOST, sources, HOST, ids, TransferOptions(timeout_s=timeout_s)
    )


async def as_soon_as_free(write: Callable[[], Awaitable[None]], within_s: float = SOON_S) -> None:
    """Writes to blocks once nobody else does."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await write()
        except BlocksRefused as error:
            if set(error.failures.values()) != {"BLOCK_BUSY"} or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.01)


def whole_content(far: ServedGroup, label: int, near: ServedGroup, rank: int) -> np.ndarray:
    """What a rank's host blocks hold once it has its heads of all blocks of a group that was filled, shape [B, n]."""
    parts = []
    for other in range(far.size):
        content = far.content(label, other)
        parts.append(content.reshape(len(content), *_axes(far.layout(other)), -1))
    total = np.concatenate(parts, axis=4)
    heads = near.layout(rank).config.num_heads
    mine = total[:, :, :, :, rank * heads : (rank + 1) * heads]
    if near.layout(rank).axis_order is AxisOrder.HND:
        mine = mine.swapaxes(3, 4)
    return np.ascontiguousarray(mine).reshape(len(mine), -1)


def _axes(layout: LayoutDescriptor) -> tuple[int, int, int, int]:
    config = layout.config
    return config.num_layers, config.outer_dim, config.page_size, config.num_heads


StartTransfer = Callable[[Ids], Notification]
"""Starts a transfer whose source blocks are the given ones."""


@dataclass(frozen=True, kw_only=True)
class Caught:
    """A transfer in whose middle an agent stands still."""

    note: Notification
    sources: Ids
    before: np.ndarray
    """The agent's blocks as they were."""


async def caught(agent: ServeAgent, view: np.ndarray, ids: Ids, start: StartTransfer) -> Caught:
    """Starts a transfer into an agent and stops the agent in the middle: some blocks have come, the last one has not.

    A transfer that is over before the agent stands still is waited for, and another one is started.
    """
    sources = ids
    for _ in range(20):
        sources = np.roll(sources, 1)
        before = view.copy()
        note = start(sources)
        await changed(view, int(ids[len(ids) // 4]), before)
        agent.stop()
        if note.could_yield() and np.array_equal(view[ids[-1]], before[ids[-1]]):
            return Caught(note=note, sources=sources, before=before)
        agent.go_on()
        await soon(note.result(), "a transfer")
    raise AssertionError("no transfer could be caught in the middle")


async def changed(view: np.ndarray, block: int, before: np.ndarray) -> None:
    """Waits until all of a block in an agent's memory is new."""
    new, old = view[block].view(np.uint64), before[block].view(np.uint64)
    async with asyncio.timeout(SOON_S):
        # Nobody tells of a block that has come, and it must not be missed.
        while (new == old).any():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def in_time(note: Notification, timeout_s: float) -> TransferResult:
    """Waits for the result of a transfer that began just before; fails when it comes too late after its deadline."""
    return await soon(note.result(), "a transfer", timeout_s + LATE_S + BUSY_S)


def check_same(now: np.ndarray, expected: np.ndarray) -> None:
    """Compares blocks; where they differ says how."""
    # What numpy has for tests takes ten times as long.
    if not np.array_equal(now, expected):
        np.testing.assert_array_equal(now, expected)


def check_blocks(
    view: np.ndarray, ids: Ids, expected: np.ndarray, before: np.ndarray, outcome: TransferOutcome
) -> None:
    """Every block that did not fail is right, and what is no destination is as before.

    Args:
        view: blocks of a rank, shape [B, n].
        ids: destinations, shape [N].
        expected: what each of them must hold, shape [N, n].
        before: all blocks as they were, shape [B, n].
        outcome: of the rank.
    """
    failed = [failure.index for failure in outcome.failures]
    assert outcome.num_done == len(ids) - len(failed)
    assert [failure.block for failure in outcome.failures] == ids[failed].tolist()
    done = np.delete(np.arange(len(ids)), failed)
    check_same(view[ids[done]], expected[done])
    guards = np.delete(np.arange(len(view)), ids)
    assert len(guards)
    check_same(view[guards], before[guards])


def reasons(outcome: TransferOutcome) -> set[str]:
    return {failure.failure.reason for failure in outcome.failures}
