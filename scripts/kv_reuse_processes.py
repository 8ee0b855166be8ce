"""The agents of `kv_reuse.py`, as the process that starts and leads them sees them."""

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ayni.blocks.layouts import LayoutConfig, LocalLayout, Tier
from ayni.blocks.metadata import GroupConfig, LayoutRequest, WorkerMetadata
from ayni.blocks.objects import ObjectStoreConfig
from coordinator_service.leader import SpmdParallelWorkers
from coordinator_service.parallelism import ParallelismTemplate
from coordinator_service.worker_stub import GrpcBlockWorker

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = "objects"
"""Folder of the object store, below the folder that all agents are given."""
G1, G2, G3 = (LocalLayout(tier=tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))

_LONGEST_LINE = 1 << 24
_LONGEST_WAIT_S = 600.0
_GOODBYE_S = 20.0


class AgentFailed(Exception):
    """An agent ended or does not answer; standard error says why."""


class AgentProcess:
    """A running agent, and its standard input and output."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self._process = name, process
        self.address = ""
        self.model_name = ""
        self.shape: dict[str, Any] = {}

    @classmethod
    async def start(cls, name: str, has: dict[str, Any]) -> "AgentProcess":
        """Starts an agent; does not wait until it listens.

        Args:
            name: for messages.
            has: its root, and its pages or its model; see `kv_reuse_agent`.
        """
        paths = os.pathsep.join((str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scripts.kv_reuse_agent"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            limit=_LONGEST_LINE,
            # Ctrl-C reaches the leader alone, which ends its agents.
            start_new_session=True,
        )
        agent = cls(name, process)
        agent._tell(has)
        return agent

    async def ready(self) -> "AgentProcess":
        """Waits until the agent listens."""
        answer = await self._answer()
        self.address, self.model_name, self.shape = answer["address"], answer["name"], answer["shape"]
        return self

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Has the agent do something and returns its answer.

        Raises:
            AgentFailed: it ended, or did not answer in time.
        """
        self._tell({"do": do, **arguments})
        return await self._answer()

    async def close(self) -> None:
        """Ends the agent, kindly at first.

        Raises:
            AgentFailed: it had to be killed.
        """
        assert self._process.stdin
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._process.wait()
        except TimeoutError:
            raise AgentFailed(f"{self.name} did not end within {_GOODBYE_S:g} s and was killed") from None
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise AgentFailed(f"{self.name} did not answer for {_LONGEST_WAIT_S:g} s") from None
        if not line:
            raise AgentFailed(f"{self.name} ended; see what it said on standard error")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def close_all(agents: Sequence[AgentProcess]) -> None:
    """Ends agents, all at the same time; raises as `AgentProcess.close`, but not before all have ended."""
    for ended in await asyncio.gather(*(agent.close() for agent in agents), return_exceptions=True):
        if ended:
            raise ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Agents that share the heads of one cache, and their leader."""

    agents: tuple[AgentProcess, ...]
    leader: SpmdParallelWorkers
    metadata: tuple[WorkerMetadata, ...]
    """What another group needs to reach this one."""

    @property
    def instance_id(self) -> str:
        return self.metadata[0].instance_id

    async def digests(self, blocks: Sequence[int]) -> list[list[str]]:
        """Returns checksums of blocks as each rank holds them, by rank."""
        asked = (agent.ask("digests", blocks=list(blocks)) for agent in self.agents)
        return [answer["digests"] for answer in await asyncio.gather(*asked)]

    async def clear(self) -> None:
        await asyncio.gather(*(agent.ask("clear") for agent in self.agents))

    async def connect(self, other: "Group", engine: str = "") -> str:
        """Connects to another group; returns the engine that blocks of its host memory will come by."""
        layouts = await self.leader.connect_remote(other.instance_id, other.metadata, [engine] if engine else [])
        return next(layout.engine for layout in layouts if layout.tier is Tier.HOST)

    async def close(self) -> None:
        await self.leader.close()
        for worker in self.leader.workers:
            assert isinstance(worker, GrpcBlockWorker)
            await worker.close()


async def lead(agents: Sequence[AgentProcess], token: str, num_blocks: int) -> Group:
    """Makes agents a group with a host tier, a disk tier and an object store.

    Args:
        agents: in rank order; each holds its part of the heads.
        token: join token of the agents.
        num_blocks: blocks of each of the lower tiers.
    """
    workers = [GrpcBlockWorker.dial(agent.address, token, rank) for rank, agent in enumerate(agents)]
    template = ParallelismTemplate.from_layout(_config_of(agents[0]), len(agents))
    leader = SpmdParallelWorkers(workers, template=template)
    group_id = str(uuid.uuid4())
    configured = await leader.configure_layouts(
        GroupConfig(
            epoch=1,
            instance_id=group_id,
            rank=0,
            world_size=len(agents),
            layouts=tuple(LayoutRequest(tier=tier, num_blocks=num_blocks) for tier in (Tier.HOST, Tier.DISK)),
            disk_folder=group_id,
            object_store=ObjectStoreConfig(kind="file", bucket=OBJECTS),
        )
    )
    return Group(agents=tuple(agents), leader=leader, metadata=configured.metadata)


def _config_of(agent: AgentProcess) -> LayoutConfig:
    shape = agent.shape
    return LayoutConfig(
        num_blocks=shape["num_blocks"],
        num_layers=shape["num_layers"],
        outer_dim=2,
        page_size=shape["page_size"],
        inner_dim=shape["num_heads"] * shape["head_dim"],
        num_heads=shape["num_heads"],
        dtype_width_bytes=4,
    )
