"""Objects in a real S3 server: what every store does, what only a service can get wrong, and blocks through it."""

import asyncio
import socket
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import AxisOrder, LayoutConfig, LayoutKind, fingerprint
from ayni.blocks.objects import KeyOutcome, ObjectStoreConfig, OutcomeState, PresenceState
from ayni.blocks.sequence_hash import SequenceHash, synthetic
from ayni.errors import AyniError, BadRequest, StorageFailed, Unsupported
from tests.support.careless_s3 import careless_s3
from tests.support.seaweedfs import SeaweedFS, s3
from tests.support.store_conformance import LockConformance, StoreConformance, Stores, fresh, read, view
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import WHOLE
from worker_agent.blocks.objects.claims import Claim
from worker_agent.blocks.objects.keys import Shelf
from worker_agent.blocks.objects.object_format import HEADER_BYTES
from worker_agent.blocks.objects.obstore_store import ObstoreStore
from worker_agent.blocks.objects.opening import open_store
from worker_agent.blocks.objects.store import ObjectStore
from worker_agent.blocks.objects.tier import ObjectTier
from worker_agent.blocks.patterns import RankDistinct, fill

__all__ = ["s3"]  # A fixture, asked for by name.

CONFIG = LayoutConfig(num_blocks=10, num_layers=2, outer_dim=2, page_size=4, inner_dim=64, num_heads=4)
FINGERPRINT = fingerprint(CONFIG, AxisOrder.HND, "model")
NOWHERE = Path("/nonexistent")
"""Root of stores of files; these tests have none."""


@pytest.fixture
def stores(s3: SeaweedFS) -> Stores:
    return ObstoreStore(s3.config()), ObstoreStore(s3.config())


@pytest.fixture
def store(s3: SeaweedFS) -> ObjectStore:
    return open_store(s3.config(), NOWHERE)


class TestS3Store(StoreConformance):
    pass


class TestS3Locks(LockConformance):
    pass


# Opening.


def refused(config: ObjectStoreConfig, error: type[AyniError], why: str) -> AyniError:
    began = time.monotonic()
    with pytest.raises(error, match=why) as caught:
        open_store(config, NOWHERE)
    assert time.monotonic() - began < 15
    return caught.value


def test_wrong_credentials_are_told_at_start(s3: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    error = refused(s3.config(), StorageFailed, "refuses the credentials of this worker's environment")
    assert error.metadata["place"] == f"s3://blocks at {s3.endpoint}"
    assert "SignatureDoesNotMatch" in str(error)
    assert "not-the-secret" not in str(error)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    assert "InvalidAccessKeyId" in str(refused(s3.config(), StorageFailed, "refuses the credentials"))


def test_absent_credentials_are_told_at_start(s3: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    refused(s3.config(), StorageFailed, "set AWS_ACCESS_KEY_ID and what belongs to it")


def test_absent_bucket_is_told_at_start(s3: SeaweedFS) -> None:
    refused(s3.config(bucket="no-such-bucket"), StorageFailed, "there is no bucket no-such-bucket; create it first")


def test_server_that_is_not_there_is_told_at_start(s3: SeaweedFS) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    refused(replace(s3.config(), endpoint=f"http://127.0.0.1:{port}"), StorageFailed, "error sending request")


def test_server_that_never_answers_is_told_at_start(s3: SeaweedFS) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        began = time.monotonic()
        refused(replace(s3.config(timeout_s=0.5), endpoint=endpoint), StorageFailed, "could not store probe")
        assert time.monotonic() - began < 3


def test_bucket_in_the_name_of_an_address_is_refused(s3: SeaweedFS) -> None:
    refused(replace(s3.config(), path_style=False), BadRequest, "set path_style")


@pytest.mark.parametrize(("kind", "name"), [("gcs", "GOOGLE_APPLICATION_CREDENTIALS"), ("azure", "AZURE_STORAGE")])
def test_other_services(kind: str, name: str, s3: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(replace(s3.config(), kind=kind), StorageFailed, f"set {name}")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "account.json")
    refused(replace(s3.config(), kind=kind), Unsupported, f"of kind '{kind}' has no path_style")
    refused(replace(s3.config(), kind=kind, path_style=False, region="x"), Unsupported, "has no region")


@pytest.mark.parametrize(
    ("minds", "why"),
    [
        ([], r"does not create an object only where there is none \(If-None-Match\)"),
        (["If-None-Match"], r"does not replace an object only if it has a given version \(If-Match\)"),
    ],
    ids=["all", "If-Match"],
)
def test_server_that_ignores_conditions_is_refused(s3: SeaweedFS, minds: list[str], why: str) -> None:
    with careless_s3(*minds) as (endpoint, objects):
        refused(replace(s3.config(), endpoint=endpoint), Unsupported, why)
        assert objects == {}, "the probe removes what it stored"


def test_object_keeps_its_bytes_when_its_size_changes_under_a_reader(stores: Stores) -> None:
    name = fresh()
    stores[0].put_if_absent(name, view(b"x" * 100))
    found = stores[0].get(name, memoryview(bytearray(200)))
    assert found
    assert stores[1].put_if_match(name, view(b"y"), found.version)
    assert bytes(found.data) == b"x" * 100
    assert read(stores[0], name) == b"y"


# Blocks.


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, 60))


