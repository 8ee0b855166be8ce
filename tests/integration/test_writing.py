"""What becomes of writes to the store while the database can't: nobody stands still for them, and nothing is lost."""

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from coordinator_service import writing
from coordinator_service.config import RunFile, Timeouts
from coordinator_service.epochs import Epochs
from coordinator_service.membership import Membership
from coordinator_service.progress import Progress
from coordinator_service.signals import Signal
from coordinator_service.store import TakenOver
from coordinator_service.stored_states import StoredStates
from coordinator_service.values import Waiting
from coordinator_service.writing import Notes, Writing

DEADLINE_S = 20.0


class FailingStore:
    """Keeps facts, but first fails as often as it is told to."""

    path = "here"

    def __init__(self, *failures: OSError) -> None:
        self.failures = list(failures)
        self.kept: dict[str, str] = {}
        self.threads: set[int] = set()
        self.on_call: Callable[[], object] = lambda: None
        self.on_kept: Callable[[dict[str, str]], object] = lambda kept: None

    def facts(self) -> dict[str, str]:
        return dict(self.kept)

    def set_facts(self, facts: dict[str, str]) -> None:
        self.threads.add(threading.get_ident())
        self.on_call()
        if self.failures:
            raise self.failures.pop(0)
        self.kept |= facts
        self.on_kept(dict(self.kept))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_AGAIN_S", 0.0)


def in_loop(scenario: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await scenario()

    return asyncio.run(bounded())


def made(progress: Progress, step_s: float = 60.0) -> Writing:
    membership = Membership(min_workers=1, start_workers=1, max_workers=1, lease=1.0)
    epochs = Epochs(membership, flow_limit=1, on_gone=lambda member, reason: None)
    ladder = {
        name: timedelta(seconds=step_s * part)
        for name, part in {"heartbeat_interval": 0.1, "lease": 0.2, "accept": 0.3, "step": 1.0}.items()
    }
    file = RunFile(timeouts=Timeouts(**ladder))
    return Writing(file, epochs, progress, Signal())


def test_a_write_is_made_again_off_the_event_loop_and_everybody_is_told_meanwhile(caplog):
    store, progress = FailingStore(OSError("gone"), OSError("gone")), Progress()
    told: list[Waiting | None] = []
    progress.waiting = before = Waiting(reason="as before")
    store.on_call = lambda: told.append(progress.waiting)

    async def scenario() -> None:
        await made(progress).write("epoch 2", store.set_facts, {"a": "1"})

    in_loop(scenario)
    assert store.kept == {"a": "1"}
    assert threading.get_ident() not in store.threads
    assert told == [before] + [Waiting(reason="epoch 2 can't be written, and is tried again: gone")] * 2
    assert caplog.text.count("is tried again") == 1, "a reason that is no news"
    assert progress.waiting == before


@pytest.mark.parametrize("why", ["late", "over", "taken"])
def test_a_write_is_given_up_when_it_takes_too_long_or_nobody_needs_it(why):
    error = TakenOver("another has it") if why == "taken" else OSError("gone")
    store, progress = FailingStore(*[error] * 1000), Progress()
    if why == "over":
        progress.halt("an operator's wish")

    async def scenario() -> None:
        await made(progress, 0.01 if why == "late" else 60.0).write("the commit of step 3", store.set_facts, {"a": "1"})

    with pytest.raises(OSError, match=r"^the commit of step 3 can't be written: (gone|another has it)$"):
        in_loop(scenario)
    assert not store.kept
    assert why == "late" or len(store.failures) == 999


def test_notes_are_written_later_and_the_newest_value_counts(caplog):
    store = FailingStore(OSError("gone"), OSError("gone"))

    async def scenario() -> None:
        notes = Notes(store)  # type: ignore[arg-type]
        notes.add({"next": "1"})
        with pytest.raises(OSError, match="gone"):
            await notes.write()
        notes.add({"next": "2", "shut_out/ant": "3"})
        loop, kept = asyncio.get_running_loop(), asyncio.Queue[dict[str, str]]()
        store.on_kept = lambda now: loop.call_soon_threadsafe(kept.put_nowait, now)
        keeping = asyncio.create_task(notes.keep())
        assert await kept.get() == {"next": "2", "shut_out/ant": "3"}
        notes.add({"next": "3"})
        assert await kept.get() == {"next": "3", "shut_out/ant": "3"}
        keeping.cancel()

    in_loop(scenario)
    assert "next, shut_out/ant: kept later: gone" in caplog.text


def test_what_is_added_while_notes_are_written_is_not_lost():
    store = FailingStore()

    async def scenario() -> None:
        notes = Notes(store)  # type: ignore[arg-type]
        notes.add({"next": "1"})
        writing = asyncio.create_task(notes.write())
        await asyncio.sleep(0)
        notes.add({"next": "2"})
        await writing
        await notes.settle(DEADLINE_S)

    in_loop(scenario)
    assert store.kept == {"next": "2"}


def test_the_end_does_not_wait_for_a_store_that_another_coordinator_has(caplog):
    store = FailingStore(TakenOver("another has it"))

    async def scenario() -> None:
        notes = Notes(store)  # type: ignore[arg-type]
        notes.add({"final": "1"})
        await notes.settle(10 * DEADLINE_S)

    in_loop(scenario)
    assert "not kept in here: final: another has it" in caplog.text


def test_a_state_that_was_stored_is_noted_when_the_store_can_again():
    store = FailingStore(OSError("gone"), OSError("gone"))

    async def scenario() -> None:
        stored = StoredStates(store)
        await stored.begin(4, 7)
        store.failures.append(OSError("gone"))
        await stored.done(4)

    in_loop(scenario)
    assert store.kept["stored_states"] == '{"4": 7}'
    assert not store.failures


def test_a_state_that_was_stored_is_not_noted_when_the_run_is_over():
    store = FailingStore(OSError("gone"))

    async def scenario() -> None:
        await StoredStates(store, lambda: True).begin(4, 7)

    with pytest.raises(OSError, match="gone"):
        in_loop(scenario)
