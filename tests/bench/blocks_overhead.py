"""What one call costs beyond its copy: here, through a stub, and as a group of ranks over gRPC on loopback.

Each transfer copies one block of 4 KiB from the device to the host layout, on every rank. What a call adds is what it
takes beyond one such transfer in this process. Health checks of the same agents, all at once, show what as many calls
take with nothing behind them.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.worker import BlockWorker
from ayni.channels import open_channel
from coordinator_service.leader import SpmdParallelWorkers
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.bench import blocks_agents as agents
from tests.bench.blocks_agents import HOST, KIB
from tests.bench.blocks_measure import CaseResult, Contender, Samples, Scale, compared, limited, measure
from tests.support.coordinator import TOKEN

BLOCKS, BLOCK_BYTES = 64, 4 * KIB
RANKS = (1, 2, 4, 8)
DEVICE = LocalLayout(tier=Tier.DEVICE)
_HERE, _STUB = "in this process", "stub"
_GOAL_MS = {8: 3.0}
_LAYOUTS = [agents.entry(BLOCKS, BLOCK_BYTES, tier) for tier in ("device", "host")]


async def overhead(folder: Path, scale: Scale) -> CaseResult:
    ranks = RANKS[:2] if scale.quick else RANKS
    async with contextlib.AsyncExitStack() as stack:
        programs = [
            stack.enter_context(agents.agent(folder, _LAYOUTS, name=f"rank {rank}")) for rank in range(max(ranks))
        ]
        worker = await stack.enter_async_context(agents.local_worker(folder))
        for layout in _LAYOUTS:
            await worker.allocate(layout.place, layout.geometry())
        await worker.write(DEVICE, np.arange(BLOCKS), agents.pattern(BLOCKS, BLOCK_BYTES))
        channels = [await stack.enter_async_context(open_channel(program.word(), TOKEN)) for program in programs]
        stubs = [GrpcBlockWorker(channel, rank) for rank, channel in enumerate(channels)]
        groups = [SpmdParallelWorkers(stubs[:count]) for count in ranks]
        for group in groups:
            stack.push_async_callback(group.close)
        callers: dict[str, BlockWorker] = {_HERE: worker, _STUB: stubs[0]}
        callers |= {_group(group.worker_count): group for group in groups}
        contenders = [_transfer(name, caller) for name, caller in callers.items()]
        contenders += [_health(channels[:count]) for count in ranks]
        samples = await measure(contenders, 3 if scale.quick else 300, warm_up=3)
    return _result(samples, ranks)


def _transfer(name: str, caller: BlockWorker) -> Contender:
    source, destination = as_ids([3]), as_ids([5])

    async def work() -> None:
        result = await caller.execute_local_transfer(DEVICE, HOST, source, destination)
        assert len(result.outcomes) == caller.worker_count

    return Contender(name=name, num_bytes=BLOCK_BYTES * caller.worker_count, work=work)


def _health(channels: Sequence[aio.Channel]) -> Contender:
    stubs: list[Any] = [health_pb2_grpc.HealthStub(channel) for channel in channels]

    async def work() -> None:
        await asyncio.gather(*(stub.Check(health_pb2.HealthCheckRequest(), timeout=20) for stub in stubs))

    return Contender(name=_checks(len(channels)), num_bytes=BLOCK_BYTES * len(channels), work=work)


def _result(samples: Mapping[str, Samples], ranks: Sequence[int]) -> CaseResult:
    result = CaseResult()
    took = {name: each.milliseconds for name, each in samples.items()}
    result.rows.append(limited("local transfer of one 4 KiB block in this process", took[_HERE], "ms"))
    result.rows.append(compared("one 4 KiB block through a gRPC stub", took[_STUB], _HERE, took[_HERE], "ms"))
    for count in ranks:
        case, alone = f"one 4 KiB block on each of {count} ranks over gRPC", took[_checks(count)]
        note = f"{count} agents and their leader share the cores; as many bare gRPC calls take {alone:.2f} ms"
        result.rows += [
            compared(case, took[_group(count)], _HERE, took[_HERE], "ms", note=note),
            compared(case, took[_group(count)], _checks(count), alone, "ms", note=note),
            limited(f"{case}, beyond the copy", took[_group(count)] - took[_HERE], "ms", _GOAL_MS.get(count), note),
        ]
    result.keep("overhead", dict(samples))
    return result


def _group(count: int) -> str:
    return f"group of {count}"


def _checks(count: int) -> str:
    return f"{count} health checks"
