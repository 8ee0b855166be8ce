"""Copies between layouts of one worker, against one numpy copy of the same bytes."""

from pathlib import Path

import numpy as np

from ayni.blocks.layouts import AxisOrder, LayoutKind, LocalLayout, Tier
from tests.bench import blocks_agents as agents
from tests.bench.blocks_agents import HOST, KIB
from tests.bench.blocks_measure import CaseResult, Contender, Scale, blocking, compared, measure
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.worker import LocalBlockWorker

COUNT, BLOCK_BYTES = 16384, 64 * KIB
AT_ONCE, BY_BLOCK = "numpy copy", "numpy copy by block"
OTHER = LocalLayout(tier=Tier.HOST, resource_id=1)
_PIECES = "large copies go past the cache where the C library thinks so, pieces of this size never do"
_FC = LayoutKind.FULLY_CONTIGUOUS
_FIRST, _SECOND = LayoutKind.LAYER_SEPARATE_BLOCK_FIRST, LayoutKind.LAYER_SEPARATE_BLOCK_SECOND
_KINDS: dict[str, tuple[LayoutKind, AxisOrder, float | None, str]] = {
    "FC to FC": (_FC, AxisOrder.NHD, 0.80, "each block is copied in one piece"),
    "FC to LS, blocks first": (_FIRST, AxisOrder.NHD, 0.80, "each block is copied in 2 pieces of 32 KiB"),
    "FC to LS, outer parts first": (_SECOND, AxisOrder.NHD, 0.80, "each block is copied in 4 pieces of 16 KiB"),
    "FC NHD to FC HND": (_FC, AxisOrder.HND, None, "each block is copied in 256 pieces of 256 bytes"),
}


async def local(folder: Path, scale: Scale) -> CaseResult:
    result = CaseResult()
    count = scale.count(COUNT)
    async with agents.local_worker(folder) as worker:
        await worker.allocate(HOST, agents.geometry(count, BLOCK_BYTES))
        data = agents.pattern(count, BLOCK_BYTES)
        await worker.write(HOST, np.arange(count), data)
        copies = copying(data)
        for text, (kind, order, goal, note) in _KINDS.items():
            geometry = agents.geometry(count, BLOCK_BYTES, kind, order)
            await worker.allocate(OTHER, geometry)
            contenders = [_Move(worker, data, geometry).contender(), *copies]
            samples = await measure(contenders, scale.repeat(9))
            await worker.release(OTHER)
            case = f"local {text}, {count:,} x 64 KiB"
            ours = samples["ours"].rate
            result.rows += [
                compared(case, ours, AT_ONCE, samples[AT_ONCE].rate, "GB/s", goal, f"{note}; {_PIECES}"),
                compared(case, ours, BY_BLOCK, samples[BY_BLOCK].rate, "GB/s", note=note),
            ]
            result.keep(case, samples)
    return result


class _Move:
    def __init__(self, worker: LocalBlockWorker, data: Bytes, destination: Geometry) -> None:
        self._worker, self._data, self._expected = worker, data, _in_order(data, destination)
        self._from, self._into = (agents.shuffled(len(data), seed) for seed in (1, 2))

    def contender(self) -> Contender:
        return Contender(
            name="ours", num_bytes=self._data.nbytes, prepare=self._roll, work=self._copy, check=self._check
        )

    async def _roll(self) -> None:
        self._into = np.roll(self._into, 1)

    async def _copy(self) -> None:
        await self._worker.execute_local_transfer(HOST, OTHER, self._from, self._into)

    async def _check(self) -> None:
        await agents.check(self._worker, OTHER, self._into, self._expected, self._from)


def _in_order(data: Bytes, geometry: Geometry) -> Bytes:
    """NHD blocks in the order of a layout."""
    if geometry.axis_order is AxisOrder.NHD:
        return data
    config = geometry.config
    shape = (-1, config.num_layers * config.outer_dim, config.page_size, config.num_heads, config.head_dim * 2)
    return np.ascontiguousarray(data.reshape(shape).swapaxes(2, 3)).reshape(len(data), -1)


def copying(data: Bytes) -> list[Contender]:
    """numpy's copy of all bytes at once, and block by block to shuffled places; one thread."""
    out = np.zeros_like(data)
    source, destination = (agents.shuffled(len(data), seed).tolist() for seed in (5, 6))

    def at_once() -> None:
        np.copyto(out, data)

    def by_block() -> None:
        for one, other in zip(source, destination, strict=True):
            out[other] = data[one]

    works = {AT_ONCE: at_once, BY_BLOCK: by_block}
    return [Contender(name=name, num_bytes=data.nbytes, work=blocking(work)) for name, work in works.items()]
