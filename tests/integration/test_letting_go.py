"""Members that an operator drains, while others go on their own."""

import pytest

from coordinator_service.epochs import Epochs, Seat
from coordinator_service.membership import Applicant, Membership


def epochs_of(*names: str) -> tuple[Epochs, list[Seat]]:
    membership = Membership(min_workers=1, start_workers=1, max_workers=4, lease=60.0)
    epochs = Epochs(membership, flow_limit=1, on_gone=lambda member, reason: None)
    for name in names:
        epochs.join(Applicant(name=name, nonce=name, session=name, peer="127.0.0.1:1"))
    for seat in epochs.seats.values():
        seat.member.ready = True
    return epochs, list(epochs.seats.values())


def test_a_drained_member_is_let_go_once() -> None:
    epochs, (ant, bee) = epochs_of("ant", "bee")
    ant.draining = True
    for _ in range(2):
        epochs.let_go(3, needed=1)
    assert (ant.dismissed, bee.dismissed) == (True, False)
    assert ant.outbox.qsize() == 1


@pytest.mark.parametrize("needed", [1, 2])
def test_a_drained_member_stays_where_the_others_have_gone(needed: int) -> None:
    epochs, (ant, bee) = epochs_of("ant", "bee")
    ant.draining = True
    epochs.expel(bee.member.worker_id, "its stream broke")
    epochs.let_go(3, needed=needed)
    assert not ant.dismissed
    assert not ant.draining


def test_of_two_that_are_drained_one_stays() -> None:
    epochs, (ant, bee) = epochs_of("ant", "bee")
    ant.draining = bee.draining = True
    epochs.let_go(3, needed=1)
    assert [ant.dismissed, bee.dismissed].count(True) == 1


def test_a_member_whose_step_is_in_progress_is_not_let_go() -> None:
    epochs, (ant, bee) = epochs_of("ant", "bee")
    ant.draining = bee.draining = True
    epochs.let_go(3, needed=0, in_step=[ant.member.worker_id])
    assert (ant.dismissed, bee.dismissed) == (False, True)
