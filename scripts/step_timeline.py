"""What a worker's timeline says of one step: which bucket did what when, and how much of the exchange was hidden.

Pure but for `read_steps`. All times are moments of the worker's clock, in seconds.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

Span = tuple[float, float]

SIGNS = {"compute": "#", "wait": ".", "send": ">", "receive": "<", "both": "x", "apply": "="}
"""How text shows what a bucket does; "both" is sending and receiving."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTimes:
    """One line of a timeline."""

    step: int
    attempt: int
    epoch: int
    rank: int
    lease: int
    extra: bool
    bucket: str
    elements: int
    began: float
    computed: float
    handed_over: float
    begun: float
    accepted: float
    sent: float
    first: float
    last: float
    committed: float
    updating: float
    updated: float

    def spans(self) -> dict[str, Span]:
        """Returns when it was computed, waited, sent, received and applied; sending and receiving may overlap."""
        spans = {
            "compute": (self.began, self.handed_over),
            "wait": (self.handed_over, self.updating),
            "send": (self.accepted, self.sent),
            "receive": (self.first, self.last),
            "apply": (self.updating, self.updated),
        }
        return {name: span for name, span in spans.items() if span[0] and span[1] > span[0]}

    @property
    def arrived(self) -> float:
        """When the exchange was over."""
        return max(self.sent, self.last, self.handed_over)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """How a step's exchange and its computing lie in time, in seconds."""

    exchange: float
    """With at least one bucket on its way."""
    hidden: float
    """Of that, while the worker still computed."""
    exposed: float
    """From the end of computing to the last mean."""

    @property
    def share(self) -> float:
        """Hidden part of the exchange."""
        return self.hidden / self.exchange if self.exchange else 0.0


def read_steps(path: Path) -> dict[int, list[BucketTimes]]:
    """Returns the lines of each step of the last run in a timeline, without a line that is still being written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no step, or a line makes no sense.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no timeline at {path}; the worker writes one with --timeline")
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=1)]
    pairs = enumerate(itertools.pairwise(rows), start=1)
    rows = rows[max((index for index, (one, two) in pairs if two.step < one.step), default=0) :]
    if not rows:
        raise ValueError(f"{path} holds no step yet")
    return {step: list(group) for step, group in itertools.groupby(rows, key=lambda row: row.step)}


def overlap(rows: Sequence[BucketTimes]) -> Overlap:
    """Returns what of a step's exchange was hidden behind the first lease's computing."""
    own = [row for row in rows if not row.extra] or rows
    computed = own[0].computed
    on_the_way = joined((row.handed_over, row.arrived) for row in own)
    return Overlap(
        exchange=sum(stop - start for start, stop in on_the_way),
        hidden=sum(max(0.0, min(stop, computed) - start) for start, stop in on_the_way),
        exposed=max(0.0, max(row.arrived for row in own) - computed),
    )


def joined(spans: Iterable[Span]) -> list[Span]:
    """Returns spans that cover the same times and do not overlap."""
    result: list[Span] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((start, stop))
    return result


def text(rows: Sequence[BucketTimes], width: int = 72) -> str:
    """Draws a step with one line for each bucket, and says what its columns and signs mean."""
    start, stop = _bounds(rows)
    step = rows[0]
    names = max(len("bucket"), *(len(row.bucket) for row in rows))
    head = f"{'bucket':{names}} {'elements':>12} {'handed':>8} {'sent':>8} {'mean':>8}  (ms since the lease)"
    lines = [_line(row, start, (stop - start) / width, names, width) for row in rows]
    return "\n".join(
        [f"step {step.step}, rank {step.rank}: {(stop - start) * 1e3:.2f} ms", head, *lines, *_legend(rows)]
    )


def _legend(rows: Sequence[BucketTimes]) -> list[str]:
    found = overlap(rows)
    return [
        "  ".join(f"{sign} {name}" for name, sign in SIGNS.items()),
        f"exchange {found.exchange * 1e3:.2f} ms, {found.share:.0%} of it while the worker computed; "
        f"{found.exposed * 1e3:.2f} ms from the end of computing to the last mean",
    ]


def _line(row: BucketTimes, start: float, cell: float, names: int, width: int) -> str:
    bar = "".join(_sign(row, start + index * cell, cell) for index in range(width)).rstrip()
    ms = [
        f"{(moment - start) * 1e3:8.2f}" if moment else f"{'-':>8}" for moment in (row.handed_over, row.sent, row.last)
    ]
    return f"{row.bucket:{names}} {row.elements:>12,} {' '.join(ms)}  {bar}"


def _sign(row: BucketTimes, start: float, cell: float) -> str:
    """Returns what a bucket mostly does in one cell; that anything passes is worth more than that it waits."""
    took = {name: max(0.0, min(span[1], start + cell) - max(span[0], start)) for name, span in row.spans().items()}
    if took.get("send") and took.get("receive"):
        return SIGNS["both"]
    name = max(("send", "receive", "compute", "apply"), key=lambda each: took.get(each, 0.0))
    if took.get(name):
        return SIGNS[name]
    return SIGNS["wait"] if took.get("wait") else " "


def _bounds(rows: Sequence[BucketTimes]) -> Span:
    return min(row.began for row in rows), max(row.updated for row in rows)


def _row(path: Path, number: int, line: str) -> BucketTimes:
    try:
        values = json.loads(line)
        return BucketTimes(**{field.name: values[field.name] for field in fields(BucketTimes)})
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number} is no line of a timeline: {error}") from error
