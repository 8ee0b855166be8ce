"""Blocks between two processes on this host, by each engine, against copies in one process and a bare TCP stream.

The copy is numpy's, on one thread, of the same bytes: block by block to shuffled places where blocks are 64 KiB, all at
once where they are 1 MiB.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.bench.blocks_agents import KIB, MIB, variables
from tests.bench.blocks_bare import bare
from tests.bench.blocks_local import copying
from tests.bench.blocks_measure import (
    CPU_UNIT,
    CaseResult,
    Contender,
    Samples,
    Scale,
    compared,
    limited,
    measure,
)
from tests.bench.blocks_stage import Certificates, stage
from tests.bench.blocks_tcp import stream
from worker_agent.blocks.memory import Bytes

COUNT = 1024
SIZES = (64 * KIB, MIB)
CPU_GOAL = 0.60
COPY, TCP, TCP_BOTH = "numpy copy", "tcp", "tcp both ways"
_FRAMES = "one copy into a frame, one out of it, and both ends and the kernel share the cores"
_MAPPED = "the peer's memory is mapped in 4 KiB pages; the plain arrays may have huge ones"

Goals = Mapping[str, float | None]
"""By peer."""


async def grpc(folder: Path, scale: Scale) -> CaseResult:
    result = CaseResult()
    for block_bytes in SIZES:
        count = scale.count(COUNT)
        place = folder / str(block_bytes)
        async with stage(place, count, block_bytes, ("grpc",)) as two, bare(place, two.data) as floor:
            with stream(place, two.data.nbytes) as tcp:
                contenders = [
                    two.pulling("grpc"),
                    two.pushing("grpc"),
                    two.both_ways("grpc"),
                    floor.pull,
                    floor.push,
                    _copying(two.data),
                    tcp.one_way,
                    tcp.both_ways,
                ]
                samples = await measure(contenders, repeats(scale, block_bytes))
        size = size_text(count, block_bytes)
        result.rows += _grpc_rows(size, samples)
        result.keep(f"grpc {size}", samples)
    return result


def _grpc_rows(size: str, samples: Mapping[str, Samples]) -> list[dict]:
    pull, push, both = (samples[f"grpc {way}"] for way in ("pull", "push", "both ways"))
    bare_pull, bare_push = samples["bare grpc pull"], samples["bare grpc push"]
    notes = [
        f"{_FRAMES}; gRPC alone reaches {each.rate / samples[TCP].rate:.2f} of the tcp stream"
        for each in (bare_pull, bare_push)
    ]
    cpu_note = f"gRPC alone takes {bare_pull.cpu_per_gb:.2f}, a bare tcp stream {samples[TCP].cpu_per_gb:.2f}"
    return [
        *against(f"grpc pull, {size}", pull, samples, {TCP: 0.60, COPY: None, "bare grpc pull": None}, notes[0]),
        *against(f"grpc push, {size}", push, samples, {TCP: 0.55, "bare grpc push": None}, notes[1]),
        *against(f"grpc both ways, sum, {size}", both, samples, {TCP: 0.65, TCP_BOTH: 0.45}, notes[0]),
        limited(f"grpc pull, {size}", pull.cpu_per_gb, CPU_UNIT, CPU_GOAL, cpu_note),
        limited(f"grpc push, {size}", push.cpu_per_gb, CPU_UNIT),
    ]


async def grpc_tls(folder: Path, scale: Scale) -> CaseResult:
    result = CaseResult()
    tls = Certificates.make(folder / "certificates")
    for block_bytes in SIZES:
        count = scale.count(COUNT)
        place = folder / str(block_bytes)
        async with stage(place, count, block_bytes, ("grpc",), tls) as two:
            with stream(place, two.data.nbytes) as tcp:
                contenders = [two.pulling("grpc"), tcp.one_way]
                samples = await measure(contenders, repeats(scale, block_bytes))
        size = size_text(count, block_bytes)
        note = f"{_FRAMES}; every byte is encrypted and decrypted as well"
        result.rows += against(f"grpc pull with TLS, {size}", samples["grpc pull"], samples, {TCP: 0.45}, note)
        result.rows.append(limited(f"grpc pull with TLS, {size}", samples["grpc pull"].cpu_per_gb, CPU_UNIT))
        result.keep(f"grpc with TLS {size}", samples)
    return result


async def shm(folder: Path, scale: Scale) -> CaseResult:
    goals = {64 * KIB: {COPY: 0.75, TCP: None}, MIB: {COPY: 0.85, TCP: None}}
    return await _one_engine(folder, scale, "shm", goals, _MAPPED)


async def nixl(folder: Path, scale: Scale) -> CaseResult:
    goals = {64 * KIB: {COPY: 0.30, TCP: None}, MIB: {COPY: 0.45, TCP: None}}
    return await _nixl(folder, scale, "nixl", goals, {})


async def nixl_tcp(folder: Path, scale: Scale) -> CaseResult:
    goals = {64 * KIB: {TCP: 0.70, COPY: None}, MIB: {TCP: 0.90, COPY: None}}
    return await _nixl(folder, scale, "nixl over TCP", goals, {"UCX_TLS": "tcp"})


async def _nixl(
    folder: Path, scale: Scale, text: str, goals: Mapping[int, Goals], settings: Mapping[str, str]
) -> CaseResult:
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        if importlib.util.find_spec(package):
            break
    else:
        result = CaseResult()
        result.skip(text, "nixl is not installed; the extras nixl-cu12 and nixl-cu13 bring it")
        return result
    with variables(**settings):
        return await _one_engine(folder, scale, "nixl", goals, text=text)


async def _one_engine(
    folder: Path, scale: Scale, engine: str, goals: Mapping[int, Goals], note: str = "", text: str = ""
) -> CaseResult:
    """Pulls through one engine."""
    result = CaseResult()
    for block_bytes in SIZES:
        count = scale.count(COUNT)
        place = folder / str(block_bytes)
        async with stage(place, count, block_bytes, (engine, "grpc")) as two:
            with stream(place, two.data.nbytes) as tcp:
                contenders = [two.pulling(engine), _copying(two.data), tcp.one_way]
                samples = await measure(contenders, repeats(scale, block_bytes))
        case = f"{text or engine} pull, {size_text(count, block_bytes)}"
        result.rows += against(case, samples[f"{engine} pull"], samples, goals[block_bytes], note)
        result.rows.append(limited(case, samples[f"{engine} pull"].cpu_per_gb, CPU_UNIT))
        result.keep(case, samples)
    return result


def against(case: str, ours: Samples, samples: Mapping[str, Samples], goals: Goals, note: str = "") -> list[dict]:
    """A row for each peer."""
    return [compared(case, ours.rate, peer, samples[peer].rate, "GB/s", goal, note) for peer, goal in goals.items()]


def _copying(data: Bytes) -> Contender:
    """A copy of the same bytes in this process."""
    at_once, by_block = copying(data)
    return replace(by_block if data.shape[1] < MIB else at_once, name=COPY)


def size_text(count: int, block_bytes: int) -> str:
    return f"{count:,} x {'1 MiB' if block_bytes == MIB else f'{block_bytes // KIB} KiB'}"


def repeats(scale: Scale, block_bytes: int) -> int:
    return scale.repeat(15 if block_bytes < MIB else 7)
