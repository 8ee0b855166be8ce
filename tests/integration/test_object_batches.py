"""Calls of the object tier end by their deadline, whatever stores and memories do, and nothing lands afterwards."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.objects import KeyOutcome
from ayni.blocks.sequence_hash import SequenceHash
from ayni.errors import StorageFailed
from tests.support.object_tiers import (
    ALREADY,
    DONE,
    FAILED,
    LIMIT_S,
    NOT_THERE,
    UNKNOWN,
    content,
    contents,
    keys_of,
    make,
    memory_of,
    object_path,
    reasons,
    run,
    soon,
    states,
    store,
    tier,
)
from worker_agent.blocks.host_memory import HostMemory
from worker_agent.blocks.memory import Bytes, Part
from worker_agent.blocks.objects.batch import Batch
from worker_agent.blocks.objects.file_store import FileStore
from worker_agent.blocks.objects.store import Stored
from worker_agent.blocks.objects.tier import ObjectTier

__all__ = ["make", "store", "tier"]  # Fixtures, asked for by name.


class Gate:
    """Holds whoever comes until it is opened, at the latest when its test has ended."""

    all: ClassVar[list["Gate"]] = []

    def __init__(self) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        self.all.append(self)

    def pass_through(self) -> None:
        self.arrived.set()
        assert self.opened.wait(LIMIT_S)


class Wrapped:
    """A store with one call replaced."""

    def __init__(self, store: FileStore, call: str, act: Callable[..., Any]) -> None:
        self._store, self._call, self._act = store, call, act

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        return (lambda *arguments: self._act(real, *arguments)) if name == self._call else real


@pytest.fixture(autouse=True)
def _gates() -> Iterator[None]:
    yield
    for gate in Gate.all:
        gate.opened.set()
    Gate.all.clear()


async def arrival(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.arrived.wait, LIMIT_S)


def test_deadline_ends_a_get_and_nothing_lands_afterwards(make: Callable[..., ObjectTier], store: FileStore) -> None:
    gate, destination = Gate(), memory_of(rank=1)
    before = contents(destination)
    keys = keys_of(3)
    returned = threading.Event()

    def late(real: Callable[..., Stored], name: str, buffer: memoryview) -> Stored:
        if name.endswith(str(SequenceHash.from_bytes(keys[1]))):
            gate.pass_through()
        try:
            return real(name, buffer)
        finally:
            returned.set()

    async def test() -> None:
        await make().put(memory_of(), as_ids([0, 1, 2]), keys, None, soon())
        tier = make(Wrapped(store, "get", late))
        began = soon(0)
        batch = tier.get(keys, destination, as_ids([0, 1, 2]), began + 0.1)
        outcomes = await batch
        assert soon(0) - began < 1
        assert (states(outcomes), reasons(outcomes)) == ([DONE, FAILED, DONE], ["", "DEADLINE", ""])
        assert batch.quiesced.done(), "no block is being touched"
        returned.clear()
        gate.opened.set()
        assert await asyncio.to_thread(returned.wait, LIMIT_S)
        tier._threads.shutdown()

    run(test())
    assert content(destination, 1) == before[1]
    assert content(destination, 0) != before[0]


class SlowMemory(HostMemory):
    """Copies of one block wait at a gate."""

    gate: Gate
    slow_block: int

    @classmethod
    def of(cls, memory: HostMemory, slow_block: int) -> "SlowMemory":
        slow = cls(memory.geometry, memory.buffers)
        slow.gate, slow.slow_block = Gate(), slow_block
        return slow

    def read(self, blocks: Ids, part: Part, out: Bytes, *rest: Any) -> None:
        self._wait(blocks)
        super().read(blocks, part, out, *rest)

    def write(self, blocks: Ids, part: Part, data: Bytes, *rest: Any) -> None:
        self._wait(blocks)
        super().write(blocks, part, data, *rest)

    def _wait(self, blocks: Ids) -> None:
        if self.slow_block in blocks:
            self.gate.pass_through()


@pytest.mark.parametrize("call", ["put", "get"])
@pytest.mark.parametrize("end", ["deadline", "cancel", "give up"])
def test_batch_is_not_quiesced_while_a_block_is_touched(tier: ObjectTier, call: str, end: str) -> None:
    slow, keys = SlowMemory.of(memory_of(rank=1), slow_block=1), keys_of(3)
    reason = {"deadline": "DEADLINE", "cancel": "CANCELLED", "give up": "CANCELLED"}[end]

    def start(deadline: float) -> Batch[KeyOutcome]:
        blocks = as_ids([0, 1, 2])
        return tier.get(keys, slow, blocks, deadline) if call == "get" else tier.put(slow, blocks, keys, None, deadline)

    async def test() -> None:
        if call == "get":
            await tier.put(memory_of(), as_ids([0, 1, 2]), keys, None, soon())
        batch = start(soon(0.2 if end == "deadline" else 20))
        await arrival(slow.gate)
        if end == "cancel":
            batch.cancel()
        if end == "give up":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(batch, 0.01)
        outcomes = await batch
        assert outcomes[1].failure
        assert outcomes[1].failure.reason == reason
        assert not batch.quiesced.done()
        slow.gate.opened.set()
        await batch.quiesced
        assert (await batch) == outcomes, "what was told stays true"

    run(test())


def test_keys_that_wait_for_a_thread_end_by_their_deadline_too(
    make: Callable[..., ObjectTier], store: FileStore
) -> None:
    gate = Gate()

    def wait(real: Callable[..., Any], *arguments: Any) -> Any:
        gate.pass_through()
        return real(*arguments)

    async def test() -> None:
        tier = make(Wrapped(store, "has", wait), max_requests=2)
        first = tier.has(keys_of(5), soon(0.1))
        second = tier.has(keys_of(2), soon(0.1))
        for presences in (await first, await second):
            assert set(states(presences)) == {UNKNOWN}
            assert set(reasons(presences)) == {"DEADLINE"}
        gate.opened.set()
        assert states(await tier.has(keys_of(2), soon())) == [NOT_THERE] * 2, "the next call works"

    run(test())


def test_no_key_is_asked_for_after_the_end(make: Callable[..., ObjectTier], store: FileStore) -> None:
    gate, asked = Gate(), []

    def wait(real: Callable[..., Any], name: str) -> Any:
        asked.append(name)
        gate.pass_through()
        return real(name)

    async def test() -> None:
        tier = make(Wrapped(store, "has", wait), max_requests=2)
        await tier.has(keys_of(9), soon(0.05))
        gate.opened.set()
        tier._threads.shutdown()

    run(test())
    assert len(asked) == 2


def test_no_more_keys_are_asked_for_at_once_than_allowed(make: Callable[..., ObjectTier], store: FileStore) -> None:
    lock, now, most = threading.Lock(), [0], [0]
    together = threading.Barrier(4)

    def count(real: Callable[..., Any], *arguments: Any) -> Any:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        together.wait(LIMIT_S)
        with lock:
            now[0] -= 1
        return real(*arguments)

    async def test() -> None:
        tier = make(Wrapped(store, "has", count), max_requests=4)
        await tier.has(keys_of(40), soon())

    run(test())
    assert most == [4], "no more, and also no fewer"


def test_store_that_is_gone_is_not_asked_for_every_key(make: Callable[..., ObjectTier], store: FileStore) -> None:
    asked = []

    def refuse(real: object, name: str, *_: object) -> None:
        asked.append(name)
        raise StorageFailed("the store is gone", place="here", detail="gone")

    async def test() -> None:
        tier = make(Wrapped(store, "has", refuse), max_requests=4)
        presences = await tier.has(keys_of(500), soon())
        assert set(states(presences)) == {UNKNOWN}
        assert set(reasons(presences)) == {"STORAGE_FAILED"}
        assert 8 <= len(asked) <= 8 + 3, "those that are out when the eighth fails are still answered"
        assert "the store stopped answering" in str(presences[-1].failure)
        assert "at last: the store is gone" in str(presences[-1].failure)

    run(test())


def test_store_that_takes_few_keys_at_a_time_is_not_given_up_for_two_of_them(
    make: Callable[..., ObjectTier], store: FileStore
) -> None:
    left = [7]

    def refuse(real: Callable[..., Any], name: str) -> Any:
        if left[0]:
            left[0] -= 1
            raise StorageFailed("not now", place="here", detail="")
        return real(name)

    async def test() -> None:
        presences = await make(Wrapped(store, "has", refuse), max_requests=1).has(keys_of(20), soon())
        assert states(presences) == [UNKNOWN] * 7 + [NOT_THERE] * 13

    run(test())


class TornMemory(HostMemory):
    """Most blocks can't be read or written."""

    def read(self, blocks: Ids, part: Part, out: Bytes, *rest: Any) -> None:
        self._check(blocks)
        super().read(blocks, part, out, *rest)

    def write(self, blocks: Ids, part: Part, data: Bytes, *rest: Any) -> None:
        self._check(blocks)
        super().write(blocks, part, data, *rest)

    def _check(self, blocks: Ids) -> None:
        if blocks[0] < 10:
            raise StorageFailed("the block is torn", place="a slab", detail="checksum")


