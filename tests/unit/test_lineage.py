"""A state is of the run if it has as many steps behind it, and the last one is the commit that counts."""

import random

from ayni.step_values import Origin
from coordinator_service.lineage import Lineage


def origin(epoch: int, attempt: int = 0) -> Origin:
    return Origin(epoch=epoch, attempt=attempt)


def made(*origins: Origin, first: int = 0) -> Lineage:
    lineage = Lineage()
    for step, one in enumerate(origins, first):
        lineage.note(step, one)
    return lineage


def test_a_state_of_a_commit_that_was_taken_back_is_told_from_the_one_in_its_place() -> None:
    lineage = made(origin(1), origin(1), origin(1))
    lineage.rewind(2)
    lineage.note(2, origin(2))
    assert lineage.has(2, origin(1))
    assert lineage.has(3, origin(2))
    assert not lineage.has(3, origin(1))
    assert not lineage.has(2, origin(2))


def test_another_attempt_is_another_commit() -> None:
    lineage = made(origin(1), origin(1, 2), origin(1))
    assert lineage.has(2, origin(1, 2))
    assert not lineage.has(2, origin(1))
    assert lineage.has(3, origin(1))


def test_what_is_not_said_or_not_known_is_believed() -> None:
    lineage = made(origin(1), origin(1), first=5)
    assert lineage.has(6, None)
    assert lineage.has(0, None)
    assert lineage.has(5, origin(40))
    lineage.rewind(6)
    assert lineage.has(7, origin(1))


def test_a_commit_that_is_noted_again_changes_nothing() -> None:
    lineage = made(origin(1), origin(2))
    lineage.note(0, origin(1))
    lineage.note(1, origin(2))
    assert lineage.has(2, origin(2))
    assert not lineage.has(2, origin(1))


def test_any_history_gives_what_a_plain_list_gives() -> None:
    draw = random.Random(7)
    for _ in range(200):
        lineage, plain = Lineage(), list[Origin]()
        for epoch in range(1, 6):
            for _ in range(draw.randrange(5)):
                plain.append(origin(epoch, draw.randrange(2)))
                lineage.note(len(plain) - 1, plain[-1])
            steps = draw.randrange(len(plain) + 1)
            lineage.rewind(steps)
            del plain[steps:]
        for steps in range(1, 30):
            for asked in (origin(epoch, attempt) for epoch in range(1, 6) for attempt in range(2)):
                assert lineage.has(steps, asked) == (steps > len(plain) or plain[steps - 1] == asked)
