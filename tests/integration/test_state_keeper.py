"""When a published state is stored, what is noted of it, and when the workers are told not to wait for it any more."""

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ayni.run_config import StateConfig
from coordinator_service import state_keeper
from coordinator_service.progress import Progress
from coordinator_service.signals import Signal
from coordinator_service.state_group import Foreign
from coordinator_service.state_keeper import StateKeeper
from coordinator_service.stored_states import StoredStates


class Facts:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def facts(self) -> dict[str, str]:
        return dict(self.values)

    def set_facts(self, facts: dict[str, str]) -> None:
        self.values |= facts


class Group:
    """Stores nothing, but notes what it would have done."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.fails: dict[str, Exception] = {}
        self.led: list[tuple[int, ...]] = []
        self.on_put: Any = lambda: None

    async def lead(self, seats: Any) -> None:
        self.led.append(tuple(seat.member.worker_id for seat in seats))

    async def num_blocks(self) -> int:
        return 7

    async def put(self, steps: int, num_blocks: int, timeout_s: float) -> int:
        self.on_put()
        self._note("put", steps)
        return 10

    async def check_place(self, steps: int, timeout_s: float) -> None:
        if error := self.fails.get(f"place {steps}"):
            raise error

    async def remove(self, steps: int, num_blocks: int, timeout_s: float) -> None:
        assert num_blocks == 7
        self._note("remove", steps)

    async def close(self) -> None:
        pass

    def _note(self, what: str, steps: int) -> None:
        if error := self.fails.get(f"{what} {steps}"):
            raise error
        self.done.append((what, steps))


def seat(number: int, published: int, completed: int = 0) -> Any:
    member = SimpleNamespace(worker_id=number, name=f"ant{number}")
    return SimpleNamespace(published_steps=published, completed_steps=completed, member=member)


class World:
    """A keeper, and a run reduced to what it reads."""

    def __init__(
        self, *published: int, keep: int = 0, initial: int = 0, committed: int = 100, facts: Facts | None = None
    ) -> None:
        self.facts = facts or Facts()
        self.progress = Progress(committed, initial)
        self.seats = {number: seat(number, steps) for number, steps in enumerate(published)}
        self.run: Any = SimpleNamespace(
            file=SimpleNamespace(
                run_id="run",
                state=StateConfig(publish_every=3, store_every=3, keep=keep),
                timeouts=SimpleNamespace(store=timedelta(seconds=5), heartbeat_interval=timedelta(milliseconds=1)),
            ),
            stored=StoredStates(self.facts),
            progress=self.progress,
            changed=Signal(),
            epochs=SimpleNamespace(seats=self.seats, able=[]),
        )
        self.group = Group()
        self.keeper = self.new_keeper()

    def new_keeper(self) -> StateKeeper:
        keeper = StateKeeper(self.run, lambda seat, rank: pytest.fail("nobody is to be dialled"))
        keeper._group = self.group  # type: ignore[assignment]
        return keeper

    async def settle(self, seconds: float = 0.1) -> "World":
        """Has everything done that can be done now."""
        self.run.epochs.able = list(self.seats.values())
        keeping = asyncio.create_task(self.keeper.keep())
        await asyncio.sleep(seconds)
        self.run.changed.notify()
        await asyncio.sleep(0.02)
        keeping.cancel()
        return self


def stored(world: World) -> list[int]:
    return [steps for what, steps in world.group.done if what == "put"]


@pytest.mark.parametrize(
    ("published", "puts", "settled"),
    [
        ((3, 3), [3], 3),
        ((3, 0), [], 0),
        ((2, 2), [], 0),
        ((0, 4), [], 3),
        ((3, 4), [3], 3),
        ((3, 6), [3], 3),
        ((6, 6), [6], 6),  # Step 3 was skipped by both, step 6 is held by both.
        ((3, 7), [3], 6),
    ],
)
def test_a_state_is_stored_by_those_who_hold_it_and_given_up_when_nobody_does(published, puts, settled) -> None:
    world = asyncio.run(World(*published).settle())
    assert (stored(world), world.progress.settled_steps) == (puts, settled)


def test_what_is_before_the_first_step_is_left_alone() -> None:
    assert stored(asyncio.run(World(3, 3, initial=3).settle())) == []


def test_what_a_coordinator_before_did_not_settle_is_stored_by_the_next_one() -> None:
    world = World(6, 6)
    world.run.stored.whole[3] = 7
    world.keeper = world.new_keeper()
    assert stored(asyncio.run(world.settle())) == [6]


def test_steps_that_were_taken_back_are_stored_again_when_they_are_made_again() -> None:
    async def test() -> None:
        world = await World(6, 6).settle()
        assert world.progress.settled_steps == 6
        world.progress.committed_steps = 3
        world.seats[0].published_steps = world.seats[1].published_steps = 3
        await world.settle()
        assert world.progress.settled_steps == 3
        world.progress.committed_steps = 6
        world.seats[0].published_steps = world.seats[1].published_steps = 6
        await world.settle()
        # The first one is ours, so it is replaced.
        assert world.group.done[-2:] == [("remove", 6), ("put", 6)]

    asyncio.run(test())


def test_what_a_crash_left_is_removed_before_the_state_is_stored_again() -> None:
    async def test() -> None:
        facts = Facts()
        await StoredStates(facts).begin(3, 7)
        world = World(3, 3, facts=facts)
        await world.settle()
        assert world.group.done == [("remove", 3), ("put", 3)]
        assert StoredStates(world.facts).whole == {3: 7}

    asyncio.run(test())


def test_older_states_than_the_run_keeps_are_removed() -> None:
    async def test() -> None:
        world = World(0, 0, keep=2)
        for steps in (3, 6, 9, 12):
            for one in world.seats.values():
                one.published_steps = steps
            await world.settle(0.05)
        assert world.group.done == [
            *(("put", 3), ("put", 6), ("put", 9), ("remove", 3)),
            *(("put", 12), ("remove", 6)),
        ]

    asyncio.run(test())


def test_an_older_state_that_can_not_be_removed_is_tried_again_after_the_next(caplog) -> None:
    async def test() -> None:
        world = World(0, 0, keep=1)
        world.group.fails["remove 3"] = OSError("read-only")
        for steps in (3, 6):
            for one in world.seats.values():
                one.published_steps = steps
            await world.settle(0.05)
        assert "the older state behind step 3 was not removed: read-only" in caplog.text
        assert list(world.run.stored.whole) == [6]
        world.group.fails.clear()
        for one in world.seats.values():
            one.published_steps = 9
        await world.settle(0.05)
        assert world.group.done[-3:] == [("remove", 3), ("put", 9), ("remove", 6)]

    asyncio.run(test())


def test_a_state_that_can_not_be_stored_is_given_up_and_said_so(caplog) -> None:
    async def test() -> None:
        world = World(3, 3)
        world.group.fails["put 3"] = OSError("the disk is full")
        await world.settle()
        assert world.progress.settled_steps == 3
        assert world.progress.stored_steps == 0
        assert "the state behind step 3 was not stored: the disk is full" in caplog.text

    asyncio.run(test())


def test_when_a_member_leaves_meanwhile_the_others_store_the_state() -> None:
    async def test() -> None:
        world = World(3, 3)

        def leave() -> None:
            if 1 in world.seats:
                del world.seats[1]
                world.run.epochs.able = list(world.seats.values())
                raise ConnectionError("lost")

        world.group.on_put = leave
        await world.settle()
        assert world.group.led == [(0, 1), (0,)]
        assert world.group.done == [("remove", 3), ("put", 3)]
        assert world.progress.stored_steps == 3

    asyncio.run(test())


def test_the_last_state_is_stored_by_those_who_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_keeper, "_LAST_S", 0.05)

    async def test() -> None:
        world = World(3, 0, committed=4)
        world.run.epochs.able = list(world.seats.values())
        keeping = asyncio.create_task(world.keeper.keep())
        await world.keeper.settle(4)
        keeping.cancel()
        assert stored(world) == [3]

    asyncio.run(test())


def test_a_run_that_is_stopped_has_its_last_state_stored_although_it_is_not_due() -> None:
    async def test() -> None:
        world = World(4, 4, committed=4)
        world.progress.settled_steps = 3
        world.run.epochs.able = list(world.seats.values())
        keeping = asyncio.create_task(world.keeper.keep())
        await asyncio.sleep(0.05)
        assert stored(world) == []
        await world.keeper.final(4, 5.0)
        keeping.cancel()
        assert stored(world) == [4]

    asyncio.run(test())


def test_nobody_waits_for_a_last_state_that_nobody_publishes() -> None:
    async def test() -> None:
        world = World(3, 3, committed=4)
        world.run.epochs.able = list(world.seats.values())
        began = asyncio.get_running_loop().time()
        keeping = asyncio.create_task(world.keeper.keep())
        await world.keeper.final(4, 0.3)
        keeping.cancel()
        assert stored(world) == [3]
        assert asyncio.get_running_loop().time() - began < 2

    asyncio.run(test())


def test_what_a_failure_left_is_removed_at_once_and_again_before_the_next_state() -> None:
    async def test() -> None:
        world = World(3, 3)
        world.group.fails["put 3"] = OSError("the disk is full")
        await world.settle(0.05)
        assert world.group.done == [("remove", 3)]
        for one in world.seats.values():
            one.published_steps = 6
        await world.settle(0.05)
        assert world.group.done[1:] == [("remove", 3), ("put", 6)]
        assert (StoredStates(world.facts).whole, StoredStates(world.facts).leftovers) == ({6: 7}, {})

    asyncio.run(test())


def test_what_can_not_be_removed_at_once_is_removed_later_by_whoever_is_there(caplog) -> None:
    async def test() -> None:
        world = World(3, 3)
        world.group.fails = {"put 3": ConnectionError("lost"), "remove 3": ConnectionError("lost")}
        await world.settle(0.05)
        assert "what is left of the state behind step 3 is removed later: lost" in caplog.text
        again = World(6, 6, facts=world.facts)
        await again.settle(0.05)
        assert again.group.done == [("remove", 3), ("put", 6)]

    asyncio.run(test())


def test_a_state_that_the_run_went_back_behind_meanwhile_is_not_stored(caplog) -> None:
    async def test() -> None:
        world = World(6, 6)
        world.group.on_put = lambda: setattr(world.progress, "committed_steps", 3)
        await world.settle(0.05)
        assert "the state behind step 6 was not stored: the run went back behind it" in caplog.text
        assert world.group.done == [("put", 6), ("remove", 6)]
        assert StoredStates(world.facts).whole == {}

    asyncio.run(test())


@pytest.mark.parametrize("when", ["place 3", "put 3"])
def test_what_another_run_has_stored_is_never_removed(when, caplog) -> None:
    async def test() -> None:
        world = World(3, 3)
        world.group.fails[when] = Foreign(0)
        await world.settle(0.05)
        assert "was not stored: block 0 is there already, from another run with this run_id" in caplog.text
        for one in world.seats.values():
            one.published_steps = 6
        await world.settle(0.05)
        assert world.group.done == [("put", 6)]

    asyncio.run(test())
