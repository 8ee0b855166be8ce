"""Small object tiers over a store of files, and memory whose bytes nobody else has."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import AxisOrder, LayoutConfig, LayoutKind, fingerprint
from ayni.blocks.objects import KeyOutcome, OutcomeState, Presence, PresenceState
from ayni.blocks.sequence_hash import SequenceHash, synthetic
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import WHOLE
from worker_agent.blocks.objects.claims import Claim, decode
from worker_agent.blocks.objects.file_store import FileStore
from worker_agent.blocks.objects.keys import Shelf
from worker_agent.blocks.objects.tier import ObjectTier
from worker_agent.blocks.patterns import RankDistinct, fill

LIMIT_S = 30.0
CONFIG = LayoutConfig(num_blocks=12, num_layers=3, outer_dim=2, page_size=4, inner_dim=16, num_heads=4)
BLOCK_BYTES = CONFIG.block_bytes
DONE, ALREADY, ABSENT, FAILED = OutcomeState
PRESENT, NOT_THERE, UNKNOWN = PresenceState


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, LIMIT_S))


def memory_of(
    kind: LayoutKind = LayoutKind.FULLY_CONTIGUOUS,
    order: AxisOrder = AxisOrder.NHD,
    config: LayoutConfig = CONFIG,
    rank: int = 0,
) -> HostMemory:
    """A layout whose bytes nobody else has; of the other rank than what is stored, unless said."""
    memory = allocate_host(Geometry(config=config, kind=kind, axis_order=order))
    fill(memory, range(config.num_blocks), RankDistinct(rank))
    return memory


def content(memory: HostMemory, block: int) -> bytes:
    out = np.empty((1, memory.geometry.config.block_bytes), np.uint8)
    memory.read(as_ids([block]), WHOLE, out)
    return out.tobytes()


def contents(memory: HostMemory) -> list[bytes]:
    return [content(memory, block) for block in range(memory.geometry.config.num_blocks)]


def keys_of(count: int, name: str = "k") -> list[bytes]:
    return [bytes(synthetic(name, number)) for number in range(count)]


def shelf_of(order: AxisOrder = AxisOrder.NHD, config: LayoutConfig = CONFIG, rank: int = 0) -> Shelf:
    return Shelf(prefix="t/", fingerprint=fingerprint(config, order, "model"), rank=rank)


def soon(seconds: float = 20.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def states(outcomes: Sequence[KeyOutcome] | Sequence[Presence]) -> list[Any]:
    return [outcome.state for outcome in outcomes]


def reasons(outcomes: Sequence[KeyOutcome] | Sequence[Presence]) -> list[str]:
    return [outcome.failure.reason if outcome.failure else "" for outcome in outcomes]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    opened = FileStore(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def make(store: FileStore) -> Iterator[Callable[..., ObjectTier]]:
    made: list[ObjectTier] = []

    def tier(through: Any = None, shelf: Shelf | None = None, instance_id: str = "group a", **more: Any) -> ObjectTier:
        made.append(ObjectTier(through or store, shelf or shelf_of(), BLOCK_BYTES, instance_id, **more))
        return made[-1]

    yield tier
    for each in made:
        each.close()


@pytest.fixture
def tier(make: Callable[..., ObjectTier]) -> ObjectTier:
    return make()


def path_of(store: FileStore, name: str) -> Path:
    return Path(store._path(name))


def object_path(store: FileStore, key: bytes, shelf: Shelf | None = None) -> Path:
    return path_of(store, (shelf or shelf_of()).object_name(SequenceHash.from_bytes(key)))


def lock_of(store: FileStore, key: bytes) -> Claim | None:
    path = path_of(store, shelf_of().lock_name(SequenceHash.from_bytes(key)))
    return decode(path.read_bytes()) if path.exists() else None


def put_lock(store: FileStore, key: bytes, acquired_at: float, owner: str = "theirs", instance: str = "b") -> Claim:
    claim = Claim(owner=owner, instance_id=instance, acquired_at=acquired_at, deadline=acquired_at + 300, fence=1)
    store.put_if_absent(shelf_of().lock_name(SequenceHash.from_bytes(key)), memoryview(claim.encode()))
    return claim