@pytest.mark.parametrize("call", ["put", "get"])
def test_blocks_that_can_not_be_touched_do_not_stop_the_others(make: Callable[..., ObjectTier], call: str) -> None:
    whole, keys, blocks = memory_of(), keys_of(12), as_ids(range(12))
    torn = TornMemory(whole.geometry, whole.buffers)

    async def test() -> None:
        tier = make(max_requests=1)
        if call == "get":
            await tier.put(whole, blocks, keys, None, soon())
        outcomes = await (
            tier.get(keys, torn, blocks, soon()) if call == "get" else tier.put(torn, blocks, keys, None, soon())
        )
        assert states(outcomes) == [FAILED] * 10 + [DONE] * 2
        assert {outcome.failure.message for outcome in outcomes if outcome.failure} == {"the block is torn"}

    run(test())


@pytest.mark.parametrize("moment", ["has", "get"])
@pytest.mark.parametrize("spoilt", [b"", b"AYNIBLK\n short"], ids=["empty", "short"])
def test_put_does_not_harm_an_object_that_another_process_stores_meanwhile(
    make: Callable[..., ObjectTier], store: FileStore, moment: str, spoilt: bytes
) -> None:
    [key], memory, destination = keys_of(1), memory_of(), memory_of(rank=1)
    gate, other = Gate(), make()

    def late(real: Callable[..., Any], *arguments: Any) -> Any:
        answer = real(*arguments)
        if isinstance(answer, Stored):
            answer = Stored(data=memoryview(bytes(answer.data)), tag=answer.version)
        gate.pass_through()
        return answer

    async def test() -> None:
        await other.put(memory, as_ids([3]), [key], None, soon())
        object_path(store, key).write_bytes(spoilt)
        batch = make(Wrapped(store, moment, late)).put(memory, as_ids([4]), [key], None, soon())
        await arrival(gate)
        assert states(await other.put(memory, as_ids([3]), [key], None, soon())) == [DONE]
        gate.opened.set()
        assert states(await batch) == [ALREADY]
        assert states(await other.get([key], destination, as_ids([0]), soon())) == [DONE]

    run(test())
    assert content(destination, 0) == content(memory, 3)


