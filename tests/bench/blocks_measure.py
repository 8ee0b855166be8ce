"""How the block bench measures: contenders take turns, medians count, and a goal is a ratio or a limit.

A row compares ours with a peer; its goal is what the ratio ours / theirs must reach (GB/s) or stay below (all other
units). Where there is no peer the goal holds for ours itself.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

CPU_UNIT = "cpu_s_per_GB"
HIGHER_IS_BETTER = "GB/s"


async def nothing() -> None:
    """Prepares or checks nothing."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to move some bytes. Only `work` is timed."""

    name: str
    num_bytes: int
    work: Callable[[], Awaitable[object]]
    prepare: Callable[[], Awaitable[object]] = nothing
    check: Callable[[], Awaitable[object]] = nothing
    pids: tuple[int, ...] = ()
    """Other processes that take part."""


@dataclass
class Samples:
    """What one contender took in each repetition that counts."""

    num_bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor time of all processes that take part."""

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.num_bytes / median(self.seconds) / 1e9

    @property
    def cpu_per_gb(self) -> float:
        return median(self.cpu_seconds) / (self.num_bytes / 1e9)

    @property
    def milliseconds(self) -> float:
        return median(self.seconds) * 1e3


@dataclass(kw_only=True)
class CaseResult:
    """What one case found out."""

    rows: list[dict] = field(default_factory=list)
    samples: dict[str, dict] = field(default_factory=dict)
    skipped: list[dict] = field(default_factory=list)

    def keep(self, name: str, samples: dict[str, Samples]) -> None:
        self.samples[name] = {contender: asdict(each) for contender, each in samples.items()}

    def skip(self, case: str, why: object) -> None:
        self.skipped.append({"case": case, "why": str(why)})


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured."""

    quick: bool = False

    def count(self, full: int) -> int:
        """Blocks or objects."""
        return max(8, full // 64) if self.quick else full

    def repeat(self, full: int) -> int:
        return 1 if self.quick else full


async def measure(contenders: Sequence[Contender], repeat: int, warm_up: int = 1) -> dict[str, Samples]:
    """Lets all contenders work in turn, beginning with another one each time."""
    samples = {contender.name: Samples(contender.num_bytes) for contender in contenders}
    for repetition in range(-warm_up, repeat):
        first = repetition % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            seconds, cpu_seconds = await _once(contender)
            if repetition >= 0:
                samples[contender.name].seconds.append(round(seconds, 6))
                samples[contender.name].cpu_seconds.append(round(cpu_seconds, 6))
    return samples


async def _once(contender: Contender) -> tuple[float, float]:
    await contender.prepare()
    cpu, start = _cpu_seconds(contender.pids), time.perf_counter()
    await contender.work()
    seconds = time.perf_counter() - start
    cpu_seconds = _cpu_seconds(contender.pids) - cpu
    await contender.check()
    return seconds, cpu_seconds


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time of this process and others, from their own clocks (see clock_getcpuclockid)."""
    return time.process_time() + sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def blocking(function: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    """Returns work that blocks the event loop, on which nothing else runs meanwhile."""

    async def work() -> object:
        return function()

    return work


def compared(
    case: str,
    ours: float,
    peer: str,
    theirs: float,
    unit: str,
    goal: float | None = None,
    note: str = "",
) -> dict:
    """A row whose goal is a ratio."""
    ratio = ours / theirs
    met = None if goal is None else (ratio >= goal if unit == HIGHER_IS_BETTER else ratio <= goal)
    return {
        "case": case,
        "ours": _rounded(ours),
        "peer": peer,
        "theirs": _rounded(theirs),
        "unit": unit,
        "ratio": _rounded(ratio),
        "goal": goal,
        "met": met,
        "note": note,
    }


def limited(case: str, ours: float, unit: str, goal: float | None = None, note: str = "") -> dict:
    """A row without a peer, whose goal is in the row's own unit."""
    met = None if goal is None else (ours >= goal if unit == HIGHER_IS_BETTER else ours <= goal)
    return {
        "case": case,
        "ours": _rounded(ours),
        "peer": None,
        "theirs": None,
        "unit": unit,
        "ratio": None,
        "goal": goal,
        "met": met,
        "note": note,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}") if abs(value) < 10_000 else round(value)
