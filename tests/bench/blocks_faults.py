"""How soon a worker notices that the agent it pulls from stands still (SIGSTOP) or has ended (SIGKILL).

The signal is sent when the first block of a pull has arrived. What counts is the time until the pull has its outcome,
of the slowest of all repetitions.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

from ayni.blocks.ids import as_ids
from ayni.blocks.transfers import RemoteBlocks, TransferOptions
from ayni.blocks.worker import Notification
from ayni.endpoints import Keepalive
from ayni.errors import PeerLost
from tests.bench import blocks_agents as agents
from tests.bench.blocks_agents import HOST, MIB
from tests.bench.blocks_measure import CaseResult, Scale, limited
from tests.bench.processes import Program
from tests.support.coordinator import TOKEN
from worker_agent.blocks.engine import Engine
from worker_agent.blocks.engines.grpc_engine import Dialling, GrpcEngine
from worker_agent.blocks.engines.shm import ShmEngine
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.worker import LocalBlockWorker
from worker_agent.blocks_config import BlocksConfig

COUNT = 1024
KEEPALIVE = Keepalive(interval=timedelta(seconds=2), timeout=timedelta(seconds=1.5))
DEAD_GOAL = 0.2
FROZEN_GOAL = KEEPALIVE.interval.total_seconds() + KEEPALIVE.timeout.total_seconds() + 0.5
_DEADLINE_S = 60.0
_PLANS = (("frozen", "grpc", signal.SIGSTOP), ("dead", "grpc", signal.SIGKILL), ("dead", "shm", signal.SIGKILL))


async def faults(folder: Path, scale: Scale) -> CaseResult:
    result = CaseResult()
    for what, engine, number in _PLANS:
        took = [
            await _noticed(folder / f"{what}-{engine}-{repetition}", engine, number)
            for repetition in range(scale.repeat(3))
        ]
        goal = DEAD_GOAL if what == "dead" else FROZEN_GOAL
        note = "" if what == "dead" else "keepalive 2 s, ping timeout 1.5 s"
        result.rows.append(limited(f"{what} peer noticed in a pull through {engine}", max(took), "s", goal, note))
        result.samples[f"{what} {engine}"] = {"seconds": [round(seconds, 4) for seconds in took]}
    return result


async def _noticed(folder: Path, engine: str, number: signal.Signals) -> float:
    """Seconds from the signal to the outcome of the first pull that fails."""
    async with _pair(folder, engine) as (program, pulling, memory):
        pull = pulling(COUNT)
        # Nobody tells that a byte has landed.
        while not memory.buffers[0][MIB - 8 : MIB].any() and pull.could_yield():  # noqa: ASYNC110
            await asyncio.sleep(0)
        os.kill(program.pid, number)
        start = time.perf_counter()
        # Shared memory outlives its owner: what is already being copied may well be whole.
        while (result := await pull.result()).is_done:
            pull = pulling(1)
        seconds = time.perf_counter() - start
    reasons = {failure.failure.reason for outcome in result.outcomes for failure in outcome.failures}
    assert reasons == {PeerLost.reason}, f"a lost peer gave {reasons}"
    return seconds


@contextlib.asynccontextmanager
async def _pair(folder: Path, engine: str) -> AsyncIterator[tuple[Program, Callable[[int], Notification], HostMemory]]:
    """An agent, what starts a pull of its first blocks, and the memory that it goes to."""
    config, blocks = BlocksConfig(root=folder / "here"), as_ids(range(COUNT))
    engines: list[Engine] = [ShmEngine(), GrpcEngine(Dialling(token=TOKEN, keepalive=KEEPALIVE))]
    worker = LocalBlockWorker(engines=engines, config=config)
    with agents.agent(folder, [agents.entry(COUNT, MIB)], ("shm", "grpc")) as program:
        try:
            memory = allocate_host(agents.geometry(COUNT, MIB))
            worker.register(HOST, memory)
            peer = await agents.connect(worker, program.word())
            await worker.write(HOST, blocks, agents.pattern(COUNT, MIB))
            await worker.execute_remote_offload(
                HOST, blocks, RemoteBlocks(layout=peer.layouts[0].handle, blocks=blocks)
            )
            memory.buffers[0].fill(0)

            def pulling(count: int) -> Notification:
                options = TransferOptions(engine=engine, timeout_s=_DEADLINE_S)
                some = blocks[:count]
                return worker.execute_remote_onboard_for_instance(
                    peer.instance_id, HOST.tier, some, HOST, some, options
                )

            yield program, pulling, memory
        finally:
            await worker.close()