def test_put_never_takes_an_object_away(make: Callable[..., ObjectTier], store: FileStore) -> None:
    [key], deleted = keys_of(1), []

    def note(real: Callable[..., Any], name: str) -> Any:
        deleted.append(name)
        return real(name)

    async def test() -> None:
        tier = make(Wrapped(store, "delete", note))
        await tier.put(memory_of(), as_ids([3]), [key], None, soon())
        object_path(store, key).write_bytes(b"AYNIBLK\n short")
        assert states(await tier.put(memory_of(), as_ids([3]), [key], None, soon())) == [DONE]

    run(test())
    assert deleted == []


def test_store_that_fails_now_and_then_is_asked_for_every_key(
    make: Callable[..., ObjectTier], store: FileStore
) -> None:
    def refuse(real: Callable[..., Any], name: str) -> Any:
        if "/0:" in name or "/7:" in name:
            raise StorageFailed("not now", place="here", detail="")
        return real(name)

    async def test() -> None:
        presences = await make(Wrapped(store, "has", refuse), max_requests=2).has(keys_of(20), soon())
        assert [i for i, p in enumerate(presences) if p.state is UNKNOWN] == [0, 7]

    run(test())


def test_mistake_of_ours_is_a_failure_and_not_silence(
    make: Callable[..., ObjectTier], store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    async def test() -> None:
        outcomes = await make(Wrapped(store, "put_if_absent", fail)).put(
            memory_of(), as_ids([0]), keys_of(1), None, soon()
        )
        assert (states(outcomes), reasons(outcomes)) == ([FAILED], ["FAULT"])

    run(test())
    assert "a mistake" in caplog.text


def test_put_that_could_not_be_marked_or_unlocked_has_still_stored(
    make: Callable[..., ObjectTier], store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    def no_marks(real: Callable[..., bool], name: str, data: memoryview) -> bool:
        if name.endswith(".meta"):
            raise StorageFailed("no marks today", place="here", detail="")
        return real(name, data)

    async def test() -> None:
        tier = make(Wrapped(store, "put_if_absent", no_marks))
        assert states(await tier.put(memory_of(), as_ids([0]), keys_of(1), 300.0, soon())) == [DONE]

    run(test())
    assert "no marks today" in caplog.text
