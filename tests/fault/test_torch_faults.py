"""Members of a torch group that are killed or stopped in the middle of a bucket: nobody hangs, and the rest go on."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.torch_members import Member

SIZE = 1_000_000
"""Elements of a bucket."""
PROMPT_S = 5.0
"""Within this every member has to notice; a collective's own time is longer by far."""
REDUCE_S = 60.0


@contextmanager
def crew(count: int, victim: int = -1) -> Iterator[list[Member]]:
    """Members, of which one is stopped in its second turn before it adds."""
    with ExitStack() as stack:
        places = ["worker.contribution.half=stop@2" if rank == victim else "" for rank in range(count)]
        started = [Member.start(rank, REDUCE_S, place) for rank, place in enumerate(places)]
        for member in started:
            stack.callback(member.kill)
        yield [member.ready() for member in started]


def regroup(members: list[Member], generation: int) -> None:
    stores = [member.store for member in members]
    for member in members:
        member.tell(group=stores, generation=generation)


def bring(members: list[Member], of: int, step: int) -> None:
    """Has each bring one micro-batch, and waits until all have."""
    tell_to_bring(members, of, step)
    assert answers(members) == [{"sent": step}] * len(members)


def tell_to_bring(members: list[Member], of: int, step: int) -> None:
    for number, member in enumerate(members):
        member.tell(reduce={"range": [number, number + 1, of], "step": step, "size": SIZE})


def answers(members: list[Member]) -> list[dict]:
    return [member.answer() for member in members]


def reduced_together(members: list[Member], generation: int, step: int) -> None:
    """Has them form a group that works."""
    count = len(members)
    regroup(members, generation)
    bring(members, count, step)
    assert answers(members) == [{"mean": (count + 1) / 2, "weight": count}] * count


def restarted(said: list[dict]) -> bool:
    return all(one.get("error") == "ROUND_RESTARTED" for one in said)


@contextmanager
def stuck(victim: int) -> Iterator[tuple[list[Member], list[Member]]]:
    """All of three members, and those that wait in a bucket of step 1 for the one that is stopped."""
    with crew(3, victim) as members:
        reduced_together(members, 1, 0)
        tell_to_bring(members, 3, 1)
        left = [member for rank, member in enumerate(members) if rank != victim]
        # What it brought has left the victim, but it may be stopped before it says so.
        assert answers(left) == [{"sent": 1}] * 2
        os.waitid(os.P_PID, members[victim].process.pid, os.WSTOPPED)
        yield members, left


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_member_that_is_killed_breaks_the_group_at_once_and_the_others_form_one_without_it(victim: int):
    with stuck(victim) as (members, left):
        began = time.monotonic()
        members[victim].kill()
        assert answers(left) == [{"broken": 1}] * 2
        assert time.monotonic() - began < PROMPT_S
        regroup(left, 2)
        assert restarted(answers(left))
        reduced_together(left, 3, 1)
        assert [member.end() for member in left] == [0, 0]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_member_that_is_stopped_holds_nobody_once_there_is_another_group(victim: int):
    with stuck(victim) as (_, left):
        began = time.monotonic()
        regroup(left, 2)
        assert restarted(answers(left))
        assert time.monotonic() - began < PROMPT_S
        reduced_together(left, 3, 1)
        assert time.monotonic() - began < 2 * PROMPT_S
        assert [member.end() for member in left] == [0, 0]
        assert time.monotonic() - began < 3 * PROMPT_S


def test_a_member_that_goes_on_after_it_was_left_behind_finds_its_group_gone_and_joins_the_next():
    with stuck(2) as (members, left):
        regroup(left, 2)
        assert restarted(answers(left))
        members[2].go_on()
        said = members[2].answer()
        assert {"broken": 1} == (members[2].answer() if said == {"sent": 1} else said)
        regroup(members, 3)
        assert restarted(answers(members[2:]))
        reduced_together(members, 4, 2)


def test_a_member_that_dies_before_the_group_is_built_holds_nobody():
    with crew(3) as (ant, bee, cow):
        stores = [member.store for member in (ant, bee, cow)]
        cow.kill()
        for member in (ant, bee):
            member.tell(group=stores, generation=1)
        bring([ant, bee], 3, 0)
        began = time.monotonic()
        regroup([ant, bee], 2)
        assert restarted(answers([ant, bee]))
        reduced_together([ant, bee], 3, 1)
        assert time.monotonic() - began < 2 * PROMPT_S


def test_who_loses_the_store_tells_at_once():
    with crew(3) as (ant, bee, cow):
        reduced_together([ant, bee, cow], 1, 0)
        ant.kill()
        for member in (bee, cow):
            member.tell(reduce={"range": [1, 2, 3], "step": 1, "size": SIZE})
        assert sorted(str(one) for one in answers([bee, cow]) + answers([bee, cow])) == sorted(
            ["{'sent': 1}", "{'broken': 1}"] * 2
        )
        regroup([bee, cow], 2)
        assert restarted(answers([bee, cow]))
        reduced_together([bee, cow], 3, 1)


def test_groups_that_end_well_do_not_pile_up():
    with crew(2) as members:
        for generation in range(1, 25):
            reduced_together(members, generation, generation)
        assert [member.end() for member in members] == [0, 0]
