"""Simulated time: stories that wait, processes that share the cores of a host, links that carry bytes in order.

A story is a generator. What it yields is what it waits for: it is given a callback, and calls it when that is over.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Then = Callable[[], None]
Wait = Callable[[Then], None]
Story = Iterator[Wait]


class Clock:
    """Time, in seconds. It jumps from one event to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._count = 0

    def at(self, moment: float, then: Then) -> None:
        """Has something happen; what is due at one moment happens in the order in which it was asked for."""
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, then))

    def pause(self, seconds: float) -> Wait:
        """Waits."""
        return lambda then: self.at(self.now + seconds, then)

    def begin(self, story: Story) -> None:
        """Lets a story begin now."""

        def go_on() -> None:
            wait = next(story, None)
            if wait is not None:
                wait(go_on)

        go_on()

    def run(self) -> None:
        """Lets everything happen."""
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()


class Gate:
    """Opens once so many have come; then all who wait go on, in their order."""

    def __init__(self, expected: int) -> None:
        self._missing = expected
        self._waiting: list[Then] = []

    def come(self) -> None:
        self._missing -= 1
        while not self._missing and self._waiting:
            self._waiting.pop(0)()

    def opened(self) -> Wait:
        """Waits until the gate is open."""
        return self._waiting.append if self._missing else lambda then: then()


@dataclass
class Host:
    """A machine. Its processes take turns where there are more of them than cores."""

    clock: Clock
    cores: int
    waiting: "deque[Process]" = field(default_factory=deque)

    def give(self) -> None:
        """Gives free cores to those who wait."""
        while self.cores and self.waiting:
            self.cores -= 1
            self.waiting.popleft().start()


class Process:
    """Does one thing at a time, in the order in which it was asked."""

    def __init__(self, host: Host) -> None:
        self.busy_s = 0.0
        self._host = host
        self._tasks: deque[tuple[float, Then]] = deque()

    def work(self, seconds: float) -> Wait:
        """Takes so much processor time, behind all that came before."""
        return lambda then: self._add(seconds, then)

    def start(self) -> None:
        """Has been given a core for its next task."""
        seconds, _ = self._tasks[0]
        self.busy_s += seconds
        self._host.clock.at(self._host.clock.now + seconds, self._end)

    def _add(self, seconds: float, then: Then) -> None:
        self._tasks.append((seconds, then))
        if len(self._tasks) == 1:
            self._host.waiting.append(self)
            self._host.give()

    def _end(self) -> None:
        _, then = self._tasks.popleft()
        self._host.cores += 1
        if self._tasks:
            self._host.waiting.append(self)
        self._host.give()
        then()


class Link:
    """One direction of a network link: so many bytes a second, first come first served."""

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self.busy_s = 0.0
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def carry(self, num_bytes: float, latency_s: float = 0.0) -> Wait:
        """Waits until the last of these bytes is through, and the latency over."""
        return lambda then: self._add(num_bytes / self._bytes_per_s, latency_s, then)

    def _add(self, seconds: float, latency_s: float, then: Then) -> None:
        self.busy_s += seconds
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self._clock.at(self._free_at + latency_s, then)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A process and its link, both ways."""

    process: Process
    up: Link
    down: Link


def send(source: Node, target: Node, num_bytes: float, latency_s: float) -> Story:
    """A message passes both links, one after the other."""
    yield source.up.carry(num_bytes, latency_s)
    yield target.down.carry(num_bytes)
