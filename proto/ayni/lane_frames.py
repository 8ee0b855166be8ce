"""Frames of lanes that wait to leave: what a lane says in one go is one frame, and a message carries many.  [core]"""

from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

MESSAGE_BYTES = 1 << 20
"""From which on a message takes no more frames."""


class Frame(Protocol):
    """`LaneRequest` or `LaneResponse`."""

    @property
    def lane(self) -> int:
        """Number of the lane."""

    @property
    def messages(self) -> Iterable[bytes]:
        """What the lane says."""

    def MergeFrom(self, other: Any) -> None:  # noqa: N802
        """Adds what another frame of the same lane says."""


F = TypeVar("F", bound=Frame)


class Waiting(Generic[F]):
    """What waits on one side of one stream of lanes."""

    def __init__(self) -> None:
        """Starts empty."""
        self._frames: deque[F] = deque()
        self.num_bytes = 0
        """Of all messages that wait."""

    def __bool__(self) -> bool:
        return bool(self._frames)

    def put(self, frame: F) -> None:
        """Adds a frame; it joins the last one where that is of the same lane."""
        self.num_bytes += _num_bytes(frame)
        if self._frames and self._frames[-1].lane == frame.lane:
            self._frames[-1].MergeFrom(frame)
        else:
            self._frames.append(frame)

    def take(self) -> list[F]:
        """Takes as many frames as one message should have: at least one, where there is one."""
        frames: list[F] = []
        size = 0
        while self._frames and size < MESSAGE_BYTES:
            frames.append(self._frames.popleft())
            size += _num_bytes(frames[-1])
        self.num_bytes -= size
        return frames


def _num_bytes(frame: Frame) -> int:
    return sum(map(len, frame.messages))
