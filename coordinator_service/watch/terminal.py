"""The view as text for a terminal.  [shell]"""

import time
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from coordinator_service.exchange_groups import EPOCH_BITS
from coordinator_service.watch.view import PHASES, Event, Phases, RunView, WorkerView

_HEIGHTS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_PLAIN_HEIGHTS = "_.-=+*#@"
_STYLES = {"compute": "blue", "send": "yellow", "wait": "bright_black", "apply": "green"}
_LEVELS = {"warning": "yellow", "error": "red"}
_BAR, _CURVE = 16, 60
"""Columns of a worker's step, and of a curve."""
_NEWEST_EVENTS = 6


def draw(view: RunView, wide: bool = True, *, plain: bool = False) -> Group:
    """Returns the run as text: where it stands, curves, its workers, why their shares are as they are, what happened.

    A narrow one leaves out what is least asked for. Curves and events are there where the view has its history.

    Args:
        view: the run.
        wide: whether there is room for all columns.
        plain: whether the terminal shows ASCII alone.
    """
    reasons = [f"{w.name}: {w.share_reason}" for w in view.workers if wide and w.share_reason]
    return Group(
        *(Text(line) for line in _head(view)),
        *_curves(view, _PLAIN_HEIGHTS if plain else _HEIGHTS),
        _table(view, wide),
        *(Text(line) for line in reasons),
        *_memory(view),
        *_events(view.events),
    )


def _head(view: RunView) -> list[str]:
    steps = f"{view.committed_steps}" + (f" of {view.num_steps}" if view.num_steps else "")
    lines = [
        f"run {view.run_id}: {view.state}, {steps} steps committed, epoch {view.epoch}, attempt {view.attempt}, "
        f"{_clock(view.elapsed)} since start"
    ]
    values = [
        f"loss {view.loss:.4f}" if view.loss is not None else "",
        f"held-out loss {view.evaluation_loss:.4f}" if view.evaluation_loss is not None else "",
        f"held-out accuracy {view.evaluation_accuracy:.4f}" if view.evaluation_accuracy is not None else "",
        f"{view.samples_per_second:.1f} samples/s",
        f"about {_clock(view.seconds_left)} left" if view.seconds_left and view.state == "running" else "",
        f"gradients in {view.wire_type}" if view.wire_type else "",
        f"in {_size(view.received_bytes)}, out {_size(view.sent_bytes)}",
        f"reducer {_size(view.reducer_bytes)} (peak {_size(view.reducer_peak_bytes)})",
    ]
    lines.append(", ".join(value for value in values if value))
    counted = [
        (view.extra_leases, "lease", "given to others inside a step"),
        (view.skipped_microbatches, "micro-batch", "skipped"),
        (view.norm_alarms, "norm alarm", ""),
        (view.divergences, "divergence", ""),
        (view.regroups, "exchange group", "formed inside a step"),
        (view.voided_attempts, "attempt", "given up"),
    ]
    if view.generation:
        lines.append(_exchange(view))
    if parts := [_counted(*one) for one in counted if one[0]]:
        lines.append(", ".join(parts))
    if view.sentence:
        lines.append(view.sentence)
    return lines


def _exchange(view: RunView) -> str:
    """Returns who reduces, where the coordinator does not."""
    owners = [worker.name for worker in view.workers if worker.owns_slices]
    number = f"{view.generation >> EPOCH_BITS}.{view.generation % (1 << EPOCH_BITS)}"
    slices = f", slices owned by {', '.join(owners)}" if owners else ""
    return f"topology {view.topology}, exchange group {number}{slices}"


def _curves(view: RunView, heights: str) -> list[Text]:
    """Returns loss and throughput as one line each."""
    curves = {
        "loss": [(point.step, point.loss) for point in view.training],
        "held out": [(point.step, point.loss) for point in view.evaluations],
        "samples/s": [(point.step, point.samples_per_second) for point in view.training],
    }
    known = {name: [(s, v) for s, v in points if v is not None] for name, points in curves.items()}
    return [_curve(name, points, heights) for name, points in known.items() if len(points) > 1]


