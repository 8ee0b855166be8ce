"""Two connected groups of ranks that move bytes in this process."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from ayni.blocks.layouts import LocalLayout
from ayni.blocks.metadata import ParallelismMode
from ayni.blocks.transfers import (
    TransferResult,
)
from ayni.errors import StorageFailed
from coordinator_service.leader import GroupSettings, SpmdParallelWorkers
from tests.support.fake_ranks import HOST, Fabric, FakeRank, make_group

A, B = "a0000000-1111-4222-8333-444455556666", "b0000000-1111-4222-8333-444455556666"
FULL = StorageFailed("the disk is full", place="", detail="")
REPLICATED = ParallelismMode.REPLICATED_DATA


def run(test: Coroutine[Any, Any, Any], limit_s: float = 15) -> Any:
    """No test hangs: what waits for longer fails where it waits."""
    return asyncio.run(asyncio.wait_for(test, limit_s))


def leader(ranks: list[FakeRank], **settings) -> SpmdParallelWorkers:
    return SpmdParallelWorkers(ranks, settings=GroupSettings(**settings))


async def joined(here: int, there: int, total_heads: int = 16, **arguments):
    """Returns two connected groups: ranks and leader of each; this one reads the other."""
    fabric = Fabric()
    ours = make_group(fabric, A, here, total_heads, **arguments)
    theirs = make_group(fabric, B, there, total_heads, **arguments)
    group, other = leader(ours), leader(theirs)
    await group.connect_remote(B, await other.export_metadata())
    return ours, theirs, group, other


def whole(ranks: list[FakeRank], place: LocalLayout = HOST) -> np.ndarray:
    """Returns the undivided blocks of a group: heads of all ranks side by side."""
    return np.concatenate([rank.array(place) for rank in ranks], axis=4)


def copies(ranks: list[FakeRank], place: LocalLayout = HOST) -> list[np.ndarray]:
    return [rank.array(place).copy() for rank in ranks]


def check_moved(now: np.ndarray, before: np.ndarray, source: np.ndarray, sources: list[int], ids: list[int]) -> None:
    """Destination blocks are the source blocks; all other blocks are as before."""
    assert (now[ids] == source[sources]).all()
    others = [block for block in range(len(now)) if block not in ids]
    assert (now[others] == before[others]).all()


async def ended(note: Any) -> TransferResult:
    return await note
