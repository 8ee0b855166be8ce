"""The coordinator has followers handed the run's state: asks a worker to publish, offers it, and offers another."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ayni.blocks.metadata import WorkerMetadata
from coordinator_service import onboarding
from coordinator_service.epochs import Seat
from coordinator_service.membership import Applicant, Member
from coordinator_service.onboarding import Onboarding
from coordinator_service.rounds import Flow
from coordinator_service.signals import Signal
from coordinator_service.values import PeerState, StateOffer

METADATA = WorkerMetadata(instance_id="0" * 36, epoch=0, rank=0, owner_id=1, incarnation=2, address="there")


class World:
    """A run reduced to what onboarding reads and writes; time stands still unless it is moved."""

    def __init__(self, *, store_every: int = 0) -> None:
        self.now = 0.0
        self.attached: set[int] = set()
        self.broken: set[int] = set()
        self.exports = 0
        self.seats: dict[int, Seat] = {}
        self.changed = Signal()
        self.progress = SimpleNamespace(committed_steps=5, settled_steps=0)
        self.live: Any = None
        self.stored_source: tuple[str, int] | None = None
        self.stored_problem = ""
        self.file = SimpleNamespace(
            timeouts=SimpleNamespace(onboard=timedelta(seconds=60)), state=SimpleNamespace(store_every=store_every)
        )
        self.epochs = SimpleNamespace(seats=self.seats, changed=Signal())
        self.foreign: set[int] = set()
        """Members whose parameters are not of the run's commits."""
        self.states = SimpleNamespace(is_ours=lambda seat: seat.member.worker_id not in self.foreign)

    def join(self, worker_id: int, *, address: str = "there", published: int = 0, speed: float = 1.0) -> Seat:
        applicant = Applicant(name=f"ant{worker_id}", nonce="n", session="s", peer="p", address=address, elastic=True)
        member = Member(worker_id=worker_id, applicant=applicant, last_seen=0.0, ready=True)
        seat = Seat(member=member, flow=Flow(1))
        seat.published_steps, seat.speed = published, speed
        self.seats[worker_id] = seat
        self._count_able()
        return seat

    def follow(self, worker_id: int, follow_from: int | None = 5) -> Seat:
        seat = self.join(worker_id)
        seat.follow()
        seat.follow_from = follow_from
        self._count_able()
        return seat

    def lead(self, worker_id: int) -> None:
        self.seats[worker_id].lead()
        self._count_able()

    def leave(self, worker_id: int) -> None:
        del self.seats[worker_id]
        self._count_able()

    def tell(self, worker_id: int) -> None:
        """A step is committed whose lease carried the request."""
        self.seats[worker_id].publish_requested = False
        self.progress.committed_steps += 1

    def _count_able(self) -> None:
        self.epochs.able = [seat for _, seat in sorted(self.seats.items()) if not seat.following]


class Stub:
    def __init__(self, world: World, worker_id: int) -> None:
        self._world, self._worker_id = world, worker_id

    async def export_metadata(self) -> tuple[WorkerMetadata]:
        self._world.exports += 1
        if self._worker_id in self._world.broken:
            raise ConnectionError("ExportMetadata broke")
        return (METADATA,)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def keeping(world: World) -> AsyncIterator[Onboarding]:
    attachments: Any = SimpleNamespace(is_attached=world.attached.__contains__)
    run: Any = world
    dial: Any = lambda seat, rank: Stub(world, seat.member.worker_id)  # noqa: E731
    keeper = Onboarding(run, attachments, dial, clock=lambda: world.now)
    task = asyncio.create_task(keeper.keep())
    try:
        await settled(world)
        yield keeper
    finally:
        task.cancel()
        await keeper.close()


async def settled(world: World) -> None:
    """Has everything looked at that has changed."""
    for _ in range(3):
        world.changed.notify()
        for _ in range(10):
            await asyncio.sleep(0)


def offer_of(seat: Seat) -> StateOffer | None:
    frames = []
    while not seat.outbox.empty():
        frames.append(seat.outbox.get_nowait())
    assert len(frames) < 2, "one offer at a time"
    if not frames:
        return None
    assert isinstance(frames[0], StateOffer)
    return frames[0]


