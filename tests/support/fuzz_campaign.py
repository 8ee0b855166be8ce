"""Bursts of calls at a live server for a while, what is looked at after each, and what was found."""

import concurrent.futures
import difflib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.fuzz_calls import Call, Ended, draw_call, make_all
from tests.support.fuzz_servers import (
    Target,
    bad_line,
    num_descriptors,
    num_threads,
    resident_bytes,
)

MOST_CALLS = 4
"""Calls of one burst."""

_ROUND = 200
"""Bursts that one seed is used for."""
_HEALTH_EVERY = 50
_WARM_UP = 0.3
"""Part of a campaign after which nothing may grow any more."""
_SETTLE_S = 0.05
_GROWTH_BYTES = 48 << 20
_GROWTH_FILES, _GROWTH_THREADS = 12, 8


@dataclass
class Found:
    """What went wrong, the first time that it did."""

    what: str
    burst: Sequence[Call]

    def __str__(self) -> str:
        return f"{self.what}\n  after {list(self.burst)!r}"


@dataclass
class Usage:
    """What a process holds."""

    resident: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        return cls(resident_bytes(pid), num_descriptors(pid), num_threads(pid))

    def grown(self, before: "Usage") -> str:
        """What is clearly more than before; empty when nothing is."""
        more = {
            "bytes of memory": (self.resident - before.resident, _GROWTH_BYTES),
            "descriptors": (self.descriptors - before.descriptors, _GROWTH_FILES),
            "threads": (self.threads - before.threads, _GROWTH_THREADS),
        }
        return ", ".join(f"{by} {what}" for what, (by, limit) in more.items() if by > limit)


@dataclass(repr=False)
class Campaign:
    """Fuzzes one server, and goes on after what it finds."""

    target: Target
    found: dict[str, Found] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    num_bursts: int = 0
    num_unchanged: int = 0
    """Bursts of refused calls alone after which the state was compared."""
    usage: list[Usage] = field(default_factory=list)
    _log_seen: int = 0
    _usage_pid: int = 0

    def __post_init__(self) -> None:
        self._state: dict[str, object] | None = None
        self._unsettled = False

    def run(self, seed: int, seconds: float, most_bursts: int = 1 << 30) -> None:
        """Fuzzes for a time, or for a number of bursts."""
        end = time.monotonic() + seconds
        with concurrent.futures.ThreadPoolExecutor(MOST_CALLS) as self._pool:
            for number in itertools.count():
                left = most_bursts - self.num_bursts
                if time.monotonic() >= end or left <= 0:
                    break
                self._round(seed + number, end, min(_ROUND, left))
        self._check_alive([])
        self._check_growth()

    def report(self) -> str:
        """Counts, and everything that was found."""
        calls = sum(self.outcomes.values())
        lines = [
            f"{self.target.name}: {calls} calls in {self.num_bursts} bursts, {self.num_unchanged} states compared",
            *(f"  {count:7} {outcome}" for outcome, count in sorted(self.outcomes.items())),
            *(f"FOUND: {found}" for found in self.found.values()),
        ]
        return "\n".join(lines)

    def _round(self, seed: int, end: float, most: int) -> None:
        @hypothesis.seed(seed)
        @settings(
            max_examples=most,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(burst=_bursts(self))
        def fuzz(burst: list[Call]) -> None:
            if time.monotonic() < end:
                self._burst(burst)

        fuzz()

    def _burst(self, burst: Sequence[Call]) -> None:
        if self._state is None:
            self._state = self._settled_state()
        ended = make_all(self.target.channel, self.target.methods, burst, self._pool)
        self.num_bursts += 1
        for one in ended:
            self.outcomes[f"{one.call.name} {one.reason or one.code}"] += 1
            if problem := one.problem:
                self._note(problem, burst)
        self._check_log(burst)
        self._check_state(burst, ended)
        if self.num_bursts % _HEALTH_EVERY == 0:
            self._check_alive(burst)

    def _check_log(self, burst: Sequence[Call]) -> None:
        log = self.target.log
        new, self._log_seen = log[self._log_seen :], len(log)
        if line := bad_line(new):
            self._note(f"in the log: {line}", burst)

    def _check_state(self, burst: Sequence[Call], ended: Sequence[Ended]) -> None:
        before, self._state = self._state, None
        if all(one.refused and not self.target.may_change(one) for one in ended):
            self.num_unchanged += 1
            self._state = self.target.snapshot()
            if changes := _differences(before or {}, self._state):
                self._note(f"refused calls changed the state: {changes}", burst)
            return
        given_up = any(one.code in ("DEADLINE_EXCEEDED", "CANCELLED") for one in ended)
        self._unsettled = self.target.renew() or given_up

    def _settled_state(self) -> dict[str, object]:
        """Returns the state once the server is done with what it was told before."""
        state = self.target.snapshot()
        while self._unsettled:
            time.sleep(_SETTLE_S)
            before, state = state, self.target.snapshot()
            self._unsettled = bool(_differences(before, state))
        return state

    def _check_alive(self, burst: Sequence[Call]) -> None:
        try:
            self.target.good_call()
        except Exception as error:
            self._note(f"a good call failed: {error!r}", burst)
            raise
        self._state = None  # A good call may change it.
        if self.target.pid != self._usage_pid:
            self._usage_pid = self.target.pid
            self.usage.clear()
        self.usage.append(Usage.of(self.target.pid))

    def _check_growth(self) -> None:
        if len(self.usage) >= 4 and (
            growth := self.usage[-1].grown(self.usage[max(1, int(len(self.usage) * _WARM_UP))])
        ):
            self._note(f"it grew by {growth}: {self.usage}", [])

    def _note(self, what: str, burst: Sequence[Call]) -> None:
        signature = " ".join(_signature(what))
        self.found.setdefault(signature, Found(what, burst))


@st.composite
def _bursts(draw: Any, campaign: Campaign) -> list[Call]:
    target = campaign.target
    methods = sorted(target.methods)
    count = draw(st.sampled_from((1, 1, 1, 2, MOST_CALLS)))
    chosen = [target.methods[draw(st.sampled_from(methods))] for _ in range(count)]
    return [draw_call(draw, method, target.bases(method), target.hints) for method in chosen]


def _differences(before: dict[str, object], now: dict[str, object]) -> str:
    found = []
    for name in before:
        if before[name] != now[name]:
            old, new = (str(state[name]).splitlines() for state in (before, now))
            found.append(f"{name}: " + "; ".join(difflib.unified_diff(old, new, lineterm="", n=1)))
    return "\n".join(found)


def _signature(what: str) -> Iterator[str]:
    """The words that tell one fault from another: no numbers, no values."""
    lines = what.splitlines()
    text = what[:60] + (lines[-1] if "Traceback" in what else "")
    for word in text.split():
        if word.isalpha() or word.endswith((":", "Error")):
            yield word
