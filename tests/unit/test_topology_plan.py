"""The arithmetic of topology "auto"."""

import pytest

from coordinator_service.topology_plan import Situation, TopologyPlan

V = 100_000_000


def among(workers: int, owners: int | None = None, **changes) -> Situation:
    return Situation(num_workers=workers, num_owners=workers if owners is None else owners, **changes)


def made(plan, topology, seconds, now, steps=3):
    for _ in range(steps):
        plan.observe(topology, seconds, V, now)


@pytest.mark.parametrize(
    ("now", "topology", "sentence"),
    [
        (among(3, 0, obstacle="nobody can be dialed"), "star", "topology auto: star, because nobody can be dialed"),
        (among(3, shares_memory=True), "star", "all workers share memory with the coordinator, so no bytes travel"),
        (among(1), "sharded", "one worker alone has nothing to exchange"),
        (among(3), "star", "the links are not measured yet (3 steps are enough)"),
    ],
)
def test_what_decides_before_any_rate(now, topology, sentence):
    choice = TopologyPlan().choose(now)
    assert choice.topology == topology
    assert sentence in choice.sentence


def test_a_decision_is_explained_once():
    plan = TopologyPlan()
    assert plan.choose(among(3)).sentence
    assert not plan.choose(among(3)).sentence
    assert plan.choose(among(1)).sentence
    assert plan.choose(among(3)).sentence


def test_links_that_are_alike_make_workers_reduce_and_the_sentence_shows_the_numbers():
    plan = TopologyPlan()
    plan.choose(among(4))
    made(plan, "star", 4.0, among(4))
    choice = plan.choose(among(4))
    assert choice.topology == "sharded"
    assert choice.sentence == (
        "topology auto: sharded, because 100 MB a step among 4 workers (4 own slices) take max(4 x 100 MB / 100 MB/s, "
        "100 MB / 100 MB/s) = 4 s with star and 1.5 x 100 MB / 100 MB/s = 1.5 s with sharded"
    )


def test_what_sharded_really_takes_decides_from_then_on():
    plan = TopologyPlan()
    made(plan, "star", 1.0, among(4))
    assert plan.choose(among(4)).topology == "sharded"
    made(plan, "sharded", 1.4, among(4), steps=2)
    assert plan.choose(among(4)).topology == "sharded"
    made(plan, "sharded", 1.4, among(4), steps=1)
    assert plan.choose(among(4)).topology == "star"
    assert plan.choose(among(4)).topology == "star"


def test_a_small_gain_changes_nothing():
    plan = TopologyPlan()
    made(plan, "star", 1.0, among(2))
    assert plan.choose(among(2)).topology == "sharded"
    made(plan, "sharded", 1.05, among(2))
    assert plan.choose(among(2)).topology == "sharded"


def test_workers_that_share_memory_with_one_another_reduce_what_is_large():
    plan, now = TopologyPlan(), among(3, shares_memory=True, peers_share_memory=True)
    choice = plan.choose(now)
    assert (choice.topology, "not known yet" in choice.sentence) == ("star", True)
    plan.observe("star", 0.01, 5_500_000, now)
    choice = plan.choose(now)
    assert (choice.topology, "5.5 MB a step are soon added" in choice.sentence) == ("star", True)
    plan.observe("star", 0.01, V, now)
    choice = plan.choose(now)
    assert choice.topology == "sharded"
    assert "share memory with one another, and each adds a part of 100 MB a step" in choice.sentence
    assert plan.choose(among(3, shares_memory=True)).topology == "star"


@pytest.mark.parametrize(("owners", "factor"), [(8, "1.75"), (2, "4"), (1, "7")])
def test_fewer_owners_carry_more(owners, factor):
    plan = TopologyPlan()
    made(plan, "star", 8.0, among(8))
    choice = plan.choose(among(8, owners))
    assert choice.topology == "sharded"
    assert f"with star and {factor} x 100 MB / 100 MB/s = {factor} s with sharded" in choice.sentence


def test_a_rate_from_one_world_serves_another():
    plan = TopologyPlan()
    made(plan, "star", 2.0, among(2))
    assert plan.choose(among(2)).topology == "sharded"
    made(plan, "sharded", 2.6, among(2))
    assert plan.choose(among(2)).topology == "star"
    assert plan.choose(among(8)).topology == "sharded", "8 V / C grows with the workers, 2 V (N - 1) / N does not"


def test_steps_that_show_nothing_are_not_counted():
    plan = TopologyPlan()
    made(plan, "star", 0.0, among(4))
    made(plan, "star", 1.0, among(4, shares_memory=True))
    made(plan, "star", 1.0, among(1))
    plan.observe("star", 1.0, 0, among(4))
    assert "not measured yet" in plan.choose(among(4)).sentence
