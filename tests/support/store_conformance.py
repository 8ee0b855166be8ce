"""What every store of objects must do, whatever is behind it.

A test file makes a class of each of these with a fixture `stores` that gives two handles of one store, as two processes
would have them. Names are fresh in every test.
"""

import itertools
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ayni.blocks.sequence_hash import hash_tokens, synthetic
from ayni.errors import Claimed, TooLarge
from worker_agent.blocks.objects.claims import Claim, decode
from worker_agent.blocks.objects.keys import Shelf
from worker_agent.blocks.objects.locks import KeyLocks
from worker_agent.blocks.objects.probe import check_conditions
from worker_agent.blocks.objects.store import ObjectStore

Stores = tuple[ObjectStore, ObjectStore]
KEY = hash_tokens(range(32), 16)[1]
SHELF = Shelf(prefix="race/", fingerprint="5c" * 32, rank=1)
_numbers = itertools.count()


def fresh(suffix: str = "") -> str:
    return f"conformance/{secrets.token_hex(4)}/{next(_numbers)}{suffix}"


def view(text: bytes) -> memoryview:
    return memoryview(text)


def read(store: ObjectStore, name: str, limit: int = 1 << 16) -> bytes | None:
    found = store.get(name, memoryview(bytearray(limit)))
    return bytes(found.data) if found else None


def version(store: ObjectStore, name: str) -> str:
    found = store.get(name, memoryview(bytearray(1 << 16)))
    assert found is not None
    return found.version


