"""Who leads and who follows, by what members say of their parameters."""

import pytest

from ayni.step_values import Origin
from coordinator_service.epochs import Epochs, Seat
from coordinator_service.member_states import MemberStates
from coordinator_service.membership import Applicant, Membership
from coordinator_service.progress import Progress
from coordinator_service.signals import Signal

BEFORE, NOW = Origin(epoch=1, attempt=0), Origin(epoch=2, attempt=0)


class World:
    """A run that has committed five steps, went back to four of them, and has made the fifth again or has not yet."""

    def __init__(self, *, is_made_again: bool) -> None:
        membership = Membership(min_workers=1, start_workers=1, max_workers=9, lease=10.0)
        self.epochs = Epochs(membership, flow_limit=1, on_gone=lambda member, reason: None)
        self.progress = Progress(5 if is_made_again else 4)
        self.states = MemberStates(self.epochs, self.progress, Signal())
        for step in range(4):
            self.states.lineage.note(step, BEFORE)
        if is_made_again:
            self.states.lineage.note(4, NOW)

    def follower(self, completed_steps: int = 0, origin: Origin | None = None) -> Seat:
        name = f"ant{len(self.epochs.seats)}"
        member = self.epochs.join(Applicant(name=name, nonce=name, session=name, peer="p", elastic=True))
        seat = self.epochs.seats[member.worker_id]
        member.ready, seat.completed_steps, seat.origin = True, completed_steps, origin
        self.states.follow(seat)
        return seat

    def offered(self, seat: Seat) -> None:
        seat.unproven = False


def test_a_state_that_the_run_went_back_behind_is_not_the_runs_when_as_many_steps_are_made_again(caplog) -> None:
    world = World(is_made_again=True)
    stale = world.follower(5, BEFORE)
    assert "worker ant0 has parameters of 5 updates that are not those of the run" in caplog.text
    assert stale.tainted
    world.states.completed(stale, 5, BEFORE)
    world.offered(stale)
    world.states.completed(stale, 5, BEFORE)
    assert stale.following
    world.states.completed(stale, 0, None)
    world.states.completed(stale, 5, NOW)
    assert not stale.following


@pytest.mark.parametrize("origin", [BEFORE, None])
def test_a_state_that_is_ahead_of_the_run_is_thrown_away_before_the_run_is_there(origin) -> None:
    world = World(is_made_again=False)
    stale = world.follower(5, origin)
    assert stale.tainted
    world.progress.committed_steps = 5
    world.states.completed(stale, 5, origin)
    assert stale.following


def test_who_does_not_say_the_commit_is_believed() -> None:
    world = World(is_made_again=True)
    seat = world.follower(3)
    assert not seat.tainted
    world.states.completed(seat, 5, None)
    assert not seat.following


def test_a_state_that_was_taken_too_late_is_thrown_away_and_the_next_one_is_believed() -> None:
    world = World(is_made_again=True)
    seat = world.follower()
    world.states.completed(seat, 5, BEFORE)
    assert (seat.following, seat.tainted, seat.unproven) == (True, True, True)
    world.offered(seat)
    world.states.completed(seat, 5, NOW)
    assert not seat.following


def test_only_who_holds_a_state_that_counts_leads_when_the_run_goes_back() -> None:
    world = World(is_made_again=True)
    world.progress.committed_steps = 4
    holds, stale, differs, ahead = (
        world.follower(4, BEFORE),
        world.follower(4, NOW),
        world.follower(4, BEFORE),
        world.follower(5, NOW),
    )
    differs.follow(tainted=True)
    world.states.went_back(4)
    assert [seat.following for seat in (holds, stale, differs, ahead)] == [False, True, True, True]
    assert [seat.tainted for seat in (holds, stale, differs, ahead)] == [False, True, True, True]
