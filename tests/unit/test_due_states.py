"""Which published state is stored next, by whom, and which ones nobody can store any more."""

import pytest

from coordinator_service.due_states import Missed, Standing, Store, next_state


def members(*published: int, completed: tuple[int, ...] = ()) -> list[Standing]:
    steps = completed or (0,) * len(published)
    return [
        Standing(worker_id=number, published_steps=one, completed_steps=made)
        for number, (one, made) in enumerate(zip(published, steps, strict=True))
    ]


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ((3, 3), Store(steps=3, worker_ids=(0, 1))),
        ((3, 0), None),
        ((2, 2), None),
        ((), None),
        ((0, 4), Missed(steps=3)),
        ((3, 4), Store(steps=3, worker_ids=(0,))),
        ((3, 6), Store(steps=3, worker_ids=(0,))),
        ((6, 6), Missed(steps=3)),
    ],
)
def test_a_state_is_stored_when_all_hold_it_or_by_those_who_do_when_it_is_passed(published, expected) -> None:
    assert next_state(3, 0, members(*published)) == expected


def test_a_member_that_caught_up_past_a_due_state_is_not_waited_for() -> None:
    # Two hold the state behind step 6; the third got the one behind step 4 and has made step 7 by now.
    assert next_state(3, 3, members(6, 6, 4, completed=(6, 6, 6))) is None
    assert next_state(3, 3, members(6, 6, 4, completed=(7, 7, 7))) == Store(steps=6, worker_ids=(0, 1))


def test_what_is_settled_is_left_alone() -> None:
    assert next_state(3, 3, members(3, 3)) is None
    assert next_state(3, 3, members(3, 4)) is None
    assert next_state(3, 6, members(3, 3)) is None


def test_at_the_end_nobody_is_waited_for() -> None:
    assert next_state(3, 3, members(6, 5, completed=(6, 6))) is None
    assert next_state(3, 3, members(6, 5, completed=(6, 6)), is_last=True) == Store(steps=6, worker_ids=(0,))
    assert next_state(3, 3, members(5, 5, completed=(6, 6)), is_last=True) is None


def test_an_extra_state_is_stored_in_its_turn() -> None:
    assert next_state(0, 0, members(5, 5), [5]) == Store(steps=5, worker_ids=(0, 1))
    assert next_state(3, 3, members(5, 5), [5]) == Store(steps=5, worker_ids=(0, 1))
    assert next_state(3, 3, members(7, 6), [7]) == Store(steps=6, worker_ids=(1,))
    assert next_state(3, 6, members(7, 6), [7]) is None
    assert next_state(3, 7, members(7, 7), [7]) is None


def test_with_nothing_due_nothing_is_stored() -> None:
    assert next_state(0, 0, members(5, 5)) is None
