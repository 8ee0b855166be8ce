"""When a worker publishes its state, and what it does not replace."""

import pytest

from ayni.run_config import StateConfig
from worker_agent.state_schedule import StateSchedule, Todo


def schedule(published: int = 0, *, publish_every: int = 0, store_every: int = 0, asked: bool = False) -> StateSchedule:
    made = StateSchedule(StateConfig(publish_every=publish_every, store_every=store_every))
    made.published(published)
    if asked:
        made.ask()
    return made


@pytest.mark.parametrize(("steps", "expected"), [(1, Todo.NOTHING), (2, Todo.PUBLISH), (3, Todo.NOTHING)])
def test_a_state_is_published_where_the_run_file_says_so(steps: int, expected: Todo) -> None:
    assert schedule(publish_every=2).todo(steps, 0) is expected


def test_nothing_is_published_that_nobody_asked_for() -> None:
    assert schedule().todo(5, 0) is Todo.NOTHING


def test_what_was_asked_for_is_published_once() -> None:
    asked = schedule(asked=True)
    assert asked.todo(5, 0) is Todo.PUBLISH
    asked.published(5)
    assert asked.todo(6, 0) is Todo.NOTHING


def test_what_could_not_be_published_is_tried_again_at_the_next_step() -> None:
    asked = schedule(asked=True)
    assert asked.todo(5, 0) is Todo.PUBLISH
    assert asked.todo(6, 0) is Todo.PUBLISH


def test_a_state_that_is_published_already_is_not_published_again() -> None:
    # Onboarded behind the very step that is due.
    assert schedule(4, publish_every=2).todo(4, 0) is Todo.NOTHING


def test_a_state_that_is_to_be_stored_is_not_replaced_on_request_before_it_is_settled() -> None:
    asked = schedule(6, publish_every=3, store_every=3, asked=True)
    assert asked.todo(7, 3) is Todo.NOTHING
    assert asked.todo(8, 6) is Todo.PUBLISH, "the request is put off, not forgotten"


def test_a_state_that_is_only_published_waits_for_nobody() -> None:
    assert schedule(6, publish_every=1, store_every=3).todo(7, 3) is Todo.NOTHING
    assert schedule(6, publish_every=1, store_every=3).todo(7, 6) is Todo.PUBLISH
    assert schedule(7, publish_every=1, store_every=3).todo(8, 6) is Todo.PUBLISH


def test_a_state_that_is_to_be_stored_waits_for_the_one_before() -> None:
    assert schedule(6, publish_every=3, store_every=3).todo(9, 3) is Todo.SETTLE_FIRST
    assert schedule(6, publish_every=3, store_every=3).todo(9, 6) is Todo.PUBLISH


def test_while_a_state_is_being_fetched_there_is_nothing_to_wait_for() -> None:
    fetching = schedule(6, publish_every=3, store_every=3)
    fetching.published(0)
    assert fetching.todo(9, 3) is Todo.PUBLISH
