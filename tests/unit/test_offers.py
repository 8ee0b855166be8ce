"""Whose state a follower is offered, and who is asked to publish one."""

from typing import Any

import pytest

from coordinator_service.offers import STORE, Ask, Failures, Holder, Offer, Route, Wait, choose

NOW = 100.0


def holder(worker_id: int, published: int = 0, **fields: Any) -> Holder:
    return Holder(worker_id=worker_id, name=f"ant{worker_id}", published_steps=published, **fields)


def failed(*routes: Route, at: float = 0.0) -> Failures:
    failures = Failures()
    for route in routes:
        failures.note(at, route)
    return failures


def direct(worker_id: int) -> Route:
    return Route(worker_id=worker_id)


def relayed(worker_id: int) -> Route:
    return Route(worker_id=worker_id, relayed=True)


def test_who_publishes_something_new_enough_is_offered_before_anybody_is_asked() -> None:
    holders = [holder(0, speed=9.0), holder(1, published=7, speed=1.0)]
    assert choose(NOW, 7, holders, Failures()) == Offer(route=direct(1), steps=7)
    assert choose(NOW, 8, holders, Failures()) == Ask(worker_id=0)


def test_who_has_published_nothing_offers_nothing_to_a_follower_from_the_start() -> None:
    assert choose(NOW, 0, [holder(0)], Failures()) == Ask(worker_id=0)
    assert choose(NOW, 0, [holder(0), holder(1, 1)], Failures()) == Offer(route=direct(1), steps=1)


def test_of_those_who_publish_the_one_with_the_fewest_readers_serves_and_then_the_fastest() -> None:
    holders = [holder(0, 7, speed=9.0, num_readers=1), holder(1, 7, speed=1.0), holder(2, 7, speed=2.0)]
    assert choose(NOW, 7, holders, Failures()) == Offer(route=direct(2), steps=7)


def test_the_fastest_is_asked() -> None:
    assert choose(NOW, 5, [holder(0, speed=1.0), holder(1, speed=3.0), holder(2)], Failures()) == Ask(worker_id=1)


def test_while_one_is_asked_nobody_else_is() -> None:
    decision = choose(NOW, 5, [holder(0, speed=1.0, is_asked=True), holder(1, speed=3.0)], Failures())
    assert decision == Wait(reason="waiting for worker ant0 to publish its state")


def test_nobody_is_asked_whose_state_is_being_read_or_who_holds_one_that_is_to_be_stored() -> None:
    holders = [holder(0, 4, speed=9.0, num_readers=1), holder(1, 4, speed=8.0, may_be_asked=False), holder(2)]
    assert choose(NOW, 5, holders, Failures()) == Ask(worker_id=2)
    decision = choose(NOW, 5, holders[:2], Failures())
    assert isinstance(decision, Wait)
    assert "worker ant0 is being read by another" in decision.reason
    assert "worker ant1 holds a state that is being stored" in decision.reason


def test_several_followers_share_a_publication() -> None:
    holders = [holder(0, 6, num_readers=2), holder(1)]
    assert choose(NOW, 6, holders, Failures()) == Offer(route=direct(0), steps=6)


def test_who_failed_serves_again_only_when_all_others_have_failed_as_often() -> None:
    holders = [holder(0, 6), holder(1, 6), holder(2)]
    assert choose(NOW, 6, holders, failed(direct(0))) == Offer(route=direct(1), steps=6)
    assert choose(NOW, 6, holders, failed(direct(0), direct(1))) == Ask(worker_id=2)
    assert choose(NOW, 6, holders, failed(direct(0), direct(1), direct(2))) == Offer(route=direct(0), steps=6)
    twice = failed(direct(0), direct(0), direct(1), direct(2))
    assert choose(NOW, 6, holders, twice) == Offer(route=direct(1), steps=6)


def test_one_that_can_not_be_dialled_is_read_through_the_coordinator() -> None:
    attached = holder(0, 6, is_attached=True)
    assert choose(NOW, 6, [attached], Failures()) == Offer(route=direct(0), steps=6)
    assert choose(NOW, 6, [attached], failed(direct(0))) == Offer(route=relayed(0), steps=6)
    hidden = holder(0, 6, has_address=False, is_attached=True)
    assert choose(NOW, 6, [hidden], Failures()) == Offer(route=relayed(0), steps=6)
    # Another worker that did not fail comes first.
    assert choose(NOW, 6, [attached, holder(1, 6)], failed(direct(0))) == Offer(route=direct(1), steps=6)


def test_a_worker_that_nobody_can_reach_is_named() -> None:
    decision = choose(NOW, 6, [holder(0, 6, has_address=False)], Failures())
    assert isinstance(decision, Wait)
    assert "nobody can reach the workers that have the state (ant0)" in decision.reason


@pytest.mark.parametrize(("failures", "pause"), [(1, 0.5), (2, 1.0), (3, 2.0), (9, 30.0), (90, 30.0)])
def test_a_route_that_failed_rests_longer_each_time(failures: int, pause: float) -> None:
    failures_of_one = failed(*[direct(0)] * failures, at=NOW)
    assert isinstance(choose(NOW + pause - 0.01, 6, [holder(0, 6)], failures_of_one), Wait)
    assert choose(NOW + pause, 6, [holder(0, 6)], failures_of_one) == Offer(route=direct(0), steps=6)


def test_a_stored_state_is_offered_where_nobody_has_one() -> None:
    stored = Offer(route=Route(worker_id=STORE), steps=6)
    assert choose(NOW, 6, [], Failures(), stored_steps=6) == stored
    assert isinstance(choose(NOW, 7, [], Failures(), stored_steps=6), Wait)
    assert isinstance(choose(NOW, 6, [], failed(stored.route, at=NOW), stored_steps=6), Wait)
    assert choose(NOW + 1, 6, [], failed(stored.route, at=NOW), stored_steps=6) == stored
    assert choose(NOW, 6, [holder(0, 6)], Failures(), stored_steps=6) == Offer(route=direct(0), steps=6)


def test_without_anybody_the_follower_waits() -> None:
    assert choose(NOW, 0, [], Failures()) == Wait(reason="no worker that is up to date is here")