def peer_of(offer: StateOffer | None) -> tuple[int, bool]:
    assert offer is not None
    assert isinstance(offer.source, PeerState)
    return offer.source.worker_id, offer.source.relayed


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


def test_a_worker_is_asked_to_publish_and_what_it_publishes_is_offered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def test() -> None:
        world = World()
        world.join(0, speed=1.0)
        fast, follower = world.join(1, speed=2.0), world.follow(2)
        async with keeping(world) as keeper:
            assert fast.publish_requested
            assert not world.seats[0].publish_requested
            assert keeper.waiting_for(2) == "waiting for worker ant1 to publish its state"
            world.tell(1)
            await settled(world)
            assert offer_of(follower) is None
            fast.published_steps = 6
            await settled(world)
            offer = offer_of(follower)
            assert peer_of(offer) == (1, False)
            assert offer is not None
            assert (offer.completed_steps, offer.offer_id) == (6, 1)
            assert keeper.waiting_for(2) == "fetching the state behind step 6, from worker ant1"
            world.now = 2.5
            await settled(world)
            assert offer_of(follower) is None, "one offer at a time"
            world.lead(2)
            await settled(world)
            assert keeper.waiting_for(2) == ""
        assert "worker ant2 is up to date after 2.5 s, from worker ant1" in caplog.text

    run(test)


