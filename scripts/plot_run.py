"""Draws a run's loss, speed and step times from its metrics file, or one step from a worker's timeline.

    python scripts/plot_run.py METRICS.jsonl [--out run.png]
    python scripts/plot_run.py --timeline TIMELINE.jsonl [--step 12] [--text | --out step.png]

Needs matplotlib, but not for --text. The files are what a worker agent writes, the second one with --timeline; lines
that are not whole yet are left out.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import step_timeline
from scripts.step_timeline import BucketTimes

Record = dict[str, Any]

PHASES = {"data": "#b07aa1", "compute": "#4e79a7", "exchange": "#f28e2b", "commit_wait": "#bab0ac", "update": "#59a14f"}
"""Parts of a step's time, in the order in which they pass, with their colours."""
SMOOTHED_STEPS = 10
LANES = {
    "compute": ("#4e79a7", 0.1, 0.8),
    "wait": ("#e3dfdc", 0.1, 0.8),
    "send": ("#f28e2b", 0.1, 0.4),
    "receive": ("#b07aa1", 0.5, 0.4),
    "apply": ("#59a14f", 0.1, 0.8),
}
"""What a bucket does in a step: its colour, and where in the bucket's lane it lies, top and height."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws one picture; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.timeline:
            _show_step(options)
        else:
            _show_run(options)
    except (OSError, ValueError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Draws a run's loss, speed and step times, or one step of a worker.")
    parser.add_argument("file", type=Path, help="metrics.jsonl or timeline.jsonl, or the folder that holds it")
    parser.add_argument("--out", type=Path, help="PNG file (default: beside the file that is read)")
    parser.add_argument("--timeline", action="store_true", help="draw what each bucket does in one step")
    parser.add_argument("--step", type=int, help="with --timeline: which step (default: the last one)")
    parser.add_argument("--text", action="store_true", help="with --timeline: draw with letters, to standard output")
    return parser


def _show_run(options: argparse.Namespace) -> None:
    path = options.file / "metrics.jsonl" if options.file.is_dir() else options.file
    out = options.out or path.with_suffix(".png")
    draw(read_metrics(path), out, title=path.parent.name)
    print(out)


def _show_step(options: argparse.Namespace) -> None:
    path = options.file / "timeline.jsonl" if options.file.is_dir() else options.file
    steps = step_timeline.read_steps(path)
    number = max(steps) if options.step is None else options.step
    if number not in steps:
        raise ValueError(f"{path} has steps {min(steps)} to {max(steps)}, and not step {number}")
    if options.text:
        print(step_timeline.text(steps[number]))
        return
    out = options.out or path.with_name(f"step-{number}.png")
    draw_step(steps[number], out)
    print(out)


def read_metrics(path: Path) -> list[Record]:
    """Returns the events of the last run in a metrics file, without a line that is still being written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no training step, or another line is not JSON.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no metrics file at {path}")
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    records = records[_last_start(records) :]
    if not any(record["kind"] == "train" for record in records):
        raise ValueError(f"{path} holds no training step yet")
    return records


def _last_start(records: Sequence[Record]) -> int:
    """Returns where the last run in a file begins: a file that was used twice has steps that fall back."""
    pairs = itertools.pairwise(records)
    return max((index for index, (one, two) in enumerate(pairs, start=1) if two["step"] < one["step"]), default=0)


def draw(records: Sequence[Record], out: Path, title: str) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train = [record for record in records if record["kind"] == "train"]
    held_out = [record for record in records if record["kind"] == "evaluate"]
    figure, (loss, speed, times) = pyplot.subplots(3, 1, figsize=(9, 10), sharex=True, layout="constrained")
    _draw_loss(loss, train, held_out)
    _draw_speed(speed, train)
    _draw_times(times, train)
    figure.suptitle(title)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def draw_step(rows: Sequence[BucketTimes], out: Path) -> None:
    """Writes the picture of one step: a lane for each bucket, from the lease to the end of the update."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    start = min(row.began for row in rows)
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.32 * len(rows)), layout="constrained")
    for lane, row in enumerate(rows):
        for name, (left, right) in row.spans().items():
            colour, bottom, height = LANES[name]
            span = [((left - start) * 1e3, (right - left) * 1e3)]
            axes.broken_barh(span, (lane + bottom, height), color=colour, label=name if lane == 0 else None)
    found = step_timeline.overlap(rows)
    axes.axvline((rows[0].computed - start) * 1e3, color="#4e79a7", linestyle="--", linewidth=1, label="computed")
    axes.axvline((rows[0].committed - start) * 1e3, color="#e15759", linestyle="--", linewidth=1, label="commit")
    axes.set_yticks([lane + 0.5 for lane in range(len(rows))], [row.bucket for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the lease")
    axes.set_title(f"step {rows[0].step}, rank {rows[0].rank}: {found.share:.0%} of the exchange hidden", loc="left")
    figure.legend(loc="outside lower center", ncols=len(LANES) + 2)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _draw_loss(axes: Any, train: Sequence[Record], held_out: Sequence[Record]) -> None:
    steps, losses = _column(train, "loss")
    axes.plot(steps, losses, color="#a0cbe8", linewidth=1, label="training")
    axes.plot(steps, _smoothed(losses), color="#4e79a7", label=f"training, mean of {SMOOTHED_STEPS} steps")
    axes.plot(*_column(held_out, "loss"), "o-", color="#e15759", label="held out")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    lines, labels = axes.get_legend_handles_labels()
    steps, accuracies = _column(held_out, "accuracy")
    if accuracies:
        right = axes.twinx()
        right.plot(steps, accuracies, "s--", color="#59a14f", label="held-out accuracy (right)")
        right.set_ylim(0, 1)
        right.set_ylabel("accuracy")
        lines, labels = lines + right.get_legend_handles_labels()[0], [*labels, *right.get_legend_handles_labels()[1]]
    axes.legend(lines, labels, loc="center right")


def _draw_speed(axes: Any, train: Sequence[Record]) -> None:
    steps, speeds = _column(train, "samples_per_s")
    axes.plot(steps, speeds, color="#a0cbe8", linewidth=1)
    axes.plot(steps, _smoothed(speeds), color="#4e79a7", label=f"all workers, mean of {SMOOTHED_STEPS} steps")
    axes.set_ylabel("samples/s")
    axes.set_ylim(bottom=0)
    workers = axes.twinx()
    workers.step(*_column(train, "world_size"), where="post", color="#e15759", linewidth=1, label="workers (right)")
    workers.set_ylim(0, 1 + max(record["world_size"] for record in train))
    workers.yaxis.get_major_locator().set_params(integer=True)
    workers.set_ylabel("workers")
    lines, labels = axes.get_legend_handles_labels()
    more_lines, more_labels = workers.get_legend_handles_labels()
    axes.legend(lines + more_lines, labels + more_labels, loc="lower right")


def _draw_times(axes: Any, train: Sequence[Record]) -> None:
    steps = [record["step"] for record in train]
    parts = [_smoothed([record["times"][name] for record in train]) for name in PHASES]
    axes.stackplot(steps, parts, labels=[name.replace("_", " ") for name in PHASES], colors=list(PHASES.values()))
    axes.set_ylabel(f"s/step, mean of {SMOOTHED_STEPS}")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", ncols=len(PHASES))


def _column(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    """Returns the steps that have a value, and the values."""
    present = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in present], [value for _, value in present]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and those before it, up to SMOOTHED_STEPS of them."""
    windows = [values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


if __name__ == "__main__":
    sys.exit(main())
