"""Who is in a group of CollectiveService, and what is refused."""

import pytest

from ayni.errors import Deadline, IdentityTaken, Incompatible, TooLarge, WorldFull
from coordinator_service.collective_groups import MOST_GROUPS, Groups


def test_ranks_are_those_that_were_asked_for_or_the_next_free_ones():
    groups = Groups(8)
    group, first = groups.enter("g", 3, 1, "a")
    assert (first, group.was_whole, group.missing) == (1, False, [0, 2])
    assert groups.enter("g", 3, None, "b")[1] == 0
    assert groups.enter("g", 3, None, "c")[1] == 2
    assert group.was_whole
    assert group.names == ("b", "a", "c")


def test_one_that_goes_frees_its_rank_only_before_the_group_is_whole():
    groups = Groups(8)
    group, rank = groups.enter("g", 2, 0, "a")
    groups.enter("g", 2, 1, "b")
    with pytest.raises(WorldFull, match=r"group 'g' has all of its 2 processes \(a, b\)"):
        groups.enter("g", 2, 0, "again")
    groups.leave(group, rank)
    # Nobody takes the place of one that has gone; who comes then is of the next group of that name.
    other, rank = groups.enter("g", 4, 0, "anew")
    assert (other.world_size, rank, other.missing) == (4, 0, [1, 2, 3])
    groups.leave(group, 1)
    assert groups.enter("g", 4, 1, "another")[0] is other
    group, rank = groups.enter("h", 2, 0, "a")
    groups.leave(group, rank)
    assert groups.enter("h", 2, 0, "b")[1] == 0


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (("g", 3, None, "b"), Incompatible, "opened with world_size 2 and b says 3"),
        (("g", 2, 0, "b"), IdentityTaken, "rank 0 of group 'g' is a already"),
        (("g", 2, 2, "b"), Incompatible, "rank 2 is impossible"),
        (("other", 9, 0, "b"), TooLarge, "takes 1 to 8"),
        (("other", 0, 0, "b"), TooLarge, "takes 1 to 8"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple, error: type[Exception], sentence: str):
    groups = Groups(8)
    groups.enter("g", 2, 0, "a")
    with pytest.raises(error, match=sentence):
        groups.enter(*arguments)
    assert groups.enter("g", 2, None, "b")[1] == 1


def test_there_are_only_so_many_groups():
    groups = Groups(8)
    for number in range(MOST_GROUPS):
        groups.enter(str(number), 2, None, "a")
    with pytest.raises(TooLarge, match="groups already"):
        groups.enter("one more", 2, None, "a")


def test_a_group_that_does_not_become_whole_says_who_is_missing_and_lets_nobody_else_in():
    groups = Groups(64)
    group, _ = groups.enter("g", 4, 2, "c")
    groups.enter("g", 4, 0, "a")
    error = group.not_whole(90)
    assert isinstance(error, Deadline)
    assert "not whole within 90 s" in str(error)
    assert "ranks 1, 3 of 4 did not come; there are a (rank 0), c (rank 2)" in str(error)
    assert error.metadata["waiting_for"] == "ranks 1, 3"
    groups.forget(group)
    other, rank = groups.enter("g", 4, 2, "anew")
    assert (other is group, rank) == (False, 2)
    groups.leave(group, 2)
    groups.leave(group, 0)
    assert groups.enter("g", 4, 0, "another")[0] is other
    many, _ = groups.enter("many", 20, 0, "a")
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more of 20" in str(many.not_whole(1))
