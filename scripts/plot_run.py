"""Draws a run's loss, speed and step times from its metrics file.

    python scripts/plot_run.py METRICS.jsonl [--out run.png]

Needs matplotlib. The file is what a worker agent writes; lines that are not whole yet are left out.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

PHASES = {"data": "#b07aa1", "compute": "#4e79a7", "exchange": "#f28e2b", "commit_wait": "#bab0ac", "update": "#59a14f"}
"""Parts of a step's time, in the order in which they pass, with their colours."""
SMOOTHED_STEPS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws one picture; returns the exit code."""
    parser = argparse.ArgumentParser(description="Draws a run's loss, speed and step times from its metrics file.")
    parser.add_argument("metrics", type=Path, help="metrics.jsonl, or the folder that holds it")
    parser.add_argument("--out", type=Path, help="PNG file (default: beside the metrics file)")
    options = parser.parse_args(arguments)
    path = options.metrics / "metrics.jsonl" if options.metrics.is_dir() else options.metrics
    try:
        records = read_metrics(path)
        out = options.out or path.with_suffix(".png")
        draw(records, out, title=path.parent.name)
    except (OSError, ValueError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


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
