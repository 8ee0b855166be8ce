"""What the conformance suite of block workers is given, and how it knows what every block must hold."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Optional, TypeVar

import numpy as np

from ayni.blocks.layouts import LayoutConfig, LocalLayout, Tier
from ayni.blocks.metadata import GroupConfig
from ayni.blocks.sequence_hash import synthetic
from ayni.blocks.worker import BlockWorker

T = TypeVar("T")

SOON_S = 15.0
"""Longest wait for one thing; a hang then fails where it hangs."""


@dataclass(frozen=True, kw_only=True)
class BlockGroup:
    """A worker, or a group of them, that has been configured."""

    worker: BlockWorker
    num_ranks: int
    config: GroupConfig
    """In force; its epoch is at least 1."""
    shape: LayoutConfig
    """Of one rank's blocks; every tier has `num_blocks`, at least 16, of at least 2 layers. Not UNIVERSAL."""
    tiers: tuple[Tier, ...]
    """Tiers that have a layout; DEVICE and HOST at least."""
    fill: Callable[[int, Tier, int, bytes], Awaitable[None]]
    """Writes a block: rank, tier, block, bytes."""
    read: Callable[[int, Tier, int], Awaitable[bytes]]
    """Reads a block: rank, tier, block."""
    stalled: Callable[[], AbstractContextManager[None]]
    """While it is open, no copy of any rank ends."""
    has_objects: bool = True
    """Whether there is an object tier, empty at first, which the peer has as well."""
    peer: Optional["BlockGroup"] = None
    """Another group with as many ranks and the same shape, not connected yet."""

    @property
    def far(self) -> "BlockGroup":
        """The peer."""
        assert self.peer is not None
        return self.peer

    @property
    def places(self) -> list[LocalLayout]:
        """Names of the layouts."""
        return [LocalLayout(tier=tier) for tier in self.tiers]


OpenGroup = Callable[[], AbstractAsyncContextManager[BlockGroup]]


def pattern(label: int, rank: int, tier: Tier, block: int, num_bytes: int) -> bytes:
    """Returns bytes that no other block has, nor another layer or outer part of this one."""
    return np.random.default_rng([label, rank, list(Tier).index(tier), block]).bytes(num_bytes)


class Contents:
    """What every block of a group must hold. Each block begins with bytes of its own, so that each is a guard."""

    def __init__(self, group: BlockGroup, label: int) -> None:
        self._group = group
        self._label = label
        self._bytes: dict[tuple[int, Tier, int], bytes] = {}

    async def fill(self, fill: Callable[[int, Tier, int], bytes] | None = None) -> "Contents":
        """Fills every block, each with its own bytes unless something else is given."""
        group = self._group
        for rank, tier, block in self._all():
            data = fill and fill(rank, tier, block)
            self._bytes[rank, tier, block] = data or pattern(self._label, rank, tier, block, group.shape.block_bytes)
            await group.fill(rank, tier, block, self._bytes[rank, tier, block])
        return self

    def copied(
        self,
        source: "Contents",
        tiers: tuple[Tier, Tier],
        source_blocks: Iterable[int],
        destination_blocks: Iterable[int],
        layers: tuple[int, int] | None = None,
    ) -> None:
        """Notes that every rank has copied blocks."""
        shape = self._group.shape
        layer_bytes = shape.block_bytes // shape.num_layers
        first, stop = (layer * layer_bytes for layer in layers or (0, shape.num_layers))
        for one, other in zip(source_blocks, destination_blocks, strict=True):
            for rank in range(self._group.num_ranks):
                old, new = self._bytes[rank, tiers[1], other], source._bytes[rank, tiers[0], one]
                self._bytes[rank, tiers[1], other] = old[:first] + new[first:stop] + old[stop:]

    def undefined(self, tier: Tier, blocks: Iterable[int]) -> None:
        """Notes that blocks may hold anything."""
        for block in blocks:
            for rank in range(self._group.num_ranks):
                del self._bytes[rank, tier, block]

    async def check(self) -> None:
        """Compares every block."""
        wrong = [
            f"rank {rank}, {tier.value}, block {block}"
            for (rank, tier, block), data in self._bytes.items()
            if await self._group.read(rank, tier, block) != data
        ]
        assert not wrong, f"these blocks do not hold what they should: {'; '.join(wrong)}"

    def _all(self) -> list[tuple[int, Tier, int]]:
        group = self._group
        return [
            (rank, tier, block)
            for rank in range(group.num_ranks)
            for tier in group.tiers
            for block in range(group.shape.num_blocks)
        ]


async def soon(awaitable: Awaitable[T], what: str, within_s: float = SOON_S) -> T:
    """Waits for something, so long at most; whoever hangs is named."""
    try:
        async with asyncio.timeout(within_s):
            return await awaitable
    except TimeoutError:
        raise AssertionError(f"{what} has not ended within {within_s:g} s") from None


def keys(*numbers: int, name: str = "conformance") -> list[bytes]:
    """Returns keys of objects."""
    return [bytes(synthetic(name, number)) for number in numbers]
