"""Messages of other ranks, until a collective takes them."""

import threading

import pytest

from ayni.errors import BadChunk, Deadline, PeerLost, SpecMismatch, TooLarge
from worker_agent.integrations.mailbox import Mailbox, Message


def expected(size: int = 4, about: str = "allreduce #0, float32 [1]") -> Message:
    return Message(about=about, total_bytes=size)


def deliver(mailbox: Mailbox, sender: int, data: bytes, offset: int = 0, size: int = 4, key: bytes = b"k") -> None:
    mailbox.deliver(sender, key, offset, data, expected(size))


def test_a_message_is_taken_once_all_of_it_has_come():
    mailbox = Mailbox(100)
    deliver(mailbox, 1, b"ab")
    waiting = threading.Timer(0.05, deliver, (mailbox, 1, b"cd", 2))
    waiting.start()
    assert mailbox.take([(1, b"k")], expected(), 10, "rank 0") == b"abcd"
    waiting.join()
    with pytest.raises(Deadline, match=r"rank 0 waited 0 s in vain for rank 1 in allreduce #0"):
        mailbox.take([(1, b"k")], expected(), 0, "rank 0")


def test_an_empty_message_is_a_message():
    mailbox = Mailbox(100)
    deliver(mailbox, 1, b"", size=0)
    assert mailbox.take([(1, b"k")], expected(0), 0, "rank 0") == b""


def test_parts_that_do_not_follow_one_another_are_refused():
    mailbox = Mailbox(100)
    deliver(mailbox, 1, b"ab")
    with pytest.raises(BadChunk, match="begins at byte 1; 2 bytes of allreduce #0"):
        deliver(mailbox, 1, b"cd", offset=1)
    with pytest.raises(BadChunk):
        mailbox.deliver(1, b"k", 2, b"cd", expected(about="barrier #0, uint8 [0]"))


def test_what_nobody_asks_for_is_bounded_by_what_came_and_not_by_what_was_announced():
    mailbox = Mailbox(10)
    deliver(mailbox, 1, b"ab", size=1 << 62)
    with pytest.raises(TooLarge, match=r"11 bytes from other ranks wait here .* rank 2"):
        deliver(mailbox, 2, b"123456789", size=1 << 62)


def test_what_differs_is_named_on_both_sides_before_it_is_whole():
    mailbox = Mailbox(100)
    deliver(mailbox, 1, b"ab")
    with pytest.raises(SpecMismatch, match=r"rank 1 sent allreduce #0, float32 \[1\] where rank 0 has barrier #0"):
        mailbox.take([(1, b"k")], expected(about="barrier #0"), 10, "rank 0")
    with pytest.raises(SpecMismatch, match="rank 1 sent 4 bytes where rank 0 has 8 bytes"):
        mailbox.take([(1, b"k")], expected(8), 10, "rank 0")


def test_a_rank_that_left_is_missed_only_where_its_message_is():
    mailbox = Mailbox(100)
    deliver(mailbox, 2, b"abcd")
    mailbox.note_left(2, "bee")
    assert mailbox.take([(2, b"k")], expected(), 10, "rank 0") == b"abcd"
    # Rank 1 is waited for, but without rank 2 nothing can come of it.
    with pytest.raises(PeerLost, match=r"rank 2 \(bee\) has left the group, and rank 0 needs it"):
        mailbox.take([(1, b"k"), (2, b"k")], expected(), 10, "rank 0")


def test_a_failure_is_told_to_all_and_the_first_one_counts():
    mailbox = Mailbox(100)
    mailbox.check()
    deliver(mailbox, 3, b"abcd", key=b"before")
    mailbox.fail(PeerLost("rank 3 is lost", peer=3, detail=""))
    mailbox.fail(OSError("later"))
    with pytest.raises(PeerLost, match="rank 3"):
        mailbox.check()
    with pytest.raises(PeerLost, match="rank 3"):
        mailbox.take([(1, b"k")], expected(), 10, "rank 0")
    assert mailbox.take([(3, b"before")], expected(), 10, "rank 0") == b"abcd"