def soon(seconds: float = 30.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def memory_of(kind: LayoutKind, rank: int) -> HostMemory:
    memory = allocate_host(Geometry(config=CONFIG, kind=kind, axis_order=AxisOrder.HND))
    fill(memory, range(CONFIG.num_blocks), RankDistinct(rank))
    return memory


def content(memory: HostMemory, block: int) -> bytes:
    out = np.empty((1, CONFIG.block_bytes), np.uint8)
    memory.read(as_ids([block]), WHOLE, out)
    return out.tobytes()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(prefix=fresh("/"), fingerprint=FINGERPRINT, rank=0)


@pytest.fixture
def tiers(stores: Stores, shelf: Shelf) -> Iterator[list[ObjectTier]]:
    made = [ObjectTier(stores[i], shelf, CONFIG.block_bytes, f"group {i}") for i in range(2)]
    yield made
    for tier in made:
        tier.close()


KEYS = [bytes(synthetic("s3", number)) for number in range(8)]


def states(outcomes: tuple[KeyOutcome, ...]) -> list[OutcomeState]:
    return [outcome.state for outcome in outcomes]


def test_blocks_go_through_the_service_unchanged(tiers: list[ObjectTier]) -> None:
    source, destination = (
        memory_of(LayoutKind.FULLY_CONTIGUOUS, 0),
        memory_of(LayoutKind.LAYER_SEPARATE_BLOCK_SECOND, 1),
    )
    before = [content(destination, block) for block in range(10)]

    async def test() -> None:
        assert (
            states(await tiers[0].put(source, as_ids(range(1, 7)), KEYS[:6], None, soon())) == [OutcomeState.DONE] * 6
        )
        outcomes = await tiers[1].get(KEYS, destination, as_ids(range(8, 0, -1)), soon())
        assert states(outcomes) == [OutcomeState.DONE] * 6 + [OutcomeState.ABSENT] * 2
        presences = await tiers[1].has(KEYS, soon())
        assert [p.state for p in presences] == [PresenceState.PRESENT] * 6 + [PresenceState.ABSENT] * 2

    run(test())
    after = [content(destination, block) for block in range(10)]
    assert after == [*before[:3], *(content(source, block) for block in range(6, 0, -1)), before[9]]


def test_two_groups_store_each_key_once(tiers: list[ObjectTier]) -> None:
    blocks = as_ids(range(8))

    async def test() -> None:
        source = memory_of(LayoutKind.FULLY_CONTIGUOUS, 0)
        both = await asyncio.gather(*(tier.put(source, blocks, KEYS, 300.0, soon()) for tier in tiers))
        for here, there in zip(*both, strict=True):
            assert [here.state, there.state].count(OutcomeState.DONE) == 1
            lost = there if here.state is OutcomeState.DONE else here
            assert lost.failure is None or lost.failure.reason == "CLAIMED"
        assert {p.state for p in await tiers[0].has(KEYS, soon())} == {PresenceState.PRESENT}

    run(test())


def test_expired_lock_of_a_dead_group_is_taken_over(tiers: list[ObjectTier], stores: Stores, shelf: Shelf) -> None:
    now = time.time()
    dead = Claim(owner="x", instance_id="dead", acquired_at=now - 400, deadline=now - 100, fence=1)
    alive = Claim(owner="y", instance_id="alive", acquired_at=now, deadline=now + 100, fence=1)
    names = [shelf.lock_name(SequenceHash.from_bytes(key)) for key in KEYS[:2]]
    for name, claim in zip(names, (dead, alive), strict=True):
        stores[0].put_if_absent(name, view(claim.encode()))

    async def test() -> None:
        source = memory_of(LayoutKind.FULLY_CONTIGUOUS, 0)
        outcomes = await tiers[0].put(source, as_ids([0, 1]), KEYS[:2], 300.0, soon())
        assert states(outcomes) == [OutcomeState.DONE, OutcomeState.FAILED]
        assert outcomes[1].failure
        assert dict(outcomes[1].failure.metadata)["owner"] == "alive"

    run(test())
    assert read(stores[0], names[0]) is None
    assert read(stores[0], names[1]) == alive.encode()


def test_truncated_foreign_and_damaged_objects_are_misses(tiers: list[ObjectTier], s3: SeaweedFS, shelf: Shelf) -> None:
    source, destination = memory_of(LayoutKind.FULLY_CONTIGUOUS, 0), memory_of(LayoutKind.FULLY_CONTIGUOUS, 1)
    before = [content(destination, block) for block in range(10)]
    names = [shelf.object_name(SequenceHash.from_bytes(key)) for key in KEYS[:5]]
    raw = s3.raw()

    async def test() -> None:
        await tiers[0].put(source, as_ids(range(5)), KEYS[:5], None, soon())
        whole = [obstore.get(raw, name).bytes().to_bytes() for name in names]
        obstore.put(raw, names[0], whole[0][:-10])
        obstore.put(raw, names[1], b"<html>not a block</html>" * 50)
        obstore.put(raw, names[2], whole[3])
        obstore.put(raw, names[3], whole[3][:HEADER_BYTES] + bytes(CONFIG.block_bytes))
        outcomes = await tiers[1].get(KEYS[:5], destination, as_ids(range(5)), soon())
        assert states(outcomes) == [*[OutcomeState.ABSENT] * 4, OutcomeState.DONE]
        flaws = [dict(outcome.failure.metadata)["detail"] for outcome in outcomes if outcome.failure]
        assert flaws == ["short", "magic", "key", "checksum"]

    run(test())
    assert [content(destination, block) for block in range(10)] == [*before[:4], content(source, 4), *before[5:]]