def race(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Does something `count` times at once; gives back results in order."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(act, range(count)))


class StoreConformance:
    """The five calls."""

    @pytest.mark.fact("T113")
    def test_absent_then_stored_then_absent(self, stores: Stores) -> None:
        name, (store, other) = fresh(), stores
        assert (store.has(name), read(store, name)) == (None, None)
        assert store.put_if_absent(name, view(b"content"))
        assert (other.has(name), read(other, name)) == (7, b"content")
        other.delete(name)
        assert (store.has(name), read(store, name)) == (None, None)
        assert store.put_if_absent(name, view(b"again"))

    def test_deleting_what_is_not_there_is_no_error(self, stores: Stores) -> None:
        stores[0].delete(fresh())

    def test_the_first_object_stays(self, stores: Stores) -> None:
        name, (store, other) = fresh(), stores
        assert store.put_if_absent(name, view(b"first"))
        assert not other.put_if_absent(name, view(b"second"))
        assert read(store, name) == b"first"

    def test_empty_object_is_there(self, stores: Stores) -> None:
        name, (store, other) = fresh(), stores
        assert store.put_if_absent(name, view(b""))
        assert (other.has(name), read(other, name)) == (0, b"")

    def test_names_that_the_tier_makes(self, stores: Stores) -> None:
        shelf = Shelf(prefix=f"{fresh()} v1/a..b-", fingerprint="a7" * 32, rank=65535)
        names = [make(key) for key in (KEY, synthetic("x", 7)) for make in (shelf.object_name, shelf.lock_name)]
        for name in names:
            assert stores[0].put_if_absent(name, view(name.encode()))
        assert [read(stores[1], name) for name in names] == [name.encode() for name in names]

    def test_replaces_only_the_version_that_was_read(self, stores: Stores) -> None:
        name, (store, other) = fresh(), stores
        assert store.put_if_absent(name, view(b"one"))
        old = version(other, name)
        assert other.put_if_match(name, view(b"two"), old)
        assert not store.put_if_match(name, view(b"three"), old)
        assert read(store, name) == b"two"
        assert store.put_if_match(name, view(b"four"), version(store, name))
        assert read(other, name) == b"four"

    def test_does_not_replace_what_is_gone(self, stores: Stores) -> None:
        name, (store, other) = fresh(), stores
        store.put_if_absent(name, view(b"one"))
        old = version(store, name)
        other.delete(name)
        assert not store.put_if_match(name, view(b"two"), old)
        assert store.has(name) is None

    def test_longer_object_than_the_buffer_is_not_read(self, stores: Stores) -> None:
        name, store = fresh(), stores[0]
        store.put_if_absent(name, view(b"x" * 100))
        buffer = bytearray(99)
        with pytest.raises(TooLarge, match="100 bytes; at most 99"):
            store.get(name, memoryview(buffer))
        assert buffer == bytes(99)
        assert read(store, name, limit=100) == b"x" * 100

    def test_object_is_whatever_it_was_when_the_call_returned(self, stores: Stores) -> None:
        name, data = fresh(), bytearray(b"a" * 5000)
        stores[0].put_if_absent(name, memoryview(data))
        data[:] = b"b" * 5000
        assert read(stores[1], name) == b"a" * 5000

    def test_object_larger_than_any_part_of_it(self, stores: Stores) -> None:
        name, data = fresh(), bytes(range(251)) * (9 << 12)
        assert stores[0].put_if_absent(name, view(data))
        assert not stores[1].put_if_absent(name, view(data[::-1]))
        assert read(stores[1], name, limit=len(data)) == data

    def test_one_of_many_creators_wins(self, stores: Stores) -> None:
        name = fresh()
        won = race(8, lambda place: stores[place % 2].put_if_absent(name, view(b"%d" % place)))
        assert sum(won) == 1
        assert read(stores[0], name) == b"%d" % won.index(True)

    def test_one_of_many_replacers_wins(self, stores: Stores) -> None:
        name = fresh()
        stores[0].put_if_absent(name, view(b"old"))
        old = version(stores[0], name)
        won = race(8, lambda place: stores[place % 2].put_if_match(name, view(b"%d" % place), old))
        assert sum(won) == 1
        assert read(stores[0], name) == b"%d" % won.index(True)

    def test_probe_accepts_the_store_and_leaves_nothing(self, stores: Stores) -> None:
        names: list[str] = []

        class Watched:
            def __getattr__(self, call: str) -> Any:
                def forward(name: str, *rest: Any) -> Any:
                    names.append(name)
                    return getattr(stores[0], call)(name, *rest)

                return forward

        check_conditions(Watched(), "the store", prefix="probed/")
        assert len(set(names)) == 1
        assert names[0].startswith("probed/")
        assert stores[1].has(names[0]) is None


class Clock:
    """Seconds since 1970 that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


class LockConformance:
    """Claims to keys; `a` and `b` are two groups' processes."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def shelf(self) -> Shelf:
        return Shelf(prefix=fresh("/"), fingerprint="5c" * 32, rank=1)

    @pytest.fixture
    def a(self, stores: Stores, shelf: Shelf, clock: Clock) -> KeyLocks:
        return KeyLocks(stores[0], shelf, "group a", now=clock)

    @pytest.fixture
    def b(self, stores: Stores, shelf: Shelf, clock: Clock) -> KeyLocks:
        return KeyLocks(stores[1], shelf, "group b", now=clock)

    def held(self, stores: Stores, shelf: Shelf) -> Claim | None:
        data = read(stores[0], shelf.lock_name(KEY))
        return decode(data) if data is not None else None

    @pytest.mark.fact("T105")
    def test_claim_then_mark_then_release(self, a: KeyLocks, stores: Stores, shelf: Shelf) -> None:
        claim = a.acquire(KEY, 300)
        assert self.held(stores, shelf) == claim
        assert (claim.instance_id, claim.fence) == ("group a", 1)
        a.mark(KEY)
        assert a.release(KEY, claim)
        assert stores[0].has(shelf.lock_name(KEY)) is None
        assert stores[0].has(shelf.meta_name(KEY)) == 0

    @pytest.mark.fact("T106")
    def test_owner_claims_again_and_for_longer(self, a: KeyLocks, clock: Clock) -> None:
        first = a.acquire(KEY, 300)
        clock.now += 200
        again = a.acquire(KEY, 300)
        assert (again.owner, again.fence) == (first.owner, first.fence)
        assert again.deadline == first.deadline + 200

    @pytest.mark.fact("T107")
    def test_other_group_is_refused_while_the_claim_holds(self, a: KeyLocks, b: KeyLocks, clock: Clock) -> None:
        a.acquire(KEY, 300)
        clock.now += 299
        with pytest.raises(Claimed, match="claimed by group a") as refused:
            b.acquire(KEY, 300)
        assert refused.value.metadata == {"key": str(KEY), "owner": "group a"}
        assert a.acquire(KEY, 300)

    @pytest.mark.fact("T108")
    def test_expired_claim_is_taken_over(
        self, a: KeyLocks, b: KeyLocks, clock: Clock, stores: Stores, shelf: Shelf
    ) -> None:
        lost = a.acquire(KEY, 300)
        clock.now += 301
        taken = b.acquire(KEY, 300)
        assert self.held(stores, shelf) == taken
        assert (taken.instance_id, taken.fence) == ("group b", 2)
        with pytest.raises(Claimed):
            a.renew(KEY, lost, 300)
        assert not a.release(KEY, lost), "a late owner leaves its successor's claim alone"
        assert self.held(stores, shelf) == taken

    @pytest.mark.fact("T109")
    def test_two_never_both_win_an_expired_claim(self, stores: Stores, shelf: Shelf, clock: Clock) -> None:
        for round_number in range(3):
            racers = [KeyLocks(stores[i % 2], shelf, f"group {i}", now=clock) for i in range(4)]

            def attempt(place: int, racers: list[KeyLocks] = racers) -> Claim | None:
                try:
                    return racers[place].acquire(KEY, 300)
                except Claimed:
                    return None

            won = [claim for claim in race(4, attempt) if claim]
            assert len(won) == 1
            assert self.held(stores, shelf) == won[0]
            assert won[0].fence == round_number + 1
            clock.now += 301

    @pytest.mark.fact("T110")
    def test_mark_is_seen_by_all(self, a: KeyLocks, b: KeyLocks) -> None:
        assert not b.is_marked(KEY)
        a.mark(KEY)
        a.mark(KEY)
        assert a.is_marked(KEY)
        assert b.is_marked(KEY)

    @pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"owner": 7}'], ids=repr)
    def test_malformed_claim_is_taken_over(self, content: bytes, a: KeyLocks, stores: Stores, shelf: Shelf) -> None:
        stores[0].put_if_absent(shelf.lock_name(KEY), view(content))
        assert self.held(stores, shelf) is None
        assert a.acquire(KEY, 300) == self.held(stores, shelf)

    def test_renewed_claim_holds_on(self, a: KeyLocks, b: KeyLocks, clock: Clock) -> None:
        claim = a.acquire(KEY, 300)
        clock.now += 299
        claim = a.renew(KEY, claim, 300)
        clock.now += 299
        with pytest.raises(Claimed):
            b.acquire(KEY, 300)
        assert a.release(KEY, claim)
        assert b.acquire(KEY, 300).fence == 1

    def test_release_of_a_claim_that_has_expired_but_was_not_taken(
        self, a: KeyLocks, clock: Clock, stores: Stores, shelf: Shelf
    ) -> None:
        claim = a.acquire(KEY, 300)
        clock.now += 1000
        assert a.release(KEY, claim)
        assert self.held(stores, shelf) is None

    def test_release_twice(self, a: KeyLocks, b: KeyLocks) -> None:
        claim = a.acquire(KEY, 300)
        assert a.release(KEY, claim)
        theirs = b.acquire(KEY, 300)
        assert not a.release(KEY, claim)
        assert b.release(KEY, theirs)

    def test_claim_that_was_lost_and_won_again_is_another_one(self, a: KeyLocks, b: KeyLocks, clock: Clock) -> None:
        first = a.acquire(KEY, 300)
        clock.now += 301
        b.acquire(KEY, 300)
        clock.now += 301
        third = a.acquire(KEY, 300)
        assert third.fence == 3
        assert not a.release(KEY, first)
        with pytest.raises(Claimed):
            a.renew(KEY, first, 300)
        assert a.release(KEY, third)

    @pytest.mark.fact("T111")
    def test_key_that_this_process_is_storing_is_refused(self, a: KeyLocks, stores: Stores, shelf: Shelf) -> None:
        with a.held(KEY, 300):
            with pytest.raises(Claimed, match="another call of this worker"), a.held(KEY, 300):
                pass
            assert self.held(stores, shelf) is not None
        assert self.held(stores, shelf) is None
        with a.held(KEY, 300):
            assert self.held(stores, shelf) is not None