def _curve(name: str, points: Sequence[tuple[int, float]], heights: str) -> Text:
    """Draws a curve along its steps; a column shows the mean of its points."""
    first, last = points[0][0], points[-1][0]
    columns: list[list[float]] = [[] for _ in range(min(_CURVE, len(points)))]
    for step, value in points:
        columns[min(len(columns) - 1, (step - first) * len(columns) // max(1, last - first))].append(value)
    means = [sum(column) / len(column) if column else None for column in columns]
    low, high = min(m for m in means if m is not None), max(m for m in means if m is not None)
    span = (high - low) or 1.0
    line = "".join(" " if m is None else heights[round((m - low) / span * (len(heights) - 1))] for m in means)
    label = f"{name:>9} {_number(points[0][1])} "
    return Text.assemble(label, (line, "cyan"), f" {_number(points[-1][1])}  (steps {first} to {last})")


def _table(view: RunView, wide: bool) -> Table:
    scale = max((max(w.so_far.total, w.last.total) for w in view.workers), default=0.0)
    columns: list[tuple[str, Callable[[WorkerView], str | Text]]] = [
        ("worker", lambda w: Text(w.name)),
        ("backend", lambda w: Text(", ".join((w.backend, *(w.devices if wide else ()))))),
        ("share", lambda w: f"{w.share:.0%}"),
        ("samples/s", lambda w: f"{w.samples_per_second:.1f}"),
        ("doing", lambda w: Text(_doing(w))),
        ("step", lambda w: _bar(w.last, scale)),
        ("compute, send, wait, apply", lambda w: _times(w.last)),
        ("by", lambda w: w.route),
        ("in", lambda w: _size(w.received_bytes)),
        ("out", lambda w: _size(w.sent_bytes)),
        ("seen", lambda w: f"{w.silence:.1f} s ago"),
    ]
    if not wide:
        hidden = ("step", "by", "in", "out", "seen")
        columns = [column for column in columns if column[0] not in hidden]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title, _ in columns:
        table.add_column(title, overflow="fold", no_wrap=title not in ("worker", "backend", "doing"))
    for worker in view.workers:
        table.add_row(*(cell(worker) for _, cell in columns))
    return table


def _bar(phases: Phases, scale: float) -> Text:
    """Draws where a step's time went, to the scale of the longest one."""
    bar, so_far, drawn = Text(), 0.0, 0
    for name in PHASES:
        so_far += getattr(phases, name)
        end = round(_BAR * so_far / scale) if scale else 0
        bar.append(name[0] * (end - drawn), style=_STYLES[name])
        drawn = max(drawn, end)
    return bar


def _doing(worker: WorkerView) -> str:
    notes = [f"{worker.lag_steps} behind"] if worker.lag_steps else []
    notes += [f"{worker.strikes} not finite"] if worker.strikes else []
    notes += [_counted(worker.cpu_fallbacks, "fallback", "to CPU")] if worker.cpu_fallbacks else []
    return f"{worker.state} ({', '.join(notes)})" if notes else worker.state


def _memory(view: RunView) -> list[Text]:
    """Returns which tier holds what, and what is under way, where there is more to say than that workers train."""
    is_whole = not any(worker.lag_steps for worker in view.workers)
    told = [
        f"{tier.name}: {tier.sentence}"
        for tier in view.tiers
        if tier.steps and not (tier.name == "device" and is_whole)
    ]
    return [Text(line) for line in (*told, *(one.sentence for one in view.transfers))]


def _events(events: Sequence[Event]) -> list[Text]:
    return [
        Text.assemble(
            (time.strftime("%H:%M:%S ", time.localtime(event.unix_time)), "bright_black"),
            (event.sentence, _LEVELS.get(event.level, "")),
        )
        for event in events[-_NEWEST_EVENTS:]
    ]


def _counted(count: int, what: str, rest: str) -> str:
    plural = "" if count == 1 else "es" if what.endswith("ch") else "s"
    return f"{count} {what}{plural} {rest}".rstrip()


def _number(value: float) -> str:
    return f"{value:.4g}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def _times(phases: Phases) -> str:
    return " ".join(f"{getattr(phases, name):.2f}" for name in PHASES) + " s"


def _size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