def test_an_offer_that_failed_is_followed_by_one_of_another_worker(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        world = World()
        world.join(0, published=5, speed=2.0)
        world.join(1, published=5, speed=1.0)
        follower = world.follow(2)
        async with keeping(world):
            first = offer_of(follower)
            assert peer_of(first) == (0, False)
            follower.failed_offer = (1, "PEER_LOST: nobody listens")
            await settled(world)
            assert peer_of(offer_of(follower)) == (1, False)
        assert "worker ant2 did not get the state behind step 5, from worker ant0: PEER_LOST: nobody" in caplog.text

    run(test)


def test_when_the_serving_worker_leaves_another_serves() -> None:
    async def test() -> None:
        world = World()
        world.join(0, published=5, speed=2.0)
        other, follower = world.join(1), world.follow(2)
        async with keeping(world):
            assert peer_of(offer_of(follower)) == (0, False)
            assert not other.publish_requested
            world.leave(0)
            await settled(world)
            assert other.publish_requested
            world.tell(1)
            other.published_steps = 6
            await settled(world)
            assert peer_of(offer_of(follower)) == (1, False)

    run(test)


def test_a_worker_that_falls_behind_itself_serves_no_longer() -> None:
    async def test() -> None:
        world = World()
        first = world.join(0, published=5, speed=2.0)
        world.join(1, published=5)
        follower = world.follow(2)
        async with keeping(world):
            assert peer_of(offer_of(follower)) == (0, False)
            first.follow(tainted=True)
            world._count_able()
            await settled(world)
            assert peer_of(offer_of(follower)) == (1, False)

    run(test)


def test_an_offer_that_takes_too_long_is_made_elsewhere() -> None:
    async def test() -> None:
        world = World()
        world.join(0, published=5, speed=2.0)
        world.join(1, published=5)
        follower = world.follow(2)
        async with keeping(world):
            assert peer_of(offer_of(follower)) == (0, False)
            world.now = 61.0
            await settled(world)
            assert peer_of(offer_of(follower)) == (1, False)

    run(test)


def test_a_worker_that_can_not_be_asked_about_itself_is_passed_over() -> None:
    async def test() -> None:
        world = World()
        world.join(0, published=5, speed=2.0)
        world.join(1, published=5)
        world.broken.add(0)
        follower = world.follow(2)
        async with keeping(world):
            assert peer_of(offer_of(follower)) == (1, False)

    run(test)


def test_a_worker_that_nobody_can_dial_is_offered_through_the_coordinator() -> None:
    async def test() -> None:
        world = World()
        world.join(0, published=5, address="")
        follower = world.follow(2)
        async with keeping(world) as keeper:
            assert offer_of(follower) is None
            assert "nobody can reach" in keeper.waiting_for(2)
            world.attached.add(0)
            await settled(world)
            assert peer_of(offer_of(follower)) == (0, True)

    run(test)


def test_two_followers_share_one_publication_and_nobody_replaces_what_is_read() -> None:
    async def test() -> None:
        world = World()
        only, first, second = world.join(0), world.follow(1), world.follow(2)
        async with keeping(world):
            assert only.publish_requested
            world.tell(0)
            only.published_steps = 6
            await settled(world)
            assert peer_of(offer_of(first)) == (0, False)
            assert peer_of(offer_of(second)) == (0, False)
            third = world.follow(3, follow_from=7)
            await settled(world)
            assert not only.publish_requested, "what is read would be replaced"
            world.lead(1)
            world.lead(2)
            await settled(world)
            assert world.seats[0].publish_requested or world.seats[1].publish_requested
            assert offer_of(third) is None

    run(test)


def test_a_worker_that_was_asked_and_did_not_publish_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        world = World()
        world.join(0, speed=2.0)
        other = world.join(1)
        world.follow(2)
        async with keeping(world):
            world.tell(0)
            await settled(world)
            world.now, world.progress.committed_steps = 3.0, 7
            await settled(world)
            assert other.publish_requested
        assert "worker ant0 was asked to publish its state and did not" in caplog.text

    run(test)


def test_a_state_that_is_being_stored_is_not_replaced() -> None:
    async def test() -> None:
        world = World(store_every=5)
        only = world.join(0, published=5)
        follower = world.follow(2, follow_from=6)
        async with keeping(world):
            assert not only.publish_requested
            world.progress.settled_steps = 5
            await settled(world)
            assert only.publish_requested
            # It could be read meanwhile by who can use it.
            assert offer_of(follower) is None

    run(test)


@pytest.mark.parametrize(
    ("kind", "published", "is_offered"), [("train", 5, False), ("train", 6, True), ("evaluate", 5, True)]
)
def test_a_newcomer_needs_a_state_behind_the_first_step_that_it_is_part_of(
    kind: str, published: int, is_offered: bool
) -> None:
    async def test() -> None:
        world = World()
        world.live = SimpleNamespace(core=SimpleNamespace(kind=kind))
        world.join(0, published=published)
        follower = world.follow(2, follow_from=None)
        async with keeping(world):
            assert (offer_of(follower) is not None) is is_offered

    run(test)


def test_a_stored_state_is_offered_where_the_run_has_gone_back_to_it() -> None:
    async def test() -> None:
        world = World()
        follower = world.follow(2, follow_from=None)
        async with keeping(world) as keeper:
            assert offer_of(follower) is None
            assert keeper.waiting_for(2) == "no worker that is up to date is here"
            world.stored_source = ("before", 5)
            await settled(world)
            offer = offer_of(follower)
            assert offer is not None
            assert (offer.source, offer.completed_steps) == ("before", 5)

    run(test)


def test_a_follower_that_leaves_is_forgotten() -> None:
    async def test() -> None:
        world = World()
        world.join(0, published=5)
        world.follow(2)
        async with keeping(world) as keeper:
            assert keeper.waiting_for(2)
            world.leave(2)
            await settled(world)
            assert not keeper.waiting_for(2)

    run(test)


def test_when_nobody_needs_a_state_any_more_nobody_is_asked_for_one() -> None:
    async def test() -> None:
        world = World()
        only = world.join(0)
        world.follow(2)
        async with keeping(world):
            assert only.publish_requested
            world.lead(2)
            await settled(world)
            assert not only.publish_requested

    run(test)


def test_nothing_is_missed_although_nobody_says_that_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onboarding, "_TICK_S", 0.01)

    async def test() -> None:
        world = World()
        world.join(0, published=5)
        async with keeping(world):
            follower = world.follow(2)
            async with asyncio.timeout(5):
                while follower.outbox.empty():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    run(test)


def test_an_offer_has_failed_when_what_was_taken_is_not_of_the_runs_commits(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        world = World()
        follower = world.follow(2)
        world.foreign.add(2)
        world.stored_source = ("other", 5)
        async with keeping(world):
            assert offer_of(follower) is not None
            await settled(world)
            assert "did not get" not in caplog.text  # What it had before says nothing.
            follower.completed_steps = 5
            await settled(world)
            assert "from the object store: what it took is not of the commits that count" in caplog.text
            assert "worker ant2 could not load the one that is stored behind step 5" in world.stored_problem
            world.now += 1.0
            await settled(world)
            assert offer_of(follower) is not None

    run(test)
