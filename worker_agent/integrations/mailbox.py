"""Messages that came from other processes of a group, until somebody takes them.  [shell]

The network's thread delivers parts, threads that carry out collectives take whole messages. Memory grows with the bytes
that came, never with what a sender announces, up to a limit.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ayni.errors import BadChunk, Deadline, PeerLost, SpecMismatch, TooLarge

Key = tuple[int, bytes]
"""Sender and name of a message."""


@dataclass(slots=True)
class Message:
    """A message that is coming."""

    about: str
    total_bytes: int
    data: bytearray = field(default_factory=bytearray)

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come."""
        return len(self.data) == self.total_bytes


class Mailbox:
    """What came from the other processes. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        """Keeps at most so many bytes that nobody has taken."""
        self._most_bytes = most_bytes
        self._bytes = 0
        self._messages: dict[Key, Message] = {}
        self._left: dict[int, str] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def deliver(self, sender: int, key: bytes, offset: int, data: bytes, message: Message) -> None:
        """Takes a part in; `message` says what a message that begins with it is.

        Raises:
            BadChunk: a part is missing, or the message is another one than it was.
            TooLarge: too much waits that nobody has taken.
        """
        with self._changed:
            coming = self._messages.setdefault((sender, key), message)
            if (coming.about, coming.total_bytes) != (message.about, message.total_bytes) or offset != len(coming.data):
                raise BadChunk(
                    f"a part of {message.about} from rank {sender} begins at byte {offset}; {len(coming.data)} bytes "
                    f"of {coming.about} have come",
                    field="offset_bytes",
                    expected=len(coming.data),
                    received=offset,
                    bucket=coming.about,
                )
            coming.data += data
            self._bytes += len(data)
            if self._bytes > self._most_bytes:
                raise TooLarge(
                    f"{self._bytes} bytes from other ranks wait here that no collective asked for; the last of them "
                    f"from rank {sender}, {coming.about}",
                    field="waiting",
                    limit=self._most_bytes,
                    received=self._bytes,
                )
            if coming.is_whole:
                self._changed.notify_all()

    def take(self, wanted: Sequence[Key], expected: Message, timeout: float, who: str) -> bytearray:
        """Waits for a whole message.

        Args:
            wanted: the message, and those that the same collective needs after it: none of it comes about without them.
            expected: what it must be.
            timeout: seconds.
            who: who waits, for errors.

        Raises:
            Deadline: it did not come in time.
            PeerLost: the sender, or another process of the group, is gone.
            SpecMismatch: it is something else.
        """
        deadline = time.monotonic() + timeout
        sender = wanted[0][0]
        with self._changed:
            while True:
                message = self._messages.get(wanted[0])
                if message is not None and message.about != expected.about:
                    raise _mismatch(sender, message.about, expected.about, who)
                if message is not None and message.total_bytes != expected.total_bytes:
                    sizes = f"{message.total_bytes} bytes", f"{expected.total_bytes} bytes"
                    raise _mismatch(sender, *sizes, who)
                if message is not None and message.is_whole:
                    del self._messages[wanted[0]]
                    self._bytes -= len(message.data)
                    return message.data
                self._check_alive(wanted, expected, who)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise Deadline(
                        f"{who} waited {timeout:g} s in vain for rank {sender} in {expected.about}",
                        waiting_for=f"rank {sender}",
                        timeout=timeout,
                    )

    def note_left(self, rank: int, name: str) -> None:
        """Notes that a process has left in order: what it sent before still counts."""
        with self._changed:
            self._left[rank] = name
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Makes every wait, now and from now on, raise an error; the first one counts. What has come can be taken."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what `fail` was given."""
        with self._changed:
            if self._error:
                raise self._error

    def _check_alive(self, wanted: Sequence[Key], expected: Message, who: str) -> None:
        if self._error:
            raise self._error
        for sender in (key[0] for key in wanted if key[0] in self._left and key not in self._messages):
            gone = f"rank {sender} ({self._left[sender]}) has left the group"
            sentence = f"{gone}, and {who} needs it in {expected.about}"
            raise PeerLost(sentence, peer=sender, detail="left")


def _mismatch(sender: int, theirs: str, mine: str, who: str) -> SpecMismatch:
    return SpecMismatch(
        f"rank {sender} sent {theirs} where {who} has {mine}: all ranks must make the same calls with the same shapes",
        field="tensor",
        expected=mine,
        received=theirs,
        bucket="collective",
    )
