"""Blocks as objects: every byte where it belongs, every key with its own outcome."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import AxisOrder, LayoutConfig, LayoutKind
from ayni.blocks.sequence_hash import SequenceHash, hash_tokens
from ayni.errors import BadRequest, IncompatibleLayout
from tests.support.object_tiers import (
    ABSENT,
    ALREADY,
    BLOCK_BYTES,
    CONFIG,
    DONE,
    FAILED,
    NOT_THERE,
    PRESENT,
    UNKNOWN,
    content,
    contents,
    keys_of,
    lock_of,
    make,
    memory_of,
    object_path,
    path_of,
    put_lock,
    reasons,
    run,
    shelf_of,
    soon,
    states,
    store,
    tier,
)
from worker_agent.blocks.objects.file_store import FileStore
from worker_agent.blocks.objects.object_format import HEADER_BYTES
from worker_agent.blocks.objects.tier import ObjectTier
from worker_agent.blocks.patterns import checksums

__all__ = ["make", "store", "tier"]  # Fixtures, asked for by name.


KINDS_AND_ORDERS = [
    *((kind, other, order) for kind in LayoutKind for other in LayoutKind for order in list(AxisOrder)[:3]),
    (LayoutKind.FULLY_CONTIGUOUS, LayoutKind.FULLY_CONTIGUOUS, AxisOrder.UNIVERSAL),
]


@pytest.mark.parametrize(("kind", "other", "order"), KINDS_AND_ORDERS)
def test_layouts_of_all_kinds_exchange_objects(
    make: Callable[..., ObjectTier], kind: LayoutKind, other: LayoutKind, order: AxisOrder
) -> None:
    source, destination = memory_of(kind, order), memory_of(other, order, rank=1)
    before = contents(destination)
    tier = make(shelf=shelf_of(order))
    to = {0: 7, 5: 1, 11: 8}

    async def test() -> None:
        keys = keys_of(3)
        assert states(await tier.put(source, as_ids(to.keys()), keys, None, soon())) == [DONE] * 3
        outcomes = await tier.get(keys, destination, as_ids(to.values()), soon())
        assert [(o.state, o.size_bytes, o.failure) for o in outcomes] == [(DONE, BLOCK_BYTES, None)] * 3

    run(test())
    expected = list(before)
    for here, there in to.items():
        expected[there] = content(source, here)
        assert checksums(destination, [there]) == checksums(source, [here])
    assert contents(destination) == expected, "guard blocks are as they were"


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 63, 64, 65, 1023, 1025])
def test_batches_of_any_size_come_back_in_order(make: Callable[..., ObjectTier], count: int) -> None:
    config = LayoutConfig(num_blocks=count + 2, num_layers=1, outer_dim=1, page_size=1, inner_dim=8, num_heads=1)
    source, destination = memory_of(config=config), memory_of(config=config, rank=1)
    before = contents(destination)
    shelf = shelf_of(config=config)
    # The tier of the fixture has larger blocks.
    tier = ObjectTier(make()._store, shelf, config.block_bytes, "group a")
    forward, keys = np.arange(1, count + 1), keys_of(count)

    async def test() -> None:
        assert states(await tier.put(source, forward, keys, None, soon())) == [DONE] * count
        assert states(await tier.get(keys, destination, forward[::-1].copy(), soon())) == [DONE] * count
        assert states(await tier.has(keys, soon())) == [PRESENT] * count

    run(test())
    tier.close()
    assert contents(destination) == [before[0], *contents(source)[1:-1][::-1], before[-1]]


def test_outcomes_are_by_key_in_input_order(tier: ObjectTier) -> None:
    source, destination = memory_of(), memory_of(rank=1)
    before = contents(destination)
    keys = keys_of(6)

    async def test() -> None:
        await tier.put(source, as_ids([1, 3, 5]), keys[1::2], None, soon())
        presences = await tier.has(keys, soon())
        assert states(presences) == [NOT_THERE, PRESENT] * 3
        assert [p.size_bytes for p in presences] == [0, BLOCK_BYTES] * 3
        assert {p.failure for p in presences} == {None}
        outcomes = await tier.get(keys, destination, as_ids(range(6)), soon())
        assert states(outcomes) == [ABSENT, DONE] * 3
        assert {o.failure for o in outcomes} == {None}

    run(test())
    assert contents(destination)[:6] == [(before[i], content(source, i))[i % 2] for i in range(6)]
    assert contents(destination)[6:] == before[6:]


def test_a_key_may_be_asked_for_and_loaded_twice(tier: ObjectTier) -> None:
    source, destination = memory_of(), memory_of(rank=1)
    (key,) = keys_of(1)

    async def test() -> None:
        await tier.put(source, as_ids([4]), [key], None, soon())
        assert states(await tier.has([key, key], soon())) == [PRESENT, PRESENT]
        assert states(await tier.get([key, key], destination, as_ids([2, 9]), soon())) == [DONE, DONE]

    run(test())
    assert content(destination, 2) == content(destination, 9) == content(source, 4)


def test_second_put_leaves_the_first_object(tier: ObjectTier) -> None:
    source, destination = memory_of(), memory_of(rank=1)
    (key,) = keys_of(1)

    async def test() -> None:
        first = await tier.put(source, as_ids([4]), [key], None, soon())
        second = await tier.put(source, as_ids([5]), [key], None, soon())
        assert (states(first), states(second)) == ([DONE], [ALREADY])
        assert second[0].is_success
        await tier.get([key], destination, as_ids([0]), soon())

    run(test())
    assert content(destination, 0) == content(source, 4)


def test_removed_objects_are_gone_with_their_marks_and_can_be_stored_again(tier: ObjectTier, store: FileStore) -> None:
    keys = keys_of(3)

    async def test() -> None:
        await tier.put(memory_of(), as_ids([0, 1]), keys[:2], 300.0, soon())
        path_of(store, shelf_of().object_name(SequenceHash.from_bytes(keys[1]))).write_bytes(b"cut short")
        assert states(await tier.remove(keys, soon())) == [DONE] * 3
        assert states(await tier.has(keys, soon())) == [NOT_THERE] * 3
        # A mark without an object would be taken for one by who puts with claims.
        assert states(await tier.put(memory_of(), as_ids([0, 1]), keys[:2], 300.0, soon())) == [DONE, DONE]

    run(test())


def test_ranks_and_layouts_do_not_see_each_other_s_objects(make: Callable[..., ObjectTier]) -> None:
    source, keys = memory_of(), keys_of(2)
    others = [
        make(shelf=shelf_of(rank=1)),
        make(shelf=shelf_of(AxisOrder.HND)),
        make(shelf=replace(shelf_of(), prefix="")),
    ]

    async def test() -> None:
        await make().put(source, as_ids([0, 1]), keys, None, soon())
        for other in others:
            assert states(await other.has(keys, soon())) == [NOT_THERE] * 2
            assert states(await other.get(keys, memory_of(rank=1), as_ids([0, 1]), soon())) == [ABSENT] * 2

    run(test())


def damaged(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("spoil", "flaw"),
    [
        (lambda data: data[:-1], "short"),
        (lambda data: data[: HEADER_BYTES - 1], "short"),
        (lambda data: b"", "short"),
        (lambda data: data + b"x", "long"),
        (lambda data: b"x" * len(data), "magic"),
        (lambda data: damaged(data, 8), "version"),
        (lambda data: damaged(data, 12), "rank"),
        (lambda data: damaged(data, 24), "fingerprint"),
        (lambda data: damaged(data, 60), "key"),
        (lambda data: damaged(data, len(data) - 1), "checksum"),
        (lambda data: damaged(data, HEADER_BYTES), "checksum"),
        (lambda data: bytes(len(data)), "checksum"),
    ],
)
def test_object_that_is_not_whole_counts_as_absent_and_says_why(
    tier: ObjectTier, store: FileStore, spoil: Callable[[bytes], bytes], flaw: str
) -> None:
    source, destination = memory_of(), memory_of(rank=1)
    before = contents(destination)
    keys = keys_of(3)

    async def test() -> None:
        await tier.put(source, as_ids([0, 1, 2]), keys, None, soon())
        path = object_path(store, keys[1])
        path.write_bytes(spoil(path.read_bytes()))
        outcomes = await tier.get(keys, destination, as_ids([5, 6, 7]), soon())
        assert states(outcomes) == [DONE, ABSENT, DONE]
        failure = outcomes[1].failure
        assert failure
        assert failure.reason == "UNKNOWN_OBJECT"
        assert dict(failure.metadata)["detail"] == flaw
        presence = (await tier.has(keys, soon()))[1]
        assert (presence.state, presence.failure) == (NOT_THERE, failure)

    run(test())
    expected = [*before[:5], content(source, 0), before[6], content(source, 2), *before[8:]]
    assert contents(destination) == expected


def test_object_that_was_cut_short_is_stored_again(tier: ObjectTier, store: FileStore) -> None:
    source, destination = memory_of(), memory_of(rank=1)
    (key,) = keys_of(1)

    async def test() -> None:
        await tier.put(source, as_ids([3]), [key], None, soon())
        object_path(store, key).write_bytes(b"")
        assert states(await tier.put(source, as_ids([3]), [key], None, soon())) == [DONE]
        assert states(await tier.get([key], destination, as_ids([0]), soon())) == [DONE]

    run(test())
    assert content(destination, 0) == content(source, 3)


def test_object_that_was_found_damaged_is_stored_again(tier: ObjectTier, store: FileStore) -> None:
    memory, destination, [key] = memory_of(), memory_of(rank=1), keys_of(1)

    async def test() -> None:
        await tier.put(memory, as_ids([3]), [key], None, soon())
        path = object_path(store, key)
        data = path.read_bytes()
        path.write_bytes(damaged(data, len(data) - 1))
        assert states(await tier.has([key], soon())) == [PRESENT]
        assert states(await tier.get([key], destination, as_ids([5]), soon())) == [ABSENT]
        assert states(await tier.has([key], soon())) == [NOT_THERE]
        assert states(await tier.put(memory, as_ids([3]), [key], None, soon())) == [DONE]
        assert states(await tier.has([key], soon())) == [PRESENT]
        assert states(await tier.get([key], destination, as_ids([5]), soon())) == [DONE]
        assert content(destination, 5) == content(memory, 3)

    run(test())


def test_object_of_zeros_is_stored_again_once_it_was_read(tier: ObjectTier, store: FileStore) -> None:
    """A loss of power leaves files of the right size without their bytes."""
    memory, destination, [key] = memory_of(), memory_of(rank=1), keys_of(1)

    async def test() -> None:
        await tier.put(memory, as_ids([3]), [key], None, soon())
        object_path(store, key).write_bytes(bytes(HEADER_BYTES + BLOCK_BYTES))
        assert states(await tier.get([key], destination, as_ids([5]), soon())) == [ABSENT]
        assert states(await tier.put(memory, as_ids([3]), [key], None, soon())) == [DONE]
        assert states(await tier.get([key], destination, as_ids([5]), soon())) == [DONE]

    run(test())
    assert content(destination, 5) == content(memory, 3)


@pytest.mark.parametrize("validity", [None, 300.0], ids=["plain", "claims"])
@pytest.mark.parametrize(
    ("spoil", "flaw", "advice"),
    [
        (lambda data: b"x" * len(data), "magic", "delete it or use another prefix"),
        (lambda data: b"x" * 5, "magic", "delete it or use another prefix"),
        (lambda data: data + b"x", "long", "delete it"),
        (lambda data: damaged(data, 8), "version", "delete it or use another prefix"),
        (lambda data: damaged(data, 12), "rank", "delete it"),
        (lambda data: damaged(data, 24), "fingerprint", "delete it"),
        (lambda data: damaged(data, 60), "key", "delete it"),
    ],
)
def test_put_does_not_replace_what_is_somebody_else_s_and_does_not_call_it_stored(
    tier: ObjectTier,
    store: FileStore,
    spoil: Callable[[bytes], bytes],
    flaw: str,
    advice: str,
    validity: float | None,
) -> None:
    memory, [key] = memory_of(), keys_of(1)
    path = object_path(store, key)

    async def test() -> None:
        await tier.put(memory, as_ids([3]), [key], None, soon())
        path.write_bytes(spoil(path.read_bytes()))
        before = path.read_bytes()
        await tier.get([key], memory_of(rank=1), as_ids([5]), soon())
        for _ in range(2):
            (outcome,) = await tier.put(memory, as_ids([3]), [key], validity, soon())
            assert (outcome.state, reasons([outcome])) == (FAILED, ["UNKNOWN_OBJECT"])
            assert outcome.failure
            assert dict(outcome.failure.metadata)["detail"] == flaw
            assert advice in outcome.failure.message
            assert shelf_of().object_name(SequenceHash.from_bytes(key)) in outcome.failure.message
        assert path.read_bytes() == before
        assert not path_of(store, shelf_of().meta_name(SequenceHash.from_bytes(key))).exists(), "nothing whole is there"
        path.unlink()
        assert states(await tier.put(memory, as_ids([3]), [key], validity, soon())) == [DONE]

    run(test())


def test_object_that_another_process_stored_again_is_present_for_a_put(
    make: Callable[..., ObjectTier], store: FileStore
) -> None:
    memory, [key], here, there = memory_of(), keys_of(1), make(), make()

    async def test() -> None:
        await here.put(memory, as_ids([3]), [key], None, soon())
        path = object_path(store, key)
        path.write_bytes(damaged(path.read_bytes(), HEADER_BYTES))
        for each in (here, there):
            assert states(await each.get([key], memory_of(rank=1), as_ids([5]), soon())) == [ABSENT]
        assert states(await there.put(memory, as_ids([4]), [key], None, soon())) == [DONE]
        assert states(await here.put(memory, as_ids([3]), [key], None, soon())) == [ALREADY]
        assert states(await here.has([key], soon())) == [PRESENT]
        destination = memory_of(rank=1)
        await here.get([key], destination, as_ids([5]), soon())
        assert content(destination, 5) == content(memory, 4)

    run(test())


@pytest.mark.parametrize("validity", [float("inf"), float("nan"), 0.0, -1.0, 1e12])
def test_claims_that_never_begin_or_end_are_refused(tier: ObjectTier, validity: float) -> None:
    async def test() -> None:
        with pytest.raises(BadRequest, match="a claim can't hold for"):
            tier.put(memory_of(), as_ids([0]), keys_of(1), validity, soon())

    run(test())


def test_object_of_another_key_under_this_name_is_not_loaded(tier: ObjectTier, store: FileStore) -> None:
    one, other = keys_of(2)

    async def test() -> None:
        await tier.put(memory_of(), as_ids([0]), [one], None, soon())
        path = object_path(store, other)
        path.parent.mkdir(parents=True, exist_ok=True)
        object_path(store, one).rename(path)
        outcomes = await tier.get([other], memory_of(rank=1), as_ids([0]), soon())
        assert outcomes[0].failure
        assert dict(outcomes[0].failure.metadata)["detail"] == "key"

    run(test())


def test_what_is_no_key_fails_by_itself(tier: ObjectTier) -> None:
    keys = [keys_of(1)[0], bytes(24), b"short"]

    async def test() -> None:
        put = await tier.put(memory_of(), as_ids([0, 1, 2]), keys, None, soon())
        assert (states(put), reasons(put)) == ([DONE, FAILED, FAILED], ["", "BAD_REQUEST", "BAD_REQUEST"])
        get = await tier.get(keys, memory_of(rank=1), as_ids([0, 1, 2]), soon())
        assert (states(get), reasons(get)) == ([DONE, FAILED, FAILED], ["", "BAD_REQUEST", "BAD_REQUEST"])
        has = await tier.has(keys, soon())
        assert (states(has), reasons(has)) == ([PRESENT, UNKNOWN, UNKNOWN], ["", "BAD_REQUEST", "BAD_REQUEST"])

    run(test())


def test_lengths_and_sizes_are_checked_before_anything_starts(tier: ObjectTier, store: FileStore) -> None:
    larger = memory_of(config=replace(CONFIG, num_layers=4))

    async def test() -> None:
        with pytest.raises(BadRequest, match="3 keys and 2 blocks"):
            tier.put(memory_of(), as_ids([0, 1]), keys_of(3), None, soon())
        with pytest.raises(BadRequest, match="1 keys and 2 blocks"):
            tier.get(keys_of(1), memory_of(), as_ids([0, 1]), soon())
        with pytest.raises(IncompatibleLayout, match="1024 bytes and the objects 768"):
            tier.put(larger, as_ids([0]), keys_of(1), None, soon())

    run(test())
    assert not list(store.root.glob("t/**/*"))


# Claims.


@pytest.mark.fact("T111")
@pytest.mark.fact("T105")
def test_put_with_claims_marks_the_object_and_gives_the_claim_back(tier: ObjectTier, store: FileStore) -> None:
    (key,) = keys_of(1)

    async def test() -> None:
        assert states(await tier.put(memory_of(), as_ids([0]), [key], 300.0, soon())) == [DONE]

    run(test())
    assert lock_of(store, key) is None
    assert path_of(store, shelf_of().meta_name(SequenceHash.from_bytes(key))).read_bytes() == b""


@pytest.mark.fact("T112")
def test_put_with_claims_passes_over_what_is_stored(tier: ObjectTier) -> None:
    keys = keys_of(3)

    async def test() -> None:
        await tier.put(memory_of(), as_ids([0]), keys[:1], 300.0, soon())
        assert states(await tier.put(memory_of(), as_ids([0, 1, 2]), keys, 300.0, soon())) == [ALREADY, DONE, DONE]

    run(test())


@pytest.mark.fact("T111", "T107")
def test_key_that_another_group_is_storing_is_claimed(tier: ObjectTier, store: FileStore) -> None:
    keys = keys_of(3)
    theirs = put_lock(store, keys[1], time.time())

    async def test() -> None:
        outcomes = await tier.put(memory_of(), as_ids([0, 1, 2]), keys, 300.0, soon())
        assert states(outcomes) == [DONE, FAILED, DONE]
        assert reasons(outcomes) == ["", "CLAIMED", ""]
        assert states(await tier.has(keys, soon())) == [PRESENT, NOT_THERE, PRESENT]

    run(test())
    assert lock_of(store, keys[1]) == theirs


@pytest.mark.fact("T108")
def test_expired_claim_of_another_group_does_not_stop_a_put(tier: ObjectTier, store: FileStore) -> None:
    (key,) = keys_of(1)
    put_lock(store, key, time.time() - 301)

    async def test() -> None:
        assert states(await tier.put(memory_of(), as_ids([0]), [key], 300.0, soon())) == [DONE]

    run(test())
    assert lock_of(store, key) is None


def test_marked_key_without_an_object_is_stored(tier: ObjectTier, store: FileStore) -> None:
    (key,) = keys_of(1)

    async def test() -> None:
        await tier.put(memory_of(), as_ids([0]), [key], 300.0, soon())
        object_path(store, key).unlink()
        assert states(await tier.put(memory_of(), as_ids([0]), [key], 300.0, soon())) == [DONE]
        assert states(await tier.has([key], soon())) == [PRESENT]

    run(test())


@pytest.mark.fact("T109")
def test_two_groups_that_store_the_same_keys_make_each_object_once(make: Callable[..., ObjectTier]) -> None:
    groups = [make(instance_id=f"group {i}") for i in range(2)]
    keys, blocks = keys_of(12), as_ids(range(12))

    async def test() -> None:
        both = await asyncio.gather(*(group.put(memory_of(), blocks, keys, 300.0, soon()) for group in groups))
        for here, there in zip(*both, strict=True):
            assert sorted([here.state.value, there.state.value]) in (["already_present", "done"], ["done", "failed"])
            assert {*reasons([here, there])} <= {"", "CLAIMED"}
        assert states(await groups[0].has(keys, soon())) == [PRESENT] * 12

    run(test())


def test_tokens_name_blocks(tier: ObjectTier) -> None:
    """Two conversations that begin alike share objects for as long as they are alike."""
    source, destination = memory_of(), memory_of(rank=1)
    one = [bytes(link) for link in hash_tokens(range(64), 16)]
    other = [bytes(link) for link in hash_tokens([*range(32), 7, *range(33, 64)], 16)]

    async def test() -> None:
        await tier.put(source, as_ids([0, 1, 2, 3]), one, None, soon())
        outcomes = await tier.get(other, destination, as_ids([4, 5, 6, 7]), soon())
        assert states(outcomes) == [DONE, DONE, ABSENT, ABSENT]

    run(test())
    assert content(destination, 5) == content(source, 1)
