"""What happens to a run follows from the seed, and leaves workers to go on with."""

import pytest

from ayni import order
from scripts.chaos_schedule import (
    COORDINATOR,
    KINDS,
    LINK_MODES,
    LONGEST_STOP_S,
    SHORTEST_STOP_S,
    schedule,
    spoilt_samples,
)

SEEDS = range(40)
KNOWN = [
    (4, "stop", "worker-1"),
    (11, "stop", "worker-2"),
    (14, "kill", "worker-0"),
    (15, "coordinator", "coordinator"),
    (22, "kill", "worker-2"),
    (27, "coordinator", "coordinator"),
    (36, "kill", "worker-1"),
    (42, "stop", "worker-1"),
    (47, "kill", "worker-2"),
    (48, "stop", "worker-2"),
]


def test_same_seed_gives_the_same_events_and_another_one_others():
    first = schedule(3, 200, 3, 5, tuple(KINDS))
    assert first == schedule(3, 200, 3, 5, tuple(KINDS))
    assert first != schedule(4, 200, 3, 5, tuple(KINDS))


def test_events_known_by_heart_so_that_a_seed_means_the_same_tomorrow():
    events = schedule(0, 60, 3, 5, ("kill", "stop", "coordinator"))
    assert [(event.step, event.kind, event.target) for event in events] == KNOWN


@pytest.mark.parametrize("every", [1, 2, 5, 20])
def test_events_are_so_many_steps_apart_on_average(every):
    counts = [len(schedule(seed, 400, 3, every, tuple(KINDS))) for seed in SEEDS]
    assert 400 / every * 0.85 <= sum(counts) / len(counts) <= 400 / every * 1.1


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_targets_are_members_at_that_time_and_their_number_stays_within_bounds(workers):
    for seed in SEEDS:
        crew = {f"worker-{number}" for number in range(workers)}
        for event in schedule(seed, 300, workers, 3, tuple(KINDS)):
            if event.kind == "join":
                assert event.target not in crew
                crew.add(event.target)
            else:
                assert event.target in {*crew, COORDINATOR}
            if event.kind == "leave":
                crew.remove(event.target)
            assert max(1, workers - 1) <= len(crew) <= workers + 1


def test_every_kind_comes_and_nothing_begins_in_the_last_steps():
    events = [event for seed in SEEDS for event in schedule(seed, 200, 3, 5, tuple(KINDS))]
    assert {event.kind for event in events} == set(KINDS) - {"nan"}
    assert {event.mode for event in events if event.kind == "link"} == set(LINK_MODES)
    assert max(event.step for event in events) <= 195
    assert min(event.step for event in events) >= 1


def test_only_the_kinds_that_were_asked_for_come():
    assert {event.kind for seed in SEEDS for event in schedule(seed, 200, 3, 5, ("leave", "join"))} == {"leave", "join"}
    assert schedule(0, 200, 3, 5, ("nan",)) == ()
    assert schedule(0, 200, 1, 5, ("leave",)) == ()


def test_stops_last_one_to_eight_seconds_and_what_does_not_last_has_none():
    events = [event for seed in SEEDS for event in schedule(seed, 200, 3, 5, tuple(KINDS))]
    assert all(SHORTEST_STOP_S <= event.seconds <= LONGEST_STOP_S for event in events if event.kind == "stop")
    assert all((event.seconds > 0) == (event.kind in ("stop", "link", "disk")) for event in events)


def test_spoilt_samples_are_used_in_the_step_that_they_are_said_for():
    events = spoilt_samples(11, 200, 24, 4800)
    assert events == spoilt_samples(11, 200, 24, 4800)
    assert 3 <= len(events) <= 20
    for event in events:
        used = order.samples_at(11, event.step * 24, (event.step + 1) * 24, 4800).tolist()
        assert int(event.target) in used
