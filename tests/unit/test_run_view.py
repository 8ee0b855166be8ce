"""The view of a run: what page, metrics and terminal are made from."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.messages import duration
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.watch.curve import BOUNDS, MOST_POINTS, Curve, Durations
from coordinator_service.watch.gate import Gate
from coordinator_service.watch.history import History
from coordinator_service.watch.view import Event, Point, plain, seconds_left
from coordinator_service.watch.view_messages import view_of


def point(step: int, unix_time: float = 0.0) -> Point:
    return Point(step=step, unix_time=unix_time, loss=float(step))


@given(st.integers(0, 3000))
def test_a_curve_stays_short_and_keeps_its_first_and_its_newest_points(count: int) -> None:
    curve = Curve()
    for step in range(count):
        curve.add(point(step))
    steps = [one.step for one in curve.points()]
    assert steps == sorted(set(steps))
    assert len(steps) <= MOST_POINTS
    assert steps[:1] == [0][:count]
    assert steps[-100:] == list(range(max(0, count - 100), count))
    gaps = [after - before for before, after in pairwise(steps[:-100])]
    assert len(set(gaps)) <= 3, gaps


def test_steps_that_were_taken_back_leave_the_curve() -> None:
    curve = Curve()
    for step in (0, 1, 2, 3, 2):
        curve.add(point(step))
    assert [one.step for one in curve.points()] == [0, 1, 2]


def test_durations_are_counted_in_the_class_that_they_just_fit() -> None:
    durations = Durations()
    for seconds in (BOUNDS[0], BOUNDS[0] + 1e-9, 1e9):
        durations.add(seconds)
    counts = dict(durations.cumulative())
    assert counts["0.01"] == 1
    assert counts["0.025"] == counts["300.0"] == 2
    assert counts["+Inf"] == 3


def test_a_sentence_is_one_line_of_bounded_length_and_the_oldest_go() -> None:
    history = History()
    for number in range(150):
        text = f"{number} " + "a\nb " * 400
        history.happened(Event(unix_time=1.0, level="info", sentence=text, committed_steps=0))
    sentences = [event.sentence for event in history.events]
    assert len(sentences) == 100
    assert sentences[0].startswith("50 a b a b")
    assert all(len(one) <= 500 and "\n" not in one for one in sentences)


def test_what_is_left_is_told_by_the_speed_of_the_last_steps() -> None:
    points = [point(step, 10.0 * step if step < 50 else 500 + 2.0 * (step - 50)) for step in range(100)]
    assert seconds_left(points, 100, 150) == pytest.approx(100.0)
    assert seconds_left(points, 100, 0) is None
    assert seconds_left(points[:1], 1, 150) is None


def test_a_view_says_who_is_behind_and_where_states_are() -> None:
    ant = pb.WorkerSnapshot(worker_id=1, worker_name="ant", activity="waiting", published_steps=10)
    ant.so_far.compute.CopyFrom(duration(0.5))
    bee = pb.WorkerSnapshot(
        worker_id=2,
        worker_name="bee",
        following=True,
        completed_steps=7,
        waiting_for="fetching the state behind step 10",
    )
    cat = pb.WorkerSnapshot(worker_id=3, worker_name="cat", activity="waiting", committed=True, draining=True)
    snapshot = pb.RunSnapshot(
        state=pb.RUN_STATE_RUNNING, committed_steps=12, step_elapsed=duration(1.0), workers=[ant, bee, cat]
    )
    view = view_of("toy", snapshot)
    assert [worker.state for worker in view.workers] == ["computing", "following", "draining"]
    assert [worker.lag_steps for worker in view.workers] == [0, 5, 0]
    assert [tier.sentence for tier in view.tiers] == [
        "2 of 3 workers have the run's parameters",
        "1 worker offers a state to others, the newest behind step 10",
        "no state is stored yet",
    ]
    assert [one.sentence for one in view.transfers] == ["worker bee is fetching the state behind step 10"]


def test_a_view_is_json_also_where_numbers_are_not_finite() -> None:
    snapshot = pb.RunSnapshot(loss=float("nan"), workers=[pb.WorkerSnapshot(samples_per_second=float("inf"))])
    text = json.dumps(plain(view_of("toy", snapshot)), allow_nan=False)
    assert json.loads(text)["loss"] is None


GATE = {True: Gate(token="right", is_loopback=True), False: Gate(token="right", is_loopback=False)}


WRONG = ["", "right", "Bearer wrong", "Bearer ", "Basic right", "Bearer right2", "Bearer \udcff", "Bearer r\u00efght"]


@pytest.mark.parametrize("given", WRONG)
def test_without_the_token_nothing_can_be_pressed_and_nothing_seen_from_elsewhere(given: str) -> None:
    for gate in GATE.values():
        assert not gate.may_act(given)
    assert not GATE[False].may_read(given, "127.0.0.1:80")


@pytest.mark.parametrize("given", ["Bearer right", "bearer right", "Bearer  right "])
def test_with_the_token_everything_may_be_done(given: str) -> None:
    for gate in GATE.values():
        assert gate.may_act(given)
        assert gate.may_read(given, "example.org")


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost:1", "localhost", "[::1]:8080", "[::1]", "127.0.0.1"])
def test_on_loopback_this_host_may_look(host: str) -> None:
    assert GATE[True].may_read("", host)


@pytest.mark.parametrize(
    "host", ["", "example.org", "example.org:8080", "127.0.0.1.example.org", "localhost.example.org:1", "::1"]
)
def test_on_loopback_a_name_that_leads_here_from_elsewhere_sees_nothing(host: str) -> None:
    assert not GATE[True].may_read("", host)
